"""The least shared memory for blocks of which some may share bytes: offsets under an interference graph.

A graph of blocks, an edge where two must not overlap. Taken in the order of their offsets, the blocks of a best
assignment can each be lowered onto the highest end of those before it that interfere with it; so some order of the
blocks, stacked like that, is a best assignment. Branch and bound over orders is therefore exact. The heaviest clique is
what no assignment can beat, and most often a first fit reaches it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

EXACT = 10  # blocks up to which all orders are searched
NODES = 200_000  # of that search
TRIES = 400  # random orders for a first fit, where the orders of old do not reach the bound


@dataclass(frozen=True)
class Assignment:
    """``offsets`` of every block, the bytes they ``span``, what is at least needed, and whether less is impossible."""

    offsets: Mapping[str, int]
    span: int
    bound: int
    proven: bool


def assign(graph: nx.Graph) -> Assignment:
    """Offsets for the blocks of ``graph``, nodes with ``size`` and ``align`` (bytes; at least 1), none sharing a byte
    with a neighbour.

    >>> graph = nx.Graph([("a", "b"), ("b", "c")])
    >>> for name, size in {"a": 64, "b": 32, "c": 48}.items():
    ...     graph.add_node(name, size=size, align=16)
    >>> assign(graph)
    Assignment(offsets={'a': 0, 'b': 64, 'c': 0}, span=96, bound=96, proven=True)
    """
    if not graph:
        return Assignment({}, 0, 0, True)
    size = graph.nodes(data="size")
    bound = nx.max_weight_clique(graph, weight="size")[1]
    names = list(graph)
    reach = {name: size[name] + sum(size[other] for other in graph[name]) for name in names}
    orders = [
        sorted(names, key=lambda name: (-size[name], names.index(name))),
        sorted(names, key=lambda name: (-reach[name], names.index(name))),
        names,
    ]
    best, best_span = {}, None
    shuffled = random.Random(0)
    while best_span is None or (best_span > bound and orders):
        offsets = _first_fit(graph, orders.pop(0))
        span = max(offsets[name] + size[name] for name in names)
        if best_span is None or span < best_span:
            best, best_span = offsets, span
    for _ in range(TRIES):
        if best_span == bound:
            break
        offsets = _first_fit(graph, shuffled.sample(names, len(names)))
        span = max(offsets[name] + size[name] for name in names)
        if span < best_span:
            best, best_span = offsets, span
    proven = best_span == bound
    if not proven and len(names) <= EXACT:
        best, best_span, proven = _search(graph, best, best_span, bound)
    return Assignment({name: best[name] for name in names}, best_span, bound, proven)


def _up(offset: int, align: int) -> int:
    return -(-offset // align) * align


def _first_fit(graph: nx.Graph, order: list[str]) -> dict[str, int]:
    """Each block in turn into the lowest gap that its placed neighbours leave."""
    placed: dict[str, int] = {}
    for name in order:
        need, align = graph.nodes[name]["size"], graph.nodes[name]["align"]
        offset = 0
        for start, stop in sorted((placed[other], placed[other] + graph.nodes[other]["size"])
                                  for other in graph[name] if other in placed):
            if offset + need <= start:
                break
            offset = max(offset, _up(stop, align))
        placed[name] = offset
    return placed


def _search(graph: nx.Graph, best: dict, best_span: int, bound: int) -> tuple[dict[str, int], int, bool]:
    """All orders of stacking, but those that cannot be better; whether the search came to its end."""
    size = {name: graph.nodes[name]["size"] for name in graph}
    align = {name: graph.nodes[name]["align"] for name in graph}
    left = NODES

    def stack(placed: dict[str, int], last: int) -> None:
        nonlocal best, best_span, left
        left -= 1
        if left < 0 or best_span == bound:
            return
        if len(placed) == len(size):
            best = dict(placed)
            best_span = max(placed[name] + size[name] for name in placed)
            return
        options = []
        for name in size:
            if name not in placed:
                floor = max((placed[other] + size[other] for other in graph[name] if other in placed), default=0)
                options.append((_up(floor, align[name]), name))
        # What is left to place only ever goes up: one block too high ends this branch.
        if any(offset + size[name] >= best_span for offset, name in options):
            return
        for offset, name in sorted(options):
            if offset >= last:  # offsets ascend in the order that justifies the search
                stack({**placed, name: offset}, offset)

    stack({}, 0)
    return best, best_span, left >= 0
