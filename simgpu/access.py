"""The path of one memory access: where each lane points, what is refused, the event, and the bytes behind it.

:class:`MemoryAccess` is the stage between the lanes of :class:`simgpu.lockstep.Lockstep` and the instructions of
:class:`simgpu.cta.CTA`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simgpu.errors import SimError
from simgpu.events import AccessEvent, Sink, Site
from simgpu.instructions import FULL_MASK, LANES
from simgpu.launch import Launch
from simgpu.lockstep import Lockstep, describe, pack_mask
from simgpu.memory import Bytes, GlobalMemory, SharedMemory
from simgpu.tensor import GLOBAL_ALIGNMENT, Ref, SharedTensor, Tensor


class MemoryAccess(Lockstep):
    """Addresses of shared and global memory, and reads and writes of the bytes when there are values."""

    def __init__(
        self,
        launch: Launch,
        ctas: np.ndarray,
        sink: Sink,
        *,
        memory: GlobalMemory | None,
        shared_limit: int,
        sites: dict[str, Site],
        layouts: Mapping[str, Any] | None = None,
    ):
        super().__init__(launch, ctas, sink, sites)
        self.tensors: dict[str, SharedTensor] = {}  # in shared memory, in the order of their allocation
        self._layouts = layouts or {}  # in place of those the kernel gives its shared tensors of these names
        self._extents: dict[str, tuple[int, int]] = {}  # shared tensors: first byte, byte after the last
        self._shared_limit, self._global = shared_limit, memory
        self._shared = SharedMemory(self.shape) if memory else None
        self._bases, base = {}, 0
        for tensor in launch.tensors:
            self._bases[tensor] = base + tensor.byte_offset
            base += -(-(tensor.nbytes + tensor.byte_offset) // GLOBAL_ALIGNMENT) * GLOBAL_ALIGNMENT

    def _access(self, place: Site, ref: Ref, width: int, rows: int = LANES) -> np.ndarray:
        """Check where ``ref`` points, emit the event, and return byte offsets into the tensor, int[c, w, 32]."""
        lanes = self.active if rows == LANES else self.active & (self.lane < rows)
        offset = self._offset(place, ref, width, lanes)
        if rows < LANES:  # ldmatrix.x1 and .x2 ignore the addresses of the other lanes
            offset = np.where(lanes, offset, 0)
        address = self._absolute(ref.tensor, offset)
        if isinstance(ref.tensor, SharedTensor):
            self._emit(place, address, None, ref.tensor.name)
        else:
            self._emit(place, None, address)
        return offset

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
        self, place: Site, shared: np.ndarray | None, global_: np.ndarray | None, tensor: str | None = None
    ) -> None:
        """Tell the sink. ``shared`` (int32, in the shared tensor of that name) and ``global_`` (int64) are byte
        addresses, [c, w, 32]."""
        self._order += 1
        issued = self._issued()
        if not issued.any():
            return  # no warp takes this branch
        masks = np.full((1, 1), FULL_MASK, np.uint32) if self._mask is None else pack_mask(self._mask)
        shared, global_ = (
            None if side is None else np.broadcast_to(side, (*side.shape[:2], LANES)) for side in (shared, global_)
        )
        self._sink.access(
            AccessEvent(place, masks, issued, shared, global_, self.ctas, self.shape[1], self._order, tensor)
        )

    def _at(self, tensor: Tensor, offset: np.ndarray) -> np.ndarray:
        """Where the tensor's bytes lie in the memory that holds them: shared memory is one, a global tensor its own."""
        return offset + tensor.base if isinstance(tensor, SharedTensor) else offset

    def _read(self, place: Site, tensor: Tensor, offset: np.ndarray, count: int, lanes) -> np.ndarray:
        self._require_readable(place, tensor, offset, count * tensor.dtype.itemsize, lanes)
        return self._bytes(tensor).read(self._at(tensor, offset), tensor.dtype, count)

    def _require_readable(self, place: Site, tensor: Tensor, offset: np.ndarray, width: int, lanes) -> None:
        if isinstance(tensor, SharedTensor):
            address = self._at(tensor, offset)
            unwritten, in_flight = self._shared.unreadable(address, width, lanes)
            self._refuse(
                place,
                _widen(unwritten),
                f"reads shared byte {{}} ({tensor.name!r}), which nobody wrote",
                _widen(address),
            )
            self._refuse(
                place,
                _widen(in_flight),
                f"reads shared byte {{}} ({tensor.name!r}) before the wait for its cp.async",
                _widen(address),
            )

    def _write(
        self, tensor: Tensor, offset: np.ndarray, values: np.ndarray, count: int, lanes: np.ndarray | None
    ) -> None:
        address = self._at(tensor, offset)
        self._bytes(tensor).write(address, values, lanes, self.shape)
        if isinstance(tensor, SharedTensor):
            self._shared.mark(address, count * tensor.dtype.itemsize, lanes)

    def _value(self, place: Site, tensor: Tensor, value, vec: int) -> np.ndarray:
        """``value`` as elements of ``tensor``: Python numbers and integers convert, other types must match."""
        if isinstance(value, (bool, int, float)):
            value = _number(place, tensor, value)
        value = np.asarray(value)
        if value.dtype != tensor.dtype:
            if value.dtype.kind not in "iub" or tensor.dtype.kind not in "iu":
                raise SimError(
                    f"{describe(place)}: stores {value.dtype} into {tensor.name!r} of {tensor.dtype}; use .astype"
                )
            value = value.astype(tensor.dtype)
        shape = (*self.shape, vec) if vec > 1 else self.shape
        try:
            return np.broadcast_to(value, shape)
        except ValueError:
            raise SimError(f"{describe(place)}: a value of shape {list(value.shape)} is not {list(shape)}") from None


def _number(place: Site, tensor: Tensor, value: float) -> np.ndarray:
    """A Python number as an element of ``tensor``; refused where an integer type does not hold it."""
    if tensor.dtype.kind in "iu":
        limits = np.iinfo(tensor.dtype)
        if value != value or not limits.min <= value <= limits.max or value != int(value):
            raise SimError(f"{describe(place)}: {tensor.name!r} of {tensor.dtype} cannot hold {value}")
    return np.asarray(value, tensor.dtype)


def _widen(lanes: np.ndarray) -> np.ndarray:
    """Fewer than 32 row pointers (ldmatrix.x1, .x2), padded to 32 lanes."""
    missing = LANES - lanes.shape[-1]
    return np.pad(lanes, [(0, 0), (0, 0), (0, missing)]) if 0 < missing < LANES - 1 else lanes
