"""Access patterns whose counters somebody published, re-emulated and held against what they printed.

The cases are TOML files in ``published/``. One looks like this::

    [[case]]
    id = "h20-sgemm-vectorized"
    gpu = "h20"                                  # a GPU of models/gpus, or any text for one that is not there
    source = "..."                               # where the numbers stand, and the kernel they are of
    pattern = "..."                              # in words
    [[case.access]]
    site = "As.store"
    op = "sts"
    width = 4                                    # bytes per lane
    shared = "4 * ((4 * (lane % 2) + i) * 64 + lane // 2)"      # byte address; global likewise
    vary = { i = 4 }                             # i = 0..3, each as often as the others
    executed = "1024 * 4 * 256 * 4"              # warp instructions in all
    [[case.published]]
    kind = "sass"
    quantity = "excessive"
    value = 4_194_304

Instead of accesses a case may name another case that executes the same ones (``like = "h20-sgemm-vectorized"``), a
kernel (``kernel = "patterns@stride4"``, ``params = { ctas = 2 }``) or a query of the occupancy model
(``[case.occupancy]``). A published value is compared by its kind (:data:`KINDS`). What cannot be reproduced is listed
as ``[[not_reproduced]]`` with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from kernels_py import find
from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.counters import SiteCounters, concerns
from simgpu.errors import SimError
from simgpu.expression import lane_expression
from simgpu.instructions import FULL_MASK, LANES, instruction
from simgpu.replay import replay
from simgpu.run import simulate
from validation.compare import Comparison, Outcome
from validation.toml_file import read_toml

PUBLISHED = "published"
KINDS = {
    "sass": "attributed to instructions by ncu (its source page): exact",
    "derived": "wavefronts minus conflicts of the l1tex counters, in which arbitration cancels: exact",
    "hardware": "l1tex counters, which also count what arbitration adds: within the stated noise",
    "driver": "the driver's or ncu's occupancy calculation: exact",
    "spreadsheet": "NVIDIA's occupancy spreadsheet: exact",
    "arithmetic": "worked out by the publisher, not measured: exact",
}
SAME_CHIP = ({"a100-40g", "a100-80g", "a800"}, {"h20", "h20-3e"})  # a case of one stands for the others
TOTALS = ("executed", "wavefronts", "ideal", "excessive", "sectors", "ideal_sectors", "excessive_sectors", "lines")
RATIOS = {  # quantities that are means
    "n_way": ("wavefronts", "ideal"),
    "wavefronts_per_instruction": ("wavefronts", "executed"),
    "sectors_per_request": ("sectors", "executed"),
}


@dataclass(frozen=True)
class Access:
    """One memory instruction: the byte addresses of its lanes as expressions, and how often warps execute it.

    ``vary`` maps each further name of the expressions to n, for 0..n-1; ``executed`` counts all of these together.
    """

    op: str
    width: int
    executed: str | int
    site: str = ""
    shared: str | None = None
    global_: str | None = None
    mask: int = FULL_MASK
    vary: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """One published number: what it is (``quantity``), of which sites (all that have it if empty), and its kind.

    ``noise`` is a fraction of the instructions executed and belongs to ``hardware`` alone; ``rounding`` is half a unit
    of the last digit that was printed.
    """

    kind: str
    quantity: str
    value: float
    sites: tuple[str, ...] = ()
    noise: float = 0.0
    rounding: float = 0.0


@dataclass(frozen=True)
class Case:
    """One published pattern with its numbers; see the module's description."""

    id: str
    gpu: str
    source: str
    pattern: str
    published: tuple[Value, ...]
    access: tuple[Access, ...] = ()
    like: str | None = None
    kernel: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    occupancy: Mapping[str, Any] | None = None
    note: str = ""

    def stands_for(self, gpu: str) -> bool:
        """Whether the case belongs to ``gpu``: its own, or one with the same chip; ``all`` asks for every case."""
        return gpu in ("all", self.gpu) or any({gpu, self.gpu} <= chips for chips in SAME_CHIP)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_cases(folder: Path) -> list[Case]:
    """The cases of every TOML file in ``folder``; :class:`SimError` names the file, the case and what is wrong."""
    cases = [case for path in sorted(folder.glob("*.toml")) for case in read_file(path)]
    ids = [case.id for case in cases]
    if repeated := {name for name in ids if ids.count(name) > 1}:
        raise SimError(f"{folder}: case {min(repeated)!r} is there twice")
    by_id = {case.id: case for case in cases}
    for case in cases:
        if case.like and not by_id.get(case.like, case).access:
            raise SimError(f"{folder}: case {case.id!r} is like {case.like!r}, which has no accesses of its own")
    return [replace(case, access=by_id[case.like].access) if case.like else case for case in cases]


def read_file(path: Path) -> list[Case]:
    """The cases of one file, where one that is ``like`` another still has no accesses."""
    document = read_toml(path, ("case", "not_reproduced"))
    for entry in document.get("not_reproduced", []):
        if set(entry) != {"id", "source", "why"}:
            raise SimError(f"{path}: a not_reproduced entry has id, source and why, not {', '.join(sorted(entry))}")
    return [_case(entry, f"{path}: case {entry.get('id', number)}")
            for number, entry in enumerate(document.get("case", []), 1)]


def _case(entry: Mapping[str, Any], place: str) -> Case:
    parts = dict(entry)
    parts["published"] = tuple(_made(Value, {**value, "sites": tuple(value.get("sites", ()))}, f"{place}: published")
                               for value in parts.get("published", ()))
    parts["access"] = tuple(_made(Access, {"global_" if key == "global" else key: value
                                           for key, value in access.items()}, f"{place}: access")
                            for access in parts.get("access", ()))
    case = _made(Case, parts, place)
    if sum(map(bool, (case.access, case.like, case.kernel, case.occupancy))) != 1 or not case.published:
        raise SimError(f"{place}: needs published values, and accesses or a kernel or an occupancy query")
    for value in case.published:
        if value.kind not in KINDS:
            raise SimError(f"{place}: kind {value.kind!r} is none of {', '.join(KINDS)}")
        if (value.noise > 0) != (value.kind == "hardware"):
            raise SimError(f"{place}: {value.quantity}: hardware counters, and they alone, state their noise")
    return case


