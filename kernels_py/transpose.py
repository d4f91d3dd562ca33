"""Transpose of a float32 matrix through a 32x32 tile of shared memory: four ways to store the tile.

The tile is written by rows and read by columns. With a pitch of 32 words all 32 lanes of a column read meet in one
bank; ``pad1`` widens the pitch, ``xor`` permutes the columns of each row, and ``vec4`` moves 16 bytes at a time through
global memory and permutes 16-byte chunks. Any matrix size works, edges are predicated; under ``vec4`` any multiples
of 4, because each row must begin on 16 bytes. The CUDA twin is ``validation/cuda/transpose.cu``.
"""

from __future__ import annotations

import numpy as np

from simgpu.errors import SimError
from simgpu.launch import Launch, kernel
from simgpu.tensor import GlobalTensor, float32

TILE = 32
ROWS = 8  # rows of threads: each thread moves TILE / ROWS elements


def chunk_swizzle(row, column):
    """Element offset in a 32-word row whose eight 16-byte chunks are permuted by the row's group of four."""
    return 32 * row + (column ^ (row >> 2 & 7) << 2)


LAYOUTS = {
    "plain": None,
    "pad1": lambda row, column: 33 * row + column,
    "xor": lambda row, column: 32 * row + (column ^ row),
    "vec4": chunk_swizzle,
}


@kernel(plain={"layout": "plain"}, pad1={"layout": "pad1"}, xor={"layout": "xor"}, vec4={"layout": "vec4"})
def transpose(*, rows: int = 4096, cols: int = 4096, layout: str = "plain", src_offset: int = 0) -> Launch:
    """Transpose a float32 matrix through a 32x32 shared tile.

    ``layout`` is plain, pad1, xor or vec4; ``src_offset`` displaces the source from its 256-byte alignment, in
    elements.
    """
    if layout not in LAYOUTS:
        raise SimError(f"transpose: layout {layout!r} is none of {', '.join(LAYOUTS)}")
    vector = layout == "vec4"
    if vector and (rows % 4 or cols % 4):
        raise SimError(f"transpose: vec4 needs rows and columns that are multiples of 4, not {rows} x {cols}")
    source = GlobalTensor(
        "src",
        float32,
        (rows, cols),
        byte_offset=4 * src_offset,
        init=lambda: np.arange(rows * cols, dtype=np.float32).reshape(rows, cols),
    )
    target = GlobalTensor("dst", float32, (cols, rows))
    return Launch(
        by_vectors if vector else by_elements,
        grid=(-(-cols // TILE), -(-rows // TILE)),
        block=(ROWS, TILE) if vector else (TILE, ROWS),
        args=(source, target, LAYOUTS[layout]),
        check=lambda arrays: np.array_equal(arrays["dst"], arrays["src"].T),
    )


def by_elements(cta, src, dst, layout):
    rows, cols = src.shape
    tile = cta.shared("tile", float32, (TILE, TILE), layout)
    x, y = cta.bx * TILE + cta.tx, cta.by * TILE + cta.ty
    for j in range(0, TILE, ROWS):  # nvcc predicates these at the edge, and branches around the second half
        with cta.where((x < cols) & (y + j < rows), predicated=True):
            value = cta.load(src[y + j, x], site="src.load")
            cta.store(tile[cta.ty + j, cta.tx], value, site="tile.store")
    cta.sync()
    x, y = cta.by * TILE + cta.tx, cta.bx * TILE + cta.ty
    for j in range(0, TILE, ROWS):
        with cta.where((x < rows) & (y + j < cols)):
            value = cta.load(tile[cta.tx, cta.ty + j], site="tile.load")
            cta.store(dst[y + j, x], value, site="dst.store")


def by_vectors(cta, src, dst, layout):
    rows, cols = src.shape
    tile = cta.shared("tile", float32, (TILE, TILE), layout)
    x, y = cta.bx * TILE + 4 * cta.tx, cta.by * TILE + cta.ty
    with cta.where((x < cols) & (y < rows), predicated=True):
        four = cta.load(src[y, x], vec=4, site="src.load")
        cta.store(tile[cta.ty, 4 * cta.tx], four, vec=4, site="tile.store")
    cta.sync()
    x, y = cta.by * TILE + 4 * cta.tx, cta.bx * TILE + cta.ty
    with cta.where((x < rows) & (y < cols)):
        four = [cta.load(tile[4 * cta.tx + i, cta.ty], site="tile.load") for i in range(4)]
        cta.store(dst[y, x], np.stack(four, -1), vec=4, site="dst.store")
