"""The rules of :mod:`simgpu.rules` over whole columns of warp accesses, compiled.

:func:`replay` answers access by access, :func:`totals` sums without keeping the answers. Both equal
:func:`simgpu.rules.cost` on every access and refuse what it refuses; the same tests run on all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np

from simgpu import replay_lanes as lanes
from simgpu.errors import SimError
from simgpu.instructions import FULL_MASK, LANES, NO_SOURCE, Instruction
from simgpu.replay_conflicts import distinct_words
from simgpu.rules import WORD, group_lanes

ALL_LANES = np.uint32(FULL_MASK)
ROWS_PER_THREAD = 1 << 12  # fewer are counted before a thread has started
ROWS_PER_SUM = 1 << 15  # totals: the columns of this many accesses stay in the cache


@dataclass(frozen=True)
class Columns:
    """What each of n warp accesses costs, in the terms of :class:`simgpu.rules.Cost`.

    ``wavefronts``, ``ideal`` (int32[n]): None when the instruction does not address shared memory. ``sectors``,
    ``ideal_sectors``, ``lines`` (int32[n]): None when it does not address global memory. ``unmodelled`` (bool[n]): at
    least one number of this access has no proven rule; that number is -1.
    """

    wavefronts: np.ndarray | None
    ideal: np.ndarray | None
    sectors: np.ndarray | None
    ideal_sectors: np.ndarray | None
    lines: np.ndarray | None
    unmodelled: np.ndarray

    def arrays(self) -> list[np.ndarray]:
        """The columns the instruction has, in the order of the fields."""
        return [column for column in vars(self).values() if column is not None]

    def rows(self, span: slice) -> Columns:
        """Views of these accesses only."""
        return Columns(*(None if column is None else column[span] for column in vars(self).values()))


@dataclass(frozen=True)
class Totals:
    """Sums over accesses. A number without a proven rule adds 0; ``unmodelled`` counts the accesses with one.

    ``wavefronts``, ``ideal``: shared-memory passes; ``max_wavefronts``: those of the worst single access.
    ``sectors``, ``ideal_sectors``: 32-byte global sectors; ``lines``: 128-byte lines. ``unknown_wavefronts``,
    ``unknown_sectors``, ``unknown_lines`` count the accesses whose rule for that number is not proven.
    """

    accesses: int = 0
    wavefronts: int = 0
    ideal: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    lines: int = 0
    unmodelled: int = 0
    max_wavefronts: int = 0
    unknown_wavefronts: int = 0
    unknown_sectors: int = 0
    unknown_lines: int = 0

    def __add__(self, other: Totals) -> Totals:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Totals(**sums | {"max_wavefronts": max(self.max_wavefronts, other.max_wavefronts)})


def replay(instruction: Instruction, width: int, masks, shared=None, global_=None, *, threads: int = 1) -> Columns:
    """The cost of each of n warps executing ``instruction`` at ``width`` bytes per lane.

    ``masks``: n active masks (uint32[n]). ``shared``: int32[n, 32] byte addresses from the start of the
    bank-0-aligned shared window; ``global_``: int64[n, 32] byte addresses; each is needed exactly when the
    instruction addresses that memory, and addresses of inactive lanes are ignored. Arrays of these dtypes in C
    order are not copied. ``threads`` > 1 splits the accesses over that many threads.

    Raises :class:`~simgpu.errors.SimError` for what :func:`simgpu.rules.cost` refuses, naming the first such
    access, its lane and the value.

    >>> from simgpu.instructions import instruction
    >>> stride = np.array([[4], [8], [128]])
    >>> replay(instruction("lds"), 4, [0xFFFFFFFF] * 3, shared=stride * np.arange(32)).wavefronts.tolist()
    [1, 2, 32]
    """
    masks, sides = _checked(instruction, width, masks, shared, global_)
    columns = _columns(instruction, len(masks))

    def part(rows: slice) -> None:
        _count(instruction, width, masks[rows], [side[rows] for side in sides], columns.rows(rows), rows.start)

    _over_threads(part, len(masks), threads)
    return columns


def totals(instruction: Instruction, width: int, masks, shared=None, global_=None, *, threads: int = 1) -> Totals:
    """The sums of :func:`replay`'s columns, from the same arguments, in memory that does not grow with n.

    >>> from simgpu.instructions import instruction
    >>> totals(instruction("lds"), 4, [0xFFFFFFFF] * 2, shared=[[128 * lane for lane in range(32)]] * 2).wavefronts
    64
    """
    masks, sides = _checked(instruction, width, masks, shared, global_)

    def part(rows: slice) -> Totals:
        scratch, total = _columns(instruction, ROWS_PER_SUM), Totals()
        for start in range(rows.start, rows.stop, ROWS_PER_SUM):
            block = slice(start, min(start + ROWS_PER_SUM, rows.stop))
            columns = scratch.rows(slice(0, block.stop - block.start))
            _count(instruction, width, masks[block], [side[block] for side in sides], columns, start)
            total += _sum(columns)
        return total

    return sum(_over_threads(part, len(masks), threads), Totals())


# ---- one rule per family, as in simgpu.rules: fills columns, returns the first refused access or -1 --------


def shared_load(_: Instruction, width: int, masks, shared, out: Columns) -> int:
    return distinct_words(width, group_lanes(width), width > WORD, ALL_LANES, masks, shared, out.wavefronts, out.ideal)


def shared_store(_: Instruction, width: int, masks, shared, out: Columns) -> int:
    return distinct_words(width, group_lanes(width), False, ALL_LANES, masks, shared, out.wavefronts, out.ideal)


def matrix_rows(instruction: Instruction, width: int, masks, shared, out: Columns) -> int:
    named = np.uint32((1 << 8 * instruction.matrices) - 1)
    return distinct_words(width, 8, False, named, masks, shared, out.wavefronts, out.ideal)


def shared_atomic(_: Instruction, width: int, masks, shared, out: Columns) -> int:
    return lanes.shared_atomic(1, width, masks, shared, out.wavefronts, out.ideal)


def shared_compare_and_swap(_: Instruction, width: int, masks, shared, out: Columns) -> int:
    return lanes.shared_atomic(2, width, masks, shared, out.wavefronts, out.ideal)


def global_access(_: Instruction, width: int, masks, global_, out: Columns) -> int:
    return lanes.global_access(width, masks, global_, out.sectors, out.ideal_sectors, out.lines)


def global_atomic(_: Instruction, width: int, masks, global_, out: Columns) -> int:
    return lanes.global_atomic(width, masks, global_, *out.arrays())


def copy_through_l1(_: Instruction, width: int, masks, shared, global_, out: Columns) -> int:
    return lanes.copy_through_l1(width, masks, shared, global_, *out.arrays())


def copy_past_l1(_: Instruction, width: int, masks, shared, global_, out: Columns) -> int:
    return lanes.copy_past_l1(width, masks, shared, global_, *out.arrays())


def nobody_knows(_: Instruction, width: int, masks, *sides_and_out) -> int:
    """Without a proven rule nothing is counted, and a width that no rule has room for never meets one."""
    *sides, out = sides_and_out
    *numbers, unmodelled = out.arrays()
    for column in numbers:
        column[:] = -1
    unmodelled[:] = True
    refused = [access for rows in sides if (access := lanes.first_refused(width, masks, rows)) >= 0]
    return min(refused, default=-1)


RULES: dict[str, Callable[..., int]] = {
    "lds": shared_load,
    "sts": shared_store,
    "ldmatrix": matrix_rows,
    "stmatrix": matrix_rows,
    "atoms": shared_atomic,
    "atoms.cas": shared_compare_and_swap,
    "ldg": global_access,
    "stg": global_access,
    "atomg": global_atomic,
    "cp.async.ca": copy_through_l1,
    "cp.async.cg": copy_past_l1,
}


# ---- arguments in, columns out ------------------------------------------------------------------------------


def _checked(instruction: Instruction, width: int, masks, shared, global_) -> tuple[np.ndarray, list[np.ndarray]]:
    """The masks as uint32[n] and the address rows of the memories the instruction uses, read-only, C order."""
    instruction.require_width(width)
    masks = np.asarray(masks)
    if masks.ndim != 1 or (masks.size and masks.dtype.kind not in "iuO"):
        raise SimError(f"active masks must be n integers, not {masks.dtype} of shape {masks.shape}")
    refused = (masks != 0) & (masks != FULL_MASK) if instruction.matrices else (masks < 0) | (masks > FULL_MASK)
    if refused.any():
        access = int(np.argmax(refused))
        try:
            instruction.require_mask(int(masks[access]))
        except SimError as error:
            raise SimError(f"access {access}: {error}") from None
    masks = _frozen(masks, np.uint32)
    sides = []
    for memory, addresses, dtype in _sides(instruction, shared, global_):
        if addresses is None:
            raise SimError(f"{instruction.name} needs {LANES} {memory} byte addresses per access")
        rows = np.asarray(addresses)
        if rows.shape != (len(masks), LANES) or rows.dtype.kind not in "iu":
            raise SimError(f"{memory} byte addresses must be integers of shape {(len(masks), LANES)}, "
                           f"not {rows.dtype} of shape {rows.shape}")
        if not np.can_cast(rows.dtype, dtype):
            _require_fit(memory, masks, rows, dtype)
        sides.append(_frozen(rows, dtype))
    return masks, sides


def _sides(instruction: Instruction, shared, global_) -> Iterator[tuple[str, object, type]]:
    """(memory, its addresses, their dtype) of the memories the instruction addresses, shared first."""
    if instruction.shared:
        yield "shared", shared, np.int32
    if instruction.global_:
        yield "global", global_, np.int64


def _require_fit(memory: str, masks: np.ndarray, rows: np.ndarray, dtype: type) -> None:
    limits = np.iinfo(dtype)
    active = (masks[:, None] >> np.arange(LANES, dtype=np.uint32) & 1).astype(bool)
    outside = active & ((rows < limits.min) | (rows > limits.max))
    if outside.any():
        access, lane = np.argwhere(outside)[0]
        raise SimError(f"access {access}: lane {lane}: {memory} byte address {rows[access, lane]} "
                       f"does not fit {limits.dtype}")


def _frozen(array: np.ndarray, dtype: type) -> np.ndarray:
    """A read-only C-ordered view: numba compiles read-only and writable arrays apart, and one compile is enough."""
    view = np.require(array, dtype, "CA").view()
    view.flags.writeable = False
    return view


def _columns(instruction: Instruction, accesses: int) -> Columns:
    def numbers(used: bool, count: int):
        return [np.empty(accesses, np.int32) if used else None for _ in range(count)]

    return Columns(*numbers(instruction.shared, 2), *numbers(instruction.global_, 3), np.zeros(accesses, bool))


def _count(instruction: Instruction, width: int, masks, sides, columns: Columns, first: int) -> None:
    """Fill ``columns``; ``first`` is the index of the first of these accesses, for the message of a refusal."""
    rule = RULES[instruction.family] if instruction.proven else nobody_knows
    refused = rule(instruction, width, masks, *sides, columns)
    if refused >= 0:
        for memory, rows, _ in _sides(instruction, sides[0], sides[-1]):
            for lane, address in enumerate(rows[refused].tolist()):
                if instruction.shared and memory == "global" and address == NO_SOURCE:
                    continue
                if int(masks[refused]) >> lane & 1 and (address < 0 or address % width):
                    raise SimError(f"access {first + refused}: lane {lane}: {memory} byte address {address} is not a "
                                   f"non-negative multiple of {width}")


def _sum(columns: Columns) -> Totals:
    def known(column: np.ndarray | None) -> int:
        return 0 if column is None else int(np.maximum(column, 0).sum(dtype=np.int64))

    def unknown(column: np.ndarray | None) -> int:
        return 0 if column is None else int(np.count_nonzero(column < 0))

    worst = 0 if columns.wavefronts is None else max(int(columns.wavefronts.max()), 0)
    return Totals(len(columns.unmodelled), known(columns.wavefronts), known(columns.ideal), known(columns.sectors),
                  known(columns.ideal_sectors), known(columns.lines), int(np.count_nonzero(columns.unmodelled)), worst,
                  unknown(columns.wavefronts), unknown(columns.sectors), unknown(columns.lines))


def _over_threads(part: Callable[[slice], object], accesses: int, threads: int) -> list:
    """``part`` of consecutive spans that cover the accesses, in order, so the first refusal is the one raised.

    Threads of our own instead of numba's: its portable threading layer must not be entered from two threads.
    """
    if threads < 1:
        raise SimError(f"threads must be at least 1, not {threads}")
    parts = max(1, min(threads, accesses // ROWS_PER_THREAD))
    bounds = [accesses * i // parts for i in range(parts + 1)]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    if parts == 1:
        return [part(spans[0])]
    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(part, spans))
