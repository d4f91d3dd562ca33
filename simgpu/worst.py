"""The most expensive warp access of every site: what a picture of the site should show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simgpu import rules
from simgpu.events import AccessEvent, Site, WorkEvent
from simgpu.replay import replay


@dataclass(frozen=True)
class WorstAccess:
    """One warp's access: ``mask`` (active lanes) and its 32 ``shared`` and ``global_`` byte addresses, as used.

    No other access of ``site`` takes more wavefronts, or more sectors if it does not touch shared memory; of equal
    ones it is the first that the run came by.
    """

    site: Site
    cta: int
    warp: int
    mask: int
    shared: tuple[int, ...] | None
    global_: tuple[int, ...] | None

    def cost(self) -> rules.Cost:
        """What the reference rule says of it."""
        return rules.cost(self.site.instruction, self.site.width, self.mask, self.shared, self.global_)


class WorstSink:
    """Keeps, per site, the most expensive access heard of; memory does not grow with the grid.

    >>> from kernels_py import find
    >>> from simgpu.run import simulate
    >>> kernel, variant = find("transpose")
    >>> sink = WorstSink()
    >>> result = simulate(kernel.launch(variant, rows=64, cols=64), sinks=[sink])
    >>> sink.found["tile.load"].cost().wavefronts
    32
    """

    def __init__(self):
        self.restart()

    def access(self, event: AccessEvent) -> None:
        masks, shared, global_, _ = event.columns()
        if not len(masks):
            return
        columns = replay(event.site.instruction, event.site.width, masks, shared, global_)
        price = columns.sectors if columns.wavefronts is None else columns.wavefronts
        row = int(np.argmax(price))
        if int(price[row]) <= self._prices.get(event.site.name, -2):  # an unmodelled access has the price -1
            return
        self._prices[event.site.name] = int(price[row])
        cta, warp = _whose(event, row)
        sides = (None if side is None else tuple(side[row].tolist()) for side in (shared, global_))
        self.found[event.site.name] = WorstAccess(event.site, cta, warp, int(masks[row]), *sides)

    def work(self, event: WorkEvent) -> None:
        """Arithmetic has no addresses."""

    def restart(self) -> None:
        self.found: dict[str, WorstAccess] = {}
        self._prices: dict[str, int] = {}


def _whose(event: AccessEvent, row: int) -> tuple[int, int]:
    """CTA and warp of a row of ``event.columns()``: the first that it stands for."""
    sides = [side.shape[:2] for side in (event.shared, event.global_) if side is not None]
    shape = np.broadcast_shapes(event.masks.shape, event.issued.shape, *sides)
    runs = np.broadcast_to(event.issued & (event.masks != 0), shape)
    cta, warp = np.argwhere(runs)[row]
    return int(event.ctas[cta]), int(warp)
