"""Tensors a kernel addresses: a name, a dtype, a shape, a layout, a place in global or shared memory.

Indexing a tensor with per-lane coordinates does not read it; it makes a :class:`Ref`, which a ``cta``
operation then loads, stores or copies: ``cta.load(tile[cta.ty, cta.tx])``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from simgpu.errors import DataDependent, SimError
from simgpu.layout import tabulate
from simgpu.unknown import Unknown

bfloat16 = np.dtype(ml_dtypes.bfloat16)
float16, float32, float64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
int8, int32, int64 = np.dtype(np.int8), np.dtype(np.int32), np.dtype(np.int64)
uint8, uint16, uint32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)

MAX_VECTOR = 16  # bytes a lane moves at most
GLOBAL_ALIGNMENT = 256  # bytes: what cudaMalloc guarantees (CUDA C++ Programming Guide, "Device Memory Accesses")


@dataclass(frozen=True, eq=False)
class Tensor:
    """Elements of ``dtype`` under a layout from coordinates to element offsets.

    ``layout`` is None (row-major), a ``tensor_layouts`` layout, or any callable from coordinates to an
    element offset. Raises :class:`~simgpu.errors.SimError` for a shape that is not positive.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    layout: Any = None

    def __post_init__(self):
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        shape = (self.shape,) if isinstance(self.shape, (int, np.integer)) else tuple(self.shape)
        if not shape or any(not isinstance(n, (int, np.integer)) or n < 1 for n in shape):
            raise SimError(f"tensor {self.name!r}: shape {shape} needs positive integers")
        object.__setattr__(self, "shape", tuple(int(n) for n in shape))
        _ = self.strides if self.table is None else self.table  # a bad layout is refused where it is written

    @cached_property
    def table(self) -> np.ndarray | None:
        """Element offset of every coordinate, int64[shape]; None when plain strides say the same."""
        return None if self.layout is None or self.strides is not None else tabulate(self.layout, self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...] | None:
        """Element strides when the layout is affine, else None."""
        if self.layout is None:
            return tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        table = tabulate(self.layout, self.shape)
        unit = np.eye(len(self.shape), dtype=int)
        strides = tuple(int(table[tuple(unit[axis])]) if n > 1 else 0 for axis, n in enumerate(self.shape))
        grid = sum(
            np.arange(n).reshape([-1 if a == axis else 1 for a in range(len(self.shape))]) * strides[axis]
            for axis, n in enumerate(self.shape)
        )
        return strides if np.array_equal(table, grid) else None

    @cached_property
    def nbytes(self) -> int:
        """Bytes the layout spans (its cosize times the element size), paddings inside it included."""
        if self.strides is not None:
            last = sum(stride * (n - 1) for stride, n in zip(self.strides, self.shape, strict=True))
        else:
            last = int(self.table.max())
        return (last + 1) * self.dtype.itemsize

    def offset(self, coordinates: tuple) -> np.ndarray:
        """Element offsets at in-range coordinates: int64, or int32 where a byte offset never needs more."""
        if self.strides is None:
            return self.table[tuple(np.broadcast_arrays(*coordinates))]
        kind = np.int32 if self.nbytes < 2**31 else np.int64
        return sum(
            coordinate.astype(kind, copy=False) * stride
            for coordinate, stride in zip(coordinates, self.strides, strict=True)
        )

    def __getitem__(self, coordinates) -> Ref:
        coordinates = coordinates if isinstance(coordinates, tuple) else (coordinates,)
        if len(coordinates) != len(self.shape):
            raise SimError(f"tensor {self.name!r} has {len(self.shape)} dimensions, indexed with {len(coordinates)}")
        if any(isinstance(coordinate, Unknown) for coordinate in coordinates):
            raise DataDependent(f"tensor {self.name!r} is indexed with a loaded value; run with values")
        return Ref(self, tuple(np.asarray(coordinate) for coordinate in coordinates))


@dataclass(frozen=True, eq=False)
class GlobalTensor(Tensor):
    """A tensor in global memory, an argument of a launch.

    ``init`` gives the initial contents when values are emulated: an array of ``shape``, a callable that
    returns one (called only then), or None, which leaves every byte 0xFF so that an element nobody wrote
    shows. ``byte_offset`` displaces the base from its 256-byte alignment.

    >>> GlobalTensor("x", float32, (4, 8)).nbytes
    128
    """

    init: np.ndarray | Callable[[], np.ndarray] | None = None
    byte_offset: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.byte_offset < 0:
            raise SimError(f"tensor {self.name!r}: byte offset {self.byte_offset} is negative")

    def initial_bytes(self) -> np.ndarray:
        """The initial contents, uint8[nbytes + 16]: a zero-filling copy may point at less than a vector."""
        memory = np.full(self.nbytes + MAX_VECTOR, 0xFF, np.uint8)
        if self.init is not None:
            data = np.asarray(self.init() if callable(self.init) else self.init)
            if data.shape != self.shape or data.dtype != self.dtype:
                raise SimError(
                    f"tensor {self.name!r}: initial data is {data.dtype}{list(data.shape)}, "
                    f"not {self.dtype}{list(self.shape)}"
                )
            if self.strides is None:
                memory.view(self.dtype)[self.table] = data
            else:
                self._strided(memory)[...] = data
        return memory

    def array(self, memory: np.ndarray) -> np.ndarray:
        """The elements in ``memory`` (uint8, as of :meth:`initial_bytes`), copied to an array of the tensor's shape."""
        return memory.view(self.dtype)[self.table] if self.strides is None else self._strided(memory).copy()

    def _strided(self, memory: np.ndarray) -> np.ndarray:
        strides = tuple(self.dtype.itemsize * stride for stride in self.strides)
        return np.lib.stride_tricks.as_strided(memory.view(self.dtype), self.shape, strides)


@dataclass(frozen=True, eq=False)
class SharedTensor(Tensor):
    """A tensor at ``base`` bytes into a CTA's shared memory; made by ``cta.shared``.

    It lies there because it follows the tensors before it, on a multiple of ``align`` bytes, or lies ``over`` others.
    """

    base: int = 0
    align: int = 16
    over: tuple[SharedTensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Ref:
    """Where each lane points: a tensor and one coordinate array per dimension, broadcastable to [ctas, warps, 32]."""

    tensor: Tensor
    coordinates: tuple[np.ndarray, ...] = field(repr=False)
