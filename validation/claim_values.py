"""The numbers that a claim is about: looked up in the model and in what the H200 measured, under the same name.

A :class:`Reading` is one quantity of one launch. Counts are those of one CTA on both sides: the model emulates one, a
measured count is shared out over the grid. :mod:`validation.claims` makes claims of readings.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from kernels_py import find
from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.counters import SiteCounters, concerns
from simgpu.errors import DataDependent, SimError
from simgpu.expression import lane_expression
from simgpu.instructions import FULL_MASK, LANES, instruction, nearest
from simgpu.rules import LINE
from simgpu.run import Result, simulate
from validation.compare import COLUMNS, read_runs
from validation.compare_access import ANSWER, QUERY, WORDS, read_accesses
from validation.published import Access, count

KB = 1024
MEASURED_ON = "h200"

COUNTS = (*COLUMNS, "lanes", "bytes")  # summed over the reading's sites
RATIOS = {  # of such sums
    "n_way": ("wavefronts", "ideal"),
    "wavefronts_per_instruction": ("wavefronts", "executed"),
    "sectors_per_request": ("sectors", "executed"),
    "excessive_share": ("ideal_sectors", "sectors"),  # % of the sectors that are not ideal
}
FACTS = {
    "shared_kb": "KB (1,024 B) of shared memory a block",
    "blocks": "blocks per SM: of a kernel, or of a query of threads, registers and shared_bytes",
    "occupancy": "% of an SM's warps that the blocks have, of a kernel or a query",
    "mma": "mma instructions: a fact of the launch, the model's on both sides",
    "shared_clocks": "clocks that the wavefronts take at the GPU's shared-memory bandwidth",
    "tensor_clocks": "clocks that the mma instructions take at the GPU's tensor rate",
    "registers": "registers a thread, by ptxas",
    "time": "microseconds",
    "clocks": "clocks a k-tile, by the micro-benchmark itself",
}
QUANTITIES = (*COUNTS, *RATIOS, *FACTS)
MEASURED_ONLY = ("registers", "time", "clocks")  # the model has none
MMA_FLOP = {"mma.m16n8k16": 2 * 16 * 8 * 16, "mma.m16n8k8": 2 * 16 * 8 * 8}

Items = tuple[tuple[str, Any], ...]  # of a dictionary, sorted: hashable
Counts = Mapping[str, float | None]  # of a site, under the names of COUNTS; None where a count does not apply


@dataclass(frozen=True)
class Reading:
    """One quantity (:data:`QUANTITIES`) of one launch of ``kernel`` (NAME@VARIANT), with ``params`` replaced.

    ``sites`` are those it sums over, all that use the quantity's memory if empty. ``query`` asks the occupancy model
    or the driver, and ``access`` (op, width, shared: an expression in ``lane``) is a single access, not a kernel.
    """

    quantity: str
    kernel: str = ""
    sites: tuple[str, ...] = ()
    params: Items = ()
    query: Items = ()
    access: Items = ()


@dataclass(frozen=True)
class Range:
    """A number and the range its noise allows; the three are one where it is exact."""

    value: float
    low: float
    high: float


def exact(value: float) -> Range:
    return Range(value, value, value)


# ---- the model -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def emulate(kernel: str, params: Items) -> Result:
    """One CTA of a launch: the first, which has every row it can have, as nearly all have."""
    made, variant = find(kernel)
    launch = made.launch(variant, **dict(params))
    try:
        return simulate(launch, ctas=1, mode="addresses")
    except DataDependent:
        return simulate(launch, ctas=1, mode="values")


def model_value(reading: Reading, gpu: str) -> Range | None:
    """What the model says of ``gpu``; None for what it does not know (:data:`MEASURED_ONLY`).

    Raises :class:`~simgpu.errors.SimError` for a kernel, variant, parameter or site that does not exist.

    >>> model_value(Reading("n_way", "transpose", ("tile.load",)), "h20")
    Range(value=32.0, low=32.0, high=32.0)
    """
    quantity, machine = reading.quantity, load_gpu(gpu)
    if quantity in MEASURED_ONLY:
        return None
    if reading.query:
        fit = occupancy(machine, **dict(reading.query))
        return exact(fit.blocks_per_sm if quantity == "blocks" else 100 * fit.occupancy)
    if reading.access:
        return exact(_of_sites(quantity, [_counts(count(Access(executed=1, **dict(reading.access))))]))
    result = emulate(reading.kernel, reading.params)
    if quantity == "shared_kb":
        return exact(result.shared_bytes / KB)
    if quantity in ("blocks", "occupancy"):
        if result.launch.registers is None:
            raise SimError(f"{reading.kernel} does not say its registers")
        query = {"threads": result.launch.threads, "registers": result.launch.registers}
        query["shared_bytes"] = result.shared_bytes
        return model_value(Reading(quantity, query=tuple(query.items())), gpu)
    if quantity in ("mma", "tensor_clocks"):
        mma = {kind: count for kind, count in result.table.work.items() if kind in MMA_FLOP}
        if quantity == "mma":
            return exact(sum(mma.values()))
        return exact(sum(MMA_FLOP[kind] * count for kind, count in mma.items()) / machine.tensor_bf16_flop_per_clk)
    rows = [_counts(row) for row in _chosen(reading, result.table.sites)]
    if quantity == "shared_clocks":
        return exact(_summed("wavefronts", rows) * LINE / machine.shared_bytes_per_clk)
    return exact(_of_sites(quantity, rows))


def _chosen(reading: Reading, rows: Iterable[SiteCounters]) -> list[SiteCounters]:
    known = {row.site: row for row in rows}
    for name in reading.sites:
        if name not in known:
            raise SimError(f"{reading.kernel} has no site {name!r}{nearest(name, known)}")
    if reading.sites:
        return [known[name] for name in reading.sites]
    return [row for row in known.values() if _applies(reading.quantity, row)]


def _applies(quantity: str, row: SiteCounters) -> bool:
    """Whether the site uses the memory that the quantity is about."""
    column = "wavefronts" if quantity == "shared_clocks" else RATIOS.get(quantity, (quantity,))[0]
    return column in ("executed", "lanes", "bytes") or concerns(row, column)


def _counts(row: SiteCounters) -> Counts:
    lanes = row.bytes // row.width
    return {name: getattr(row, name) for name in COLUMNS} | _moved(row, row.executed, lanes)


def _moved(row: SiteCounters, executed: float, lanes: float) -> Counts:
    """Active lanes, and the bytes that they move: an ldmatrix moves its matrices, whatever lanes gave addresses."""
    matrices = instruction(row.instruction).matrices
    return {"lanes": lanes, "bytes": LINE * matrices * executed if matrices else lanes * row.width}


def _of_sites(quantity: str, rows: Sequence[Counts]) -> float:
    if quantity not in RATIOS:
        return _summed(quantity, rows)
    above, below = (_summed(name, rows) for name in RATIOS[quantity])
    if not below:
        raise SimError(f"{quantity}: {RATIOS[quantity][1]} is 0")
    return 100 * (below - above) / below if quantity == "excessive_share" else above / below


def _summed(name: str, rows: Sequence[Counts]) -> float:
    values = [row[name] for row in rows]
    if not values or None in values:
        raise SimError(f"{name} does not apply to all of the sites, or has no proven rule")
    return sum(values)


# ---- the measurement -------------------------------------------------------------------------------------------------


def measured_value(reading: Reading, folder: Path) -> Range | None:
    """What ``folder`` (such as ``measured/h200``) holds; None for a query that nobody put to the driver.

    Raises :class:`~simgpu.errors.SimError` for a launch or an access that was not measured, or a file that does not
    say.
    """
    if reading.query:
        blocks = _driver(dict(reading.query), folder / "occupancy.csv")
        return None if blocks is None else _of_blocks(reading.quantity, blocks, dict(reading.query)["threads"])
    if reading.access:
        return exact(_of_sites(reading.quantity, [_single(folder / "patterns.jsonl", **dict(reading.access))]))
    if reading.quantity == "mma":
        return model_value(reading, MEASURED_ON)
    run = _run(reading, folder)
    try:
        if (found := _fact(reading.quantity, run)) is not None:
            return found
        # What a site's instruction is, the twin says; the numbers are the profile's.
        sites = [(row, run["sites"][row.site]) for row in
                 _chosen(reading, emulate(reading.kernel, reading.params).table.sites)]
    except KeyError as missing:
        raise SimError(f"{reading.kernel}, measured {run['case']}: no {missing}") from None
    rows = [_measured_counts(row, site, prod(run["grid"])) for row, site in sites]
    return exact(_of_sites(reading.quantity, rows))


def _fact(quantity: str, run: Mapping[str, Any]) -> Range | None:
    """What a run says of a whole launch; None for a quantity of its sites."""
    if quantity == "time":
        return Range(*(run["time"][f"{end}_us"] for end in ("median", "low", "high")))
    if quantity == "clocks":
        return Range(*(run["clocks_per_iteration"][end] for end in ("median", "min", "max")))
    if quantity == "registers":
        return exact(run["registers"])
    if quantity in ("blocks", "occupancy"):
        return _of_blocks(quantity, run["blocks_per_sm"], prod(run["block"]))
    if quantity == "shared_kb":
        return exact((run["static_shared_bytes"] + run["dynamic_shared_bytes"]) / KB)
    return None


def _of_blocks(quantity: str, blocks: int, threads: int) -> Range:
    if quantity == "blocks":
        return exact(blocks)
    return exact(100 * blocks * -(-threads // LANES) / load_gpu(MEASURED_ON).sm_warps)


def _measured_counts(row: SiteCounters, site: Mapping[str, Any], ctas: int) -> Counts:
    """A row of a profile; what it does not mention is 0."""
    counts = {name: site.get(column, 0) / ctas if _applies(name, row) else None for name, column in COLUMNS.items()}
    return counts | _moved(row, site["executed"] / ctas, site.get("active_lanes", 0) / ctas)


def _run(reading: Reading, folder: Path) -> Mapping[str, Any]:
    """The first measured run of the reading's variant whose parameters are all the same."""
    kernel, variant = find(reading.kernel)
    wanted = kernel.parameters(variant) | dict(reading.params)
    for run in _runs(folder / f"{kernel.name}.json"):
        if run["variant"] == variant and all(wanted.get(name) == value for name, value in run["params"].items()):
            return run
    params = "".join(f",{name}={value}" for name, value in reading.params)
    raise SimError(f"{reading.kernel}{params} was not measured")


