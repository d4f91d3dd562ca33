"""When the bytes of each shared tensor hold something that is still read: live ranges, in program order.

The bytes of a tensor with three or more dimensions whose leading slices lie apart (``tiles[6]``) are followed slice by
slice. A byte is live from a write to the last read before the next write; a store that nobody reads is live for that
instruction alone, a cp.async at least until its wait. What is written through one tensor and read through another
(``S`` and its transposed view) is one :class:`Block`: it moves as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import numpy as np
from numba import njit

from simgpu.epochs import ATOMIC, READ, Copy, Watcher
from simgpu.errors import SimError
from simgpu.events import AccessEvent, WorkEvent
from simgpu.instructions import LANES
from simgpu.placement import slice_extents
from simgpu.tensor import SharedTensor

BANK_LINE = 128  # bytes: what starts on such a line keeps its bank conflicts wherever such a line starts


@dataclass(frozen=True)
class Piece:
    """A shared tensor, or one of its leading slices: ``start`` is its byte in the kernel's own shared memory."""

    tensor: str
    index: int | None
    start: int
    nbytes: int
    align: int

    @property
    def name(self) -> str:
        return self.tensor if self.index is None else f"{self.tensor}[{self.index}]"


@dataclass(frozen=True)
class Block:
    """Pieces that move together.

    ``segments`` are the live ranges, first and last place in program order; ``first_write`` and ``last_read`` are
    sites, the second "" where nothing is read. ``unread`` bytes are written and not read, in every CTA.
    """

    name: str
    pieces: tuple[Piece, ...]
    start: int
    nbytes: int
    align: int
    segments: tuple[tuple[int, int], ...]
    first_write: str
    last_read: str
    unread: int

    @property
    def first(self) -> int:
        return self.segments[0][0]


@dataclass(frozen=True)
class Ranges:
    """All blocks in the order of their first writes; ``barriers`` every CTA meets, and ``places`` where another one
    could stand (in program order; the site of the instruction behind it). ``untouched``: tensors nobody accesses."""

    blocks: tuple[Block, ...]
    barriers: tuple[int, ...]
    places: dict[int, str]
    untouched: tuple[str, ...]

    def epoch(self, order: int) -> int:
        """How many barriers come before a place in program order."""
        return int(np.searchsorted(self.barriers, order))

    def most_live(self) -> tuple[int, int]:
        """The most bytes that are live at once, and the epoch."""
        starts = [(sum(block.nbytes for block in self.blocks if _holds(block, order)), -order)
                  for block in self.blocks for order, _ in block.segments]
        nbytes, order = max(starts, default=(0, 0))
        return nbytes, self.epoch(-order)

    def gaps(self, one: Block, other: Block) -> list[tuple[int, int]] | None:
        """Where a barrier must stand if the two share bytes: after the first place, at or before the second.

        None where both are live at once, or no barrier can stand there.
        """
        order = sorted([(*segment, 0) for segment in one.segments] + [(*segment, 1) for segment in other.segments])
        gaps = []
        for (_, stop, which), (start, _, following) in pairwise(order):
            if which == following:
                continue
            if start <= stop:
                return None
            if self.epoch(stop) == self.epoch(start):
                if not any(stop < place <= start for place in self.places):
                    return None
                gaps.append((stop, start))
        return gaps


def _holds(block: Block, order: int) -> bool:
    return any(first <= order <= last for first, last in block.segments)


