"""The single accesses and the occupancy queries that were measured, against the rules and the occupancy model.

``patterns.jsonl`` holds one warp access a line, each measured in a launch of its own, with every counter that is not
zero; ``occupancy.csv`` one answer of the driver a line.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.gpu import load_gpu
from models.occupancy import occupancy
from simgpu.errors import SimError
from simgpu.instructions import INSTRUCTIONS, instruction
from simgpu.replay import replay
from validation.compare import Comparison, Outcome

PATTERNS, OCCUPANCY = "access-patterns", "occupancy"
ANSWER = "max_active_blocks_per_sm"
QUERY = {  # occupancy.csv's columns: the model's arguments
    "registers_per_thread": "registers",
    "static_shared_bytes": "static_shared_bytes",
    "threads_per_block": "threads",
    "dynamic_shared_bytes": "shared_bytes",
}

# The counters that can hold a column, the one to prefer first; {op} is the counter's word for the instruction. A launch
# of one access has no arbitration, so there the units' own counters are exact, and the first witness.
COUNTERS = {
    "wavefronts": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{op}",
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{op}",
        "memory_l1_wavefronts_shared",
    ),
    "ideal": ("memory_l1_wavefronts_shared_ideal",),
    "excessive": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}",),
    "sectors": (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_{op}",
        "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_{op}",
        "memory_l2_theoretical_sectors_global",
    ),
    "ideal_sectors": ("memory_l2_theoretical_sectors_global_ideal",),
    "lines": ("memory_l1_tag_requests_global",),
}
NEEDED = ("wavefronts", "sectors")  # a measurement without these measures nothing
# ncu's conflicts are not wavefronts - ideal for these: of an unshifted copy past L1 it reports none whatever its
# wavefronts, and of a compare-and-swap, whose every turn is two passes, the turns alone.
CONFLICTS_DIFFER = ("cp.async.ca", "cp.async.cg", "atoms.cas")
WORDS = {"lds": "ld", "sts": "st", "ldg": "ld", "stg": "st", "ldmatrix": "ld", "stmatrix": "st", "atoms": "atom",
         "atoms.cas": "atom", "cp.async.ca": "ldgsts", "cp.async.cg": "ldgsts"}


@dataclass(frozen=True)
class MeasuredAccess:
    """One line: where it stands, what the warp executed, and the counters that were not zero."""

    line: int
    op: str
    width: int
    mask: int
    shared: list[int] | None
    global_: list[int] | None
    filled: bool  # a cp.async that reads fewer bytes than it writes: no rule covers it
    counters: dict[str, int]


def compare_patterns(gpu: str, path: Path) -> list[Outcome]:
    """Every access of ``path``, against its counters: an outcome per instruction and width.

    Raises :class:`~simgpu.errors.SimError` for a line that is no measured access.
    """
    groups: dict[tuple[str, int, bool], list[MeasuredAccess]] = defaultdict(list)
    for access in read_accesses(path):
        groups[access.op, access.width, access.filled].append(access)
    outcomes = []
    for (op, width, filled), group in groups.items():
        try:
            rows = compare_accesses(group)
        except SimError as error:
            raise SimError(f"{path}, line {group[0].line} and its like: {error}") from None
        outcomes.append(Outcome(gpu, PATTERNS, f"{op} {width} B{' zero-fill' * filled}", tuple(rows)))
    return outcomes


def compare_accesses(group: Sequence[MeasuredAccess]) -> list[Comparison]:
    """The comparisons of accesses of one instruction and width: each column that some counter of theirs holds."""
    op, width, filled = group[0].op, group[0].width, group[0].filled
    if filled or op not in INSTRUCTIONS:
        return [Comparison(f"line {access.line}", "wavefronts", None, None, unmodelled=True) for access in group]
    executed = instruction(op)
    shared = [access.shared for access in group] if executed.shared else None
    global_ = [access.global_ for access in group] if executed.global_ else None
    columns = replay(executed, width, [access.mask for access in group], shared, global_)
    numbers = {name: column for name, column in vars(columns).items() if column is not None and name in COUNTERS}
    if columns.wavefronts is not None and executed.family not in CONFLICTS_DIFFER:
        numbers["excessive"] = np.where(columns.wavefronts < 0, -1, columns.wavefronts - columns.ideal)
    collected = set().union(*(access.counters for access in group))
    word, rows = WORDS.get(executed.family, op.split(".")[0]), []
    for column, values in numbers.items():
        counter = next((name.format(op=word) for name in COUNTERS[column] if name.format(op=word) in collected), None)
        if counter is None and column in NEEDED:
            raise SimError(f"no counter of {column} among {', '.join(sorted(collected)) or 'none'}")
        for access, value in zip(group, values.tolist(), strict=True) if counter else ():
            unknown = value < 0
            rows.append(Comparison(f"line {access.line}", column, None if unknown else value,
                                   access.counters.get(counter, 0), unmodelled=unknown))
    return rows


def read_accesses(path: Path) -> Iterator[MeasuredAccess]:
    """The lines of ``path``; :class:`~simgpu.errors.SimError` for one that is no JSON or lacks a key."""
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                line = json.loads(text)
                mask = line["active_mask"]
                counters = line["counters"]
                if not all(type(value) is int for value in counters.values()):
                    raise SimError(f"{path}: line {number}: a counter is no integer")
                yield MeasuredAccess(number, line["op"], line["bytes_per_lane"],
                                     int(mask, 16) if isinstance(mask, str) else mask,
                                     line.get("shared_byte_offset"), line.get("global_byte_offset"),
                                     "source_bytes" in line, counters)
    except (OSError, UnicodeDecodeError) as error:
        raise SimError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SimError(f"{path}: line {number}: not a measured access: {type(error).__name__}: {error}") from None


def compare_occupancy(gpu: str, path: Path) -> Outcome:
    """The driver's answers in ``path``, against the model: one outcome.

    Raises :class:`~simgpu.errors.SimError` for a line without the columns of :data:`QUERY` and the answer.
    """
    machine, rows = load_gpu(gpu), []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, line in enumerate(csv.DictReader(file), 2):
                try:
                    arguments = {argument: int(line[name]) for name, argument in QUERY.items()}
                    answer = int(line[ANSWER])
                except (KeyError, TypeError, ValueError):
                    raise SimError(f"{path}: line {number}: not a query of {', '.join(QUERY)} and {ANSWER}") from None
                predicted = occupancy(machine, **arguments).blocks_per_sm
                rows.append(Comparison(f"line {number}", "blocks_per_sm", predicted, answer, "driver"))
    except (OSError, UnicodeDecodeError) as error:
        raise SimError(f"{path}: {error}") from None
    if not rows:
        raise SimError(f"{path}: no queries")
    return Outcome(gpu, OCCUPANCY, f"{len(rows):,} queries", tuple(rows))
