"""Races in shared memory: accesses of different warps to one byte that no barrier orders.

Accesses of one warp are in program order; a barrier orders those of a CTA. For every byte the watcher keeps the last
two warps that wrote it and the last two that read it: an access conflicts with some earlier one exactly if it
conflicts with one of those two, because they are different warps. A cp.async is in flight from its issue to the wait of
its thread: nobody may touch the byte meanwhile, and from then on it counts as a write of that thread. Shared atomics do
not race with each other; of a store that races with several of them the first is sure to be told. What happens inside a
warp (lanes that diverge, a missing ``__syncwarp``) is not checked.

>>> from kernels_py import find
>>> launch = find("transpose")[0].launch("pad1", rows=64, cols=64)
>>> check(launch).findings
()
>>> finding = check(launch, without=[0]).findings[0]
>>> finding.kind, finding.first, finding.second
('write-read', 'tile.store (transpose.py:70)', 'tile.load (transpose.py:75)')
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from simgpu.counters import CounterTable
from simgpu.epochs import COPY, LANES, Copy, WatchedCTA, Watcher
from simgpu.errors import Fault
from simgpu.events import AccessEvent
from simgpu.launch import Launch
from simgpu.race_bytes import EXAMPLE, KINDS, State, differ, land, new_state, touch
from simgpu.run import SHARED_LIMIT, simulate


@dataclass(frozen=True)
class Finding:
    """Something wrong between barriers, or a gate exceeded.

    ``kind``: ``write-read``, ``read-write`` and ``write-write`` are races between two warps, in that order;
    ``in-flight``: an access to bytes of a cp.async that nobody waited for; ``unwritten``: a read of bytes nobody wrote;
    ``same-instruction``: lanes of one warp store different values to one byte; ``fault``: what the device refuses,
    which ends its CTA; ``gate``: too many bank conflicts. ``first`` and ``second`` are sites with file and line.
    ``bytes`` counts occurrences; the rest describes the first one: the CTA, the shared byte address, warp and lane of
    both accesses, and the barriers around it (``start`` and ``end`` are the kernel's).
    """

    kind: str
    tensor: str
    first: str
    second: str
    bytes: int = 0
    cta: int | None = None
    byte: int | None = None
    first_lane: str = ""
    second_lane: str = ""
    interval: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """What a check found: ``findings``, of ``ctas`` (their numbers); ``barriers`` a CTA meets, by source line.

    ``table`` are the counters of the checked CTAs, None after a fault.
    """

    findings: tuple[Finding, ...]
    ctas: tuple[int, ...]
    barriers: dict[str, int]
    table: CounterTable | None


def check(
    launch: Launch,
    *,
    ctas: Sequence[int] | None = None,
    without: Sequence[int | str] = (),
    shared_limit: int = SHARED_LIMIT,
    make=WatchedCTA,
    **options,
) -> Report:
    """Run ``ctas`` of ``launch`` (None: the first two and the last) with values, and report every race.

    ``without`` are barriers to overlook, by number in program order or by source line: the report then says what they
    are needed for. ``make`` builds the CTAs, a :class:`~simgpu.epochs.WatchedCTA`; ``options`` go to
    :func:`~simgpu.run.simulate`. Raises SimError for what is no finding about the kernel.
    """
    chosen = tuple(sorted({0, min(1, launch.ctas - 1), launch.ctas - 1} if ctas is None else set(ctas)))
    launch = replace(launch, check=None)  # what was read before it was written must not hide behind a wrong result

    def run(numbers: Sequence[int]) -> tuple[RaceWatcher, CounterTable | None, str]:
        watcher = RaceWatcher(without)
        try:
            found = simulate(launch, ctas=numbers, mode="values", sinks=[watcher], shared_limit=shared_limit,
                             make=partial(make, watchers=[watcher]), **options)
        except Fault as error:
            return watcher, None, str(error)
        return watcher, found.table, ""

    watcher, table, fault = run(chosen)
    if not fault:
        return Report(watcher.findings(), chosen, watcher.places, table)
    findings: dict[tuple, Finding] = {}
    for number in chosen:  # a fault ends its CTA; the others go on
        watcher, _, fault = run((number,))
        told = watcher.findings()
        if fault:
            place = re.match(r"site '(.*?)' (\(.*?\)): ", fault)
            told += (Finding("fault", "", "", f"{place[1]} {place[2]}" if place else "", cta=number,
                             detail=fault[place.end():] if place else fault),)
        for finding in told:
            key = finding.kind, finding.first, finding.second, finding.tensor, finding.detail
            known = findings.setdefault(key, finding)
            if known is not finding:
                findings[key] = replace(known, bytes=known.bytes + finding.bytes)
    return Report(tuple(findings.values()), chosen, watcher.places, None)


def needed(launch: Launch, *, ctas: Sequence[int] | None = None, each: bool = False, **options) -> dict:
    """What each barrier of a clean kernel is for: its source line, or number if ``each``, and what is found without it.

    A barrier without findings orders nothing in the ``ctas``, as long as the others stay. One run serves them all.

    >>> from kernels_py import find
    >>> list(needed(find("transpose")[0].launch("pad1", rows=64, cols=64)))
    ['transpose.py:71']
    """
    executed = check(launch, ctas=ctas, **options)
    names = list(range(sum(executed.barriers.values()))) if each else list(executed.barriers)
    watchers = [RaceWatcher([name]) for name in names]
    simulate(replace(launch, check=None), ctas=executed.ctas, mode="values", sinks=watchers,
             make=partial(WatchedCTA, watchers=watchers), **options)
    return {name: watcher.findings() for name, watcher in zip(names, watchers, strict=True)}


def gates(table: CounterTable, max_excessive: int | None, max_n_way: float | None) -> tuple[Finding, ...]:
    """Findings: every shared-memory site above ``max_n_way``; all together above ``max_excessive`` wavefronts."""
    rows = [row for row in table.sites if row.excessive is not None]
    found = []
    if max_n_way is not None:
        found += [Finding("gate", "", "", f"{row.site} ({row.file}:{row.line})",
                          detail=f"{row.n_way:.4g}-way, more than {max_n_way:g}")
                  for row in rows if row.n_way is not None and row.n_way > max_n_way]
    excessive = sum(row.excessive for row in rows)
    if max_excessive is not None and excessive > max_excessive:
        found.append(Finding("gate", "", "", "all sites",
                             detail=f"{excessive:,} excessive wavefronts, more than {max_excessive:,}"))
    return tuple(found)


class RaceWatcher(Watcher):
    """Follows every byte of shared memory: who wrote it, who read it, what is in flight to it."""

    def __init__(self, without: Sequence[int | str] = ()):
        super().__init__(without)
        self.places: dict[str, int] = {}
        self._found: dict[tuple[int, int, int], list] = {}  # (kind, first access, second): [bytes, example, batch]
        self._told: dict[tuple[int, int, int], Finding] = {}

    def begin(self, shape, ctas, threads) -> None:
        self._settle()
        super().begin(shape, ctas, threads)
        self._since = np.zeros(shape[0], np.int32)  # order of each CTA's latest barrier
        self._state = new_state(shape[0], 0)
        self._met: Counter[str] = Counter()

    def allocated(self, tensor, align) -> None:
        super().allocated(tensor, align)
        more = tensor.base + tensor.nbytes - self._state.w_order.shape[1]
        if more > 0:
            self._state = State(*(np.concatenate([old, new], 1)
                                  for old, new in zip(self._state, new_state(self.shape[0], more), strict=True)))

    def touch(self, event: AccessEvent, access: int, kind: int, lanes, address, copy: Copy | None) -> None:
        hits = np.zeros((len(KINDS), len(self.accesses) + 1), np.int64)
        examples = np.zeros((*hits.shape, EXAMPLE), np.int64)
        width = event.site.width
        if touch(self._state, self._since, kind, access, event.order, lanes, address, width,
                  copy.serial if copy else 0, hits, examples):
            self._keep(hits, examples, access, event.order)
        self._latest = access, event.order
        if kind == COPY:  # the same source is the same value
            source = np.broadcast_to(event.global_, self.shape)[..., None]
            self._same(address, np.where(source < 0, source, source + np.arange(width)), lanes)

    def stored(self, address, values, lanes) -> None:
        lanes = np.broadcast_to(np.True_ if lanes is None else lanes, self.shape)
        values = np.ascontiguousarray(np.broadcast_to(values, (*self.shape, *values.shape[3:])))
        self._same(np.broadcast_to(address, self.shape), values.view(np.uint8).reshape(*self.shape, -1), lanes)

    def land(self, copy: Copy, lanes, order: int) -> None:
        land(self._state, copy.access, copy.serial, order, lanes, copy.address, copy.width)

    def barrier(self, barrier) -> None:
        self._since[barrier.reached] = barrier.order
        self._met[barrier.where] += 1
        self.places[barrier.where] = max(self.places.get(barrier.where, 0), self._met[barrier.where])

    def _same(self, address, values, lanes) -> None:
        access, order = self._latest
        hits = np.zeros((len(KINDS), len(self.accesses) + 1), np.int64)
        examples = np.zeros((*hits.shape, EXAMPLE), np.int64)
        if differ(self._state, access, order, lanes, address, values.astype(np.uint32), hits, examples):
            self._keep(hits, examples, access, order)

    def _keep(self, hits: np.ndarray, examples: np.ndarray, second: int, order: int) -> None:
        for kind, first in zip(*np.nonzero(hits), strict=True):
            found = self._found.setdefault((int(kind), int(first) - 1, second), [0, examples[kind, first], order])
            found[0] += int(hits[kind, first])

    def _settle(self) -> None:
        """Turn what the batch showed into findings: intervals are known by its end."""
        for key, (count, example, order) in self._found.items():
            known = self._told.get(key)
            self._told[key] = (replace(known, bytes=known.bytes + count) if known
                               else self._finding(*key, count, example, order))
        self._found = {}

    def findings(self) -> tuple[Finding, ...]:
        """What was found, in the order it was first met."""
        self._settle()
        return tuple(self._told.values())

    def _finding(self, kind: int, first: int, second: int, count: int, example: np.ndarray, order: int) -> Finding:
        cta, byte, first_thread, second_thread, _ = (int(x) for x in example)
        access = self.accesses[second]
        earlier = self.accesses[first] if first >= 0 else None
        tensor = access.tensor
        if earlier and earlier.tensor != tensor:
            tensor = f"{earlier.tensor} / {tensor}"
        return Finding(
            KINDS[kind], tensor,
            f"{earlier.site.name} ({earlier.where})" if earlier else "",
            f"{access.site.name} ({access.where})",
            count, int(self.ctas[cta]), byte,
            _thread(first_thread) if earlier else "", _thread(second_thread),
            self.around(cta, order),
        )


def _thread(thread: int) -> str:
    return f"warp {thread // LANES} lane {thread % LANES}"