@lru_cache(maxsize=32)
def _runs(path: Path) -> list[dict[str, Any]]:
    read_runs(path)  # refuses what validation.measure did not write
    return json.loads(path.read_text(encoding="utf-8"))["runs"]


def _driver(query: Mapping[str, int], path: Path) -> int | None:
    """Blocks per SM by the driver's own answer; None for a query that nobody put to it."""
    wanted = {column: query.get(argument, 0) for column, argument in QUERY.items()}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                if all(int(line[column]) == value for column, value in wanted.items()):
                    return int(line[ANSWER])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SimError(f"{path}: not the driver's answers: {type(error).__name__}: {error}") from None
    return None


def _single(path: Path, op: str, width: int, shared: str) -> Counts:
    """The wavefronts of one warp's shared access at these addresses, or at these moved by whole rows of the banks."""
    wanted, word = lane_expression(shared), WORDS[instruction(op).family]
    for access in read_accesses(path):
        if (access.op, access.width, access.mask) != (op, width, FULL_MASK) or access.shared is None:
            continue
        moved = {address - start for address, start in zip(access.shared, wanted.tolist(), strict=True)}
        if len(moved) == 1 and moved.pop() % LINE == 0:
            wavefronts = access.counters.get(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{word}", 0)
            excessive = access.counters.get(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{word}", 0)
            counted = {"executed": 1, "wavefronts": wavefronts, "excessive": excessive}
            return dict.fromkeys(COUNTS) | counted | {"ideal": wavefronts - excessive}
    raise SimError(f"{op} {width} at {shared} was not measured")
