"""What a kernel does to one shared tensor, told in elements: the layout is taken out, so that another can be put in.

The kernel runs once, under its own layout. Of each access the elements are kept that the lanes point at, and how often
it was made; :mod:`simgpu.search_layout` then prices any layout without running the kernel again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from simgpu.errors import SimError
from simgpu.events import AccessEvent, Site, WorkEvent
from simgpu.instructions import LANES, NO_SOURCE, nearest
from simgpu.launch import Launch
from simgpu.layout import cosize, is_injective, tabulate
from simgpu.rules import LINE
from simgpu.run import Result, simulate
from simgpu.tensor import SharedTensor


@dataclass(frozen=True)
class Access:
    """The distinct accesses of a site to one tensor.

    ``masks`` uint32[n], ``elements`` int32[n, 32] (the element each lane points at, counted in row-major order; 0 for
    an inactive lane), ``global_`` int64[n, 32] or None, and ``times`` int64[n]: how often each was made.
    """

    site: Site
    tensor: str
    masks: np.ndarray
    elements: np.ndarray
    global_: np.ndarray | None
    times: np.ndarray


@dataclass(frozen=True)
class Recording:
    """Every access to the tensors ``names``, which share one shape, dtype and layout (``tensor`` is the first), and to
    ``views``: tensors over the same bytes, each with the elements its coordinates mean, int32 of its shape.

    ``vectors`` int32[m, v]: the elements of every vector that some lane moves, by width v; they must stay neighbours.
    ``allocated`` is all of shared memory, in order.
    """

    names: tuple[str, ...]
    views: dict[str, np.ndarray]
    tensor: SharedTensor
    accesses: tuple[Access, ...]
    vectors: tuple[np.ndarray, ...]
    allocated: tuple[SharedTensor, ...]

    @property
    def own_table(self) -> np.ndarray:
        """Element offsets under the kernel's own layout, int64[shape]."""
        return tabulate(self.tensor.layout, self.tensor.shape)

    def bases(self, nbytes: int) -> dict[str, int]:
        """The byte at which each shared tensor starts when those of the recording take ``nbytes`` each."""
        bases, end = {}, 0
        for tensor in self.allocated:
            over = [bases[other.name] for other in tensor.over]
            bases[tensor.name] = base = min(over) if over else -(-end // tensor.align) * tensor.align
            changes = tensor.name in self.names or tensor.name in self.views
            end = max(end, base + (nbytes if changes else tensor.nbytes))
        return bases

    def substitutes(self, layout: Any) -> dict[str, Any]:
        """What to give :func:`simgpu.run.simulate` as ``layouts`` so that every tensor and view has ``layout``."""
        offsets = tabulate(layout, self.tensor.shape).ravel()
        views = {name: offsets[elements] for name, elements in self.views.items()}
        return dict.fromkeys(self.names, layout) | {
            name: lambda *where, table=table: table[where] for name, table in views.items()
        }


def record(launch: Launch, pattern: str, views: Sequence[str] = (), **options) -> tuple[Recording, Result]:
    """Emulate ``launch`` (``options`` as of :func:`simgpu.run.simulate`) and keep what it does to a shared tensor.

    ``pattern`` is its name; ``As*`` stands for all whose names match. ``views`` name further tensors that see the same
    elements under coordinates of their own. Raises SimError when there is no such tensor or no access to it, when
    those of one search differ in shape, dtype or layout, for an instruction without a proven rule, and where a layout
    or an access cannot be told in elements.
    """
    listener = _Listener()
    result = simulate(launch, sinks=[listener], **options)
    known = {tensor.name: tensor for tensor in result.shared_tensors}
    for name in (pattern, *views):
        if not any(fnmatchcase(other, name) for other in known):
            raise SimError(f"kernel {launch.name!r} has no shared tensor {name!r}{nearest(name, known)}")
    tensors = [tensor for name, tensor in known.items() if fnmatchcase(name, pattern) and name not in views]
    if not tensors:
        raise SimError(f"shared tensor {pattern!r} cannot be its own view")
    first, table = tensors[0], tabulate(tensors[0].layout, tensors[0].shape)
    for other in tensors[1:]:
        same = (other.shape, other.dtype) == (first.shape, first.dtype)
        if not same or not np.array_equal(tabulate(other.layout, other.shape), table):
            raise SimError(f"shared tensors {first.name!r} and {other.name!r} differ in shape, dtype or layout")
    if not is_injective(table):
        raise SimError(f"shared tensor {first.name!r}: its layout puts two elements at one offset")
    element_at = np.full(cosize(table) + 1, -1, np.int32)  # and a last one, for past the end
    element_at[table.ravel()] = np.arange(table.size)
    seen = {name: _view(known[name], tensors, element_at) for name in views}
    accesses, vectors = [], defaultdict(list)
    for (site, name), events in listener.events.items():
        if name not in seen and known[name] not in tensors:
            continue
        if not site.instruction.proven:
            raise SimError(f"site {site.name!r}: {site.instruction.name} has no proven rule")
        access = _distinct(site, known[name], element_at, events)
        accesses.append(access)
        length = site.width // first.dtype.itemsize
        if length > 1:
            vectors[length].append(_vectors(access, length, table, element_at))
    if not accesses:
        raise SimError(f"kernel {launch.name!r} does not access shared tensor {pattern!r}")
    merged = tuple(np.unique(np.concatenate(each), axis=0) for _, each in sorted(vectors.items()))
    names = tuple(tensor.name for tensor in tensors)
    return Recording(names, seen, first, tuple(accesses), merged, result.shared_tensors), result


class _Listener:
    """A sink that keeps the accesses to shared tensors, by site and tensor."""

    def __init__(self):
        self.events = defaultdict(list)

    def access(self, event: AccessEvent) -> None:
        if event.tensor is not None:
            masks, shared, global_, times = event.columns()
            self.events[event.site, event.tensor].append((masks, shared, global_, np.full(len(masks), times)))

    def work(self, event: WorkEvent) -> None:
        pass

    def restart(self) -> None:
        self.events.clear()


def _view(view: SharedTensor, tensors: Sequence[SharedTensor], element_at: np.ndarray) -> np.ndarray:
    """The element that each coordinate of ``view`` means, int32[shape of the view]."""
    if not any((view.base, view.dtype) == (tensor.base, tensor.dtype) for tensor in tensors):
        raise SimError(f"shared tensor {view.name!r} is no view of {tensors[0].name!r}: another dtype or first byte")
    offsets = tabulate(view.layout, view.shape)
    elements = element_at[np.minimum(offsets, len(element_at) - 1)]
    if (elements < 0).any():
        raise SimError(f"shared tensor {view.name!r} is no view of {tensors[0].name!r}: it has other elements")
    return elements


def _distinct(site: Site, tensor: SharedTensor, element_at: np.ndarray, events: list) -> Access:
    """The events' rows in elements, each distinct one once.

    Rows that copy from other lines of global memory cost the same: a line's number does not matter to a rule.
    """
    masks, shared, global_, times = (None if part[0] is None else np.concatenate(part)
                                     for part in zip(*events, strict=True))
    on = _lanes_used(site, masks)
    offsets = np.where(on, (shared - tensor.base) // tensor.dtype.itemsize, 0)
    columns = [masks[:, None].astype(np.int64), np.where(on, element_at[offsets], 0)]
    if global_ is not None:
        reads = on & (global_ != NO_SOURCE)
        start = np.where(reads, global_, np.iinfo(np.int64).max).min(1, keepdims=True) // LINE * LINE
        columns.append(np.where(reads, global_ - start, NO_SOURCE))
    rows, which = np.unique(np.concatenate(columns, 1), axis=0, return_inverse=True)
    return Access(
        site,
        tensor.name,
        rows[:, 0].astype(np.uint32),
        rows[:, 1 : 1 + LANES].astype(np.int32),
        None if global_ is None else rows[:, 1 + LANES :],
        np.bincount(which.reshape(-1), times).astype(np.int64),
    )


def _lanes_used(site: Site, masks: np.ndarray) -> np.ndarray:
    """The lanes whose addresses count, bool[n, 32]: of ldmatrix and stmatrix only those that name a row."""
    lanes = np.arange(LANES, dtype=np.uint32)
    matrices = site.instruction.matrices
    return (masks[:, None] >> lanes & 1).astype(bool) & (lanes < (8 * matrices or LANES))


def _vectors(access: Access, length: int, table: np.ndarray, element_at: np.ndarray) -> np.ndarray:
    """The ``length`` elements of every distinct vector of ``access``, int32[m, length]."""
    first = np.unique(access.elements[_lanes_used(access.site, access.masks)])
    vectors = element_at[np.minimum(table.ravel()[first][:, None] + np.arange(length), len(element_at) - 1)]
    if (vectors < 0).any():
        where = np.unravel_index(first[(vectors < 0).any(1).argmax()], table.shape)
        raise SimError(f"site {access.site.name!r} moves {access.site.width} bytes from element "
                       f"({','.join(map(str, where))}) into the padding: another layout has other bytes there")
    return vectors
