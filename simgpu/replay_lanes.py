"""The other rules of :mod:`simgpu.rules` over columns of accesses: lane by lane, compiled.

One function per rule, under the name it has there; that file says what is counted and why. Each takes the bytes
per lane, the active masks (uint32[n]), a row of 32 byte addresses per access and memory (shared int32[n, 32],
global int64[n, 32]) and the columns of length n to fill. It returns -1, or the index of the first access with an
active address that is negative or misaligned.

Everything compiled together stands in one file: numba renews a cached function only when its own file changes.
Helpers take the rows and an index, not one row: a view handed on is reference-counted, atomically, every time.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from simgpu.instructions import LANES, NO_SOURCE
from simgpu.replay_conflicts import COMPARATORS
from simgpu.rules import BANKS, LINE, SECTOR, WORD

# Addresses are not negative and every unit is a power of two: shifts, because numba's // and % are slow.
WORD_SHIFT, SECTOR_SHIFT, LINE_SHIFT = (size.bit_length() - 1 for size in (WORD, SECTOR, LINE))
TO_LINE = LINE_SHIFT - SECTOR_SHIFT  # from a sector's number to its line's
PADDING = np.iinfo(np.int64).max

compiled = njit(cache=True, nogil=True)


@compiled
def refuses(width, mask, rows, access):
    """Whether an active address of the access is negative or not a multiple of ``width``."""
    bad = rows[access, 0] & 0
    for lane in range(LANES):
        if mask >> lane & 1:
            bad |= rows[access, lane]
    return bad < 0 or bad & (width - 1) != 0


@compiled
def first_refused(width, masks, rows):
    """The first access with an active address that is negative or misaligned, or -1."""
    for access in range(len(masks)):
        if refuses(width, masks[access], rows, access):
            return access
    return -1


@compiled
def moved(masks, rows, access):
    """Whether an access is the one before it moved by whole 128-byte lines, which changes no cost and no refusal.

    Neighbouring warps of a kernel mostly are. Lanes that are off count too: they can only cost the short cut.
    """
    if access == 0 or masks[access] != masks[access - 1]:
        return False
    shift = rows[access, 0] - rows[access - 1, 0]
    different, negative = shift & (LINE - 1), rows[access, 0]
    for lane in range(LANES):
        different |= (rows[access, lane] - rows[access - 1, lane]) ^ shift
        negative |= rows[access, lane]
    return different == 0 and negative >= 0


@compiled
def repeat(access, wavefronts, ideal, sectors, least_sectors, lines, unmodelled):
    """Give a copy the numbers of the one before it."""
    wavefronts[access] = wavefronts[access - 1]
    ideal[access] = ideal[access - 1]
    sectors[access] = sectors[access - 1]
    least_sectors[access] = least_sectors[access - 1]
    lines[access] = lines[access - 1]
    unmodelled[access] = unmodelled[access - 1]


@compiled
def reading(mask, global_, access):
    """The active lanes of a cp.async that have a source: the others fill with zeros."""
    reads = mask
    for lane in range(LANES):
        if global_[access, lane] == NO_SOURCE:
            reads &= ~(np.uint32(1) << np.uint32(lane))
    return reads


@compiled
def log2(power):
    exponent = 0
    while 1 << exponent < power:
        exponent += 1
    return exponent


@compiled
def sort_active(shift, mask, rows, access, units):
    """Sort address >> ``shift`` of the active lanes into ``units`` (int64[32]); return how many."""
    count, ascending = 0, True
    for lane in range(LANES):
        if mask >> lane & 1:
            units[count] = rows[access, lane] >> shift
            ascending &= count == 0 or units[count - 1] <= units[count]
            count += 1
    if not ascending:  # lanes mostly ascend; where they do not, a network has no branches to mispredict
        units[count:] = PADDING
        for c in range(len(COMPARATORS)):
            low, high = COMPARATORS[c]
            units[low], units[high] = min(units[low], units[high]), max(units[low], units[high])
    return count


@compiled
def distinct(units, count, shift):
    """How many different values >> ``shift`` the first ``count`` of sorted ``units`` hold."""
    different = min(count, 1)
    for i in range(1, count):
        different += units[i] >> shift != units[i - 1] >> shift
    return different


@compiled
def repeats(mask, rows, access, first, last, ring):
    """Whether two active lanes first..last-1 have the same address (``ring``: int64[64] scratch).

    Any two lanes stand at most 16 apart around a ring of 32, so 16 comparisons of the ring with itself meet all.
    """
    for lane in range(LANES):
        counts = first <= lane < last and mask >> lane & 1
        ring[lane] = ring[lane + LANES] = rows[access, lane] if counts else -1 - lane
    same = 0
    for apart in range(1, LANES // 2 + 1):
        for lane in range(LANES):
            same |= ring[lane] == ring[lane + apart]
    return same != 0


@compiled
def fullest_bank(shift, mask, rows, access, first, last, lanes_on):
    """The most active lanes first..last-1 on one of the banks of 1 << ``shift`` bytes (``lanes_on``: scratch)."""
    lanes_on[:] = 0
    fullest = 0
    for lane in range(first, last):
        if mask >> lane & 1:
            bank = (rows[access, lane] & LINE - 1) >> shift
            lanes_on[bank] += 1
            fullest = max(fullest, lanes_on[bank])
    return fullest


@compiled
def shared_atomic(passes, width, masks, shared, wavefronts, ideal):
    """ATOMS: lanes of a group on one bank take turns of ``passes`` wavefronts (compare-and-swap: 2)."""
    lanes_on = np.empty(BANKS, np.int64)
    group, shift = LINE // width, log2(width)
    for access in range(len(masks)):
        mask = masks[access]
        if refuses(width, mask, shared, access):
            return access
        turns = groups = 0
        for first in range(0, LANES, group):
            taken = fullest_bank(shift, mask, shared, access, first, first + group, lanes_on)
            turns += taken
            groups += min(taken, 1)
        wavefronts[access] = passes * turns
        ideal[access] = passes * groups
    return -1


@compiled
def full_lines(lanes, width):
    """The fewest wavefronts that carry ``lanes`` elements of ``width`` bytes."""
    return lanes * width + LINE - 1 >> LINE_SHIFT


@compiled
def ideal_sectors(lanes, width, sectors):
    """The fewest sectors that hold ``lanes`` distinct elements of ``width`` bytes, or those touched if fewer."""
    return min(lanes * width + SECTOR - 1 >> SECTOR_SHIFT, sectors)


@compiled
def global_access(width, masks, global_, sectors, ideal, lines):
    """LDG and STG: the distinct sectors and lines touched."""
    units = np.empty(LANES, np.int64)
    for access in range(len(masks)):
        if moved(masks, global_, access):
            sectors[access] = sectors[access - 1]
            ideal[access] = ideal[access - 1]
            lines[access] = lines[access - 1]
            continue
        mask = masks[access]
        if refuses(width, mask, global_, access):
            return access
        lanes = sort_active(SECTOR_SHIFT, mask, global_, access, units)
        sectors[access] = distinct(units, lanes, 0)
        ideal[access] = ideal_sectors(lanes, width, sectors[access])
        lines[access] = distinct(units, lanes, TO_LINE)
    return -1


@compiled
def global_atomic(width, masks, global_, sectors, ideal, lines, unmodelled):
    """ATOMG and RED: a sector is sent once per lane on its most wanted element."""
    elements = np.empty(LANES, np.int64)
    shift = log2(width)
    to_sector, to_line = SECTOR_SHIFT - shift, LINE_SHIFT - shift
    for access in range(len(masks)):
        mask = masks[access]
        if refuses(width, mask, global_, access):
            return access
        lanes = sort_active(shift, mask, global_, access, elements)
        sent = on_element = most = touched = 0
        lines[access] = distinct(elements, lanes, to_line)
        for i in range(lanes):
            on_element = on_element + 1 if i and elements[i] == elements[i - 1] else 1
            if i == 0 or elements[i] >> to_sector != elements[i - 1] >> to_sector:
                sent += most
                most = 0
                touched += 1
            most = max(most, on_element)
        known = lines[access] <= 3 or not crowded(elements, lanes, to_sector, to_line)
        sectors[access] = sent + most if known else -1
        ideal[access] = ideal_sectors(lanes, width, touched)
        unmodelled[access] = not known
    return -1


@compiled
def crowded(elements, count, to_sector, to_line):
    """Whether a sector with several wanted elements meets another line at the same place within the line."""
    within = (1 << to_line) - 1
    for i in range(count):
        several = elsewhere = False
        for j in range(count):
            several |= elements[i] != elements[j] and elements[i] >> to_sector == elements[j] >> to_sector
            elsewhere |= elements[i] != elements[j] and elements[i] & within == elements[j] & within
        if several and elsewhere:
            return True
    return False


@compiled
def most_in_the_way(shift, mask, reads, shared, global_, access, first, last):
    """The most lanes first..last-1, itself included, that one of them meets on a shared or a global bank."""
    most = 0
    for lane in range(first, last):
        meets = 0
        for other in range(first, last):
            if mask >> lane & mask >> other & 1:
                same_target = (shared[access, lane] ^ shared[access, other]) & LINE - 1
                same_source = (global_[access, lane] ^ global_[access, other]) & LINE - 1
                both_read = lane == other or reads >> lane & reads >> other & 1
                meets += same_target >> shift == 0 or (both_read and same_source >> shift == 0)
        most = max(most, meets)
    return most


@compiled
def copy_through_l1(width, masks, shared, global_, wavefronts, ideal, sectors, least_sectors, lines, unmodelled):
    """cp.async.ca: per group, the most lanes in one lane's way: on its shared bank or its bank of a global line."""
    units, lanes_on = np.empty(LANES, np.int64), np.empty(BANKS, np.int64)
    group, shift = LINE // width, log2(width)
    for access in range(len(masks)):
        if moved(masks, shared, access) and moved(masks, global_, access):
            repeat(access, wavefronts, ideal, sectors, least_sectors, lines, unmodelled)
            continue
        mask = masks[access]
        reads = reading(mask, global_, access)
        if refuses(width, mask, shared, access) or refuses(width, reads, global_, access):
            return access
        lanes = sort_active(SECTOR_SHIFT, reads, global_, access, units)
        lines[access] = distinct(units, lanes, TO_LINE)
        sectors[access] = distinct(units, lanes, 0)
        least_sectors[access] = ideal_sectors(lanes, width, sectors[access])
        passes = active = 0
        for first in range(0, LANES, group):
            s = fullest_bank(shift, mask, shared, access, first, first + group, lanes_on)
            g = fullest_bank(shift, reads, global_, access, first, first + group, lanes_on)
            if min(s, g) > 1:  # else the lanes in the way are those of the one side that conflicts
                passes += most_in_the_way(shift, mask, reads, shared, global_, access, first, first + group)
            else:
                passes += max(s, g)
        for lane in range(LANES):
            active += mask >> lane & 1
        wavefronts[access] = passes
        ideal[access] = full_lines(active, width)
    return -1


