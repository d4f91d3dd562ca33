"""What a launch asks of each unit of the GPU: the demand that :mod:`models.cost` prices.

The counter table says most of it, :mod:`models.l1` what global accesses ask of L1 and L2. Two things are added here:
the bytes that must cross DRAM at least once, and how many updates meet at the most wanted sector of global memory
(:class:`ContentionSink`), because an atomic waits for the one before it. What the emulator does not trace (float and
integer arithmetic on numpy arrays) is no part of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from models.l1 import Traffic
from simgpu.counters import CounterTable
from simgpu.events import AccessEvent, WorkEvent
from simgpu.rules import SECTOR


@dataclass(frozen=True)
class Work:
    """The demand of a whole grid of ``ctas`` CTAs.

    ``data_wavefronts``: passes of the L1's data pipe: shared memory, global memory, shuffles. ``copy_wavefronts``:
    those of cp.async.cg, which go around that pipe. ``lines``: lookups of global lines in L1. ``traffic``: what L1 asks
    of L2. ``tensor_bytes``: what the global tensors hold; ``dram_bytes``: what must cross DRAM at least. ``mma_flop``:
    on the tensor cores. ``contended``: updates of the most wanted sector by atomics. ``unmodelled`` names the sites
    some of whose accesses have no proven rule, and whose share is missing.
    """

    ctas: int
    data_wavefronts: float
    copy_wavefronts: float
    lines: float
    traffic: Traffic
    tensor_bytes: int
    dram_bytes: float
    mma_flop: float
    contended: float
    unmodelled: tuple[str, ...] = ()


def work_of(table: CounterTable, *, ctas: int, grid: int, tensor_bytes: int, traffic: Traffic,
            contended: int = 0) -> Work:
    """The demand of a grid of ``grid`` CTAs, from the counters of ``ctas`` of them (the rest is taken to be alike).

    ``tensor_bytes``: of all global tensors of the launch; each crosses DRAM once, unless fewer bytes are asked for.
    ``traffic``: that of a CTA, on average.

    >>> from simgpu.counters import SiteCounters
    >>> row = SiteCounters("x.load", "", 1, "ldg", 4, 10, 10, None, None, 40, 40, 10, 1280)
    >>> found = work_of(CounterTable((row,), {"mma.m16n8k16": 2, "shfl.xor": 5}), ctas=1, grid=3, tensor_bytes=4096,
    ...                 traffic=Traffic(passes=10, read_sectors=40, requests=10))
    >>> found.data_wavefronts, found.lines, found.traffic.read_sectors, found.dram_bytes, found.mma_flop
    (45.0, 30.0, 120, 3840.0, 24576.0)
    """
    scale = grid / ctas
    sectors, lines = (scale * sum(getattr(row, name) or 0 for row in table.sites) for name in ("sectors", "lines"))
    return Work(
        ctas=grid,
        data_wavefronts=scale * data_wavefronts(table) + grid * traffic.passes,
        copy_wavefronts=scale * sum(row.wavefronts or 0 for row in table.sites if row.instruction == "cp.async.cg"),
        lines=lines,
        traffic=traffic * grid,
        tensor_bytes=tensor_bytes,
        dram_bytes=min(float(tensor_bytes), sectors * SECTOR),
        mma_flop=scale * sum(mma_flop(kind) * warps for kind, warps in table.work.items()),
        contended=scale * contended,
        unmodelled=tuple(row.site for row in table.sites if row.unmodelled),
    )


def data_wavefronts(table: CounterTable) -> int:
    """Passes of the L1 data pipe (``l1tex__data_pipe_lsu_wavefronts``) that shared memory and shuffles take.

    cp.async.cg is among global accesses (:mod:`models.l1`). Measured on the kernels of ``validation/measured/h200``:
    together with theirs 0.9 to 1 of the counter in most of them, and nowhere 1% more.

    >>> from simgpu.counters import SiteCounters
    >>> row = SiteCounters("tile.load", "", 1, "lds", 4, 10, None, 20, 10, None, None, None, 1280)
    >>> data_wavefronts(CounterTable((row,), {"shfl.xor": 5, "barrier": 8}))
    25
    """
    shared = sum(row.wavefronts or 0 for row in table.sites if row.instruction != "cp.async.cg")
    return shared + sum(warps for kind, warps in table.work.items() if kind.startswith("shfl."))


def mma_flop(kind: str) -> int:
    """Floating-point operations of one warp's mma instruction, 0 for another kind of work.

    >>> mma_flop("mma.m16n8k16"), mma_flop("barrier")
    (4096, 0)
    """
    shape = re.fullmatch(r"mma\.m(\d+)n(\d+)k(\d+)", kind)
    return 2 * int(shape[1]) * int(shape[2]) * int(shape[3]) if shape else 0


class ContentionSink:
    """Counts, per sector of global memory, the updates that atomics send there one after the other.

    Lanes of a warp on different elements of a sector travel together, lanes on one element do not
    (:func:`simgpu.rules.global_atomic`).
    """

    def __init__(self):
        self.restart()

    def access(self, event: AccessEvent) -> None:
        if event.site.instruction.family != "atomg":
            return
        masks, _, addresses, times = event.columns()
        on = (masks[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)
        warp = np.broadcast_to(np.arange(len(masks))[:, None], on.shape)[on]
        element, lanes = np.unique(np.stack([warp, addresses[on]]), axis=1, return_counts=True)
        place, first = np.unique(np.stack([element[0], element[1] // SECTOR]), axis=1, return_index=True)
        if len(first):
            turns = np.maximum.reduceat(lanes, first)
            for sector, updates in zip(*_sums(place[1], turns), strict=True):
                self.updates[sector] = self.updates.get(sector, 0) + updates * times

    def work(self, event: WorkEvent) -> None:
        """No atomic is among these."""

    def restart(self) -> None:
        self.updates: dict[int, int] = {}

    @property
    def busiest(self) -> int:
        """Updates of the most wanted sector, 0 without atomics."""
        return max(self.updates.values(), default=0)


def _sums(keys: np.ndarray, values: np.ndarray) -> tuple[list[int], list[int]]:
    """The distinct ``keys`` and the sum of ``values`` at each."""
    distinct, place = np.unique(keys, return_inverse=True)
    return distinct.tolist(), np.bincount(place, values, len(distinct)).astype(np.int64).tolist()
