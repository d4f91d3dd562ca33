"""Layouts: where the element at a coordinate lies, tabulated once so a tensor can index it.

Layouts are CuTe layouts from the ``tensor-layouts`` package, which evaluates one coordinate at a time. This
module turns any layout into a numpy array of element offsets and says which banks they fall on; the GMMA atoms
and the command line's notation come from :mod:`simgpu.layout_spec`. Offsets count elements, never bytes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tensor_layouts import ComposedLayout, Layout, Swizzle, product_each, size

from simgpu.errors import SimError
from simgpu.layout_spec import gmma_atom, parse_layout
from simgpu.rules import BANKS, WORD

__all__ = ["bank_map", "cosize", "gmma_atom", "is_injective", "parse_layout", "tabulate"]

# No offset comes near this; keeping every product below it keeps int64 sums exact.
FAR = 2**48

# ---- tabulation ----------------------------------------------------------------------------------------------


def tabulate(layout: Any, shape: int | Sequence[int] | None = None) -> np.ndarray:
    """The element offset of every coordinate: an int64 array of shape ``shape``.

    ``layout`` is a ``tensor_layouts`` layout (affine, swizzled, composed, hierarchical), any callable
    ``layout(*coordinates) -> offset`` (a pycute layout, a hand-written XOR), or None for row-major. One
    coordinate over a layout of several modes counts through them first mode fastest, as in CuTe. ``shape``
    may cover part of the layout's domain; left out, it is the whole domain, one extent per top-level mode.

    Raises :class:`SimError` where the domain is smaller than ``shape`` or of another rank, and where an offset
    is negative, not an integer, or beyond 2^48.

    >>> tabulate(Layout((2, 4), (4, 1))).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    >>> tabulate(lambda row, column: row * 4 + (column ^ row), (2, 4)).tolist()
    [[0, 1, 2, 3], [5, 4, 7, 6]]
    >>> tabulate(None, (2, 2)).tolist()
    [[0, 1], [2, 3]]
    """
    shape = _shape_over(layout, shape)
    if layout is None:
        return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    if isinstance(layout, (Layout, ComposedLayout)):
        table = _evaluate(layout, np.indices(shape, dtype=np.int64, sparse=True))
    elif callable(layout):
        table = _call(layout, shape)
    else:
        raise SimError(f"a layout is None, a tensor_layouts layout or a callable, not {type(layout).__name__}")
    table = np.array(np.broadcast_to(table, shape), dtype=np.int64)
    if table.size and table.min() < 0:
        where = np.unravel_index(table.argmin(), shape)
        raise SimError(f"layout gives the negative offset {table[where]} at {_coordinate(where)}")
    if table.max(initial=0) >= FAR:
        where = np.unravel_index(table.argmax(), shape)
        raise SimError(f"layout gives {table[where]} at {_coordinate(where)}, past 2^48 elements")
    return table


def _shape_over(layout: Any, shape: int | Sequence[int] | None) -> tuple[int, ...]:
    """``shape`` as a tuple, checked against the domain of ``layout`` where the layout tells its own."""
    known = getattr(layout, "shape", None) if callable(layout) else None
    domain = product_each(known) if isinstance(known, (int, tuple)) else None
    if shape is None:
        if domain is None:
            raise SimError("this layout does not tell its domain: give the shape")
        return domain
    try:
        shape = tuple(map(operator.index, (shape,) if isinstance(shape, (int, np.integer)) else shape))
    except TypeError:
        raise SimError(f"a shape is one integer or several, not {shape!r}") from None
    if min(shape, default=1) < 0:
        raise SimError(f"shape {shape} has a negative extent")
    if domain is None:
        return shape
    if len(shape) == 1:
        domain = (math.prod(domain),)
    if len(shape) != len(domain):
        raise SimError(f"shape {shape} has {len(shape)} modes, the layout {len(domain)}: {layout}")
    if any(wanted > extent for wanted, extent in zip(shape, domain, strict=True)):
        raise SimError(f"shape {shape} exceeds the domain {domain} of the layout {layout}")
    return shape


def _evaluate(layout: Layout | ComposedLayout, coordinates: Sequence[np.ndarray]) -> np.ndarray:
    """A ``tensor_layouts`` layout at arrays of coordinates that broadcast together."""
    if isinstance(layout, Layout):
        if len(coordinates) == 1:
            return _affine(coordinates[0], layout.shape, layout.stride)
        return sum(_affine(*mode) for mode in zip(coordinates, layout.shape, layout.stride, strict=True))
    inner, outer = layout.inner, layout.outer
    if abs(layout.offset) >= FAR:
        raise SimError(f"a layout with the offset {layout.offset} reaches past 2^48 elements")
    index = layout.offset + (inner(coordinates[0]) if isinstance(inner, Swizzle) else _evaluate(inner, coordinates))
    if isinstance(outer, (Layout, ComposedLayout)):
        return _evaluate(outer, (index,))
    if isinstance(outer, Swizzle):  # plain shifts, masks and XOR: the package's own code runs on an array
        if outer.bits + outer.base + abs(outer.shift) > 62:
            raise SimError(f"{outer} reaches past 62 bits")
        return outer(index)
    return np.array([_whole(outer(int(i)), (int(i),)) for i in index.flat], dtype=np.int64).reshape(index.shape)


def _affine(index: np.ndarray, shape: Any, stride: Any) -> np.ndarray:
    """One mode of an affine layout; an index over nested modes counts through them first mode fastest.

    The last mode takes what is left without a modulo: CuTe lets it run past its extent.
    """
    if isinstance(shape, int):
        farthest = int(np.abs(index).max(initial=0))
        if farthest * abs(stride) >= FAR:
            raise SimError(f"a layout with stride {stride} over extent {shape} reaches past 2^48 elements")
        return index * (stride if farthest else 0)
    offset = np.zeros_like(index)
    for mode, (extent, step) in enumerate(zip(shape, stride, strict=True)):
        last = mode == len(shape) - 1
        offset = offset + _affine(index if last else index % size(extent), extent, step)
        index = index if last else index // size(extent)
    return offset


def _call(layout: Callable[..., Any], shape: tuple[int, ...]) -> np.ndarray:
    """A callable at every coordinate: once on whole index arrays where that proves right, else one by one.

    Branches, ``max`` or ``int()`` in the callable make the array call fail or differ. So the array's answer
    counts only when it agrees with single calls at every corner and at 32 places between.
    """
    try:
        with np.errstate(all="ignore"):
            table = np.broadcast_to(np.asarray(layout(*np.indices(shape, dtype=np.int64, sparse=True))), shape)
    except Exception:  # whatever a function written for plain integers makes of arrays
        table = None
    if table is not None and np.issubdtype(table.dtype, np.integer) and table.size:
        corners = itertools.product(*({0, extent - 1} for extent in shape))
        between = np.random.default_rng(0).integers(0, shape, size=(32, len(shape))).tolist()
        if all(table[where] == _one(layout, where) for where in (*corners, *map(tuple, between))):
            return table
    return np.array([_one(layout, where) for where in np.ndindex(shape)], dtype=np.int64).reshape(shape)


def _one(layout: Callable[..., Any], where: tuple[int, ...]) -> int:
    try:
        offset = layout(*where)
    except Exception as error:
        raise SimError(f"layout fails at {_coordinate(where)}: {type(error).__name__}: {error}") from error
    return _whole(offset, where)


def _whole(offset: Any, where: tuple[int, ...]) -> int:
    try:
        whole = operator.index(offset)
    except TypeError:
        raise SimError(f"layout gives {offset!r} at {_coordinate(where)}, not an integer offset") from None
    if abs(whole) >= FAR:
        raise SimError(f"layout gives {whole} at {_coordinate(where)}, past 2^48 elements")
    return whole


def _coordinate(where: Sequence[int]) -> str:
    return "(" + ",".join(str(int(i)) for i in where) + ")"


# ---- what a table says ---------------------------------------------------------------------------------------


def cosize(table: np.ndarray) -> int:
    """Elements the layout spans: one more than its largest offset; 0 for an empty table.

    >>> cosize(tabulate(Layout((16, 128), (132, 1))))
    2108
    """
    return int(table.max(initial=-1)) + 1


def is_injective(table: np.ndarray) -> bool:
    """Whether no two coordinates share an offset.

    >>> is_injective(tabulate(Layout((2, 2), (1, 1))))
    False
    """
    return np.unique(table).size == table.size


def bank_map(table: np.ndarray, itemsize: int) -> np.ndarray:
    """The bank (0..31) of each element's first byte, from the table's offsets and ``itemsize`` bytes an element.

    Assumes that offset 0 lies on bank 0. Raises :class:`SimError` for an ``itemsize`` below 1.

    >>> bank_map(tabulate(Layout((3, 2), (36, 1))), itemsize=4).tolist()
    [[0, 1], [4, 5], [8, 9]]
    """
    if itemsize < 1:
        raise SimError(f"an element of {itemsize} bytes has no bank")
    return table * itemsize // WORD % BANKS
