"""Predicted against measured: what a profiled launch counted, beside what its Python twin says it must count.

Equality is the standard. A number is compared exactly when Nsight Compute attributes it to instructions (the columns
of its source page, the ``smsp__sass_*`` metrics); the ``l1tex__*`` counters of the units themselves also count what
arbitration adds, so they are shown beside the others when asked for and decide nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernels_py import find
from simgpu.counters import CounterTable, SiteCounters, concerns
from simgpu.errors import DataDependent, SimError
from simgpu.instructions import instruction
from simgpu.run import simulate

# A column of ours, and the source page's under the name that validation.ncu gives it.
COLUMNS = {
    "executed": "executed",
    "wavefronts": "l1_wavefronts_shared",
    "ideal": "l1_wavefronts_shared_ideal",
    "excessive": "l1_wavefronts_shared_excessive",
    "sectors": "l2_theoretical_sectors_global",
    "ideal_sectors": "l2_theoretical_sectors_global_ideal",
    "lines": "l1_tag_requests_global",
}
LAUNCH = "(whole launch)"  # where a site's name stands, in the rows that compare totals


# ---- one number, one run ---------------------------------------------------------------------------------------------

VERDICTS = ("different", "unmodelled", "explained", "within noise", "shown", "equal")  # the worst first


@dataclass(frozen=True)
class Comparison:
    """One number, predicted and measured.

    ``predicted`` is None where the twin has no such site or its rule is not proven (``unmodelled``), ``measured``
    where the profile has none. ``kind`` says what was measured: ``sass`` is attributed to instructions and exact. The
    two may lie ``noise`` apart, which is 0 for everything exact. ``why`` explains a difference that is understood.
    ``decides`` is False for a number that is only shown.
    """

    site: str
    column: str
    predicted: float | None
    measured: float | None
    kind: str = "sass"
    noise: float = 0.0
    unmodelled: bool = False
    decides: bool = True
    why: str = ""

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`.

        >>> Comparison("tile.load", "wavefronts", 32, 32).verdict, Comparison("tile.load", "wavefronts", 32, 31).verdict
        ('equal', 'different')
        """
        if self.unmodelled:
            return "unmodelled"
        if self.predicted == self.measured:
            return "equal"
        if not self.decides:
            return "shown"
        if None not in (self.predicted, self.measured) and abs(self.predicted - self.measured) <= self.noise:
            return "within noise"
        return "explained" if self.why else "different"

    def as_dict(self) -> dict[str, Any]:
        names = ("site", "column", "kind", "predicted", "measured", "noise", "why")
        return {name: getattr(self, name) for name in names} | {"verdict": self.verdict}


@dataclass(frozen=True)
class Outcome:
    """The comparisons of one case of ``kernel`` (a kernel, or a set of measurements such as ``occupancy``).

    ``single``: every number counts for itself, not together with the others of its site.
    """

    gpu: str
    kernel: str
    case: str
    comparisons: tuple[Comparison, ...]
    single: bool = False

    @property
    def different(self) -> bool:
        return any(comparison.verdict == "different" for comparison in self.comparisons)

    def tally(self) -> dict[str, int]:
        """How many sites were compared, and how many came to each verdict; a site counts as its worst number does."""
        worst: dict[str | int, int] = {}
        for number, comparison in enumerate(self.comparisons):
            rank, unit = VERDICTS.index(comparison.verdict), number if self.single else comparison.site
            worst[unit] = min(worst.get(unit, rank), rank)
        ranks = list(worst.values())
        return {"sites": len(ranks)} | {verdict: ranks.count(rank) for rank, verdict in enumerate(VERDICTS)}


# ---- metrics of a whole launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """What a metric of Nsight Compute sums: a column of ours, over the sites of these instruction families."""

    column: str
    families: tuple[str, ...]
    exact: bool = True

    def predict(self, table: CounterTable) -> tuple[int | None, bool]:
        """The metric's value, and whether an access without a proven rule keeps it unknown (None then)."""
        rows = [row for row in table.sites if instruction(row.instruction).family in self.families]
        values = [getattr(row, self.column) for row in rows]
        if any(value is None and row.unmodelled for value, row in zip(values, rows, strict=True)):
            return None, True
        return sum(value or 0 for value in values), False


