"""How little shared memory a kernel needs if tensors share bytes, what that takes, and whether it still works.

Live ranges (:mod:`simgpu.live_ranges`) say which blocks are never live at once; :mod:`simgpu.aliasing` places them; a
pair that shares bytes within one epoch needs a barrier more. The result is a :class:`~simgpu.placement.Plan` that the
emulator follows: :func:`confirm` compares every output bit for bit and looks for races.

>>> from kernels_py import find
>>> found = analyse(find("kda_b2")[0].launch("noalias", tokens=20, heads=1))
>>> found.declared, found.least.span, found.least.proven, len(found.least.barriers)
(77824, 53248, True, 1)
>>> confirm(found.launch, found.ctas, found.least.plan).holds
True
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations

import networkx as nx
import numpy as np

from simgpu.aliasing import assign
from simgpu.epochs import WatchedCTA
from simgpu.launch import Launch
from simgpu.live_ranges import Block, LiveWatcher, Ranges, delays
from simgpu.placement import PlacedCTA, Plan
from simgpu.races import Finding, RaceWatcher
from simgpu.run import SHARED_LIMIT, simulate

EASED = 64  # pairs that need a barrier, up to which each is tried without


class WatchedPlacedCTA(WatchedCTA, PlacedCTA):
    """A CTA that follows a plan, and tells its watchers."""


@dataclass(frozen=True)
class Packing:
    """Blocks placed: ``offsets`` in bytes by block, the bytes they ``span``, the ``bound`` no placement can beat.

    ``barriers`` are the sites in front of which a barrier more is needed; ``shared`` the pairs of blocks that have
    bytes in common. ``proven``: less is impossible, given the live ranges and alignments.
    """

    plan: Plan
    offsets: dict[str, int]
    span: int
    bound: int
    proven: bool
    barriers: tuple[str, ...]
    shared: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Union:
    """One tensor over others, all else as declared: the bytes of a block then, and the barriers it takes."""

    tensor: str
    over: tuple[str, ...]
    span: int
    barriers: tuple[str, ...]


@dataclass(frozen=True)
class Liveness:
    """``declared`` bytes, live ``ranges`` by slice, the packing without new barriers (``free``), and the ``least``."""

    launch: Launch
    ctas: tuple[int, ...]
    declared: int
    ranges: Ranges
    free: Packing
    least: Packing
    unions: tuple[Union, ...]


@dataclass(frozen=True)
class Confirmation:
    """Whether a plan gives the kernel's own outputs bit for bit, the races under it, and the bytes of a block.

    ``wavefronts`` of shared memory, of all CTAs run: the kernel's own and the plan's (another place may mean other
    banks); of accesses without a proven rule none.
    """

    equal: bool
    findings: tuple[Finding, ...]
    shared_bytes: int
    wavefronts: tuple[int, int]

    @property
    def holds(self) -> bool:
        return self.equal and not self.findings


def analyse(
    launch: Launch,
    *,
    ctas: Sequence[int] | None = None,
    recompute: Sequence[str] = (),
    whole: bool = False,
    shared_limit: int = SHARED_LIMIT,
) -> Liveness:
    """Live ranges of ``ctas`` of ``launch`` (None: the first two and the last), and the tightest packings.

    ``recompute`` names tensors whose values may be computed again: their stores wait until the barrier before their
    first read. ``whole``: tensors are not taken apart into slices. Raises SimError for what the device refuses, and a
    ``recompute`` that cannot be.
    """
    chosen = tuple(sorted({0, min(1, launch.ctas - 1), launch.ctas - 1} if ctas is None else set(ctas)))
    launch = replace(launch, check=None)

    def run(plan: Plan) -> tuple[LiveWatcher, LiveWatcher, int]:
        slices, tensors = LiveWatcher(whole), LiveWatcher(whole=True)
        watchers = [slices, tensors]
        found = simulate(launch, ctas=chosen, mode="values", sinks=watchers, shared_limit=shared_limit,
                         make=partial(WatchedPlacedCTA, plan=plan, watchers=watchers))
        return slices, tensors, found.shared_bytes

    slices, tensors, declared = run(Plan({}))
    delayed = delays(slices, recompute)
    if delayed:
        slices, tensors, declared = run(Plan({}, delayed=delayed))
    ranges = slices.ranges()
    free, least = (pack(ranges, slices, delayed, free) for free in (True, False))
    least = _pruned(launch, chosen, ranges, least, shared_limit) if least.span < free.span else free
    return Liveness(launch, chosen, declared, ranges, free, least, tuple(single_unions(tensors.ranges(), declared)))


def confirm(launch: Launch, ctas: Sequence[int], plan: Plan, *, shared_limit: int = SHARED_LIMIT) -> Confirmation:
    """Run ``ctas`` as the kernel is and under ``plan``, both with values, and compare all global memory."""
    launch = replace(launch, check=None)
    own = simulate(launch, ctas=ctas, mode="values", shared_limit=shared_limit,
                   make=partial(PlacedCTA, plan=Plan({})))
    watcher = RaceWatcher()
    planned = simulate(launch, ctas=ctas, mode="values", sinks=[watcher], shared_limit=shared_limit,
                       make=partial(WatchedPlacedCTA, plan=plan, watchers=[watcher]))
    equal = all(np.array_equal(own.arrays[name].view(np.uint8), planned.arrays[name].view(np.uint8))
                for name in own.arrays)
    wavefronts = tuple(found.table.total(allow_unmodelled=True).wavefronts or 0 for found in (own, planned))
    return Confirmation(equal, watcher.findings(), planned.shared_bytes, wavefronts)


# ---- packings --------------------------------------------------------------------------------------------------------


def interference(ranges: Ranges, free: bool = False) -> nx.Graph:
    """Blocks by name, with ``size``, ``align`` and ``block``; an edge where two cannot share bytes.

    ``free``: nor where they could at the price of a barrier.
    """
    graph = nx.Graph()
    for block in sorted(ranges.blocks, key=lambda block: block.start):  # a first fit in this order is no step back
        graph.add_node(block.name, size=block.nbytes, align=block.align, block=block)
    for one, other in combinations(ranges.blocks, 2):
        gaps = ranges.gaps(one, other)
        if gaps is None or (free and gaps):
            graph.add_edge(one.name, other.name)
    return graph


def pack(ranges: Ranges, watcher: LiveWatcher, delayed: dict, free: bool) -> Packing:
    """The tightest placement; ``free``: without barriers that the kernel does not have."""
    graph = interference(ranges, free)
    assigned = assign(graph)
    if not free:  # as few pairs as will do may need a barrier
        cost = [pair for pair in combinations(graph, 2) if not graph.has_edge(*pair)
                and ranges.gaps(*(graph.nodes[name]["block"] for name in pair))]
        for pair in cost[:EASED]:
            graph.add_edge(*pair)
            stricter = assign(graph)
            if stricter.span > assigned.span:
                graph.remove_edge(*pair)
            else:
                assigned = replace(stricter, bound=assigned.bound, proven=assigned.proven)
    offsets = dict(assigned.offsets)
    placed = [(graph.nodes[name]["block"], offset) for name, offset in offsets.items()]
    shared, gaps = [], []
    for (one, at), (other, beside) in combinations(placed, 2):
        if at < beside + other.nbytes and beside < at + one.nbytes:
            shared.append((one.name, other.name))
            gaps += ranges.gaps(one, other)
    orders = stab(gaps, ranges.places)
    plan = Plan(_tensor_offsets(placed, watcher), orders, delayed)
    return Packing(plan, offsets, assigned.span, assigned.bound, assigned.proven, _sites(ranges, orders), tuple(shared))


def stab(gaps: Iterable[tuple[int, int]], places: Collection[int]) -> frozenset[int]:
    """The fewest of ``places`` such that every gap (after its first number, up to its second) has one.

    >>> sorted(stab([(0, 5), (3, 9), (6, 8)], range(10)))
    [5, 8]
    """
    chosen: list[int] = []
    for after, until in sorted(gaps, key=lambda gap: gap[1]):
        if not chosen or chosen[-1] <= after:
            chosen.append(max(place for place in places if place <= until))
    return frozenset(chosen)


def single_unions(ranges: Ranges, declared: int) -> Iterable[Union]:
    """Every tensor that fits over others, all else as declared but closed up: the largest saving first."""
    rows = []
    for block in ranges.blocks:
        others = [other for other in ranges.blocks if other is not block]
        if any(other.start < block.start + block.nbytes and block.start < other.start + other.nbytes
               for other in others):
            continue  # it shares bytes already
        saved = block.nbytes // block.align * block.align
        at = {other.name: other.start - saved * (other.start > block.start) for other in others}
        gaps = {other.name: ranges.gaps(block, other) for other in others}
        offset, span = 0, declared - saved
        for other in sorted(others, key=lambda other: at[other.name]):
            if gaps[other.name] is None and at[other.name] < offset + block.nbytes:
                offset = max(offset, -(-(at[other.name] + other.nbytes) // block.align) * block.align)
        if offset + block.nbytes > span:
            continue
        under = [other for other in others
                 if at[other.name] < offset + block.nbytes and offset < at[other.name] + other.nbytes]
        orders = stab(chain.from_iterable(gaps[other.name] for other in under), ranges.places)
        rows.append(Union(block.name, tuple(other.name for other in under), span, _sites(ranges, orders)))
    return sorted(rows, key=lambda row: row.span)


def _pruned(launch: Launch, ctas: Sequence[int], ranges: Ranges, packing: Packing, shared_limit: int) -> Packing:
    """``packing`` without the barriers that order nothing: where each warp follows itself on the bytes shared."""
    orders = packing.plan.barriers
    for order in sorted(orders):
        plan = replace(packing.plan, barriers=orders - {order})
        if confirm(launch, ctas, plan, shared_limit=shared_limit).holds:
            orders = plan.barriers
    return replace(packing, plan=replace(packing.plan, barriers=orders), barriers=_sites(ranges, orders))


def _sites(ranges: Ranges, orders: Collection[int]) -> tuple[str, ...]:
    return tuple(ranges.places[order] for order in sorted(orders))


def _tensor_offsets(placed: list[tuple[Block, int]], watcher: LiveWatcher) -> dict[str, tuple[int, ...]]:
    """Where each tensor, or each of its slices, lies; what nobody touches lies at 0."""
    at = {piece: offset + piece.start - block.start for block, offset in placed for piece in block.pieces}
    offsets: dict[str, dict[int, int]] = {}
    for piece in watcher.pieces:
        offsets.setdefault(piece.tensor, {})[piece.index or 0] = at.get(piece, 0)
    return {name: tuple(slices[index] for index in sorted(slices)) for name, slices in offsets.items()}
