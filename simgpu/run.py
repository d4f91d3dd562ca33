"""Run a launch on the emulator and return its counters.

>>> from kernels_py import find
>>> kernel, variant = find("transpose@pad1")
>>> simulate(kernel.launch(variant, rows=64, cols=64)).table["tile.load"].wavefronts_per_instruction
1.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from simgpu.counters import CounterSink, CounterTable
from simgpu.cta import CTA
from simgpu.errors import DataDependent, SimError
from simgpu.events import AccessEvent, Sink, Site, WorkEvent
from simgpu.instructions import nearest
from simgpu.launch import Launch, blaming
from simgpu.memory import GlobalMemory
from simgpu.tensor import SharedTensor

SHARED_LIMIT = 232448  # bytes a block may opt in to on compute capability 9.0 (227 KB)
BATCH_WARPS = 8192  # addresses only: 8,192 warps x 32 lanes x 8 bytes = 2 MiB an array. Smaller is slower: Python's
# cost is per batch, and threads hand the interpreter's lock over at every array operation.
BATCH_WARPS_WITH_VALUES = 1024  # a quarter of it takes twice the time; more gains nothing
VERIFY_WARPS = 512  # a launch up to this size that can check its result is run with values in mode auto
CHECK_BYTES = 2**28  # global memory up to which a first CTA is checked with values before an address-only run

LARGEST_KEPT = 2**25 - 2**16  # bytes: just under the largest block whose release makes glibc keep such blocks

MODES = ("auto", "values", "addresses")


@dataclass(frozen=True)
class Result:
    """What a run found.

    ``table``: counters per site. ``shared_bytes``: what a block allocated. ``ctas`` were emulated of
    ``launch.ctas``. ``values``: whether data was computed; ``arrays``: then the global tensors by name.
    ``checked``: the CTAs run with values first, to find what only values show (0: none). ``shared_tensors``: what the
    last batch allocated in shared memory, in order.
    """

    launch: Launch
    table: CounterTable
    shared_bytes: int
    ctas: int
    values: bool
    checked: int = 0
    arrays: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    shared_tensors: tuple[SharedTensor, ...] = field(default=(), repr=False)


def simulate(
    launch: Launch,
    *,
    ctas: int | Sequence[int] | None = None,
    mode: str = "auto",
    sinks: Iterable[Sink] = (),
    threads: int = 1,
    shared_limit: int = SHARED_LIMIT,
    layouts: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    make: Callable[..., CTA] = CTA,
) -> Result:
    """Emulate the first ``ctas`` CTAs of ``launch`` (None: all; a sequence: those) and count every memory instruction.

    ``mode``: ``values`` computes data, so results can be compared and every refusal of the device is
    reproduced; ``addresses`` computes addresses alone; ``auto`` runs CTA 0 with values, then all with addresses
    alone, or everything with values when addresses depend on data, or when the launch can check its result and
    has at most :data:`VERIFY_WARPS` warps. ``sinks`` also receive every
    event, in program order. ``threads`` share the CTAs of an address-only run. ``layouts`` maps names of shared tensors
    to layouts that take the place of the kernel's own. ``progress(done, all)`` is called after every batch. ``make``
    builds a batch of CTAs: a subclass of :class:`~simgpu.cta.CTA` may watch a run, or change it. Raises
    :class:`~simgpu.errors.SimError` for what the device would refuse, and for a layout of a tensor there is not.
    """
    chosen = _chosen(launch, ctas)
    total = len(chosen)
    if mode not in MODES:
        raise SimError(f"mode {mode!r} is none of {', '.join(MODES)}")
    # glibc gives a large array's pages back to the system when it is freed, and faults them in again for the next
    # one: half the time of a run, and threads wait for each other in it. Freeing one block of this size (never
    # touched, so it costs nothing) makes it keep them: mallopt(3), "dynamic adjustment of the mmap threshold".
    np.empty(LARGEST_KEPT, np.uint8)
    sinks = tuple(sinks)
    emulation = _Emulation(launch, chosen, sinks, shared_limit, progress, layouts, make)
    small = launch.check is not None and total == launch.ctas and total * launch.warps <= VERIFY_WARPS
    if mode == "values" or (mode == "auto" and small):
        return emulation.with_values()
    checked = 0
    if mode == "auto" and sum(tensor.nbytes for tensor in launch.tensors) <= CHECK_BYTES:
        checked = 1
        _Emulation(launch, chosen[:1], (), shared_limit, None, layouts, make).with_values(verify=False)
    try:
        return emulation.addresses_only(1 if sinks else threads, checked)
    except DataDependent:
        if mode == "addresses":
            raise
        # The run starts over: what the sinks have heard of it so far they will hear again.
        for sink in sinks:
            sink.restart()
        return _Emulation(launch, chosen, sinks, shared_limit, progress, layouts, make).with_values()


def _chosen(launch: Launch, ctas: int | Sequence[int] | None) -> Sequence[int]:
    """The linear numbers of the CTAs to emulate, ascending."""
    if ctas is None:
        return range(launch.ctas)
    if isinstance(ctas, int):
        if not 1 <= ctas <= launch.ctas:
            raise SimError(f"{ctas} CTAs asked for; the grid {launch.grid} has {launch.ctas}")
        return range(ctas)
    numbers = sorted(set(ctas))
    if not numbers or not 0 <= numbers[0] <= numbers[-1] < launch.ctas:
        raise SimError(f"CTAs {list(ctas)} asked for; the grid {launch.grid} has 0 to {launch.ctas - 1}")
    return numbers


class _Emulation:
    """One pass over the CTAs of a launch."""

    def __init__(self, launch: Launch, chosen: Sequence[int], sinks: tuple[Sink, ...], shared_limit: int, progress,
                 layouts, make: Callable[..., CTA]):
        self.launch, self.chosen, self.ctas, self.sinks = launch, chosen, len(chosen), sinks
        self.shared_limit, self.progress, self.layouts, self.make = shared_limit, progress, layouts or {}, make
        self.sites: dict[str, Site] = {}
        self.shared_bytes = 0
        self.shared_tensors: tuple[SharedTensor, ...] = ()

    def with_values(self, verify: bool = True) -> Result:
        with blaming(f"{self.launch.name}: initial data"):
            memory = GlobalMemory(self.launch.tensors)
        counter = CounterSink()
        done = 0
        for batch in self._batches(BATCH_WARPS_WITH_VALUES):
            self._run(batch, _Tee((counter, *self.sinks)), memory)
            done += len(batch)
            if self.progress:
                self.progress(done, self.ctas)
        arrays = memory.arrays(self.launch.tensors) if verify else {}
        if verify and self.launch.check is not None and self.ctas == self.launch.ctas:
            with blaming(f"{self.launch.name}: the result is wrong"):
                right = self.launch.check(arrays)
                right = right is None or bool(right)
            if not right:
                raise SimError(f"{self.launch.name}: the result is wrong")
        return self._result(counter.table(), True, 0, arrays)

    def addresses_only(self, threads: int, checked: int) -> Result:
        def count(batch: np.ndarray) -> tuple[CounterSink, int]:
            counter = CounterSink()
            self._run(batch, _Tee((counter, *self.sinks)) if self.sinks else counter, None)
            return counter, len(batch)

        whole, done = CounterSink(), 0
        with ThreadPoolExecutor(threads) as pool:
            batches = self._batches(min(BATCH_WARPS, -(-self.ctas * self.launch.warps // threads)))
            # A few batches per thread are in the air at a time, so that neither results nor batches pile up.
            while window := list(islice(batches, 4 * threads)):
                for counter, size in pool.map(count, window) if threads > 1 else map(count, window):
                    whole.merge([counter])
                    done += size
                    if self.progress:
                        self.progress(done, self.ctas)
        return self._result(whole.table(), False, checked, {})

    def _result(self, table: CounterTable, values: bool, checked: int, arrays: dict[str, np.ndarray]) -> Result:
        return Result(
            self.launch, table, self.shared_bytes, self.ctas, values, checked, arrays, self.shared_tensors
        )

    def _batches(self, warps: int):
        step = max(1, warps // self.launch.warps)
        return (np.array(self.chosen[first : first + step]) for first in range(0, self.ctas, step))

    def _run(self, batch: np.ndarray, sink: Sink, memory: GlobalMemory | None) -> None:
        cta = self.make(
            self.launch,
            batch,
            sink,
            memory=memory,
            shared_limit=self.shared_limit,
            sites=self.sites,
            layouts=self.layouts,
        )
        # Arithmetic on a GPU does not trap: infinities and NaNs are values.
        with blaming(f"kernel {self.launch.name!r}"), np.errstate(all="ignore"):
            self.launch.body(cta, *self.launch.args)
        for name in self.layouts:
            if name not in cta.tensors:
                raise SimError(
                    f"kernel {self.launch.name!r} has no shared tensor {name!r}{nearest(name, cta.tensors)}"
                )
        self.shared_bytes = max(self.shared_bytes, cta.shared_bytes)
        self.shared_tensors = tuple(cta.tensors.values())


@dataclass(frozen=True)
class _Tee:
    """Several sinks as one."""

    sinks: tuple[Sink, ...]

    def access(self, event: AccessEvent) -> None:
        for sink in self.sinks:
            sink.access(event)

    def work(self, event: WorkEvent) -> None:
        for sink in self.sinks:
            sink.work(event)
