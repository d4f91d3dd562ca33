"""What one warp-wide memory access costs: the living definition, in plain Python.

Every function here is the rule for one family of instructions, written to be read, not to be fast;
:mod:`simgpu.replay` is the same rules over whole columns and is tested against this file.

Vocabulary. A *word* is 4 bytes, a *bank* is the word index modulo 32. The hardware serves a warp access in
groups of lanes, a group in passes over the 32 banks; each pass is a *wavefront*. The *ideal* is the
wavefronts the same instruction would take if no two of its lanes fought over a bank; what exceeds it is
*excessive*. A *sector* is 32 aligned bytes of global memory.

Evidence. "Measured" means one warp and one instruction on an H200 (GH100, driver 580.159, Nsight Compute
2025.3.1): the cases of ``validation/measured/h200/patterns.jsonl`` and ``access_*.jsonl.gz``, where the rule is
exact. A *fresh* case was measured after its rule was written. Elements of 1 and 2 bytes cost what their words do,
lanes that are off nothing (exact on 576 such rows of shared loads and stores, 95 of them masked); code compiled for
sm_80 costs what code for sm_90 does, on every row measured as both.

Where counters differ, a rule follows the hardware's counter (``l1tex__*``), not Nsight Compute's source page and the
``smsp__sass_*`` metrics, which repeat it. That is so for global atomics (:func:`global_atomic`), and for merging
loads (:func:`pairs_merge`): under a full mask the page merges only where the merged groups are free of conflicts
(584 of 584 cases), the hardware always (384 of 384).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simgpu.errors import SimError
from simgpu.instructions import LANES, NO_SOURCE, Instruction

WORD = 4  # bytes
BANKS = 32
SECTOR = 32  # bytes
LINE = 128  # bytes: a shared-memory row of all banks, and a global cache line


@dataclass(frozen=True)
class Cost:
    """What one warp access costs. ``None``: the instruction does not use that memory, or no rule is proven.

    ``wavefronts``, ``ideal``: shared-memory data-pipe passes. ``sectors``, ``ideal_sectors``: 32-byte global
    sectors; ``lines``: 128-byte global lines, each of which L1 looks up once. ``unmodelled``: at least one of the
    numbers above has no proven rule and is therefore None.
    """

    wavefronts: int | None = None
    ideal: int | None = None
    sectors: int | None = None
    ideal_sectors: int | None = None
    lines: int | None = None
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
    list, or a misaligned or negative address. A lane of a cp.async that reads nothing, because it fills all its
    bytes with zeros, has :data:`~simgpu.instructions.NO_SOURCE` for a global address.

    >>> from simgpu.instructions import instruction
    >>> cost(instruction("lds"), 4, 0xFFFFFFFF, shared=[128 * lane for lane in range(32)])
    Cost(wavefronts=32, ideal=1, sectors=None, ideal_sectors=None, lines=None, unmodelled=False)
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
        copies = instruction.shared and memory == "global"
        used = [lane for lane in active if not (copies and addresses[lane] == NO_SOURCE)]
        for lane in used:
            if addresses[lane] < 0 or addresses[lane] % width:
                raise SimError(
                    f"{instruction.name}: lane {lane}: {memory} byte address {addresses[lane]} is not a "
                    f"non-negative multiple of {width}"
                )
        sides.append({lane: addresses[lane] for lane in used})
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

    ``.trans`` changes which lane receives what, not what is read. Measured: exact on all 240 cases, and on 1,600 rows
    of ``access_*.jsonl.gz``, in 953 of which rows repeat: groups never merge.
    """
    rows = {lane: address for lane, address in shared.items() if lane < 8 * instruction.matrices}
    return _grouped(rows, width, 8)


def turns(addresses: dict[int, int], width: int) -> list[int]:
    """Per group of lanes (those of stores), the turns it takes where lanes on one bank never share.

    That is the most lanes on one bank; the bank is that of an element's first word.
    """
    lanes = group_lanes(width)
    return [fullest_bank([addresses[lane] for lane in range(first, first + lanes) if lane in addresses], width)
            for first in range(0, LANES, lanes)]


