"""What lanes of a warp do with each other's registers: shuffles, 8x8 matrices, mma.

Registers are arrays [c, w, 32]; a register of packed 16-bit elements is [c, w, 32, 2]; a fragment of n such
registers is [c, w, 32, n, 2]. With g = lane // 4 and t = lane % 4, an 8x8 matrix of 16-bit elements gives lane
(g, t) the elements (g, 2t) and (g, 2t + 1) in one register (PTX ISA, "Matrix fragments for mma.m16n8k16").
"""

from __future__ import annotations

import numpy as np

from simgpu.errors import SimError

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
PAIR_ROW = np.repeat(G[:, None], 2, 1)  # [32, 2]: row and column of each element of a lane's register
PAIR_COLUMN = 2 * T[:, None] + np.arange(2)


def shuffle_source(mode: str, operand, width: int) -> np.ndarray:
    """The lane each lane reads in ``shfl.sync`` (PTX ISA): int, broadcastable to [c, w, 32].

    ``mode`` is idx, up, down or xor; ``width`` a power of two: lanes stay inside their segment of it.

    >>> shuffle_source("xor", 1, 32)[:4].tolist()
    [1, 0, 3, 2]
    """
    if width not in (1, 2, 4, 8, 16, 32):
        raise SimError(f"shuffle width {width} is not a power of two up to 32")
    base = LANE // width * width
    operand = np.asarray(operand) & 31  # the instruction takes five bits
    if mode == "idx":
        return base + operand % width
    source = {"up": LANE - operand, "down": LANE + operand, "xor": LANE ^ operand}[mode]
    inside = source < base + width if mode == "xor" else (source >= base) & (source < base + width)
    return np.where(inside, source, LANE)


def take_lanes(values: np.ndarray, source: np.ndarray) -> np.ndarray:
    """``values`` [c, w, 32] with lane n holding what lane ``source[n]`` held."""
    shape = np.broadcast_shapes(values.shape, np.shape(source))
    return np.take_along_axis(np.broadcast_to(values, shape), np.broadcast_to(source, shape), -1)


def distribute(matrices: np.ndarray, trans: bool) -> np.ndarray:
    """8x8 matrices [c, w, n, 8, 8] handed to lanes: [c, w, 32, n, 2], transposed on the way if ``trans``."""
    row, column = (PAIR_COLUMN, PAIR_ROW) if trans else (PAIR_ROW, PAIR_COLUMN)
    return np.moveaxis(matrices[..., row, column], -3, -2)


def collect(registers: np.ndarray, trans: bool) -> np.ndarray:
    """The inverse of :func:`distribute`: registers [c, w, 32, n, 2] back to matrices [c, w, n, 8, 8].

    >>> m = np.arange(64.0).reshape(1, 1, 1, 8, 8)
    >>> bool((collect(distribute(m, True), True) == m).all())
    True
    """
    row, column = (PAIR_COLUMN, PAIR_ROW) if trans else (PAIR_ROW, PAIR_COLUMN)
    matrices = np.empty((*registers.shape[:-3], registers.shape[-2], 8, 8), registers.dtype)
    matrices[..., row, column] = np.moveaxis(registers, -2, -3)
    return matrices


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, k: int = 16) -> np.ndarray:
    """``mma.sync.m16n8kK`` with 16-bit inputs and float32 accumulators, K = ``k`` = 16 or 8.

    a [c, w, 32, K/4, 2]: 8x8 blocks in the order (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15);
    b [c, w, 32, K/8, 2]: k pairs 2t (and 2t + 8) of column g; c and the result [c, w, 32, 4] float32: rows g and
    g + 8, columns 2t and 2t + 1 (PTX ISA). Products are exact; they are summed in float32, in an order the
    hardware does not promise either. Raises SimError for other fragment shapes or element types.
    """
    wanted = ((k // 4, 2), (k // 8, 2), (4,))
    if k not in (8, 16) or (a.shape[-2:], b.shape[-2:], c.shape[-1:]) != wanted:
        raise SimError(
            f"mma.m16n8k{k}: fragments {a.shape[-2:]}, {b.shape[-2:]}, {c.shape[-1:]} are not "
            f"{', '.join(map(str, wanted))}"
        )
    if a.dtype.itemsize != 2 or a.dtype != b.dtype or c.dtype != np.float32:
        raise SimError(f"mma: a {a.dtype}, b {b.dtype}, c {c.dtype}; it takes one 16-bit type and float32 accumulators")
    blocks = collect(a.astype(np.float32), trans=False)  # [..., K/4, 8, 8]
    left = np.concatenate(
        [np.concatenate([blocks[..., i, :, :], blocks[..., i + 1, :, :]], -2) for i in range(0, k // 4, 2)], -1
    )  # [..., 16, K]
    columns = collect(b.astype(np.float32), trans=True)  # [..., K/8, 8 (k), 8 (n)]
    right = columns.reshape(*columns.shape[:-3], k, 8)
    product = left @ right
    return c + np.concatenate([product[..., G[:, None] + 8 * half, PAIR_COLUMN] for half in (0, 1)], -1)
