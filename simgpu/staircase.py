"""Blocks per SM as a function of one resource, drawn: where a kernel stands and how far the next step is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 250  # of the drawing; a page scales it
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 42, 44


@dataclass(frozen=True)
class Staircase:
    """``steps`` (first, last, blocks), ascending and without gaps: from ``first`` to ``last`` an SM holds ``blocks``.

    ``at`` is what the kernel uses (None: unknown), ``blocks`` what it gets; ``next_at`` the most that one block more
    allows, None where no change of this resource alone is needed or helps. ``ticks`` label the axis.
    """

    title: str
    axis: str
    steps: tuple[tuple[int, int, int], ...]
    ticks: tuple[tuple[int, str], ...]
    at: int | None
    blocks: int
    next_at: int | None
    next_label: str


def steps(blocks: list[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Steps from (value, blocks) samples in ascending order of value.

    >>> steps([(0, 4), (1, 4), (2, 3), (3, 3), (4, 1)])
    ((0, 1, 4), (2, 3, 3), (4, 4, 1))
    """
    found: list[tuple[int, int, int]] = []
    for value, count in blocks:
        if found and found[-1][2] == count:
            found[-1] = (found[-1][0], value, count)
        else:
            found.append((value, value, count))
    return tuple(found)


def draw(stairs: Staircase) -> str:
    """The staircase as an SVG element; its colours are classes of the page's style sheet."""
    right = max(stairs.steps[-1][1], 1)
    top = max(step[2] for step in stairs.steps)

    def x(value: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * value / right:.1f}"

    def y(count: float) -> str:
        return f"{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * count / top:.1f}"

    # A count holds up to its last value: the drop is there, so that the limit itself lies on the higher step.
    edges = [stairs.steps[0][0], *(last for _, last, _ in stairs.steps)]
    line = " L".join(f"{x(before)} {y(step[2])} L{x(after)} {y(step[2])}"
                     for step, (before, after) in zip(stairs.steps, itertools.pairwise(edges), strict=True))
    parts = [f'<path class="area" d="M{x(edges[0])} {y(0)} L{line} L{x(right)} {y(0)} Z"/>']
    for count in sorted({*range(0, top + 1, max(1, -(-top // 6))), top}):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(count)}" y2="{y(count)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y(count)}" text-anchor="end" dy="4">{count}</text>')
    for value, label in stairs.ticks:
        parts.append(f'<text class="tick" x="{x(value)}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">'
                     f"{escape(label)}</text>")
    parts.append(f'<path class="stairs" d="M{line}"/>')
    parts.append(f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
                 f"{escape(stairs.axis)}</text>")
    parts.append(f'<text class="axis" x="6" y="{TOP - 30}">blocks/SM</text>')
    labels = []  # drawn last, above the lines
    if stairs.next_at is not None:
        parts.append(f'<line class="next" x1="{x(stairs.next_at)}" x2="{x(stairs.next_at)}" '
                     f'y1="{TOP - 8}" y2="{y(0)}"/>')
        labels.append(_label("next", stairs.next_label, stairs.next_at / right, x(stairs.next_at),
                             HEIGHT - BOTTOM - 10))
    if stairs.at is not None:
        parts.append(f'<line class="here" x1="{x(stairs.at)}" x2="{x(stairs.at)}" y1="{y(stairs.blocks)}" '
                     f'y2="{y(0)}"/>')
        parts.append(f'<circle class="here" cx="{x(stairs.at)}" cy="{y(stairs.blocks)}" r="5"/>')
        labels.append(_label("here", f"this kernel: {stairs.blocks}", stairs.at / right, x(stairs.at),
                             float(y(stairs.blocks)) - 9))
    return (f'<svg class="staircase" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(stairs.title)}">'
            f"{''.join([*parts, *labels])}</svg>")


def _label(kind: str, text: str, share: float, x: str, y: float) -> str:
    """A label beside ``x``, on the side that has room."""
    anchor, shift = ("start", 8) if share < 0.6 else ("end", -8)
    return f'<text class="{kind}" x="{x}" y="{y:.1f}" dx="{shift}" text-anchor="{anchor}">{escape(text)}</text>'
