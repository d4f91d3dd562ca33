"""What :mod:`simgpu.races` knows of every byte of shared memory, and how an access changes it.

Arrays are [ctas, ...]; ``lanes`` bool[c, w, 32] are the active lanes, ``address`` int32[c, w, 32] their first bytes.
Hits are counted in ``hits`` int64[kinds, 1 + earlier access]; ``examples`` describes the first of each.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba import njit

from simgpu.epochs import ATOMIC, COPY, LANES, READ, WRITE

KINDS = ("write-read", "read-write", "write-write", "in-flight", "unwritten", "same-instruction")
WRITE_READ, READ_WRITE, WRITE_WRITE, IN_FLIGHT, UNWRITTEN, SAME = range(len(KINDS))
EXAMPLE = 5  # of the first hit: CTA in the batch, byte, first thread, second thread, order of the second access

# Of every byte, [ctas, bytes]; the last axis of w_ and r_ holds the two latest warps. Orders are 0 where there is none.
State = namedtuple("State", "w_order w_access w_thread w_plain r_order r_access r_thread f_serial f_access f_thread "
                            "s_order s_thread s_value")


def new_state(ctas: int, nbytes: int) -> State:
    """The state of bytes that nobody touched."""
    one, two = (ctas, nbytes), (ctas, nbytes, 2)
    return State(np.zeros(two, np.int32), np.zeros(two, np.int16), np.zeros(two, np.int16), np.zeros(two, np.bool_),
                 np.zeros(two, np.int32), np.zeros(two, np.int16), np.zeros(two, np.int16),
                 np.zeros(one, np.int32), np.zeros(one, np.int16), np.zeros(one, np.int16),
                 np.zeros(one, np.int32), np.zeros(one, np.int16), np.zeros(one, np.uint32))


@njit(cache=True, nogil=True)
def _hit(hits, examples, kind, first, c, byte, first_thread, thread, order):
    if hits[kind, first + 1] == 0:
        example = examples[kind, first + 1]
        example[0], example[1], example[2], example[3], example[4] = c, byte, first_thread, thread, order
    hits[kind, first + 1] += 1


@njit(cache=True, nogil=True)
def _remember(orders, accesses, threads, order, access, thread):
    """Put an access first among the two latest of different warps; returns whether the same warp was first."""
    same = orders[0] > 0 and threads[0] // LANES == thread // LANES
    if not same:
        orders[1], accesses[1], threads[1] = orders[0], accesses[0], threads[0]
    orders[0], accesses[0], threads[0] = order, access, thread
    return same


@njit(cache=True, nogil=True)
def _wrote(s, c, byte, order, access, thread, plain, since):
    orders, plains = s.w_order[c, byte], s.w_plain[c, byte]
    same = orders[0] > since and s.w_thread[c, byte, 0] // LANES == thread // LANES
    if same and plains[0] and not plain:
        return  # an atomic does not excuse the plain store before it
    was = plains[0]
    if not _remember(orders, s.w_access[c, byte], s.w_thread[c, byte], order, access, thread):
        plains[1] = was
    plains[0] = plain


@njit(cache=True, nogil=True)
def touch(s, since, kind, access, order, lanes, address, width, serial, hits, examples):
    found = False
    for c in range(lanes.shape[0]):
        for w in range(lanes.shape[1]):
            for lane in range(lanes.shape[2]):
                if not lanes[c, w, lane]:
                    continue
                thread = w * LANES + lane
                for byte in range(address[c, w, lane], address[c, w, lane] + width):
                    # Two lanes of one copy: differ() tells, unless their warps are two.
                    if s.f_serial[c, byte] and s.f_serial[c, byte] != serial:
                        other = s.f_thread[c, byte]
                        _hit(hits, examples, IN_FLIGHT, s.f_access[c, byte], c, byte, other, thread, order)
                        found = True
                    elif s.f_serial[c, byte] and s.f_thread[c, byte] // LANES != w:
                        _hit(hits, examples, WRITE_WRITE, access, c, byte, s.f_thread[c, byte], thread, order)
                        found = True
                    elif kind in (READ, ATOMIC) and s.w_order[c, byte, 0] == 0:
                        _hit(hits, examples, UNWRITTEN, -1, c, byte, 0, thread, order)
                        found = True
                    for i in range(2):
                        other = s.w_thread[c, byte, i]
                        if s.w_order[c, byte, i] > since[c] and other // LANES != w and (
                            kind != ATOMIC or s.w_plain[c, byte, i]
                        ):
                            _hit(hits, examples, WRITE_READ if kind == READ else WRITE_WRITE, s.w_access[c, byte, i],
                                 c, byte, other, thread, order)
                            found = True
                        other = s.r_thread[c, byte, i]
                        if kind != READ and s.r_order[c, byte, i] > since[c] and other // LANES != w:
                            _hit(hits, examples, READ_WRITE, s.r_access[c, byte, i], c, byte, other, thread, order)
                            found = True
                    if kind == READ:
                        _remember(s.r_order[c, byte], s.r_access[c, byte], s.r_thread[c, byte], order, access, thread)
                    elif kind == COPY:
                        s.f_serial[c, byte], s.f_access[c, byte], s.f_thread[c, byte] = serial, access, thread
                    else:
                        _wrote(s, c, byte, order, access, thread, kind == WRITE, since[c])
    return found


@njit(cache=True, nogil=True)
def land(s, access, serial, order, lanes, address, width):
    for c in range(lanes.shape[0]):
        for w in range(lanes.shape[1]):
            for lane in range(lanes.shape[2]):
                if lanes[c, w, lane]:
                    for byte in range(address[c, w, lane], address[c, w, lane] + width):
                        if s.f_serial[c, byte] == serial:
                            s.f_serial[c, byte] = 0
                        _wrote(s, c, byte, order, access, w * LANES + lane, True, 0)


@njit(cache=True, nogil=True)
def differ(s, access, order, lanes, address, values, hits, examples):
    """Lanes of one warp that give one byte different values in one instruction."""
    found = False
    for c in range(lanes.shape[0]):
        for w in range(lanes.shape[1]):
            for lane in range(lanes.shape[2]):
                if not lanes[c, w, lane]:
                    continue
                thread = w * LANES + lane
                for b in range(values.shape[3]):
                    byte, value = address[c, w, lane] + b, values[c, w, lane, b]
                    other = s.s_thread[c, byte]
                    again = s.s_order[c, byte] == order and other // LANES == w
                    if again and s.s_value[c, byte] != value:
                        _hit(hits, examples, SAME, access, c, byte, other, thread, order)
                        found = True
                    s.s_order[c, byte], s.s_thread[c, byte], s.s_value[c, byte] = order, thread, value
    return found