@compiled
def find(first, second, count, wanted_first, wanted_second):
    """Index of the pair among the first ``count``, or -1. Newest first: neighbouring lanes mostly share a pair."""
    at = count - 1
    while at >= 0 and (first[at] != wanted_first or second[at] != wanted_second):
        at -= 1
    return at


@compiled
def written_before(mask, shared, access, lane):
    """Whether an active lane before ``lane`` has its target."""
    found = False
    for earlier in range(lane):
        found |= mask >> earlier & 1 and shared[access, earlier] == shared[access, lane]
    return found


@compiled
def copy_past_l1(width, masks, shared, global_, wavefronts, ideal, sectors, least_sectors, lines, unmodelled):
    """cp.async.cg: (row, line, kind of the moves, parity) over the (block, sector) pairs, sectors repeated or not."""
    ring = np.empty(2 * LANES, np.int64)
    block, sector, kind = np.empty(LANES, np.int64), np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    row, line, deep = np.empty(LANES, np.int64), np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    wave_of, units = np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    chunk = log2(width)
    for access in range(len(masks)):
        if moved(masks, shared, access) and moved(masks, global_, access):
            repeat(access, wavefronts, ideal, sectors, least_sectors, lines, unmodelled)
            continue
        mask = masks[access]
        reads = reading(mask, global_, access)
        if refuses(width, mask, shared, access) or refuses(width, reads, global_, access):
            return access
        lines[access] = distinct(units, sort_active(LINE_SHIFT, reads, global_, access, units), 0)
        if reads != mask:
            wavefronts[access] = ideal[access] = sectors[access] = least_sectors[access] = -1
            unmodelled[access] = True
            continue
        repeated = repeats(mask, shared, access, 0, LANES, ring)
        lanes = pairs = 0  # lanes that copy: the first of each target
        for lane in range(LANES):
            if mask >> lane & 1 and not (repeated and written_before(mask, shared, access, lane)):
                lanes += 1
                target, source = shared[access, lane], global_[access, lane]
                pair = find(block, sector, pairs, target >> SECTOR_SHIFT, source >> SECTOR_SHIFT)
                if pair < 0:
                    pair = pairs
                    block[pair], sector[pair], kind[pair] = target >> SECTOR_SHIFT, source >> SECTOR_SHIFT, 0
                    pairs += 1
                # The kind is a set of half -> half moves: one bit for each of the four.
                kind[pair] |= 1 << ((source >> chunk & 1) * 2 + (target >> chunk & 1))
        waves = groups = twice = 0
        for pair in range(pairs):
            twice += kind[pair] & 3 == 3 or kind[pair] >> 2 == 3  # one half feeds both halves of the block
            # Kind and parity ride in the low bits of the row, so that a group is a pair of numbers too.
            parity = (block[pair] ^ sector[pair]) & 1
            tagged = (block[pair] >> TO_LINE) * 32 + kind[pair] * 2 + parity
            group = find(row, line, groups, tagged, sector[pair] >> TO_LINE)
            if group < 0:
                group = groups
                row[group], line[group], deep[group] = tagged, sector[pair] >> TO_LINE, 0
                groups += 1
            wave_of[pair] = group
            from_sector = 0
            for other in range(pair + 1):
                from_sector += wave_of[other] == group and sector[other] == sector[pair]
            if from_sector > deep[group]:
                deep[group] = from_sector
                waves += 1
        sectors[access] = pairs + twice
        least_sectors[access] = ideal_sectors(lanes, width, sectors[access])
        wavefronts[access] = waves if not twice else -1
        ideal[access] = full_lines(lanes, width) if not twice else -1
        unmodelled[access] = twice > 0
    return -1
