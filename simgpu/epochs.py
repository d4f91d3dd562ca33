"""What happens between barriers, told to whoever watches: accesses with their lanes, copies that land, barriers.

An *epoch* is what a CTA does from one barrier to the next. :class:`WatchedCTA` runs a kernel without refusing what a
:class:`Watcher` is there to report; the watcher, a sink, translates events into :meth:`~Watcher.touch`,
:meth:`~Watcher.land` and :meth:`~Watcher.barrier` of a batch of CTAs. :mod:`simgpu.races` and :mod:`simgpu.liveness`
are watchers.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simgpu.cta import CTA
from simgpu.events import AccessEvent, Site, WorkEvent
from simgpu.instructions import LANES, Instruction
from simgpu.lockstep import caller
from simgpu.tensor import SharedTensor

READ, WRITE, ATOMIC, COPY = range(4)  # COPY: cp.async, a write that lands some time before the wait


def direction(instruction: Instruction) -> int:
    """What a shared-memory instruction does to its bytes.

    >>> from simgpu.instructions import instruction
    >>> [direction(instruction(name)) for name in ("ldmatrix.x4", "stmatrix.x4", "cp.async.cg")] == [READ, WRITE, COPY]
    True
    """
    if instruction.family.startswith("atoms"):
        return ATOMIC
    if instruction.family.startswith("cp.async"):
        return COPY
    return WRITE if instruction.name.startswith("st") else READ


@dataclass(frozen=True)
class Barrier:
    """A barrier that was executed: its place in program order, its source line, the CTAs of the batch (bool[c])."""

    order: int
    where: str
    reached: np.ndarray


@dataclass(frozen=True)
class Access:
    """A site on one shared tensor: what a finding or a live range points at."""

    site: Site
    tensor: str

    @property
    def where(self) -> str:
        return f"{self.site.file}:{self.site.line}"


@dataclass
class Copy:
    """A cp.async in flight: its access, and per lane its group, whether it is waited for, and where it lands."""

    serial: int
    access: int
    order: int
    group: np.ndarray  # int64[c, w, 32]
    waiting: np.ndarray  # bool[c, w, 32]
    address: np.ndarray  # int32[c, w, 32]
    width: int


class Watcher:
    """A sink that follows batches of CTAs through their epochs.

    ``without`` are barriers to overlook: their numbers in program order (0 is the first), or source lines
    (``file:line``). The emulator runs in lockstep, so a kernel without its barrier computes the same; what is lost is
    the order between warps.
    """

    def __init__(self, without: Sequence[int | str] = ()):
        self.without = frozenset(without)
        self.accesses: list[Access] = []
        self._numbers: dict[tuple[Site, str], int] = {}
        self.tensors: dict[str, SharedTensor] = {}
        self.alignment: dict[str, int] = {}
        self.barriers: list[Barrier] = []  # of the present batch

    # ---- what a WatchedCTA says ----------------------------------------------------------------------------

    def begin(self, shape: tuple[int, int, int], ctas: np.ndarray, threads: int) -> None:
        """A batch of CTAs of so many ``threads`` starts: all its state is new."""
        self.shape, self.ctas = shape, ctas
        self.barriers, self._executed = [], 0
        self._committed = np.zeros(shape, np.int64)
        self._copies: list[Copy] = []
        self._serial = 0

    def allocated(self, tensor: SharedTensor, align: int) -> None:
        """A shared tensor, and the alignment it asked for."""
        self.tensors[tensor.name], self.alignment[tensor.name] = tensor, align

    def stored(self, address: np.ndarray, values: np.ndarray, lanes: np.ndarray | None) -> None:
        """What the store just heard of writes: values [c, w, 32] or [c, w, 32, n]."""

    # ---- what a watcher is about ---------------------------------------------------------------------------

    def touch(self, event: AccessEvent, access: int, kind: int, lanes: np.ndarray, address: np.ndarray,
              copy: Copy | None) -> None:
        """One shared-memory instruction: active ``lanes`` bool[c, w, 32] at byte ``address`` int32[c, w, 32]."""

    def land(self, copy: Copy, lanes: np.ndarray, order: int) -> None:
        """The copies of ``lanes`` are complete, for their own threads."""

    def barrier(self, barrier: Barrier) -> None:
        """The threads of the CTAs that reached it met."""

    # ---- the sink ------------------------------------------------------------------------------------------

    def access(self, event: AccessEvent) -> None:
        if event.shared is None or event.tensor is None:
            return
        active = np.where(event.issued, event.masks, 0).astype(np.uint32)
        if matrices := event.site.instruction.matrices:  # the other lanes name no row
            active &= np.uint32((1 << 8 * matrices) - 1)
        lanes = (active[..., None] >> np.arange(LANES, dtype=np.uint32) & 1).astype(bool)
        lanes = np.ascontiguousarray(np.broadcast_to(lanes, self.shape))
        address = np.ascontiguousarray(np.broadcast_to(event.shared, self.shape))
        number = self._numbers.setdefault((event.site, event.tensor), len(self.accesses))
        if number == len(self.accesses):
            self.accesses.append(Access(event.site, event.tensor))
        kind, copy = direction(event.site.instruction), None
        if kind == COPY:
            self._serial += 1
            copy = Copy(self._serial, number, event.order, self._committed.copy(), lanes.copy(), address,
                        event.site.width)
            self._copies.append(copy)
        self.touch(event, number, kind, lanes, address, copy)

    def work(self, event: WorkEvent) -> None:
        lanes = np.True_ if event.lanes is None else event.lanes
        if event.kind == "barrier":
            self._meet(event, np.broadcast_to(lanes, self.shape).any((1, 2)))
        elif event.kind == "cp.async.commit":
            self._committed += lanes
        elif event.kind == "cp.async.wait":
            done = self._committed - event.pending
            for copy in self._copies:
                landed = copy.waiting & (copy.group < done) & lanes
                if landed.any():
                    self.land(copy, landed, event.order)
                    copy.waiting &= ~landed
            self._copies = [copy for copy in self._copies if copy.waiting.any()]

    def restart(self) -> None:
        """Batches start afresh by themselves."""

    def _meet(self, event: WorkEvent, reached: np.ndarray) -> None:
        frame = caller()  # a sink runs inside the kernel's statement
        where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        number, self._executed = self._executed, self._executed + 1
        if number in self.without or where in self.without:
            return
        self.barriers.append(Barrier(event.order, where, reached))
        self.barrier(self.barriers[-1])

    def interval(self, cta: int, order: int) -> tuple[int, int]:
        """The epoch of CTA ``cta`` (of the batch) at ``order``: the orders of the barriers around it (0: the start).

        The second is 0 where no barrier has followed yet.
        """
        met = [barrier.order for barrier in self.barriers if barrier.reached[cta]]
        after = bisect_left(met, order)
        return met[after - 1] if after else 0, met[after] if after < len(met) else 0

    def around(self, cta: int, order: int) -> str:
        """The epoch at ``order`` in words, by the source lines of its barriers."""
        where = {barrier.order: barrier.where for barrier in self.barriers}
        first, last = self.interval(cta, order)
        return f"{where.get(first, 'start')} .. {where.get(last, 'end')}"


class WatchedCTA(CTA):
    """A CTA that tells its watchers what no event says, and leaves unwritten and unwaited bytes to them."""

    def __init__(self, *args, watchers: Sequence[Watcher], **kwargs):
        super().__init__(*args, **kwargs)
        self._watchers = watchers
        for watcher in watchers:
            watcher.begin(self.shape, self.ctas, self.launch.threads)

    def shared(self, name: str, dtype, shape, layout=None, *, alias_of=(), align: int = 16) -> SharedTensor:
        tensor = super().shared(name, dtype, shape, layout, alias_of=alias_of, align=align)
        for watcher in self._watchers:
            watcher.allocated(tensor, align)
        return tensor

    def _require_readable(self, *_) -> None:
        """Reads of bytes nobody wrote or waited for are findings, not refusals."""

    def _write(self, tensor, offset, values, count, lanes) -> None:
        super()._write(tensor, offset, values, count, lanes)
        if isinstance(tensor, SharedTensor):
            for watcher in self._watchers:
                watcher.stored(self._at(tensor, offset), values, lanes)