LOADS, STORES, LDSM, STSM = ("lds",), ("sts",), ("ldmatrix",), ("stmatrix",)
ATOMICS, COPIES = ("atoms", "atoms.cas"), ("cp.async.ca", "cp.async.cg")
_SASS_SHARED = {"ld": LOADS, "st": STORES, "ldsm": LDSM, "stsm": STSM, "atom": ATOMICS, "ldgsts": COPIES}
_SASS_GLOBAL = {"ld": ("ldg",), "st": ("stg",), "ldgsts": COPIES}
_ALL_SHARED = LOADS + STORES + LDSM + STSM + ATOMICS + COPIES
_ALL_GLOBAL = ("ldg", "stg", "atomg", *COPIES)
_UNIT_SHARED = {"ld": LOADS + LDSM, "st": STORES + STSM, "atom": ATOMICS}  # the units know no ldmatrix of its own

METRICS = {
    "memory_l1_wavefronts_shared": Metric("wavefronts", _ALL_SHARED),
    "memory_l1_wavefronts_shared_ideal": Metric("ideal", _ALL_SHARED),
    "memory_l2_theoretical_sectors_global": Metric("sectors", _ALL_GLOBAL),
    "memory_l2_theoretical_sectors_global_ideal": Metric("ideal_sectors", _ALL_GLOBAL),
    "memory_l1_tag_requests_global": Metric("lines", _ALL_GLOBAL),
    **{f"smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum": Metric("wavefronts", families)
       for op, families in _SASS_SHARED.items()},
    **{f"smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_{op}.sum": Metric("sectors", families)
       for op, families in _SASS_GLOBAL.items()},
    **{f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum": Metric("wavefronts", families, exact=False)
       for op, families in _UNIT_SHARED.items()},
    **{f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum": Metric("excessive", families, exact=False)
       for op, families in _UNIT_SHARED.items()},
    **{f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}.sum": Metric("sectors", families, exact=False)
       for op, families in {"ld": ("ldg", *COPIES), "st": ("stg",)}.items()},
}
"""The whole-launch metrics that the model predicts."""


def compare_totals(totals: Mapping[str, float], table: CounterTable, hardware: bool = False) -> list[Comparison]:
    """The predictable metrics that ``totals`` (metric -> value) holds; the inexact ones only with ``hardware``."""
    rows = []
    for name, metric in METRICS.items():
        if name in totals and (metric.exact or hardware):
            predicted, unmodelled = metric.predict(table)
            value = totals[name]
            measured = int(value) if value == int(value) else value
            row = Comparison(LAUNCH, name, predicted, measured, unmodelled=unmodelled)
            if not metric.exact:
                noise = "" if unmodelled else f"{measured - predicted:+,} of arbitration"
                row = replace(row, kind="hardware", decides=False, why=noise)
            rows.append(row)
    return rows


# ---- sites -----------------------------------------------------------------------------------------------------------


def compare_site(row: SiteCounters, measured: Mapping[str, Any] | None) -> list[Comparison]:
    """The columns of one site of the twin; ``measured`` is its row of the profile, None when it has none.

    A row of a profile holds the counters that are not zero.
    """
    if measured is None:
        return [Comparison(row.site, "executed", row.executed, None)]
    rows = []
    for column, name in COLUMNS.items():
        applies = column == "executed" or concerns(row, column)
        if applies or measured.get(name):
            predicted = getattr(row, column)
            unmodelled = applies and predicted is None and row.unmodelled > 0
            rows.append(Comparison(row.site, column, predicted, measured.get(name, 0), unmodelled=unmodelled))
    return rows


