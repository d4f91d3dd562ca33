"""The shared-memory-to-register micro-benchmark: the GEMM ladder's fragment reads in a loop.

Every CTA copies two k-tiles of small integers into shared memory once and then reads the fragments of one k-tile after
the other. ``mma`` 1 multiplies them, 0 adds the fragment registers as 32-bit integers. Both results are exact. CUDA
twin: ``validation/cuda/smem_to_reg.cu``, which also counts clocks (stored here as 0).

>>> from simgpu.run import simulate
>>> table = simulate(smem_to_reg.launch("A1", iterations=2, sms=1)).table
>>> table["A.lds"].wavefronts + table["B.lds"].wavefronts  # 8 warps x 4 k16 steps x 32 loads
1024
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kernels_py.gemm_tile import RUNGS, THREADS, TILE_K, TILE_M, TILE_N, Rung, Tiles, multiply
from simgpu.errors import SimError
from simgpu.launch import Launch, kernel
from simgpu.tensor import GlobalTensor, bfloat16, float32, int64, uint32

DEPTH = 2 * TILE_K


@kernel(**{name: RUNGS[name] for name in ("A1", "A2", "A2L", "A3")})
def smem_to_reg(*, iterations: int = 64, mma: int = 1, ctas: int = 1, sms: int = 132, read_mode: int = 0,
                b_layout: int = 0, swizzle: int = 1) -> Launch:
    """Fragment reads in a loop of ``iterations`` k-tiles (even), with or without ``mma``, ``ctas`` CTAs on each SM."""
    if iterations < 2 or iterations % 2 or iterations > 32768:
        raise SimError(f"smem_to_reg: iterations {iterations} must be even, 2 to 32768")
    if mma not in (0, 1):
        raise SimError(f"smem_to_reg: mma is {mma}; it is 0 or 1")
    blocks = ctas * sms
    a = GlobalTensor("A", bfloat16, (TILE_M, DEPTH), init=lambda: integers_a().astype(bfloat16))
    b = GlobalTensor("B", bfloat16, (TILE_N, DEPTH) if b_layout else (DEPTH, TILE_N),
                     init=lambda: (integers_b().T if b_layout else integers_b()).astype(bfloat16))
    c = GlobalTensor("C", float32, (blocks, TILE_M, TILE_N))
    sums = GlobalTensor("sums", uint32, (blocks, THREADS))
    clocks = GlobalTensor("clocks", int64, (blocks, THREADS // 32))
    rung = Rung(read_mode=read_mode, b_layout=b_layout, stages=2, swizzle=swizzle)
    return Launch(read_in_a_loop, grid=blocks, block=THREADS, args=(a, b, c, sums, clocks, rung, iterations, mma),
                  check=partial(is_exact, iterations, mma))


def integers_a() -> np.ndarray:
    m, k = np.ogrid[:TILE_M, :DEPTH]
    return (m * 7 + k * 5 + m * k) % 9 - 4


def integers_b() -> np.ndarray:
    k, n = np.ogrid[:DEPTH, :TILE_N]
    return (k * 3 + n * 11 + k * n) % 9 - 4


def is_exact(iterations: int, mma: int, arrays) -> bool:
    """Whether every CTA's product, or every thread's sum of registers, is ``iterations / 2`` times that of one pass."""
    if mma:
        return np.array_equal(arrays["C"], np.broadcast_to(integers_a() @ integers_b() * (iterations // 2),
                                                           arrays["C"].shape))
    thread = np.arange(THREADS)
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    pairs_a = integers_a().astype(bfloat16).view(uint32)  # [m][k / 2]: two k-neighbours in a register
    pairs_b = np.ascontiguousarray(integers_b().T).astype(bfloat16).view(uint32)  # [n][k / 2]
    total = np.zeros(THREADS, uint32)
    for pair in range(0, DEPTH // 2, 4):
        for i in range(8):
            total += pairs_a[warp // 4 * 64 + 8 * i + g, pair + t]
        for i in range(4):
            total += pairs_b[warp % 4 * 32 + 8 * i + g, pair + t]
    return np.array_equal(arrays["sums"], np.broadcast_to(total * np.uint32(iterations // 2), arrays["sums"].shape))


def read_in_a_loop(cta, a, b, c, sums, clocks, rung: Rung, iterations: int, mma: int):
    tiles = Tiles(cta, a, b, 0, 0, rung)
    for stage in range(2):
        tiles.copy_async(stage, TILE_K * stage)
    cta.cp_async_commit()
    cta.cp_async_wait(0)
    product = [[np.zeros((1, 1, 32, 4), np.float32)] * 4 for _ in range(4)]
    total = np.zeros((1, 1, 32), np.uint32)
    cta.sync()
    for i in range(iterations):
        for k0 in (0, 16):
            fragments = tiles.fragments(i % 2, k0)
            if mma:
                multiply(cta, product, fragments)
                continue
            for fragment in fragments[0] + fragments[1]:
                total = total + fragment.copy().view(uint32)[..., 0].sum(-1, dtype=np.uint32)
    cta.sync()
    with cta.where(cta.lane == 0):
        cta.store(clocks[cta.bx, cta.warp], 0, site="clocks.stg")
    if not mma:
        cta.store(sums[cta.bx, cta.tid], total, site="sum.stg")
        return
    warp_m, warp_n = tiles.warp_origin()
    for i in range(32):
        mi, ni, half = i // 8, i // 2 % 4, i % 2
        row, column = warp_m + 16 * mi + 8 * half + cta.lane // 4, warp_n + 8 * ni + cta.lane % 4 * 2
        cta.store(c[cta.bx, row, column], product[mi][ni][..., 2 * half:2 * half + 2], vec=2, site="C.stg")
