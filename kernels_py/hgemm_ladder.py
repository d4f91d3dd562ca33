"""C = A B in bf16 with float32 sums: the ladder of ways to bring tiles from shared memory into registers.

``A1`` reads A with ld.shared and B, as it lies, 16 bits at a time; ``A2`` reads a transposed B with ld.shared; ``A2L``
reads both with ldmatrix; ``A3`` too, B as it lies with ldmatrix.trans. ``naive``, ``bcf`` (swizzle), ``bcf_dbf`` (two
stages) and ``bcf_dbf_rw`` (C through shared memory) are the older rungs. All of them add the same products in the same
order. CUDA twin: ``validation/cuda/hgemm_ladder.cu``.

>>> from simgpu.run import simulate
>>> for swizzle in (0, 1):
...     table = simulate(hgemm_ladder.launch("A3", m=128, n=128, k=64, swizzle=swizzle)).table
...     print(table["A.ldsm"].n_way, table["B.ldsm"].n_way)
4.0 8.0
1.0 1.0
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kernels_py.gemm_tile import RUNGS, THREADS, TILE_K, TILE_M, TILE_N, Rung, Tiles, multiply, rows_of_128
from simgpu.errors import SimError
from simgpu.launch import Launch, kernel
from simgpu.tensor import GlobalTensor, bfloat16, float32


@kernel(**RUNGS)
def hgemm_ladder(*, m: int = 4096, n: int = 4096, k: int = 4096, load_mode: int = 1, read_mode: int = 0,
                 b_layout: int = 0, stages: int = 3, swizzle: int = 1, staged: int = 0) -> Launch:
    """C = A B in bf16, one template for the whole shared-memory-to-register ladder.

    ``m`` and ``n`` are multiples of 128, ``k`` of 32 (at least ``stages - 1`` k-tiles). ``load_mode`` 0: global load
    and shared store of 16 bytes, 1: cp.async. ``read_mode`` 0: ld.shared, 1: ldmatrix. ``b_layout`` 1: B is [N][K].
    ``staged`` 1: C goes through shared memory (at least two stages).
    """
    rung = Rung(load_mode, read_mode, b_layout, stages, swizzle, staged)
    if m < 1 or n < 1 or k < 1 or m % TILE_M or n % TILE_N or k % TILE_K:
        raise SimError(f"hgemm_ladder: m {m} and n {n} must be multiples of 128, k {k} of 32")
    if k // TILE_K < stages - 1:
        raise SimError(f"hgemm_ladder: k {k} is {k // TILE_K} k-tiles of 32; {stages} stages need {stages - 1}")
    if staged and stages < 2:
        raise SimError(f"hgemm_ladder: a staged epilogue needs two stages of shared memory, not {stages}")
    a = GlobalTensor("A", bfloat16, (m, k), init=partial(uniform, 1, (m, k)))
    b = GlobalTensor("B", bfloat16, (n, k) if b_layout else (k, n),
                     init=(lambda: uniform(2, (k, n)).T) if b_layout else partial(uniform, 2, (k, n)))
    c = GlobalTensor("C", bfloat16, (m, n))
    return Launch(hgemm, grid=(n // TILE_N, m // TILE_M), block=THREADS, args=(a, b, c, rung),
                  check=partial(is_product, b_layout))


def uniform(seed: int, shape: tuple[int, int]) -> np.ndarray:
    """bfloat16 in [-1, 1), the same for one seed and shape."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(bfloat16)


def is_product(b_layout: int, arrays) -> bool:
    """Whether C is A B up to its rounding to bfloat16 and the order of float32 sums."""
    a, b, c = (arrays[name].astype(float32) for name in "ABC")
    expected = a @ (b.T if b_layout else b)
    return bool((np.abs(c - expected) <= np.abs(expected) / 256 + 1e-6 * a.shape[1]).all())


def hgemm(cta, a, b, c, rung: Rung):
    m0, n0 = cta.by * TILE_M, cta.bx * TILE_N
    tiles = Tiles(cta, a, b, m0, n0, rung)
    sums = [[np.zeros((*cta.shape, 4), np.float32)] * 4 for _ in range(4)]
    count, ahead = a.shape[1] // TILE_K, rung.stages - 1

    def consume(tile):
        for k0 in (0, 16):
            multiply(cta, sums, tiles.fragments(tile % rung.stages, k0))

    for tile in range(ahead):
        if rung.load_mode:
            tiles.copy_async(tile, TILE_K * tile)
            cta.cp_async_commit()
        else:
            tiles.store(tile, tiles.load(TILE_K * tile))
    for tile in range(count):
        new = tile + ahead
        if rung.stages > 1 and rung.load_mode:
            cta.cp_async_wait(ahead - 1)
            cta.sync()  # the k-tile is there, and everyone is done with the stage that `new` will overwrite
            if new < count:
                tiles.copy_async(new % rung.stages, TILE_K * new)
            cta.cp_async_commit()  # also when empty: the wait counts groups
            consume(tile)
        elif rung.stages > 1:
            cta.sync()
            registers = tiles.load(TILE_K * new) if new < count else None
            consume(tile)
            if registers:
                tiles.store(new % rung.stages, registers)
        else:
            registers = None if rung.load_mode else tiles.load(TILE_K * tile)
            cta.sync()
            if registers:
                tiles.store(0, registers)
            else:
                tiles.copy_async(0, TILE_K * tile)
                cta.cp_async_commit()
                cta.cp_async_wait(0)
            cta.sync()
            consume(tile)
    (staged_epilogue if rung.staged else direct_epilogue)(cta, tiles, c, m0, n0, sums)


def accumulator_pairs(cta, tiles: Tiles, sums: list):
    """Each lane's pairs of neighbouring columns as (row, column, bf16 [c, w, 32, 2]), in the CTA's tile."""
    warp_m, warp_n = tiles.warp_origin()
    for mi in range(4):
        for ni in range(4):
            pairs = sums[mi][ni].astype(bfloat16)
            for half in range(2):
                row = warp_m + 16 * mi + 8 * half + cta.lane // 4
                yield row, warp_n + 8 * ni + cta.lane % 4 * 2, pairs[..., 2 * half:2 * half + 2]


def direct_epilogue(cta, tiles: Tiles, c, m0, n0, sums: list):
    for row, column, pair in accumulator_pairs(cta, tiles, sums):
        cta.store(c[m0 + row, n0 + column], pair, vec=2, site="C.stg")


def staged_epilogue(cta, tiles: Tiles, c, m0, n0, sums: list):
    """Cs[128][128] takes the place of the k-tiles; thread i then moves 16-byte chunks i, i + 256, ... of it."""
    tile = cta.shared("Cs", bfloat16, (TILE_M, TILE_N), rows_of_128(tiles.rung.swizzle),
                      alias_of=sum(tiles.stages, ()))
    cta.sync()
    for row, column, pair in accumulator_pairs(cta, tiles, sums):
        cta.store(tile[row, column], pair, vec=2, site="C.sts")
    cta.sync()
    for i in range(TILE_M * TILE_N // 8 // THREADS):
        chunk = cta.tid + THREADS * i
        row, column = chunk // 16, chunk % 16 * 8
        chunk8 = cta.load(tile[row, column], vec=8, site="C.lds")
        cta.store(c[m0 + row, n0 + column], chunk8, vec=8, site="C.stg")