def compare_sites(sites: Mapping, no_site: Mapping, table: CounterTable) -> list[Comparison]:
    """Every site of the twin and every site of the profile; one that only either has is a difference.

    ``sites`` maps a name to the profile's row; ``no_site`` are its memory instructions on lines that name no site,
    which a twin cannot have.
    """
    rows = [comparison for row in table.sites for comparison in compare_site(row, sites.get(row.site))]
    twin = {row.site for row in table.sites}
    orphans = {name: row for name, row in sites.items() if name not in twin}
    orphans |= {f"(no site at {where})": row for where, row in no_site.items()}
    return rows + [Comparison(name, "executed", None, row["executed"]) for name, row in orphans.items()
                   if row["executed"]]


# ---- measured files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One profiled launch: its case as text, and what validation.measure wrote about it."""

    kernel: str
    case: str
    variant: str
    params: Mapping[str, Any]
    sites: Mapping[str, Mapping] = field(repr=False)
    no_site: Mapping[str, Mapping] = field(repr=False)
    totals: Mapping[str, float] = field(repr=False)


def read_runs(path: Path) -> list[Run]:
    """The runs of a measured file ``KERNEL.json``.

    Raises :class:`~simgpu.errors.SimError` for a file that is no JSON (cut in half, say), that is another kernel's, or
    that lacks something validation.measure always writes, naming the run.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SimError(f"{path}: not a measured file: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("runs"), list) or not document["runs"]:
        raise SimError(f"{path}: not a measured file: it holds no runs")
    kernel = document.get("kernel")
    if kernel != path.stem:
        raise SimError(f"{path}: measured kernel {kernel!r}, not {path.stem!r}")
    return [_run(kernel, entry, f"{path}: run {number}") for number, entry in enumerate(document["runs"], 1)]


def _run(kernel: str, entry: Any, place: str) -> Run:
    wanted = {"case": str, "variant": str, "params": dict, "sites": dict, "no_site": dict, "totals": dict}
    for key, kind in wanted.items():
        if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
            raise SimError(f"{place}: {key} is missing or not a {kind.__name__}")
    for name, value in entry["params"].items():
        if not isinstance(value, (int, float, str)):
            raise SimError(f"{place}: parameter {name} is {value!r}, not a number or text")
    for part in ("sites", "no_site"):
        for name, row in entry[part].items():
            counters = {key: value for key, value in row.items() if key != "sass"} if isinstance(row, dict) else {}
            if "executed" not in counters or not all(type(value) is int and value >= 0 for value in counters.values()):
                raise SimError(f"{place}: {part} {name!r} is not a row of counts")
    for name, value in entry["totals"].items():
        if name in METRICS and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise SimError(f"{place}: {name} is {value!r}, not a number")
    return Run(kernel, **{key: entry[key] for key in wanted})


@lru_cache(maxsize=256)
def predict(kernel: str, variant: str, params: tuple[tuple[str, Any], ...], threads: int) -> CounterTable:
    """The counters of the whole grid of a registered kernel, from addresses alone where they depend on no data.

    Remembered, as runs repeat.
    """
    made, _ = find(f"{kernel}@{variant}")
    launch = made.launch(variant, **dict(params))
    try:
        return simulate(launch, mode="addresses", threads=threads).table
    except DataDependent:
        return simulate(launch, mode="values").table


def compare_run(gpu: str, run: Run, *, threads: int = 1, hardware: bool = False) -> Outcome:
    """Re-emulate ``run`` and compare every site and the totals of the launch.

    Raises :class:`~simgpu.errors.SimError`, naming the case, when the twin has no such variant or parameter.
    """
    try:
        table = predict(run.kernel, run.variant, tuple(sorted(run.params.items())), threads)
    except SimError as error:
        raise SimError(f"{gpu} {run.kernel} {run.case}: {error}") from error
    rows = compare_sites(run.sites, run.no_site, table) + compare_totals(run.totals, table, hardware)
    return Outcome(gpu, run.kernel, run.case, tuple(rows))
