"""LDS, STS, ldmatrix and stmatrix over columns of accesses: distinct words per bank, compiled.

The rules are ``shared_load``, ``shared_store`` and ``matrix_rows`` of :mod:`simgpu.rules`; they differ only in
which lanes form a group, so one loop serves them.

Most accesses are free of conflicts, and one OR over the lanes proves it: as many different banks as lanes.
The others are set aside until BATCH of them can be sorted side by side, one access per SIMD lane. After
sorting by (bank, row) the lanes of a bank stand together and lanes on the same word are neighbours, so one
pass finds the bank with the most distinct words. Nothing in it branches on the data.

Everything compiled together stands in one file: numba renews a cached function only when its own file changes.
"""

from __future__ import annotations

import numpy as np
from numba import int32, njit, uint32

from simgpu.instructions import LANES
from simgpu.rules import BANKS, LINE, WORD

BATCH = 64  # accesses sorted side by side: wide enough for the vector loops to pay on any SIMD width
WORD_SHIFT = WORD.bit_length() - 1
ROW_SHIFT = int32(LINE.bit_length() - 1)
BANK_SHIFT = int32(24)  # a sort key is bank << 24 | row: a 31-bit address has 24 bits of row
IDLE = int32(-1)  # the key of an inactive lane: sorts first, counts as nothing

compiled = njit(cache=True, nogil=True)


def merge_exchange(keys: int) -> tuple[np.ndarray, dict[int, int]]:
    """Batcher's sorting network for ``keys`` inputs, and how much of it sorts every aligned group of a size.

    Returns the comparators (int64[m, 2]: low and high position) and {group size: leading comparators}. (Knuth,
    The Art of Computer Programming 3, 5.2.2, algorithm M, in its bottom-up form.)

    >>> comparators, sorts_groups_of = merge_exchange(32)
    >>> len(comparators), sorts_groups_of
    (191, {2: 16, 4: 40, 8: 76, 16: 126, 32: 191})
    """
    comparators, sorts_groups_of = [], {}
    half = 1
    while half < keys:
        step = half
        while step:
            for first in range(step % half, keys - step, 2 * step):
                for low in range(first, min(first + step, keys - step)):
                    if low // (2 * half) == (low + step) // (2 * half):
                        comparators.append((low, low + step))
            step //= 2
        half *= 2
        sorts_groups_of[half] = len(comparators)
    return np.array(comparators), sorts_groups_of


COMPARATORS, _SORTS = merge_exchange(LANES)
SORTS_8, SORTS_16 = _SORTS[8], _SORTS[16]


@compiled
def sort_lanes(keys, group):
    """Sort the lanes of each aligned ``group`` of 8, 16 or 32 in every column of ``keys`` (int32[32, BATCH])."""
    comparators = SORTS_8 if group == 8 else SORTS_16 if group == 16 else len(COMPARATORS)
    for c in range(comparators):
        low, high = keys[COMPARATORS[c, 0]], keys[COMPARATORS[c, 1]]
        for k in range(BATCH):
            smaller, larger = min(low[k], high[k]), max(low[k], high[k])
            low[k] = smaller
            high[k] = larger


@compiled
def conflict_degrees(staged, accesses, count, group, keys, state, wavefronts):
    """Set ``wavefronts`` of the first ``count`` staged accesses: the sum of their groups' conflict degrees.

    ``staged`` int32[BATCH, 32] holds a row of sort keys per access, ``accesses`` their indices. ``keys``
    int32[32, BATCH] and ``state`` int32[4, BATCH] are scratch.
    """
    for k in range(BATCH):
        for lane in range(LANES):
            keys[lane, k] = staged[k, lane]
    sort_lanes(keys, group)
    previous, degree, worst, total = state[0], state[1], state[2], state[3]
    total[:] = 0
    for first in range(0, LANES, group):
        previous[:] = IDLE
        degree[:] = 0
        worst[:] = 0
        for lane in range(first, first + group):
            here = keys[lane]
            for k in range(BATCH):
                key, before, words = here[k], previous[k], degree[k]
                next_word = words + int32(1) if key >> BANK_SHIFT == before >> BANK_SHIFT else int32(1)
                words = words if key == before else next_word
                worst[k] = max(worst[k], words)
                degree[k] = words
                previous[k] = key
        for k in range(BATCH):
            total[k] += worst[k]
    for k in range(count):
        wavefronts[accesses[k]] = total[k]


@compiled
def pairs_merge(mask, rows, access):
    """Whether every active lane finds its neighbour at distance 1, or every one at 2, inactive or on its address."""
    for step in (1, 2):
        lane = 0
        while lane < LANES:
            both = mask >> lane & mask >> (lane ^ step) & 1
            if both and rows[access, lane] != rows[access, lane ^ step]:
                break
            lane += 1
        if lane == LANES:
            return True
    return False


@compiled
def active_groups(mask, group):
    """How many aligned groups of ``group`` lanes have an active lane."""
    active = 0
    for first in range(0, LANES, group):
        active += (mask >> first & (1 << group) - 1) != 0
    return active


@compiled
def distinct_words(width, group, merges, counted, masks, shared, wavefronts, ideal):
    """LDS, STS, ldmatrix, stmatrix: groups of ``group`` lanes, doubled where ``merges`` and the pairs do.

    ``counted`` (uint32) are the lanes whose address the instruction uses.
    """
    staged = np.empty((2, BATCH, LANES), np.int32)  # [0]: plain groups, [1]: merged ones
    accesses = np.empty((2, BATCH), np.int64)
    keys, state = np.empty((LANES, BATCH), np.int32), np.empty((4, BATCH), np.int32)
    count = np.zeros(2, np.int64)
    last_bank = int32(min(BANKS, LINE // width) - 1)  # an aligned vector covers whole banks: fewer, wider ones
    unit = WORD_SHIFT
    while 1 << unit < width:
        unit += 1
    shift = int32(unit)
    refused = int32(width - 1) | int32(-(2**31))
    all_groups = active_groups(counted, group)
    for access in range(len(masks)):
        mask = masks[access]
        bad, seen = int32(0), uint32(0)
        # One bit per lane and per (group, bank): a group has as many banks as lanes, so 32 bits hold both.
        for lane in range(LANES):
            on = mask >> uint32(lane) & uint32(1)
            bad |= shared[access, lane] & -int32(on)
            seen |= on << uint32((shared[access, lane] >> shift & last_bank) + (lane & -group))
        if bad & refused:
            return access
        active = uint32(mask & counted)
        if seen & counted == counted:
            ideal[access] = wavefronts[access] = all_groups
            continue
        merged = int(merges and pairs_merge(active, shared, access))
        ideal[access] = all_groups >> merged if active == counted else active_groups(active, group << merged)
        target = staged[merged, count[merged]]
        for lane in range(LANES):
            idle = int32(active >> uint32(lane) & uint32(1)) - int32(1)
            bank = shared[access, lane] >> shift & last_bank
            target[lane] = (bank << BANK_SHIFT | shared[access, lane] >> ROW_SHIFT) | idle
        accesses[merged, count[merged]] = access
        count[merged] += 1
        if count[merged] == BATCH:
            conflict_degrees(staged[merged], accesses[merged], count[merged], group << merged, keys, state, wavefronts)
            count[merged] = 0
    for merged in range(2):
        if count[merged]:
            conflict_degrees(staged[merged], accesses[merged], count[merged], group << merged, keys, state, wavefronts)
    return -1
