"""The other rules of :mod:`simgpu.rules` over columns of accesses: lane by lane, compiled.

One function per rule, under the name it has there; that file says what is counted and why. Each takes the bytes
per lane, the active masks (uint32[n]), a row of 32 byte addresses per access and memory (shared int32[n, 32],
global int64[n, 32]) and the columns of length n to fill. It returns -1, or the index of the first access with an
active address that is negative or misaligned.

Everything compiled together stands in one file: numba renews a cached function only when its own file changes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from simgpu.instructions import LANES
from simgpu.rules import BANKS, LINE, SECTOR, WORD

WORD_SHIFT, SECTOR_SHIFT, LINE_SHIFT = (size.bit_length() - 1 for size in (WORD, SECTOR, LINE))

compiled = njit(cache=True, nogil=True)

@compiled
def refuses(width, mask, row):
    """Whether an active address of ``row`` is negative or not a multiple of ``width``."""
    bad = row[0] & 0
    for lane in range(LANES):
        if mask >> lane & 1:
            bad |= row[lane]
    return bad < 0 or bad & (width - 1) != 0


@compiled
def sort_active(unit, mask, row, first, last, units):
    """Sort address // ``unit`` of the active lanes first..last-1 into ``units`` (int64[32]); return how many.

    Insertion, because lanes mostly ascend already.
    """
    count = 0
    for lane in range(first, last):
        if mask >> lane & 1:
            new = row[lane] // unit
            at = count
            while at > 0 and units[at - 1] > new:
                units[at] = units[at - 1]
                at -= 1
            units[at] = new
            count += 1
    return count


@compiled
def distinct(units, count):
    """How many different values the first ``count`` of sorted ``units`` hold."""
    different = min(count, 1)
    for i in range(1, count):
        different += units[i] != units[i - 1]
    return different


@compiled
def fullest_bank(width, mask, row, first, last, lanes_on):
    """How many active lanes first..last-1 land on the bank that most of them do (``lanes_on``: scratch[32])."""
    lanes_on[:] = 0
    fullest = 0
    for lane in range(first, last):
        if mask >> lane & 1:
            bank = row[lane] % LINE // width
            lanes_on[bank] += 1
            fullest = max(fullest, lanes_on[bank])
    return fullest


@compiled
def shared_atomic(passes, width, masks, shared, wavefronts, ideal):
    """ATOMS: lanes on one bank take turns of ``passes`` wavefronts (compare-and-swap: 2)."""
    lanes_on = np.empty(BANKS, np.int64)
    for access in range(len(masks)):
        mask, row = masks[access], shared[access]
        if refuses(width, mask, row):
            return access
        turns = fullest_bank(WORD, mask, row, 0, LANES, lanes_on)
        wavefronts[access] = passes * turns
        ideal[access] = passes * min(turns, 1)
    return -1


@compiled
def ideal_sectors(lanes, width):
    """The fewest sectors that hold ``lanes`` distinct elements of ``width`` bytes."""
    return (lanes * width + SECTOR - 1) // SECTOR


@compiled
def global_access(width, masks, global_, sectors, ideal):
    """LDG and STG: the distinct sectors touched."""
    units = np.empty(LANES, np.int64)
    for access in range(len(masks)):
        mask, row = masks[access], global_[access]
        if refuses(width, mask, row):
            return access
        lanes = sort_active(SECTOR, mask, row, 0, LANES, units)
        sectors[access] = distinct(units, lanes)
        ideal[access] = ideal_sectors(lanes, width)
    return -1


@compiled
def global_atomic(width, masks, global_, sectors, ideal):
    """ATOMG and RED: a sector is sent once per lane on its most wanted word."""
    words = np.empty(LANES, np.int64)
    for access in range(len(masks)):
        mask, row = masks[access], global_[access]
        if refuses(width, mask, row):
            return access
        lanes = sort_active(WORD, mask, row, 0, LANES, words)
        sent = on_word = most = 0
        for i in range(lanes):
            on_word = on_word + 1 if i and words[i] == words[i - 1] else 1
            if i and words[i] * WORD // SECTOR != words[i - 1] * WORD // SECTOR:
                sent += most
                most = 0
            most = max(most, on_word)
        sectors[access] = sent + most
        ideal[access] = ideal_sectors(lanes, width)
    return -1


@compiled
def copy_through_l1(width, masks, shared, global_, wavefronts, ideal, sectors, least_sectors, unmodelled):
    """cp.async.ca: per group max(s, g) of the two sides' fullest banks, where one of them is 1."""
    units, lanes_on = np.empty(LANES, np.int64), np.empty(BANKS, np.int64)
    group = LINE // width
    for access in range(len(masks)):
        mask, targets, sources = masks[access], shared[access], global_[access]
        if refuses(width, mask, targets) or refuses(width, mask, sources):
            return access
        lanes = sort_active(SECTOR, mask, sources, 0, LANES, units)
        sectors[access] = distinct(units, lanes)
        least_sectors[access] = ideal_sectors(lanes, width)
        passes = groups = 0
        known = True
        for first in range(0, LANES, group):
            s = fullest_bank(width, mask, targets, first, first + group, lanes_on)
            g = fullest_bank(width, mask, sources, first, first + group, lanes_on)
            lanes = sort_active(1, mask, sources, first, first + group, units)
            known &= min(s, g) <= 1 and distinct(units, lanes) == lanes
            passes += max(s, g)
            groups += lanes > 0
        wavefronts[access] = passes if known else -1
        ideal[access] = groups if known else -1
        unmodelled[access] = not known
    return -1


@compiled
def copy_past_l1(width, masks, shared, global_, wavefronts, ideal, sectors, least_sectors, unmodelled):
    """cp.async.cg: distinct (row, line, kind of the moves, parity) over the (block, sector) pairs."""
    units = np.empty(LANES, np.int64)
    block, sector, kind = np.empty(LANES, np.int64), np.empty(LANES, np.int64), np.empty(LANES, np.int64)
    per_line = LINE // SECTOR
    for access in range(len(masks)):
        mask, targets, sources = masks[access], shared[access], global_[access]
        if refuses(width, mask, targets) or refuses(width, mask, sources):
            return access
        lanes = sort_active(1, mask, targets, 0, LANES, units)
        known = distinct(units, lanes) == lanes
        sort_active(1, mask, sources, 0, LANES, units)
        known &= distinct(units, lanes) == lanes
        pairs = 0
        for lane in range(LANES):
            if mask >> lane & 1:
                to, source = targets[lane] // SECTOR, sources[lane] // SECTOR
                at = pairs - 1  # newest first: neighbouring lanes mostly share a pair
                while at >= 0 and (block[at] != to or sector[at] != source):
                    at -= 1
                if at < 0:
                    at = pairs
                    block[at], sector[at], kind[at] = to, source, 0
                    pairs += 1
                # The kind is a set of half -> half moves: one bit for each of the four.
                kind[at] |= 1 << (sources[lane] // width % 2 * 2 + targets[lane] // width % 2)
        waves = 0
        for i in range(pairs):
            new = True
            for j in range(i):
                new &= (kind[i] != kind[j] or (block[i] ^ sector[i] ^ block[j] ^ sector[j]) & 1 != 0
                        or block[i] // per_line != block[j] // per_line
                        or sector[i] // per_line != sector[j] // per_line)
            waves += new
        sectors[access] = pairs
        least_sectors[access] = ideal_sectors(lanes, width)
        wavefronts[access] = waves if known else -1
        ideal[access] = (lanes * width + LINE - 1) // LINE if known else -1
        unmodelled[access] = not known
    return -1
