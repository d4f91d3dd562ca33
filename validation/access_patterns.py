"""The access patterns that :mod:`validation.access` measures: masks and addresses for one warp instruction.

Every pattern belongs to a set. ``structured`` ones are what kernels do (strides, XORs, broadcasts),
``minimal`` ones have two to four active lanes and isolate a mechanism, ``random`` ones look for what nobody
thought of, and ``fresh`` ones are kept out of rule finding: a rule is fitted without them and then held
against them. Addresses are drawn in *chunks*, the bytes one lane moves, from windows small enough that lanes
meet on banks, words and sectors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

LANES = 32
FULL = 0xFFFFFFFF
LINE = 128  # bytes

ATOMS32 = ("add.u32", "exch.b32", "min.u32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32", "add.f32", "cas.b32")
ATOMS64 = ("add.u64", "exch.b64", "min.u64", "add.f64", "cas.b64")
REDS = ("add.u32", "or.b32", "add.f32", "add.u64", "add.f64")


@dataclass(frozen=True)
class Pattern:
    """One row to measure. ``shared``/``global_``/``source_bytes`` are 32 values or None where they do not apply."""

    op: str
    width: int
    set: str
    mask: int
    shared: tuple[int, ...] | None = None
    global_: tuple[int, ...] | None = None
    source_bytes: tuple[int, ...] | None = None


def masks(rng: random.Random, few: bool = False) -> int:
    """An active mask: mostly full, else a half, a run, a comb, one lane, or random lanes; ``few`` is 2 to 4 lanes."""
    if few:
        return sum(1 << lane for lane in rng.sample(range(LANES), rng.choice((2, 2, 3, 3, 4))))
    kind = rng.randrange(12)
    if kind == 0:
        return rng.choice((0xFFFF, 0xFFFF0000, 0x55555555, 0x0F0F0F0F, 0x00FF00FF, 0xFF, 0xFFFFFF))
    if kind == 1:
        return FULL >> rng.randrange(1, LANES)
    if kind == 2:
        return 1 << rng.randrange(LANES)
    if kind == 3:
        return rng.randrange(1, FULL)
    return FULL


def structured(width: int) -> Iterator[tuple[int, ...]]:
    """Strides, offsets, XORs, broadcasts, pairs and halves, as byte addresses."""
    chunks: list[Callable[[int], int]] = [lambda lane, s=s: lane * s for s in (1, 2, 3, 4, 8, 16, 32, 33, 0)]
    chunks += [lambda lane, o=o: lane + o for o in (1, 2, 3, 5, 7)]
    chunks += [lambda lane, x=x: lane ^ x for x in (1, 2, 4, 7)]
    chunks += [lambda lane, d=d: lane // d for d in (2, 4, 8, 16)]
    chunks += [lambda lane, d=d: lane % d for d in (2, 4, 8, 16)]
    chunks += [lambda lane: 31 - lane, lambda lane: lane % 8 * 33 + lane // 8, lambda lane: lane // 4 * 8 + lane % 4,
               lambda lane: lane // 8 * 32 + (lane % 8 ^ lane // 8), lambda lane: lane & 1, lambda lane: lane & ~2]
    for chunk in chunks:
        yield tuple(width * chunk(lane) for lane in range(LANES))


def window(rng: random.Random, width: int, lines: int, distinct: bool) -> tuple[int, ...]:
    """32 random chunk addresses within ``lines`` lines, all different if ``distinct`` (and if they fit)."""
    chunks = range(max(lines * LINE // width, LANES if distinct else 1))
    picked = rng.sample(chunks, LANES) if distinct else rng.choices(chunks, k=LANES)
    return tuple(width * chunk for chunk in picked)


def grid(rng: random.Random, width: int, distinct: bool) -> tuple[int, ...]:
    """32 random chunk addresses on few banks of few lines, so that even two lanes often meet."""
    per_line = LINE // width
    first, columns = rng.randrange(per_line), rng.choice((1, 2, 2, 3, 4))
    lines = rng.choice((2, 3, 4)) if not distinct else 40
    cells = [line * per_line + (first + column) % per_line for line in range(lines) for column in range(columns)]
    picked = rng.sample(cells, LANES) if distinct else rng.choices(cells, k=LANES)
    return tuple(width * cell for cell in picked)


def _one_sided(rng: random.Random, width: int, index: int) -> tuple[str, int, tuple[int, ...]]:
    """Row ``index`` of an instruction with one address list: (set, mask, addresses)."""
    shapes = list(structured(width))
    if index < len(shapes):
        return "structured", FULL, shapes[index]
    base = window(rng, width, rng.choice((1, 1, 2, 4, 8, 32)), rng.random() < 0.3)
    mask = masks(rng)
    if rng.random() < 0.3:  # neighbours at one address: what lets wide loads merge
        step = rng.choice((1, 2))
        base = tuple(base[lane & ~step] for lane in range(LANES))
    if rng.random() < 0.2:
        base, mask = rng.choice(shapes), masks(rng)
    return "fresh" if index % 4 == 3 else "random", mask, base


def _wide_loads(rng: random.Random, width: int, rows: int) -> Iterator[Pattern]:
    """Loads of 8 and 16 bytes under odd masks, within one or two lines: when do two groups of lanes travel as one?"""
    for index in range(rows):
        mask = rng.choice((FULL, 0xFFFF, 0xFF, 0x55555555, 0x33333333, 0x0F0F0F0F, 0x00FF00FF)) << rng.choice((0, 0, 1))
        mask = mask & FULL if index % 3 == 0 else rng.randrange(1, FULL) & rng.choice((FULL, 0xFFFF, 0x00FFFFFF))
        if index % 4 == 0:
            mask &= rng.randrange(1, FULL)
        base = window(rng, width, rng.choice((1, 1, 1, 2)), False)
        step = rng.choice((0, 0, 1, 2, 3))
        yield Pattern("lds", width, "minimal", mask or 1, tuple(base[lane & ~step] for lane in range(LANES)))


def _copies(rng: random.Random, op: str, width: int, rows: int) -> Iterator[Pattern]:
    """cp.async: minimal cases, strides against strides, random windows; a quarter of it fresh."""
    group = LANES * 4 // width
    strides = [(a, b) for a in (1, 2, 3, 4, 8, 9, 16, 33) for b in (1, 2, 4, 5, 8, 16, 32, 33)]
    for index in range(rows):
        kind = index % 8
        if kind < 4:  # minimal: all lanes in one group of eight or more
            first = rng.randrange(LANES // group) * group
            lanes = rng.sample(range(first, first + group), rng.choice((2, 2, 3, 3, 4)))
            mask = sum(1 << lane for lane in lanes)
            unique_s, unique_g = [(True, True), (True, True), (True, False), (False, True)][kind]
            yield Pattern(op, width, "minimal", mask, grid(rng, width, unique_s), grid(rng, width, unique_g))
        elif kind == 4:
            a, b = strides[index // 8 % len(strides)]
            mask = FULL if index // 8 < len(strides) else masks(rng)
            yield Pattern(op, width, "structured", mask, tuple(lane * a * width % 65536 for lane in range(LANES)),
                          tuple(lane * b * width for lane in range(LANES)))
        else:
            both = rng.random() < 0.6
            yield Pattern(op, width, "random" if kind == 5 else "fresh" if kind == 6 else "random", masks(rng),
                          window(rng, width, rng.choice((1, 2, 4, 8, 64)), both or rng.random() < 0.3),
                          window(rng, width, rng.choice((1, 2, 4, 8, 64)), both or rng.random() < 0.3))


def _zero_fills(rng: random.Random, op: str, width: int, rows: int) -> Iterator[Pattern]:
    """cp.async that reads fewer bytes than it writes, per lane: none, some, or all of them."""
    for index, pattern in enumerate(_copies(rng, op, width, rows)):
        choices = [(0,), (width // 2,), (0, width), (1,), (0, width // 2, width), tuple(range(width + 1))][index % 6]
        if op == "cp.async.cg":  # parts of a chunk from racing lanes may mix, and then no row's data is right
            choices = (0,) if index % 3 == 0 else (0, width)
        yield replace(pattern, source_bytes=tuple(rng.choice(choices) for _ in range(LANES)))


def _global_atomics(rng: random.Random, op: str, width: int, rows: int) -> Iterator[Pattern]:
    """Global atomics: lanes on few words of few sectors."""
    shapes = list(structured(width))
    for index in range(rows):
        if index < len(shapes) and index % 2:
            yield Pattern(op, width, "structured", FULL, global_=shapes[index])
            continue
        mask = masks(rng, few=index % 4 == 0)
        if index % 8 == 6:
            mask = rng.randrange(1, FULL)
        words = rng.choice((2, 4, 8, 16, 32, 64, 128))
        chosen = rng.choices([4096 // width * rng.randrange(2) + n for n in range(words)], k=LANES)
        label = "minimal" if index % 4 == 0 else "fresh" if index % 4 == 1 else "random"
        yield Pattern(op, width, label, mask, global_=tuple(width * word for word in chosen))


def _matrix_rows(rng: random.Random, op: str, rows: int) -> Iterator[Pattern]:
    """ldmatrix and stmatrix: row strides, swizzles, repeated rows within and across matrices."""
    for index in range(rows):
        if index % 3 == 0:
            stride, shift = rng.choice((16, 32, 48, 64, 80, 112, 128, 144, 256, 272, 528)), rng.choice((0, 1, 2, 3, 7))
            row = tuple(lane * stride + 16 * (lane & shift) for lane in range(LANES))
        else:
            row = window(rng, 16, rng.choice((1, 2, 4, 8, 16)), rng.random() < 0.3)
            repeat = rng.choice((1, 1, 2, 4, 8, 16))
            row = tuple(row[lane // repeat * repeat if index % 3 == 1 else lane % max(repeat, 8)]
                        for lane in range(LANES))
        yield Pattern(op, 16, "structured" if index % 3 == 0 else "fresh" if index % 6 == 4 else "random", FULL, row)


def patterns(seed: int = 1) -> Iterator[Pattern]:
    """Every pattern of the experiment, most wanted first; the number of rows of an instruction is a multiple of 64."""
    rng = random.Random(seed)
    for width, verbs in ((4, ATOMS32), (8, ATOMS64)):
        for verb in verbs:
            yield from _global_atomics(rng, f"atom.global.{verb}", width, 448 if verb == "add.u32" else 64)
    for verb in REDS:
        width = 8 if "64" in verb else 4
        yield from _global_atomics(rng, f"red.global.{verb}", width, 128 if verb == "add.u32" else 64)
    for width in (4, 8, 16):
        yield from _copies(rng, "cp.async.ca", width, 576)
    yield from _copies(rng, "cp.async.cg", 16, 640)
    for width, verbs in ((4, ATOMS32), (8, ATOMS64)):
        for verb in verbs:
            for index in range(64):
                label, mask, shared = _one_sided(rng, width, index)
                yield Pattern(f"atom.shared.{verb}", width, label, mask, shared)
    for verb in REDS:
        width = 8 if "64" in verb else 4
        for index in range(64):
            label, mask, shared = _one_sided(rng, width, index)
            yield Pattern(f"red.shared.{verb}", width, label, mask, shared)
    for op in ("lds", "sts", "ldg", "stg"):
        for width in (1, 2, 4, 8, 16):
            for index in range(128 if width > 4 and op == "lds" else 64):
                label, mask, addresses = _one_sided(rng, width, index)
                where = {"shared": addresses} if op in ("lds", "sts") else {"global_": addresses}
                yield Pattern(op, width, label, mask, **where)
    for width in (8, 16):
        yield from _wide_loads(rng, width, 192)
    for verb in ("ldmatrix", "stmatrix"):
        for n in (1, 2, 4):
            for trans in ("", ".trans"):
                yield from _matrix_rows(rng, f"{verb}.x{n}{trans}", 64)
    for op, width in (("cp.async.ca", 4), ("cp.async.ca", 8), ("cp.async.ca", 16), ("cp.async.cg", 16)):
        yield from _zero_fills(rng, op, width, 128)
