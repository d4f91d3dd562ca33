"""What one warp-wide memory access costs: the living definition, in plain Python.

Every function here is the rule for one family of instructions, written to be read, not to be fast;
:mod:`simgpu.replay` is the same rules over whole columns and is tested against this file.

Vocabulary. A *word* is 4 bytes, a *bank* is the word index modulo 32. The hardware serves a warp access in
groups of lanes, a group in passes over the 32 banks; each pass is a *wavefront*. The *ideal* is the
wavefronts the same instruction would take if no two of its lanes fought over a bank; what exceeds it is
*excessive*. A *sector* is 32 aligned bytes of global memory.

Evidence. "Measured" means one warp and one instruction per launch on an H200 (GH100, driver 580.159,
Nsight Compute 2025.3.1), every case of ``validation/measured/h200/patterns.jsonl``, where the rule is exact.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simgpu.errors import SimError
from simgpu.instructions import LANES, Instruction

WORD = 4  # bytes
BANKS = 32
SECTOR = 32  # bytes
LINE = 128  # bytes: a shared-memory row of all banks, and a global cache line


@dataclass(frozen=True)
class Cost:
    """What one warp access costs. ``None``: the instruction does not use that memory, or no rule is proven.

    ``wavefronts``, ``ideal``: shared-memory data-pipe passes. ``sectors``, ``ideal_sectors``: 32-byte global
    sectors. ``unmodelled``: at least one of the numbers above has no proven rule and is therefore None.
    """

    wavefronts: int | None = None
    ideal: int | None = None
    sectors: int | None = None
    ideal_sectors: int | None = None
    unmodelled: bool = False


def cost(
    instruction: Instruction,
    width: int,
    mask: int,
    shared: Sequence[int] | None = None,
    global_: Sequence[int] | None = None,
) -> Cost:
    """The cost of one warp executing ``instruction`` at ``width`` bytes per lane.

    ``shared`` and ``global_`` are 32 byte addresses (those of inactive lanes are ignored; shared
    addresses count from the start of the bank-0-aligned shared window). Raises
    :class:`~simgpu.errors.SimError` for a width or mask the instruction does not have, a missing address
    list, or a misaligned or negative address.

    >>> from simgpu.instructions import instruction
    >>> cost(instruction("lds"), 4, 0xFFFFFFFF, shared=[128 * lane for lane in range(32)])
    Cost(wavefronts=32, ideal=1, sectors=None, ideal_sectors=None, unmodelled=False)
    >>> cost(instruction("ldg"), 4, 0xFFFFFFFF, global_=[4 * lane for lane in range(32)]).sectors
    4
    """
    instruction.require_width(width)
    instruction.require_mask(mask)
    active = [lane for lane in range(LANES) if mask >> lane & 1]
    sides = []
    for wanted, addresses, memory in ((instruction.shared, shared, "shared"), (instruction.global_, global_, "global")):
        if not wanted:
            continue
        if addresses is None or len(addresses) != LANES:
            raise SimError(f"{instruction.name} needs {LANES} {memory} byte addresses")
        for lane in active:
            if addresses[lane] < 0 or addresses[lane] % width:
                raise SimError(
                    f"{instruction.name}: lane {lane}: {memory} byte address {addresses[lane]} is not a "
                    f"non-negative multiple of {width}"
                )
        sides.append({lane: addresses[lane] for lane in active})
    if not instruction.proven:
        return Cost(unmodelled=True)
    return RULES[instruction.family](instruction, width, *sides)


# ---- shared memory -------------------------------------------------------------------------------------


def conflict_degree(accesses: Sequence[tuple[int, int]]) -> int:
    """Wavefronts of one group: the most distinct words any bank is asked for; 0 for an empty group.

    ``accesses`` are (byte address, bytes) pairs. Two lanes on the same word share it: that is a broadcast,
    not a conflict, also when they want different bytes of it.

    >>> conflict_degree([(0, 4), (128, 4), (2, 2)])
    2
    """
    words = {word for address, size in accesses for word in range(address // WORD, (address + size - 1) // WORD + 1)}
    return max(Counter(word % BANKS for word in words).values(), default=0)


def group_lanes(width: int) -> int:
    """How many lanes move 128 bytes together: 32 up to 4 bytes a lane, 16 at 8, 8 at 16."""
    return LANES if width <= WORD else LINE // width


def pairs_merge(addresses: dict[int, int]) -> bool:
    """Whether an 8- or 16-byte load may serve twice the lanes at once.

    It may when every active lane finds its neighbour at distance 1 (or every one at distance 2)
    inactive or at its own address: the data path then carries half as many distinct vectors. Measured on
    loads only; stores never merge.
    """
    return any(
        all(addresses.get(lane ^ step, address) == address for lane, address in addresses.items()) for step in (1, 2)
    )


def _grouped(addresses: dict[int, int], width: int, lanes: int) -> Cost:
    degrees = [
        conflict_degree([(addresses[lane], width) for lane in range(first, first + lanes) if lane in addresses])
        for first in range(0, LANES, lanes)
    ]
    return Cost(wavefronts=sum(degrees), ideal=sum(degree > 0 for degree in degrees))


def shared_load(_: Instruction, width: int, shared: dict[int, int]) -> Cost:
    """LDS. Measured: exact on all 192 cases of 1 to 16 bytes."""
    lanes = group_lanes(width)
    if width > WORD and pairs_merge(shared):
        lanes *= 2
    return _grouped(shared, width, lanes)


def shared_store(_: Instruction, width: int, shared: dict[int, int]) -> Cost:
    """STS. Measured: exact on all 192 cases of 1 to 16 bytes."""
    return _grouped(shared, width, group_lanes(width))


def matrix_rows(instruction: Instruction, width: int, shared: dict[int, int]) -> Cost:
    """ldmatrix and stmatrix: matrix i is the eight 16-byte rows named by lanes 8i..8i+7, one group each.

    ``.trans`` changes which lane receives what, not what is read. Measured: exact on all 240 cases.
    """
    rows = {lane: address for lane, address in shared.items() if lane < 8 * instruction.matrices}
    return _grouped(rows, width, 8)


def shared_atomic(_: Instruction, __: int, shared: dict[int, int]) -> Cost:
    """ATOMS add and exch on 32 bits: lanes on one bank take turns, on the same word too.

    Measured: exact on all 60 cases.
    """
    turns = max(Counter(address // WORD % BANKS for address in shared.values()).values(), default=0)
    return Cost(wavefronts=turns, ideal=min(turns, 1))


def shared_compare_and_swap(_: Instruction, __: int, shared: dict[int, int]) -> Cost:
    """ATOMS.CAS: every turn is two passes. Measured: exact on all 20 cases."""
    turns = max(Counter(address // WORD % BANKS for address in shared.values()).values(), default=0)
    return Cost(wavefronts=2 * turns, ideal=2 * min(turns, 1))


# ---- global memory -------------------------------------------------------------------------------------


def ideal_sectors(lanes: int, width: int) -> int:
    """The fewest 32-byte sectors that hold ``lanes`` distinct elements of ``width`` bytes."""
    return -(-lanes * width // SECTOR)


def global_access(_: Instruction, width: int, global_: dict[int, int]) -> Cost:
    """LDG and STG: the distinct sectors touched. Measured: exact on all 240 cases."""
    sectors = {address // SECTOR for address in global_.values()}
    return Cost(sectors=len(sectors), ideal_sectors=ideal_sectors(len(global_), width))


def global_atomic(_: Instruction, width: int, global_: dict[int, int]) -> Cost:
    """ATOMG and RED add on 32 bits: a sector is sent once per lane on its most wanted word."""
    wanted: dict[int, Counter[int]] = defaultdict(Counter)
    for address in global_.values():
        wanted[address // SECTOR][address // WORD] += 1
    return Cost(
        sectors=sum(max(words.values()) for words in wanted.values()), ideal_sectors=ideal_sectors(len(global_), width)
    )


# ---- cp.async: global to shared -------------------------------------------------------------------------


def copy_through_l1(_: Instruction, width: int, shared: dict[int, int], global_: dict[int, int]) -> Cost:
    """cp.async.ca (LDGSTS through L1): groups as for stores, fighting over banks on both sides.

    s and g are the active lanes on the fullest bank of shared memory and of the global line, lanes on the
    same address counted each. A group with s = 1 or g = 1 takes max(s, g); one that conflicts on both
    sides is not understood, nor is one whose lanes repeat a global address: unmodelled. Measured: exact on
    382 of 382 cases with distinct global addresses.
    """
    sectors = len({address // SECTOR for address in global_.values()})
    wanted = ideal_sectors(len(global_), width)
    wavefronts = ideal = 0
    lanes = group_lanes(width)
    for first in range(0, LANES, lanes):
        group = [lane for lane in range(first, first + lanes) if lane in shared]
        if not group:
            continue
        s = fullest_bank([shared[lane] for lane in group], width)
        g = fullest_bank([global_[lane] for lane in group], width)
        distinct = len({global_[lane] for lane in group}) == len(group)
        if min(s, g) > 1 or not distinct:
            return Cost(sectors=sectors, ideal_sectors=wanted, unmodelled=True)
        wavefronts += max(s, g)
        ideal += 1
    return Cost(wavefronts, ideal, sectors, wanted)


def fullest_bank(addresses: Sequence[int], width: int) -> int:
    """How many of the accesses land on the bank that most of them land on (the bank of their first word)."""
    return max(Counter(address % LINE // width for address in addresses).values(), default=0)


def copy_past_l1(_: Instruction, width: int, shared: dict[int, int], global_: dict[int, int]) -> Cost:
    """cp.async.cg (LDGSTS past L1): whole 32-byte blocks travel, two 16-byte halves at a time.

    A *move* takes a half of a global sector to a half of a shared block. All moves between the same block
    and sector form the *kind* of that pair; pairs of one kind that go from one global line to one shared
    row, and agree in the parity of (block xor sector) within them, travel in one wavefront. Measured: exact
    on 456 of 456 cases in which no two lanes share a 16-byte chunk of either side; others are unmodelled.
    Sectors: distinct (block, sector) pairs, exact on 560 of 560.
    """
    moves: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for lane, target in shared.items():
        source = global_[lane]
        moves[target // SECTOR, source // SECTOR].add((source // width % 2, target // width % 2))
    sectors, wanted = len(moves), ideal_sectors(len(global_), width)
    if len(set(shared.values())) < len(shared) or len(set(global_.values())) < len(global_):
        return Cost(sectors=sectors, ideal_sectors=wanted, unmodelled=True)
    per_line = LINE // SECTOR
    waves = {
        (block // per_line, sector // per_line, frozenset(kind), (block ^ sector) & 1)
        for (block, sector), kind in moves.items()
    }
    return Cost(len(waves), -(-len(shared) * width // LINE), sectors, wanted)


RULES: dict[str, Callable[..., Cost]] = {
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