class LiveWatcher(Watcher):
    """Follows who wrote every byte and who still reads it. One batch of CTAs: their live ranges are united."""

    def __init__(self, whole: bool = False):
        super().__init__()
        self.whole = whole
        self.pieces: list[Piece] = []
        self._local: dict[str, np.ndarray] = {}  # piece of every byte of a tensor
        self._bytes: tuple[np.ndarray, ...] = ()

    def begin(self, shape, ctas, threads) -> None:
        if self._bytes:
            raise SimError("live ranges are those of one batch of CTAs; ask for fewer")
        super().begin(shape, ctas, threads)
        exist = np.arange(shape[1] * LANES).reshape(shape[1], LANES) < threads
        self._everyone = np.packbits(exist, axis=-1, bitorder="little").view("<u4")[..., 0]  # masks of the CTA's warps
        self._bytes = _bytes(shape[0], 0)
        self._starts = np.zeros((0, 1024), np.int64)  # [pieces, places]: live ranges that start here, less those ended
        self._unread = np.zeros((0, shape[0]), np.int64)
        self._flows: set[tuple[int, int]] = set()
        self._first: dict[int, tuple[int, str]] = {}  # per piece, the place of its first write and of its last read
        self._last: dict[int, tuple[int, str]] = {}
        self.used: dict[str, list[tuple[int, int]]] = {}  # per tensor: place and kind of every access
        self._places: dict[int, str] = {}
        self._end = 0  # the latest place

    def allocated(self, tensor: SharedTensor, align: int) -> None:
        super().allocated(tensor, align)
        extents = None if self.whole or len(tensor.shape) < 3 else slice_extents(tensor)
        local = np.full(tensor.nbytes, len(self.pieces), np.int16)
        if extents is None:
            self.pieces.append(Piece(tensor.name, None, tensor.base, tensor.nbytes, _align(align, tensor.base)))
        else:
            for index, (start, stop) in sorted(enumerate(extents), key=lambda each: each[1]):
                local[start:] = len(self.pieces)
                at = tensor.base + start
                # A slice of a tensor aligned for its swizzle keeps what alignment it has inside it.
                within = align if start % align == 0 else 16
                self.pieces.append(Piece(tensor.name, index, at, stop - start, _align(within, at)))
        self._local[tensor.name] = local
        more = max(0, tensor.base + tensor.nbytes - self._bytes[0].shape[1])
        self._bytes = tuple(np.concatenate([old, new], 1)
                            for old, new in zip(self._bytes, _bytes(self.shape[0], more), strict=True))
        count = len(self.pieces) - len(self._starts)
        self._starts = np.pad(self._starts, ((0, count), (0, 0)))
        self._unread = np.pad(self._unread, ((0, count), (0, 0)))

    def work(self, event: WorkEvent) -> None:
        self._end = event.order
        super().work(event)

    def access(self, event: AccessEvent) -> None:
        self._end = event.order
        if (event.masks == self._everyone).all():
            self._places[event.order] = f"{event.site.name} ({event.site.file}:{event.site.line})"
        super().access(event)

    def touch(self, event: AccessEvent, access: int, kind: int, lanes, address, copy: Copy | None) -> None:
        while event.order + 2 > self._starts.shape[1]:
            self._starts = np.pad(self._starts, ((0, 0), (0, self._starts.shape[1])))
        count = len(self.pieces)
        touched, flows = np.zeros(count, np.bool_), np.zeros((count, count), np.bool_)
        base, local = self.tensors[event.tensor].base, self._local[event.tensor]
        _use(*self._bytes, self._starts, self._unread, kind, event.order, lanes, address, event.site.width, base, local,
             touched, flows)
        self._flows |= set(zip(*(axis.tolist() for axis in np.nonzero(flows)), strict=True))
        where = event.order, f"{event.site.name} ({event.site.file}:{event.site.line})"
        for piece in np.flatnonzero(touched).tolist():
            if kind != READ:
                self._first.setdefault(piece, where)
            if kind in (READ, ATOMIC):
                self._last[piece] = where
        self.used.setdefault(event.tensor, []).append((event.order, kind))

    def land(self, copy: Copy, lanes, order: int) -> None:
        while order + 2 > self._starts.shape[1]:
            self._starts = np.pad(self._starts, ((0, 0), (0, self._starts.shape[1])))
        _keep(*self._bytes, copy.order, order, lanes, copy.address, copy.width)

    def ranges(self) -> Ranges:
        """What the run showed."""
        for copy in self._copies:  # nobody waited: it may land until the end
            self.land(copy, copy.waiting, self._end)
        _close_all(*self._bytes, self._starts, self._unread)
        live = np.cumsum(self._starts, 1) > 0
        graph = nx.Graph(self._flows)
        graph.add_nodes_from(int(piece) for piece in np.flatnonzero(live.any(1)))
        blocks = sorted((self._block(sorted(pieces), live) for pieces in nx.connected_components(graph)),
                        key=lambda block: (block.first, block.start))
        met = tuple(barrier.order for barrier in self.barriers if barrier.reached.all())
        touched = {piece.tensor for block in blocks for piece in block.pieces}
        return Ranges(tuple(blocks), met, self._places, tuple(name for name in self.tensors if name not in touched))

    def _block(self, numbers: list[int], live: np.ndarray) -> Block:
        pieces = [self.pieces[number] for number in numbers]
        start = min(piece.start for piece in pieces)
        stop = max(piece.start + piece.nbytes for piece in pieces)
        on = live[numbers].any(0)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], on, [False]]).astype(np.int8)))
        writes = [self._first[number] for number in numbers if number in self._first]
        reads = [self._last[number] for number in numbers if number in self._last]
        return Block(
            " + ".join(piece.name for piece in pieces), tuple(pieces), start, stop - start,
            max(piece.align for piece in pieces),
            tuple((int(a), int(b) - 1) for a, b in edges.reshape(-1, 2)),
            min(writes)[1] if writes else "", max(reads)[1] if reads else "",
            int(self._unread[numbers].sum(0).min()),
        )


