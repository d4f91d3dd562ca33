"""Find the cheapest layout of one shared tensor: record its accesses once, price every layout by replaying them.

The kernel runs once; :mod:`simgpu.search_record` keeps its accesses to the tensor as elements. A candidate layout turns
elements into addresses, and :mod:`simgpu.replay` prices those. The best candidate is then put in the place of the
kernel's own, and the kernel must compute the same bytes.

The space is row-major (and, if asked for, column-major) with every pad up to a bound, under no swizzle or under every
``Swizzle<B,M,S>`` of element offsets that moves elements among the banks.

>>> from kernels_py import find
>>> best = search_layout(find("transpose@plain")[0].launch("plain", rows=64, cols=64), "tile").ranked[0]
>>> best.name, best.nbytes, best.wavefronts, best.excessive
('Swizzle<5,0,5> o row(32,32)', 4096, 64, 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from tensor_layouts import Swizzle

from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.layout import cosize, parse_layout, tabulate
from simgpu.replay import replay
from simgpu.rules import LINE
from simgpu.run import CHECK_BYTES, SHARED_LIMIT, Result
from simgpu.search_record import Recording, record
from simgpu.tensor import SharedTensor

OWN = "the kernel's own"
DROPPED = {"split": "split a vector", "large": "are larger than allowed", "unmodelled": "have no proven rule"}
MOST_REFUSALS = 8  # layouts the kernel may refuse, each tried by emulating it, before the search gives up
ROUND = 256  # layouts priced between two reports of progress: some 50 ms. No need of processes

# ---- the space of layouts --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A row- or column-major layout of ``shape`` with ``pad`` spare elements a line, under ``swizzle`` (B, M, S)."""

    shape: tuple[int, ...]
    order: str = "row"
    pad: int = 0
    swizzle: tuple[int, int, int] | None = None

    @property
    def name(self) -> str:
        """The notation of ``simgpu layout``.

        >>> Candidate((16, 128), "row", 8, (2, 3, 3)).name
        'Swizzle<2,3,3> o row(16,128,pad=8)'
        """
        swizzle = "Swizzle<{},{},{}> o ".format(*self.swizzle) if self.swizzle else ""
        return f"{swizzle}{self.order}({','.join(map(str, self.shape))}{f',pad={self.pad}' if self.pad else ''})"

    @property
    def layout(self) -> Any:
        """The layout ``name`` describes."""
        return parse_layout(self.name)

    @property
    def table(self) -> np.ndarray:
        """Element offsets, int64[shape]: those of ``layout``, without reading its name thousands of times."""
        plain = _plain(self.shape, self.order, self.pad)
        return Swizzle(*self.swizzle)(plain) if self.swizzle else plain


@lru_cache(maxsize=4)
def _plain(shape: tuple[int, ...], order: str, pad: int) -> np.ndarray:
    return tabulate(Candidate(shape, order, pad).layout, shape)


def space(
    shape: tuple[int, ...], itemsize: int, *, max_pad: int | None = None, column_major: bool = False
) -> Iterator[Candidate]:
    """Every layout searched, in a fixed order.

    Pads go to ``max_pad`` elements (None: one short of 128 bytes, after which the banks repeat). Swizzles are those
    with ``B <= S`` that permute elements within 128-byte lines by bits the offsets have: XORing a bit above only
    renumbers lines, which no bank sees.

    >>> sum(1 for _ in space((32, 32), 4, max_pad=0))
    96
    """
    orders = ("row", "col") if column_major and len(shape) > 1 else ("row",)
    per_line = LINE // itemsize
    pads = range((per_line - 1 if max_pad is None else max_pad) + 1) if len(shape) > 1 else (0,)
    for order in orders:
        for pad in pads:
            plain = Candidate(shape, order, pad)
            yield plain
            bits = (cosize(plain.table) - 1).bit_length()
            within = per_line.bit_length() - 1
            for b in range(1, within + 1):
                for m in range(within - b + 1):
                    for s in range(b, bits - m):
                        yield replace(plain, swizzle=(b, m, s))


