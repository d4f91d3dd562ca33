"""What the Kimi Delta Attention kernels B0 to B3 share: sizes, tiles, layouts, the copy of a state, the verdict.

A launch is ``sequences`` of ``tokens`` tokens each, packed one after another, with one CTA of 256 threads a (tile,
head): blockIdx.x the tile, blockIdx.y the head. CUDA twin: ``validation/cuda/kda_common.cuh``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from tensor_layouts.layout_utils import tile_to_shape

from kernels_py.kda_reference import Bounded, Problem, make_problem
from simgpu.errors import SimError
from simgpu.layout_spec import TILE_ORDER, gmma_atom

C, D, THREADS = 16, 128, 256


def check_sizes(name: str, tokens: int, sequences: int, heads: int, seed: int) -> None:
    """Raise SimError for sizes that no launch has, and for a seed that numpy does not take.

    >>> check_sizes("kda_b0", tokens=16, sequences=0, heads=1, seed=0)
    Traceback (most recent call last):
    simgpu.errors.SimError: kda_b0: sequences is 0, below 1
    """
    for what, value, least in (("tokens", tokens, 1), ("sequences", sequences, 1), ("heads", heads, 1),
                               ("seed", seed, 0)):
        if value < least:
            raise SimError(f"{name}: {what} is {value}, below {least}")
    if tokens * sequences >= 2**31:
        raise SimError(f"{name}: {sequences} x {tokens} tokens; tile_start is an int32")


def tile_table(tokens: int, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """First token and rows of every tile: int64[tiles] each.

    >>> [column.tolist() for column in tile_table(20, 2)]
    [[0, 16, 20, 36], [16, 4, 16, 4]]
    """
    first = np.arange(0, tokens, C)
    start = (tokens * np.arange(sequences)[:, None] + first).ravel()
    return start, np.tile(np.minimum(C, tokens - first), sequences)


@lru_cache(maxsize=2)
def packed_problem(tokens: int, sequences: int, heads: int, seed: int) -> Problem:
    """The seeded inputs of a launch. Every tensor asks for them, and so does the check: they are made once."""
    return make_problem([tokens] * sequences, heads, seed)


def within_bounds(name: str, expected: Mapping[str, Bounded], arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether every element of the ``expected`` outputs is as near as bf16 and fp32 explain; SimError where not."""
    for output, bound in expected.items():
        right = bound.holds(arrays[output])
        if not right.all():
            where = tuple(int(i) for i in np.argwhere(~right)[0])
            raise SimError(f"{name}: {output}{list(where)} is {arrays[output][where]:.6g}, expected "
                           f"{bound.value[where]:.6g} within {bound.error[where]:.2g}; "
                           f"{int((~right).sum())} of {right.size} elements are wrong")
    return True


# ---- on the device ---------------------------------------------------------------------------------------------------


def tiled(atom: str, shape: tuple[int, int], order: str = "col"):
    """The bf16 GMMA ``atom`` tiled over ``shape``, its grid of atoms column- ("col") or row-first ("row")."""
    return tile_to_shape(gmma_atom(atom, 2), shape, TILE_ORDER[order])


# (atom, order of the grid of atoms) of a state for the plain and the transposed read, by ``swizzle``: each pair is
# one set of bytes, seen as [row, column] and as [column, row].
STATE_VIEWS = {
    0: (("K-INTER", "col"), ("MN-INTER", "row")),
    1: (("K-SW128", "col"), ("MN-SW128", "row")),
}


def copy_state(cta, to, source, tile, head):
    """A state in row-major order of its 16-byte chunks: a warp takes two rows at a time."""
    for i in range(D * D // 8 // THREADS):
        row, column = 16 * i + cta.tid // 16, cta.tid % 16 * 8
        cta.cp_async(to[row, column], source[tile, head, row, column], site=f"{source.name}.cp")


def multiply(cta, a, b, sums: list) -> list:
    """``sums`` plus a b; ``b`` [c, w, 32, 4, 2] holds two n8 tiles of two registers each."""
    return [cta.mma(a, b[..., 2 * j:2 * j + 2, :], sums[j]) for j in range(2)]


def zeros(cta) -> list:
    return [np.zeros((*cta.shape, 4), np.float32)] * 2


def stage_sums(cta, stage, which: int, sums: list, vec: int = 2):
    """A lane's accumulators (rows g and g + 8, columns 2t and 2t + 1 of each n8 tile) into tile ``which`` of ``stage``.

    ``vec``: floats that a store moves (1, 2).
    """
    for j in range(2):
        for half in range(2):
            row, column = cta.lane // 4 + 8 * half, 16 * cta.warp + 8 * j + cta.lane % 4 * 2
            pair = sums[j][..., 2 * half:2 * half + 2]
            if vec == 2:
                cta.store(stage[which, row, column], pair, vec=2, site="stage.store")
            else:
                for i in range(2):
                    cta.store(stage[which, row, column + i], pair[..., i], site="stage.store")
