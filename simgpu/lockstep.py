"""The machinery under ``cta``: thread coordinates, active masks, refusals, sites.

:class:`Lockstep` knows the lanes, :class:`simgpu.access.MemoryAccess` where they point, and
:class:`simgpu.cta.CTA` the instructions.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

import numpy as np

from simgpu.errors import DataDependent, Fault, SimError
from simgpu.events import Sink, Site, WorkEvent
from simgpu.instructions import instruction
from simgpu.launch import FOREIGN, Launch
from simgpu.tensor import Tensor
from simgpu.unknown import Unknown


class Lockstep:
    """A batch of CTAs that execute every statement together.

    ``tx ty tz`` and ``bx by bz`` are threadIdx and blockIdx, ``tid`` the linear thread number, ``warp`` and
    ``lane`` its parts, each broadcastable to [ctas, warps, 32]; ``grid`` and ``block`` are the launch's.
    """

    def __init__(self, launch: Launch, ctas: np.ndarray, sink: Sink, sites: dict[str, Site]):
        self.launch, self.grid, self.block, self.ctas = launch, launch.grid, launch.block, ctas
        self.shape = (len(ctas), launch.warps, 32)
        thread = np.arange(launch.warps * 32, dtype=np.int32).reshape(1, launch.warps, 32)
        x, y, _ = launch.block
        self.tid, self.warp, self.lane = thread, thread[..., :1] // 32, thread[:, :1]
        self.tx, self.ty, self.tz = thread % x, thread // x % y, thread // (x * y)
        gx, gy, _ = launch.grid
        block = ctas.astype(np.int64).reshape(-1, 1, 1)
        self.bx, self.by, self.bz = block % gx, block // gx % gy, block // (gx * gy)
        self._tail = None if launch.threads % 32 == 0 else thread < launch.threads  # the block's last, partial warp
        self._mask = self._branch = self._tail
        self._sink, self._sites, self._order = sink, sites, 0

    # ---- divergence --------------------------------------------------------------------------------------

    @contextmanager
    def where(self, condition, *, predicated: bool = False):
        """Run the block with only the lanes active where ``condition`` (bool, [ctas, warps, 32]) holds.

        A warp with no such lane branches around the block and executes none of it. ``predicated`` says that the
        compiler predicates instead (SASS ``@P0 LDG``), as it likes to do with short blocks: then that warp
        executes every instruction with no lane active, which Nsight Compute counts as executed.
        """
        condition = self._per_lane(condition, "a branch").astype(bool, copy=False)
        outer = self._mask, self._branch
        if not condition.all():
            self._mask = condition if self._mask is None else condition & self._mask
            if not predicated:
                self._branch = self._mask
        try:
            yield
        finally:
            self._mask, self._branch = outer

    @property
    def active(self) -> np.ndarray:
        """The active mask, bool broadcastable to [ctas, warps, 32]."""
        return np.ones((1, 1, 1), bool) if self._mask is None else self._mask

    def _issued(self) -> np.ndarray:
        """The warps that execute the present statement, with or without an active lane: bool[c, w]."""
        return np.ones((1, 1), bool) if self._branch is None else self._branch.any(-1)

    def any(self, condition) -> bool:
        """Whether an active lane of the batch satisfies ``condition``: the test of a divergent ``while``."""
        return bool((self._per_lane(condition, "a loop").astype(bool, copy=False) & self.active).any())

    def _per_lane(self, value, what: str) -> np.ndarray:
        """``value`` as one array broadcastable to [ctas, warps, 32]."""
        value = known(value, what)
        if not self._fits(value):
            raise SimError(f"{what} takes one value per lane, {list(self.shape)}, not shape {list(value.shape)}")
        return value

    def _fits(self, value: np.ndarray) -> bool:
        return value.ndim == 3 and all(n in (1, m) for n, m in zip(value.shape, self.shape, strict=True))

    # ---- refusals ----------------------------------------------------------------------------------------

    def _refuse(self, place: Site | None, lanes: np.ndarray, message: str, values: np.ndarray | None = None) -> None:
        """Raise a Fault for the first of ``lanes`` (bool); ``{}`` in the message becomes its entry of ``values``."""
        lanes = np.broadcast_to(lanes, self.shape)
        if not lanes.any():
            return
        cta, warp, lane = (int(i) for i in np.unravel_index(np.argmax(lanes), self.shape))
        if values is not None:
            message = message.replace("{}", str(np.broadcast_to(values, self.shape)[cta, warp, lane]))
        where = f"CTA {self.ctas[cta]}, warp {warp}, lane {lane}: "
        raise Fault(f"{'' if place is None else describe(place) + ': '}{where}{message}")

    # ---- sites, addresses, events ------------------------------------------------------------------------

    def _site(self, name: str | None, verb: str, tensor: Tensor, op: str, width: int) -> Site:
        """The site of the kernel statement now running; a name may stand for one instruction only."""
        frame = caller()
        line, file = frame.f_lineno, os.path.basename(frame.f_code.co_filename)
        name = name or f"{tensor.name}.{verb}:{line}"
        found = self._sites.get(name)
        if found is None:
            place = Site(name, file, line, instruction(op), width)
            try:
                place.instruction.require_width(width)
            except SimError as error:
                raise SimError(f"{describe(place)}: {error}") from None
            found = self._sites.setdefault(name, place)
        if (found.line, found.file, found.instruction.name, found.width) != (line, file, op, width):
            raise SimError(
                f"site {name!r} names two instructions: {found.instruction.name} of {found.width} bytes at "
                f"{found.file}:{found.line} and {op} of {width} at {file}:{line}"
            )
        return found

    def _work(self, kind: str, pending: int = 0) -> None:
        """Tell the sink about an instruction that is no memory access."""
        self._order += 1
        warps = int(np.broadcast_to(self._issued(), self.shape[:2]).sum())
        if warps:
            self._sink.work(WorkEvent(kind, warps, self._order, self._mask, pending))


def known(value, what: str) -> np.ndarray:
    """``value`` as a [c, w, 32]-broadcastable array; DataDependent when only a run with values could know it."""
    if isinstance(value, Unknown):
        raise DataDependent(f"{what} depends on a loaded value; run with values")
    value = np.asarray(value)
    return value.reshape((1,) * (3 - value.ndim) + value.shape)


def pack_mask(lanes: np.ndarray) -> np.ndarray:
    """Active lanes, bool[c, w, 32 or 1], as masks uint32[c, w]: lane n is bit n.

    >>> hex(pack_mask(np.arange(32).reshape(1, 1, 32) < 4)[0, 0])
    '0xf'
    """
    lanes = np.ascontiguousarray(np.broadcast_to(lanes, np.broadcast_shapes(lanes.shape, (1, 1, 32))))
    return np.packbits(lanes, axis=-1, bitorder="little").view("<u4")[..., 0]


def caller():
    """The frame of the kernel statement that is running: the nearest outside this package and numpy."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(FOREIGN):
        frame = frame.f_back
    return frame


def describe(place: Site) -> str:
    """How messages name a site."""
    return f"site {place.name!r} ({place.file}:{place.line})"