# ---- prices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A layout and what the recorded accesses cost under it.

    ``nbytes`` of shared memory of one tensor; ``sites``: (wavefronts, ideal) of each site by name. ``candidate`` is
    None for the kernel's own layout.
    """

    candidate: Candidate | None
    nbytes: int
    sites: dict[str, tuple[int, int]]

    @property
    def name(self) -> str:
        return self.candidate.name if self.candidate else OWN

    @property
    def wavefronts(self) -> int:
        """Of all sites."""
        return sum(wavefronts for wavefronts, _ in self.sites.values())

    @property
    def ideal(self) -> int:
        """Of all sites."""
        return sum(ideal for _, ideal in self.sites.values())

    @property
    def excessive(self) -> int:
        """Wavefronts beyond the ideal: bank conflicts."""
        return self.wavefronts - self.ideal

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Fewest wavefronts, fewest bytes, the kernel's own, fewest XORed bits."""
        bits = self.candidate.swizzle[0] if self.candidate and self.candidate.swizzle else 0
        return self.wavefronts, self.nbytes, self.candidate is not None, bits


def price(
    recording: Recording, table: np.ndarray, candidate: Candidate | None = None, max_bytes: int | None = None
) -> Found | str:
    """What the recorded accesses cost under the layout with offsets ``table``, or why it is none for them.

    ``"split"``: a vector's elements are no longer neighbours on a multiple of its width; ``"large"``: more than
    ``max_bytes``; ``"unmodelled"``: an access of a form without a proven rule.
    """
    itemsize = recording.tensor.dtype.itemsize
    nbytes = cosize(table) * itemsize
    if max_bytes is not None and nbytes > max_bytes:
        return "large"
    offsets, bases = table.ravel(), recording.bases(nbytes)
    for vectors in recording.vectors:
        length = vectors.shape[1]
        first = offsets[vectors[:, 0]]
        if any((offsets[vectors[:, i]] != first + i).any() for i in range(1, length)):
            return "split"
        starts = {bases[access.tensor] for access in recording.accesses}
        if any(((start + first * itemsize) % (length * itemsize)).any() for start in starts):
            return "split"
    wavefronts, ideals = Counter(), Counter()
    for access in recording.accesses:
        addresses = (bases[access.tensor] + offsets * itemsize).astype(np.int32)[access.elements]
        cost = replay(access.site.instruction, access.site.width, access.masks, addresses, access.global_)
        if (cost.wavefronts < 0).any() or (cost.ideal < 0).any():
            return "unmodelled"
        wavefronts[access.site.name] += int(cost.wavefronts @ access.times)
        ideals[access.site.name] += int(cost.ideal @ access.times)
    return Found(candidate, nbytes, {site: (wavefronts[site], ideals[site]) for site in wavefronts})


# ---- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutSearch:
    """What a search found.

    ``own`` is the kernel's own layout. ``ranked``: the layouts that hold the accesses, the best first; the kernel was
    emulated under the first, with ``values`` or with addresses only. ``refused``: better ones that the kernel refused,
    each with its reason. ``tried`` layouts make up the space; ``dropped`` counts those that cannot be, by
    :func:`price`'s reason.
    """

    recording: Recording
    own: Found
    ranked: tuple[Found, ...]
    refused: tuple[tuple[Found, str], ...]
    tried: int
    dropped: dict[str, int]
    values: bool

    @property
    def best(self) -> Found:
        return self.ranked[0]

    @property
    def statement(self) -> str:
        """What the search proves, in one line."""
        best, kept = self.best, " that the kernel accepts" if self.refused else ""
        dropped = "".join(f", {self.dropped[why]:,} of which {text}" for why, text in DROPPED.items()
                          if self.dropped.get(why))
        conflicts = [f"{site} {count - ideal:,}" for site, (count, ideal) in best.sites.items() if count > ideal]
        state = f"has {best.excessive:,} excessive ({', '.join(conflicts)})" if conflicts else "is free of conflicts"
        return (f"all {self.tried:,} layouts tried{dropped}: none{kept} below {best.wavefronts:,} wavefronts, nor with "
                f"as few in fewer bytes than {best.name}, which {state}")