def fullest_bank(addresses: Sequence[int], width: int) -> int:
    """How many of the accesses land on the bank that most of them land on (the bank of their first word)."""
    return max(Counter(address % LINE // max(width, WORD) for address in addresses).values(), default=0)


def full_lines(lanes: int, width: int) -> int:
    """The fewest 128-byte wavefronts that carry ``lanes`` elements of ``width`` bytes."""
    return -(-lanes * width // LINE)


def shared_atomic(_: Instruction, width: int, shared: dict[int, int]) -> Cost:
    """ATOMS on 32 and 64 bits: lanes on one bank take turns, on the same word too.

    Measured: add, exch, min, max, and, or, xor and inc on 32 bits, exch on 64: exact on all 1,564 cases (704 of
    them fresh). The ideal is the groups with an active lane, as the hardware's conflicts have it; the source page's
    is that on 32 bits, and :func:`full_lines` on 64.
    """
    taken = turns(shared, width)
    return Cost(wavefronts=sum(taken), ideal=sum(group > 0 for group in taken))


def shared_compare_and_swap(instruction: Instruction, width: int, shared: dict[int, int]) -> Cost:
    """ATOMS.CAS on 32 and 64 bits: every turn is two passes, in the ideal too. Measured: exact on all 356 cases
    (128 fresh); on 32 bits the ideal is the source page's, exact on the 192 cases that have it.
    """
    once = shared_atomic(instruction, width, shared)
    return Cost(wavefronts=2 * once.wavefronts, ideal=2 * once.ideal)


# ---- global memory -------------------------------------------------------------------------------------


def ideal_sectors(lanes: int, width: int, sectors: int) -> int:
    """The sectors the source page calls ideal: what ``lanes`` distinct elements would fill, or fewer if touched.

    Lanes on one address count each, until the distinct ``sectors`` touched are fewer: a broadcast has ideal 1,
    pairs of lanes on one word halve it only where they halve the sectors. Measured, the source page's column:
    exact on all 8,000 cases of loads, stores, atomics and cp.async.ca.

    >>> ideal_sectors(32, 16, sectors=32), ideal_sectors(32, 4, sectors=1)
    (16, 1)
    """
    return min(-(-lanes * width // SECTOR), sectors)


def touched_sectors(addresses: dict[int, int]) -> int:
    """The distinct sectors of the accesses."""
    return len({address // SECTOR for address in addresses.values()})


def touched_lines(addresses: dict[int, int]) -> int:
    """The distinct lines of the accesses: what L1 looks up, one a clock.

    The source page's "L1 Tag Requests Global", of loads, stores, atomics and both kinds of cp.async (of the lanes that
    read). Measured: exact on all 10,496 cases, all fresh, of which 5,248 are kept; the clock on loads that hit L1.
    """
    return len({address // LINE for address in addresses.values()})


def global_access(_: Instruction, width: int, global_: dict[int, int]) -> Cost:
    """LDG and STG: the distinct sectors touched. Measured: exact on all 1,880 cases (640 fresh)."""
    sectors = touched_sectors(global_)
    return Cost(sectors=sectors, ideal_sectors=ideal_sectors(len(global_), width, sectors),
                lines=touched_lines(global_))


def global_atomic(_: Instruction, width: int, global_: dict[int, int]) -> Cost:
    """ATOMG and RED on 32 and 64 bits: a sector is sent once per lane on its most wanted element.

    This is what L1 sends (``l1tex__t_sectors_..._op_{atom,red}``); the source page's theoretical sectors count
    each sector once. Sometimes a sector is split once more. That was only seen where lanes touch more than three
    lines and a sector with several wanted elements meets another line at the same place within the line: such
    accesses are unmodelled. Measured: add on u32, f32 and u64, exch and compare-and-swap: exact on the 507 other
    cases of 624 (158 of them fresh); 35 of the 117 refused took one or two sectors more.
    """
    wanted: dict[int, Counter[int]] = defaultdict(Counter)
    lines: dict[int, set[int]] = defaultdict(set)  # place within a line -> the lines wanted there
    for address in global_.values():
        wanted[address // SECTOR][address] += 1
        lines[address % LINE].add(address // LINE)
    ideal = ideal_sectors(len(global_), width, len(wanted))
    all_lines = touched_lines(global_)
    if all_lines > 3 and any(len(lines[address % LINE]) > 1
                       for elements in wanted.values() if len(elements) > 1 for address in elements):
        return Cost(ideal_sectors=ideal, lines=all_lines, unmodelled=True)
    sectors = sum(max(elements.values()) for elements in wanted.values())
    return Cost(sectors=sectors, ideal_sectors=ideal, lines=all_lines)


# ---- cp.async: global to shared -------------------------------------------------------------------------


def copy_through_l1(_: Instruction, width: int, shared: dict[int, int], global_: dict[int, int]) -> Cost:
    """cp.async.ca (LDGSTS through L1): groups as for stores, fighting over the banks of both sides.

    Two lanes of a group are in each other's way if they write the same shared bank or read the same bank of
    a global line, the same address too. A group takes as many wavefronts as its most crowded lane sees lanes in
    the way, itself included. Measured: exact on 1,728 cases, repeated sources and targets among them, on 1,728
    fresh ones and on the 210 of patterns.jsonl. A lane that fills all its bytes with zeros is on no global bank and
    in no sector, one that fills some is like any other (exact on 768 more).
    """
    wavefronts = 0
    lanes = group_lanes(width)
    for first in range(0, LANES, lanes):
        banks = [(shared[lane] % LINE // width, global_[lane] % LINE // width if lane in global_ else f"none of {lane}")
                 for lane in range(first, first + lanes) if lane in shared]
        wavefronts += max((sum(s == t or g == h for t, h in banks) for s, g in banks), default=0)
    sectors = touched_sectors(global_)
    return Cost(wavefronts, full_lines(len(shared), width), sectors, ideal_sectors(len(global_), width, sectors),
                touched_lines(global_))


def copy_past_l1(_: Instruction, width: int, shared: dict[int, int], global_: dict[int, int]) -> Cost:
    """cp.async.cg (LDGSTS past L1): whole 32-byte blocks travel, two 16-byte halves at a time.

    Of lanes with one target the first copies, the others do nothing. A *move* takes a half of a global sector to
    a half of a shared block. All moves between the same block and sector form the *kind* of that pair. Pairs of
    one kind that go from one global line to one shared row, and agree in the parity of (block xor sector) within
    them, travel together, in as many wavefronts as the sector most of them come from has pairs. A pair in which
    one half feeds both halves of the block is fetched twice, and its wavefronts are not understood: unmodelled.

    The ideals count the lanes that copy. Measured: sectors exact on all 323 cases (560 more in an earlier campaign);
    wavefronts on the 304 where no half feeds a whole block, 234 of them with repeated sources or targets, on which
    that part of the rule was found. On 630 fresh ones the source page confirms both (wavefronts on the 617 without
    such a half), and the ideals are its columns.

    With a source size (zero-fill) the instruction takes these wavefronts and those of cp.async.ca, both of all lanes:
    one that reads nothing counts by its address like any other (exact on the 126 rows of access_zero_fill that have
    a rule, whose sectors are those of the lanes that read). Accesses keep no address for such a lane: unmodelled.
    """
    lines = touched_lines(global_)
    if len(global_) < len(shared):
        return Cost(lines=lines, unmodelled=True)
    source_of: dict[int, int] = {}
    for lane, target in sorted(shared.items()):
        source_of.setdefault(target, global_[lane])
    kinds: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for target, source in source_of.items():
        kinds[target // SECTOR, source // SECTOR].add((source // width % 2, target // width % 2))
    twice = sum(len(kind) > len({half for half, _ in kind}) for kind in kinds.values())
    sectors = len(kinds) + twice
    ideal = ideal_sectors(len(source_of), width, sectors)
    if twice:
        return Cost(sectors=sectors, ideal_sectors=ideal, lines=lines, unmodelled=True)
    per_line = LINE // SECTOR
    together: dict[tuple, Counter[int]] = defaultdict(Counter)
    for (block, sector), kind in kinds.items():
        together[block // per_line, sector // per_line, frozenset(kind), (block ^ sector) & 1][sector] += 1
    waves = sum(max(pairs.values()) for pairs in together.values())
    return Cost(waves, full_lines(len(source_of), width), sectors, ideal, lines)


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
