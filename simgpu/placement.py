"""Run a kernel with its shared tensors elsewhere, barriers added and stores delayed: what an aliasing plan asks for.

>>> from functools import partial
>>> from kernels_py import find
>>> from simgpu.run import simulate
>>> launch = find("transpose")[0].launch("pad1", rows=64, cols=64)
>>> simulate(launch, make=partial(PlacedCTA, plan=Plan({"tile": (1024,)}))).shared_bytes
5244
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from simgpu.cta import CTA
from simgpu.errors import SimError
from simgpu.events import WorkEvent
from simgpu.tensor import SharedTensor


@dataclass(frozen=True)
class Plan:
    """Where shared tensors lie, and what must happen for it.

    ``offsets``: per tensor the byte offset of its start, or of each of its leading slices. ``barriers``: places in
    program order (as of :class:`~simgpu.events.AccessEvent`) before which there is a barrier more. ``delayed``: per
    tensor the numbers of barriers in program order before which its stores happen, not where the kernel has them: the
    emulator's stand-in for a value that is computed again.
    """

    offsets: Mapping[str, tuple[int, ...]]
    barriers: frozenset[int] = frozenset()
    delayed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def slice_extents(tensor: SharedTensor) -> list[tuple[int, int]] | None:
    """First byte and byte after the last of every leading slice, from the tensor's start; None where they mix.

    >>> from simgpu.tensor import float32
    >>> slice_extents(SharedTensor("x", float32, (2, 4, 8)))
    [(0, 128), (128, 256)]
    """
    offsets = np.asarray(tensor.offset(tuple(np.indices(tensor.shape)))).reshape(tensor.shape[0], -1)
    size = tensor.dtype.itemsize
    extents = [(int(low) * size, (int(high) + 1) * size)
               for low, high in zip(offsets.min(1), offsets.max(1), strict=True)]
    mixed = any(stop > start for (_, stop), (start, _) in pairwise(sorted(extents)))
    return None if mixed else extents


def moved(tensor: SharedTensor, offsets: tuple[int, ...]) -> SharedTensor:
    """``tensor`` at the byte ``offsets``: one for all of it, or one for each of its leading slices."""
    if len(offsets) == 1:
        return replace(tensor, base=offsets[0])
    if len(offsets) != tensor.shape[0]:
        raise SimError(f"shared tensor {tensor.name!r}: {len(offsets)} offsets for {tensor.shape[0]} slices")
    size = tensor.dtype.itemsize
    starts = [start for start, _ in slice_extents(tensor) or ()]
    if not starts or any((offset - min(offsets)) % size for offset in offsets):
        raise SimError(f"shared tensor {tensor.name!r}: its slices cannot be placed apart, at {list(offsets)}")
    table = np.asarray(tensor.offset(tuple(np.indices(tensor.shape)))).reshape(tensor.shape)
    shift = (np.array(offsets) - min(offsets) - np.array(starts)) // size
    table = table + shift.reshape(-1, *[1] * (len(tensor.shape) - 1))
    return replace(tensor, base=min(offsets), layout=lambda *at: table[at])


class PlacedCTA(CTA):
    """A CTA that follows a :class:`Plan`."""

    def __init__(self, *args, plan: Plan, shared_limit: int, **kwargs):
        super().__init__(*args, shared_limit=sys.maxsize, **kwargs)
        self._plan, self._limit = plan, shared_limit
        self._declared = self._met = 0  # bytes as the kernel allocates them; its own barriers so far
        self._waiting: list[tuple] = []

    def shared(self, name: str, dtype, shape, layout=None, *, alias_of=(), align: int = 16) -> SharedTensor:
        placed, self.shared_bytes = self.shared_bytes, self._declared
        tensor = super().shared(name, dtype, shape, layout, alias_of=alias_of, align=align)
        self._declared, self.shared_bytes = self.shared_bytes, placed
        if name in self._plan.offsets:
            tensor = self.tensors[name] = moved(tensor, self._plan.offsets[name])
        self.shared_bytes = max(placed, tensor.base + tensor.nbytes)
        if self.shared_bytes > self._limit:
            raise SimError(f"shared tensor {name!r}: {self.shared_bytes} bytes of shared memory exceed the "
                           f"{self._limit} a block may have")
        if self._shared:
            self._shared.reserve(self.shared_bytes)
        return tensor

    def store(self, ref, value, vec: int = 1, *, site: str | None = None) -> None:
        delayed = self._plan.delayed.get(ref.tensor.name, ())
        if not any(number >= self._met for number in delayed):
            return super().store(ref, value, vec, site=site)
        place = self._site(site, "st", ref.tensor, "sts", ref.tensor.dtype.itemsize * vec)
        self._waiting.append((place, ref, value, vec, self._mask, self._branch))

    def sync(self) -> None:
        due = {name for name, numbers in self._plan.delayed.items() if self._met in numbers}
        outer = self._mask, self._branch
        for place, ref, value, vec, mask, branch in [w for w in self._waiting if w[1].tensor.name in due]:
            self._mask, self._branch = mask, branch
            offset = self._access(place, ref, place.width)
            if self._global:
                self._write(ref.tensor, offset, self._value(place, ref.tensor, value, vec), vec, self._mask)
        self._mask, self._branch = outer
        self._waiting = [w for w in self._waiting if w[1].tensor.name not in due]
        super().sync()
        self._met += 1

    def _emit(self, *args, **kwargs) -> None:
        self._barrier_due()
        super()._emit(*args, **kwargs)

    def _work(self, *args, **kwargs) -> None:
        self._barrier_due()
        super()._work(*args, **kwargs)

    def _barrier_due(self) -> None:
        """Before the next instruction, tell of the barrier that the plan adds there; it has no place of its own."""
        if self._order + 1 in self._plan.barriers:
            self._sink.work(WorkEvent("barrier", self.shape[0] * self.shape[1], self._order))
