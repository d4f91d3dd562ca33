"""What global accesses ask of L1's data pipe and of L2: those of one CTA, replayed through its share of L1.

The data pipe is that of shared memory, with the same 32 banks: a load or store of global memory takes the passes that
the same addresses would take there.

What L2 is asked, counters cannot say: whether a line is still in L1 when it is wanted again depends on what came
between. :class:`L1Sink` hears a launch and keeps the requests of one CTA; :meth:`L1Sink.traffic` takes them, in program
order and all warps in step, through a cache of lines of 128 bytes whose four sectors come one by one. Of all lines the
one unused for longest makes room. Loads and ``cp.async.ca`` look up and fill. A store goes on to L2, but a sector only
once while its line stays. ``cp.async.cg`` and atomics go past the cache, the former in a request for each wavefront.

CTAs on an SM that march alike and share no data each have their part of such a cache: what shared memory leaves,
divided by the CTAs. How the hardware replaces lines and merges stores is unpublished; ``tests/test_l1.py`` holds all of
this against what the H200 counted.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
from numba import njit

from models.gpu import GPU
from models.occupancy import KB, smallest_carveout
from simgpu.events import AccessEvent, WorkEvent
from simgpu.instructions import LANES, instruction
from simgpu.replay import replay, totals
from simgpu.rules import LINE, SECTOR


@dataclass(frozen=True)
class Traffic:
    """What global accesses ask for: ``passes`` of L1's data pipe; of L2 the 32-byte sectors read and written, and the
    requests, of a line each, that carry them."""

    passes: float = 0
    read_sectors: float = 0
    written_sectors: float = 0
    requests: float = 0

    def __mul__(self, times: float) -> Traffic:
        return Traffic(*(times * number for number in astuple(self)))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def lines_of_a_block(gpu: GPU, blocks: int, shared_bytes: int) -> int:
    """The lines of L1 for each of ``blocks`` blocks on an SM: the carveout that holds their ``shared_bytes`` is not L1.

    >>> from models.gpu import load_gpu
    >>> lines_of_a_block(load_gpu("h200"), blocks=3, shared_bytes=70400)
    74
    """
    carveout = smallest_carveout(gpu, blocks, shared_bytes) if shared_bytes else 0
    return (gpu.l1_kb - carveout) * KB // LINE // blocks


class L1Sink:
    """Records the global requests of one CTA: from the middle of the first batch, for the first may be an edge."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.cta: int | None = None
        self.past = Traffic()  # passes of all, and what goes past the cache
        self.lines: list[np.ndarray] = []  # the others: int64[n] line numbers, in program order
        self.sectors: list[np.ndarray] = []  # uint8[n], the sectors wanted of the line; bit 4: written

    def access(self, event: AccessEvent) -> None:
        if self.cta is None:
            self.cta = int(event.ctas[len(event.ctas) // 2])
        if event.global_ is None or not len(at := np.flatnonzero(event.ctas == self.cta)):
            return
        event = _of_one(event, at)
        rows, used = event.rows(), event.site.instruction
        if used.family in ("ldg", "stg", "cp.async.ca"):
            lines, sectors = _requests(rows["mask"], rows["global"], used.shared)
            self.lines.append(lines)
            self.sectors.append(sectors | np.uint8(16 * (used.family == "stg")))
            if not used.shared:  # a copy's passes are counted with those of shared memory
                alike = instruction("sts" if used.family == "stg" else "lds")
                window = (rows["global"] % (1 << 30)).astype(np.int32)
                self.past += Traffic(totals(alike, event.site.width, rows["mask"], window).wavefronts)
            return
        columns = replay(used, event.site.width, rows["mask"], rows.get("shared"), rows["global"])
        carried = columns.lines if columns.wavefronts is None else columns.wavefronts
        # An access without a rule (-1) asks for its lines at least.
        requests = np.where(carried < 0, columns.lines, carried).sum(dtype=np.int64)
        sectors = np.where(columns.sectors < 0, columns.lines, columns.sectors).sum(dtype=np.int64)
        written = used.family == "atomg"
        # A copy's data goes around the pipe (measured: GEMMs end before the pipe could have carried both).
        self.past += Traffic(event.executed, 0 if written else int(sectors), int(sectors) if written else 0,
                             int(requests))

    def work(self, event: WorkEvent) -> None:
        """Nothing of L1 is among these."""

    def traffic(self, capacity: int) -> Traffic:
        """What the CTA asks for, of L2 through a cache of ``capacity`` lines."""
        if not self.lines:
            return self.past
        names, numbers = np.unique(np.concatenate(self.lines), return_inverse=True)
        read, written, requests = _through(numbers, np.concatenate(self.sectors), len(names), capacity)
        return self.past + Traffic(0, read, written, requests)


def _of_one(event: AccessEvent, at: np.ndarray) -> AccessEvent:
    """The event of the CTA that is the batch's ``at`` (int64[1]) alone."""
    def part(column):
        return column if column is None or len(column) == 1 else column[at]

    return replace(event, ctas=event.ctas[at], masks=part(event.masks), issued=part(event.issued),
                   shared=part(event.shared), global_=part(event.global_))


@njit(cache=True)
def _requests(masks, rows, may_lack):
    """The lines of each warp's lanes, and the sectors wanted of each (bits 0 to 3)."""
    lines, sectors = np.empty(len(masks) * LANES, np.int64), np.empty(len(masks) * LANES, np.uint8)
    count = 0
    for access in range(len(masks)):
        first = count
        for lane in range(LANES):
            address = rows[access, lane]
            if not masks[access] >> lane & 1 or (may_lack and address < 0):
                continue
            line, sector = address // LINE, np.uint8(1 << address % LINE // SECTOR)
            at = count - 1  # neighbouring lanes mostly share a line
            while at >= first and lines[at] != line:
                at -= 1
            if at < first:
                lines[count], sectors[count] = line, sector
                count += 1
            else:
                sectors[at] |= sector
    return lines[:count].copy(), sectors[:count].copy()


@njit(cache=True)
def _through(numbers, sectors, names, capacity):
    """Read and written sectors and requests that leave a cache of ``capacity`` lines; ``numbers`` below ``names``."""
    older, newer = np.full(names + 1, -1, np.int64), np.full(names + 1, -1, np.int64)
    older[names] = newer[names] = names  # a ring through the lines that are present, by age; `names` closes it
    present, stored = np.zeros(names, np.uint8), np.zeros(names, np.uint8)
    held = read = written = requests = 0
    for i in range(len(numbers)):
        line, wanted, store = numbers[i], sectors[i] & 15, sectors[i] >> 4
        if newer[line] >= 0:
            older[newer[line]], newer[older[line]] = older[line], newer[line]
        elif held < capacity:
            held += 1
        else:
            oldest = newer[names]
            newer[names], older[newer[oldest]] = newer[oldest], names
            newer[oldest] = -1
            present[oldest] = stored[oldest] = 0
        older[line], newer[line] = older[names], names
        newer[older[names]] = older[names] = line
        missing = wanted & ~(stored[line] if store else present[line])
        if missing:
            requests += 1
            count = (missing & 1) + (missing >> 1 & 1) + (missing >> 2 & 1) + (missing >> 3)
            if store:
                written += count
                stored[line] |= wanted
            else:
                read += count
        present[line] |= wanted if not store else 0
    return read, written, requests