def search_layout(
    launch: Launch,
    pattern: str,
    views: Sequence[str] = (),
    *,
    ctas: int | None = 1,
    max_bytes: int | None = None,
    max_pad: int | None = None,
    column_major: bool = False,
    shared_limit: int = SHARED_LIMIT,
    progress: Callable[[int, int], None] | None = None,
) -> LayoutSearch:
    """The cheapest layout of the shared tensor ``pattern`` for all its accesses in the first ``ctas`` CTAs.

    See :func:`~simgpu.search_record.record` for ``pattern`` and ``views``, and :func:`space` for the layouts tried;
    ``max_bytes`` is the most the tensor may take. Vectors stay whole and aligned. Fewest wavefronts first, then fewest
    bytes, then the kernel's own layout, then the swizzle of fewest bits. The winner is put into the kernel, which must
    take the wavefronts reckoned and compute, where its global memory is small enough for values, the same bytes.
    Raises SimError where no layout is left, and for what the kernel refuses under its own layout.
    """
    max_bytes = min(max_bytes or shared_limit, shared_limit)
    small = sum(each.nbytes for each in launch.tensors) <= CHECK_BYTES
    options = {"ctas": ctas, "shared_limit": shared_limit, "mode": "values" if small else "auto"}
    recording, result = record(launch, pattern, views, **options)
    own = price(recording, recording.own_table)
    if isinstance(own, str):
        raise SimError(f"shared tensor {pattern!r}: an access under the kernel's own layout has no proven rule")
    found, dropped, tried = _price_all(recording, max_bytes, max_pad, column_major, progress)
    if own.nbytes <= max_bytes:
        found.append(own)
    found.sort(key=lambda each: each.rank)
    refused = []
    for position, each in enumerate(found[:MOST_REFUSALS]):
        why = None if each is own else _refusal(launch, pattern, recording, result, each, options)
        if why is None:
            return LayoutSearch(recording, own, tuple(found[position:]), tuple(refused), tried, dropped, result.values)
        refused.append((each, why))
    if refused:
        first, why = refused[0]
        over = [other.name for other in recording.allocated if _overlaps(other, recording)]
        hint = f" ({', '.join(over)} lies over its bytes: if it sees the same data, name it as a view)" if over else ""
        raise SimError(f"shared tensor {pattern!r}: the kernel refuses the best {len(refused)} layouts{hint}; "
                       f"{first.name}: {why}")
    raise SimError(f"shared tensor {pattern!r}: none of {tried:,} layouts holds its accesses in {max_bytes:,} bytes")


def _price_all(recording: Recording, max_bytes, max_pad, column_major, progress) -> tuple[list[Found], Counter, int]:
    """The prices of the space, how many layouts were dropped by reason, and how many there are."""
    tensor, found, dropped = recording.tensor, [], Counter()
    candidates = list(space(tensor.shape, tensor.dtype.itemsize, max_pad=max_pad, column_major=column_major))
    for done, candidate in enumerate(candidates, 1):
        priced = price(recording, candidate.table, candidate, max_bytes)
        if isinstance(priced, str):
            dropped[priced] += 1
        else:
            found.append(priced)
        if progress and done % ROUND == 0:
            progress(done, len(candidates))
    return found, dropped, len(candidates)


def _refusal(
    launch: Launch, pattern: str, recording: Recording, result: Result, found: Found, options: dict
) -> str | None:
    """Why the kernel cannot have ``found`` for a layout; None if it runs, at that price, to the same result."""
    layouts = recording.substitutes(found.candidate.layout)
    try:
        again, changed = record(launch, pattern, tuple(recording.views), layouts=layouts, **options)
        counted = price(again, again.own_table)
    except SimError as error:
        return " ".join(str(error).split())
    for name, array in result.arrays.items():
        if not np.array_equal(array.reshape(-1).view(np.uint8), changed.arrays[name].reshape(-1).view(np.uint8)):
            return f"the kernel computes another {name}"
    if isinstance(counted, str) or counted.sites != found.sites:
        return "emulated, it does not take the wavefronts reckoned"
    return None


def _overlaps(other: SharedTensor, recording: Recording) -> bool:
    """Whether ``other``, a tensor the search leaves alone, lies over bytes of the one it changes."""
    tensor = recording.tensor
    left_alone = other.name not in recording.names and other.name not in recording.views
    return left_alone and other.base < tensor.base + tensor.nbytes and tensor.base < other.base + other.nbytes