def _made(kind: type, parts: Mapping[str, Any], place: str) -> Any:
    unknown = set(parts) - {entry.name for entry in fields(kind)}
    try:
        if unknown:
            raise SimError(f"{place}: unknown key {min(unknown)!r}")
        return kind(**parts)
    except TypeError as error:
        raise SimError(f"{place}: {str(error).partition('__init__() ')[2] or error}") from None


# ---- re-emulating ----------------------------------------------------------------------------------------------------


def compare_case(case: Case) -> Outcome:
    """Every published number of ``case`` beside the model's. :class:`SimError` for a case that does not hold up."""
    try:
        if case.occupancy is not None:
            quantities = _occupancy(case)
            rows = [_compare(value, _lookup(quantities, value.quantity)) for value in case.published]
        else:
            sites = _sites(case)
            rows = [_compare(value, *_quantity(value, sites)) for value in case.published]
    except SimError as error:
        raise SimError(f"published case {case.id}: {error}") from None
    return Outcome(case.gpu, PUBLISHED, case.id, tuple(rows), single=True)


def _compare(value: Value, predicted: float | None, executed: int = 0) -> Comparison:
    noise = value.noise * executed + value.rounding
    site = ", ".join(value.sites) or "all"
    return Comparison(site, value.quantity, predicted, value.value, value.kind, noise, unmodelled=predicted is None)


def _occupancy(case: Case) -> dict[str, float]:
    query = dict(case.occupancy)
    try:
        fit = occupancy(load_gpu(query.pop("gpu", case.gpu)), **query)
    except TypeError as error:
        raise SimError(f"occupancy: {error}") from None
    limits = {f"limit_{name}": limit for name, limit in fit.limits.items()}
    return {"blocks_per_sm": fit.blocks_per_sm, "occupancy": fit.occupancy} | limits


def _lookup(quantities: Mapping[str, float], name: str) -> float:
    if name not in quantities:
        raise SimError(f"unknown quantity {name!r} (known: {', '.join(quantities)})")
    return quantities[name]


def _sites(case: Case) -> list[SiteCounters]:
    if case.kernel:
        kernel, variant = find(case.kernel)
        return list(simulate(kernel.launch(variant, **case.params)).table.sites)
    return [count(access, number) for number, access in enumerate(case.access, 1)]


def count(access: Access, number: int = 1) -> SiteCounters:
    """The counters of an :class:`Access`, as the emulator would count a kernel that executes it.

    >>> count(Access("lds", 4, "2 * 8", shared="128 * lane")).wavefronts
    512
    """
    site, used = access.site or f"access {number}", instruction(access.op)
    executed = int(lane_expression(str(access.executed), {})[0])
    places = list(product(*(range(extent) for extent in access.vary.values())))
    if executed < 1 or executed % len(places):
        raise SimError(f"{site}: {executed} instructions do not share out over {prod(access.vary.values())} variations")
    sides = {}
    for side, text in (("shared", access.shared), ("global_", access.global_)):
        wanted = getattr(used, side)
        if wanted != (text is not None):
            raise SimError(f"{site}: {access.op} {'needs' if wanted else 'has no'} {side.rstrip('_')} address")
        if wanted:
            sides[side] = [lane_expression(text, _names(access.vary, place)) for place in places]
    columns = replay(used, access.width, [access.mask] * len(places), **sides)
    numbers = [None if column is None or (column < 0).any() else int(column.sum()) * (executed // len(places))
               for column in (columns.wavefronts, columns.ideal, columns.sectors, columns.ideal_sectors,
                              columns.lines)]
    lanes = access.mask.bit_count() * access.width * executed
    return SiteCounters(site, "", None, access.op, access.width, executed, executed, *numbers, lanes,
                        int(columns.unmodelled.sum()) * (executed // len(places)))


def _names(vary: Mapping[str, int], place: tuple[int, ...]) -> dict[str, Iterable[int]]:
    return {"lane": range(LANES)} | {name: [value] * LANES for name, value in zip(vary, place, strict=True)}


def _quantity(value: Value, sites: list[SiteCounters]) -> tuple[float | None, int]:
    """The quantity summed over the sites that ``value`` is about, and the instructions those execute."""
    known = {row.site: row for row in sites}
    for name in value.sites:
        if name not in known:
            raise SimError(f"no site {name!r} (there are {', '.join(known)})")
    parts = RATIOS.get(value.quantity, (value.quantity,))
    if not set(parts) <= set(TOTALS):
        raise SimError(f"unknown quantity {value.quantity!r} (known: {', '.join((*TOTALS, *RATIOS))})")
    column = parts[0].removeprefix("excessive_")
    chosen = ([known[name] for name in value.sites]
              or [row for row in sites if column == "executed" or concerns(row, column)])
    sums = [None if any(_number(row, part) is None for row in chosen) else sum(_number(row, part) for row in chosen)
            for part in parts]
    executed = sum(row.executed for row in chosen)
    if None in sums or not executed:
        return None, executed
    return (sums[0] if len(sums) == 1 else sums[0] / sums[1]), executed


def _number(row: SiteCounters, quantity: str) -> int | None:
    if quantity == "excessive_sectors":
        return None if row.sectors is None else row.sectors - row.ideal_sectors
    return getattr(row, quantity)
