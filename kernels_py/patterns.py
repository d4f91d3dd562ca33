"""One warp, one way to address memory: the patterns every tuning guide draws, as kernels to run and compare.

Each pattern fills shared memory without conflicts (site ``fill``), then reads it (site ``read``) in the way its name
says; ``gather`` reads global memory. The patterns are those people ask about: strides, broadcasts, vector widths,
ldmatrix row pitches, padded columns, atomics.
"""

from __future__ import annotations

from math import prod

import numpy as np

from simgpu.errors import SimError
from simgpu.launch import Launch, kernel
from simgpu.tensor import GlobalTensor, bfloat16, float32, uint32


@kernel(
    stride1={},
    stride2={"stride": 2},
    stride3={"stride": 3},
    stride4={"stride": 4},
    stride8={"stride": 8},
    stride16={"stride": 16},
    stride32={"stride": 32},
    stride33={"stride": 33},
    broadcast={"stride": 0},
    pairs={"share": 2},
    quads={"share": 4},
    vec2={"vec": 2, "stride": 2},
    vec4={"vec": 4, "stride": 4},
    vec4_stride8={"vec": 4, "stride": 8},
    vec4_same_banks={"vec": 4, "stride": 32},
    column={"pattern": "column"},
    column_pad1={"pattern": "column", "pad": 1},
    column_vec4={"pattern": "column", "vec": 4},
    column_vec4_pad4={"pattern": "column", "vec": 4, "pad": 4},
    ldmatrix16={"pattern": "ldmatrix", "width": 16},
    ldmatrix32={"pattern": "ldmatrix", "width": 32},
    ldmatrix64={"pattern": "ldmatrix", "width": 64},
    ldmatrix64_pad8={"pattern": "ldmatrix", "width": 64, "pad": 8},
    ldmatrix64_trans={"pattern": "ldmatrix", "width": 64, "trans": True},
    histogram={"pattern": "histogram", "share": 1},
    histogram_pairs={"pattern": "histogram", "share": 2},
    gather={"pattern": "gather"},
    gather_stride2={"pattern": "gather", "stride": 2},
    gather_vec4={"pattern": "gather", "vec": 4, "stride": 4},
    gather_misaligned={"pattern": "gather", "offset": 1},
)
def patterns(
    *,
    pattern: str = "stride",
    stride: int = 1,
    share: int = 1,
    vec: int = 1,
    pad: int = 0,
    width: int = 32,
    trans: bool = False,
    offset: int = 0,
    ctas: int = 1,
) -> Launch:
    """One warp reading memory in one textbook way.

    ``pattern``: stride (lane i reads word stride * (i // share)), column (lane i reads row i of a 32-word-wide
    tile), ldmatrix (16 rows of ``width`` bf16), histogram (lane i adds to word i // share) or gather (as stride, from
    global memory).
    ``vec``: words per lane; ``pad``: elements added to a row; ``offset``: words added to a global address.
    """
    bodies = {"stride": strided, "column": column, "ldmatrix": matrix, "histogram": histogram, "gather": gather}
    if pattern not in bodies:
        raise SimError(f"patterns: pattern {pattern!r} is none of {', '.join(bodies)}")
    if share < 1 or stride < 0 or vec < 1 or pad < 0 or width < 16 or width % 8 or offset < 0:
        raise SimError(
            f"patterns: stride {stride}, share {share}, vec {vec}, pad {pad}, width {width}, offset {offset}: "
            f"share and vec are at least 1, width a multiple of 8 from 16 on, the rest not negative"
        )
    source = GlobalTensor(
        "src", float32, (31 * stride + vec + offset,), init=lambda: np.ones(31 * stride + vec + offset, np.float32)
    )
    arguments = {
        "stride": (stride, share, vec),
        "column": (vec, pad),
        "ldmatrix": (width, pad, trans),
        "histogram": (share,),
        "gather": (source, stride, share, vec, offset),
    }
    return Launch(bodies[pattern], grid=ctas, block=32, args=arguments[pattern])


def fill(cta, tensor, value):
    """Write every element of a shared tensor, a warp-wide row at a time; conflict-free for a row-major tensor."""
    count = prod(tensor.shape)
    for first in range(0, count, 32):
        index = first + cta.lane
        with cta.where(index < count):
            coordinates = np.unravel_index(np.minimum(index, count - 1), tensor.shape)
            cta.store(tensor[coordinates], value, site="fill")
    cta.sync()


def strided(cta, stride, share, vec):
    words = cta.shared("words", float32, (31 * stride + vec,))
    fill(cta, words, 1.0)
    cta.load(words[stride * (cta.lane // share)], vec=vec, site="read")


def column(cta, vec, pad):
    tile = cta.shared("tile", float32, (32, 32 + pad))
    fill(cta, tile, 1.0)
    cta.load(tile[cta.lane, 0], vec=vec, site="read")


def matrix(cta, width, pad, trans):
    tile = cta.shared("tile", bfloat16, (16, width + pad))
    fill(cta, tile, 1.0)
    cta.ldmatrix(tile[cta.lane % 16, cta.lane // 16 * 8], x=4, trans=trans, site="read")


def histogram(cta, share):
    bins = cta.shared("bins", uint32, (32,))
    fill(cta, bins, 0)
    cta.red_add(bins[cta.lane // share], 1, site="read")


def gather(cta, src, stride, share, vec, offset):
    cta.load(src[offset + stride * (cta.lane // share)], vec=vec, site="read")