def delays(watcher: LiveWatcher, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """For tensors that may be computed again: the barriers before which their stores may as well happen.

    That is the last barrier before the first read. Raises SimError for a tensor there is not, one that is written by
    other instructions than plain stores, and one that is read before the next barrier.
    """
    met = {number: barrier.order for number, barrier in enumerate(watcher.barriers) if barrier.reached.all()}
    result = {}
    for name in names:
        if name not in watcher.used:
            raise SimError(f"no shared tensor {name!r} is used (there are {', '.join(watcher.used)})")
        stored = {access.site.instruction.name for access in watcher.accesses if access.tensor == name}
        if other := {kind for kind in stored if kind != "sts" and not kind.startswith(("lds", "ldmatrix"))}:
            raise SimError(f"shared tensor {name!r} is written by {', '.join(sorted(other))}; only stores can wait")
        chosen, written = set(), None
        for order, kind in watcher.used[name]:
            if kind != READ:
                written = order
            elif written is not None:
                between = [number for number, barrier in met.items() if written < barrier < order]
                if not between:
                    raise SimError(f"shared tensor {name!r} is read in the epoch of its stores: they cannot be delayed")
                chosen.add(between[-1])
                written = None
        result[name] = tuple(sorted(chosen))
    return result


def _align(align: int, start: int) -> int:
    return max(align, BANK_LINE) if start % BANK_LINE == 0 else align


# ---- per byte, [ctas, bytes]: the piece that wrote it last (-1: none), when, its last use, whether it was read -------


def _bytes(ctas: int, nbytes: int) -> tuple[np.ndarray, ...]:
    shape = ctas, nbytes
    return np.full(shape, -1, np.int16), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)


@njit(cache=True, nogil=True)
def _close(owner, wrote, used, read, c, byte, starts, unread):
    piece = owner[c, byte]
    if piece >= 0:
        starts[piece, wrote[c, byte]] += 1
        starts[piece, used[c, byte] + 1] -= 1
        if not read[c, byte]:
            unread[piece, c] += 1


@njit(cache=True, nogil=True)
def _close_all(owner, wrote, used, read, starts, unread):
    for c in range(owner.shape[0]):
        for byte in range(owner.shape[1]):
            _close(owner, wrote, used, read, c, byte, starts, unread)
            owner[c, byte] = -1


@njit(cache=True, nogil=True)
def _use(owner, wrote, used, read, starts, unread, kind, order, lanes, address, width, base, local, touched, flows):
    for c in range(lanes.shape[0]):
        for w in range(lanes.shape[1]):
            for lane in range(lanes.shape[2]):
                if not lanes[c, w, lane]:
                    continue
                for byte in range(address[c, w, lane], address[c, w, lane] + width):
                    piece = local[byte - base]
                    touched[piece] = True
                    if kind in (READ, ATOMIC) and owner[c, byte] >= 0:
                        if owner[c, byte] != piece:
                            flows[owner[c, byte], piece] = True
                        used[c, byte], read[c, byte] = order, True
                    elif kind == READ:  # of what nobody wrote: live from the start
                        owner[c, byte], wrote[c, byte], used[c, byte], read[c, byte] = piece, 0, order, True
                    elif owner[c, byte] != piece or wrote[c, byte] != order:
                        _close(owner, wrote, used, read, c, byte, starts, unread)
                        owner[c, byte], wrote[c, byte], used[c, byte], read[c, byte] = piece, order, order, False


@njit(cache=True, nogil=True)
def _keep(owner, wrote, used, read, issued, order, lanes, address, width):
    """A cp.async lands: its bytes were its own until now."""
    for c in range(lanes.shape[0]):
        for w in range(lanes.shape[1]):
            for lane in range(lanes.shape[2]):
                if lanes[c, w, lane]:
                    for byte in range(address[c, w, lane], address[c, w, lane] + width):
                        if owner[c, byte] >= 0 and wrote[c, byte] == issued:
                            used[c, byte] = max(used[c, byte], order)
