"""The machinery under ``cta``: thread coordinates, active masks, sites, addresses, and the events they make.

:class:`Lockstep` knows where lanes are and where they point, and refuses what the device would refuse;
:class:`simgpu.cta.CTA` adds the instructions.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

import numpy as np

from simgpu.errors import DataDependent, SimError
from simgpu.events import AccessEvent, Sink, Site, WorkEvent
from simgpu.instructions import FULL_MASK, LANES, instruction
from simgpu.launch import FOREIGN, Launch
from simgpu.memory import Bytes, GlobalMemory, SharedMemory
from simgpu.tensor import GLOBAL_ALIGNMENT, Ref, SharedTensor, Tensor
from simgpu.unknown import Unknown


class Lockstep:
    """A batch of CTAs that execute every statement together.

    ``tx ty tz`` and ``bx by bz`` are threadIdx and blockIdx, ``tid`` the linear thread number, ``warp`` and
    ``lane`` its parts, each broadcastable to [ctas, warps, 32]; ``grid`` and ``block`` are the launch's.
    """

    def __init__(
        self,
        launch: Launch,
        ctas: np.ndarray,
        sink: Sink,
        *,
        memory: GlobalMemory | None,
        shared_limit: int,
        sites: dict[str, Site],
    ):
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
        self._mask = self._tail
        self._sink, self._sites, self._order = sink, sites, 0
        self._extents: dict[str, tuple[int, int]] = {}  # shared tensors: first byte, byte after the last
        self._shared_limit, self._global = shared_limit, memory
        self._shared = SharedMemory(self.shape, -(-shared_limit // 16) * 16) if memory else None
        self._bases, base = {}, 0
        for tensor in launch.tensors:
            self._bases[tensor] = base + tensor.byte_offset
            base += -(-(tensor.nbytes + tensor.byte_offset) // GLOBAL_ALIGNMENT) * GLOBAL_ALIGNMENT

    # ---- divergence --------------------------------------------------------------------------------------

    @contextmanager
    def where(self, condition):
        """Run the block with only the lanes active where ``condition`` (bool, [ctas, warps, 32]) holds."""
        condition = self._per_lane(condition, "a branch").astype(bool, copy=False)
        outer = self._mask
        if not condition.all():
            self._mask = condition if outer is None else condition & outer
        try:
            yield
        finally:
            self._mask = outer

    @property
    def active(self) -> np.ndarray:
        """The active mask, bool broadcastable to [ctas, warps, 32]."""
        return np.ones((1, 1, 1), bool) if self._mask is None else self._mask

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
        """Raise SimError for the first of ``lanes`` (bool); ``{}`` in the message becomes its entry of ``values``."""
        lanes = np.broadcast_to(lanes, self.shape)
        if not lanes.any():
            return
        cta, warp, lane = (int(i) for i in np.unravel_index(np.argmax(lanes), self.shape))
        if values is not None:
            message = message.replace("{}", str(np.broadcast_to(values, self.shape)[cta, warp, lane]))
        where = f"CTA {self.ctas[cta]}, warp {warp}, lane {lane}: "
        raise SimError(f"{'' if place is None else describe(place) + ': '}{where}{message}")

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

    def _offset(
        self, place: Site, ref: Ref, width: int, lanes: np.ndarray, touched: np.ndarray | int | None = None
    ) -> np.ndarray:
        """Byte offsets of ``ref`` from its tensor's start, int[c, w, 32], in range; refused where a lane faults.

        ``lanes`` are those that matter. What the others point at is arbitrary, but in range. ``touched``
        (None: ``width``) are the bytes a lane really reads of its vector.
        """
        tensor, coordinates = ref.tensor, ref.coordinates
        for axis, extent in enumerate(tensor.shape):
            index = coordinates[axis]
            if index.dtype.kind not in "iu":
                raise SimError(f"{describe(place)}: index {axis} of {tensor.name!r} is {index.dtype}, not an integer")
            if index.size and (index.min() < 0 or index.max() >= extent):
                self._refuse(
                    place,
                    ((index < 0) | (index >= extent)) & lanes,
                    f"index {axis} of {tensor.name!r} is {{}}, outside 0..{extent - 1}",
                    index,
                )
                coordinates = tuple(np.where(lanes, c, 0) for c in coordinates)
        itemsize = tensor.dtype.itemsize
        offset = np.asarray(tensor.offset(coordinates))
        offset = offset.reshape((1,) * (3 - offset.ndim) + offset.shape) * itemsize
        if not self._fits(offset):
            raise SimError(
                f"{describe(place)}: the coordinates of {tensor.name!r} have shape {list(offset.shape)}, "
                f"not one per lane, {list(self.shape)}"
            )
        base = self._base(tensor)
        bits = np.bitwise_or.reduce(offset, axis=None) if base % width == 0 else 1
        if bits & (width - 1):
            address = self._absolute(tensor, offset)
            self._refuse(
                place,
                (address % width != 0) & lanes,
                f"byte address {{}} ({tensor.name!r} starts at {base}) is not a multiple of {width}",
                address,
            )
        if width > itemsize and offset.max(initial=0) > tensor.nbytes - width:
            beyond = offset > tensor.nbytes - (width if touched is None else touched)
            self._refuse(
                place,
                beyond & lanes,
                f"{width} bytes at byte {{}} of {tensor.name!r} run past its end ({tensor.nbytes} bytes)",
                offset,
            )
            offset = np.where(lanes, offset, 0)
        return offset

    def _base(self, tensor: Tensor) -> int:
        if isinstance(tensor, SharedTensor):
            return tensor.base
        if tensor not in self._bases:
            raise SimError(f"tensor {tensor.name!r} is no argument of the launch (give it in args, not inside another)")
        return self._bases[tensor]

    def _absolute(self, tensor: Tensor, offset: np.ndarray) -> np.ndarray:
        """Byte addresses of ``offset`` bytes into ``tensor``: int32 in shared memory, int64 in global memory."""
        kind = np.int32 if isinstance(tensor, SharedTensor) else np.int64
        return np.add(offset, self._base(tensor), dtype=kind, casting="unsafe")

    def _bytes(self, tensor: Tensor) -> Bytes:
        return self._shared if isinstance(tensor, SharedTensor) else self._global[tensor]

    def _emit(
        self, place: Site, shared: np.ndarray | None, global_: np.ndarray | None, odd: np.ndarray | None = None
    ) -> None:
        """Tell the sink. ``shared`` (int32) and ``global_`` (int64) are byte addresses, [c, w, 32].

        A warp with one of the ``odd`` lanes (bool) is reported as one that no rule covers.
        """
        self._order += 1
        masks = np.full((1, 1), FULL_MASK, np.uint32) if self._mask is None else pack_mask(self._mask)
        if not masks.any():
            return  # no warp takes this branch
        shared, global_ = (
            None if side is None else np.broadcast_to(side, (*side.shape[:2], LANES)) for side in (shared, global_)
        )
        parts = [(masks, False)]
        if odd is not None:
            warps = (odd & self.active).any(-1)
            parts = [(np.where(warps, 0, masks), False), (np.where(warps, masks, 0), True)]
        for part, unmodelled in parts:
            if part.any():
                event = AccessEvent(place, part, shared, global_, self.ctas, self.shape[1], self._order, unmodelled)
                self._sink.access(event)

    def _work(self, kind: str) -> None:
        """Tell the sink about an instruction that is no memory access."""
        self._order += 1
        if self._mask is None:
            warps = self.shape[0] * self.shape[1]
        else:
            warps = int(np.broadcast_to(self._mask.any(-1), self.shape[:2]).sum())
        if warps:
            self._sink.work(WorkEvent(kind, warps, self._order))


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
