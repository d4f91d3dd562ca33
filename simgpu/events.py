"""What the emulator tells its listeners: one event per instruction and batch of CTAs, in columns.

Per-lane columns have shape [c, w, 32] where c is 1 or the batch's CTAs and w is 1 or a CTA's warps: an
address that does not depend on the CTA is stated once and stands for all of them, so it is also counted once
and multiplied. :func:`AccessEvent.rows` spells every warp out where that is wanted (a trace).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from simgpu.instructions import Instruction


@dataclass(frozen=True)
class Site:
    """One memory instruction in a kernel's source. ``width`` is bytes per lane."""

    name: str
    file: str
    line: int
    instruction: Instruction
    width: int


@dataclass(frozen=True)
class AccessEvent:
    """One memory instruction executed by every warp of a batch.

    ``masks`` uint32[c, w] active lanes; ``issued`` bool[c, w] the warps that execute it, a predicated one without an
    active lane included; ``shared`` int32[c, w, 32] and ``global_`` int64[c, w, 32] byte addresses, None where the
    instruction does not use that memory.
    ``ctas`` are the linear CTA numbers of the batch, ``warps`` the warps of a CTA, ``order`` the
    instruction's place in program order; ``tensor`` is the name of the shared tensor it addresses, where it is known.
    """

    site: Site
    masks: np.ndarray
    issued: np.ndarray
    shared: np.ndarray | None
    global_: np.ndarray | None
    ctas: np.ndarray
    warps: int
    order: int
    tensor: str | None = None

    @property
    def executed(self) -> int:
        """How many warps execute the instruction."""
        return int(np.broadcast_to(self.issued, (len(self.ctas), self.warps)).sum())

    def columns(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, int]:
        """The warps with an active lane: masks uint32[n], shared int32[n, 32], global int64[n, 32], and the warps
        each row stands for."""
        sides = [side for side in (self.shared, self.global_) if side is not None]
        c, w = np.broadcast_shapes(self.masks.shape, self.issued.shape, *(side.shape[:2] for side in sides))
        shared, global_ = (
            None if side is None else np.ascontiguousarray(np.broadcast_to(side, (c, w, 32))).reshape(-1, 32)
            for side in (self.shared, self.global_)
        )
        masks = np.ascontiguousarray(np.broadcast_to(np.where(self.issued, self.masks, 0), (c, w))).reshape(-1)
        if not masks.all():
            runs = masks != 0
            masks, shared, global_ = (None if side is None else side[runs] for side in (masks, shared, global_))
        return masks, shared, global_, (len(self.ctas) // c) * (self.warps // w)

    def rows(self) -> dict[str, np.ndarray]:
        """Every executing warp spelt out: cta int64[n], warp int32[n], mask uint32[n], shared and global [n, 32]."""
        full = (len(self.ctas), self.warps)
        runs = np.broadcast_to(self.issued, full)
        rows = {
            "cta": np.broadcast_to(self.ctas[:, None], full)[runs],
            "warp": np.broadcast_to(np.arange(self.warps, dtype=np.int32), full)[runs],
            "mask": np.broadcast_to(self.masks, full)[runs],
        }
        for name, side in (("shared", self.shared), ("global_", self.global_)):
            if side is not None:
                rows[name.rstrip("_")] = np.broadcast_to(side, (*full, 32))[runs]
        return rows


@dataclass(frozen=True)
class WorkEvent:
    """An instruction that is no memory access: ``kind`` (``mma.m16n8k16``, ``barrier`` ...), by ``warps`` warps.

    ``lanes`` bool broadcastable to [ctas, warps, 32] are the active ones, None for all; ``pending`` is the operand of
    a ``cp.async.wait``.
    """

    kind: str
    warps: int
    order: int
    lanes: np.ndarray | None = None
    pending: int = 0


class Sink(Protocol):
    """A listener: a counter, a trace writer."""

    def access(self, event: AccessEvent) -> None:
        """Hear of one memory instruction."""

    def work(self, event: WorkEvent) -> None:
        """Hear of one other instruction."""

    def restart(self) -> None:
        """Forget everything heard: the run starts over, this time with values."""
