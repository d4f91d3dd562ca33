"""ldmatrix, stmatrix, movmatrix and mma against the fragment maps of the PTX ISA, written out lane by lane.

With g = lane // 4 and t = lane % 4. An 8x8 matrix: lane holds (g, 2t) and (g, 2t + 1). mma.m16n8k16: A registers are
rows g, g + 8 x columns 2t, 2t + 8 (pairs along k), B registers k pairs 2t and 2t + 8 of column g, C rows g and g + 8,
columns 2t and 2t + 1 (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type").
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simgpu import warp
from simgpu.errors import SimError
from simgpu.launch import Launch
from simgpu.run import simulate
from simgpu.tensor import GlobalTensor, bfloat16, float16, float32, int32, uint16

LANE_G_T = [(lane, lane // 4, lane % 4) for lane in range(32)]


def emulate(body, *args, grid=1, block=32, mode="values"):
    return simulate(Launch(body, grid, block, args), mode=mode).arrays


def store_fragment(cta, out, fragment, x):
    for i in range(x):
        for j in (0, 1):
            cta.store(out[cta.bx, cta.tid, i, j], fragment[..., i, j])


# ---- ldmatrix, stmatrix, movmatrix ------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(x=st.sampled_from((1, 2, 4)), trans=st.booleans(), warps=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_ldmatrix_hands_out_rows_by_the_map(x, trans, warps, seed):
    """Lane 8i + r names row r of matrix i; any 16-byte rows of shared memory may be named, repeats too."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, 40, (2, warps * 32))
    data = random.integers(0, 2**16, (2, 40, 8), np.uint16)

    def body(cta, src, out):
        tile = cta.shared("tile", uint16, (40, 8))
        for row in range(40):
            cta.store(tile[row, 0], cta.load(src[cta.bx, row, 0], vec=8), vec=8)
        store_fragment(cta, out, cta.ldmatrix(tile[rows[cta.bx, cta.tid], 0], x, trans=trans), x)

    src = GlobalTensor("src", uint16, data.shape, init=data)
    found = emulate(body, src, GlobalTensor("out", uint16, (2, warps * 32, x, 2)), grid=2, block=32 * warps)["out"]
    for block, w, i in np.ndindex(2, warps, x):
        for lane, g, t in LANE_G_T:
            for j in (0, 1):
                row, column = (2 * t + j, g) if trans else (g, 2 * t + j)
                wanted = data[block, rows[block, 32 * w + 8 * i + row], column]
                assert found[block, 32 * w + lane, i, j] == wanted


@settings(max_examples=30, deadline=None)
@given(x=st.sampled_from((1, 2, 4)), trans=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_stmatrix_puts_back_what_the_map_says(x, trans, seed):
    random = np.random.default_rng(seed)
    rows, fragment = random.permutation(32), random.integers(0, 2**16, (1, 1, 32, x, 2), np.uint16)

    def body(cta, out):
        tile = cta.shared("tile", uint16, (32, 8))
        cta.store(tile[cta.lane, 0], np.zeros((1, 1, 1, 8), np.uint16), vec=8)
        cta.stmatrix(tile[rows[cta.lane], 0], fragment, x, trans=trans)
        cta.store(out[cta.lane, 0], cta.load(tile[cta.lane, 0], vec=8), vec=8)

    found = emulate(body, GlobalTensor("out", uint16, (32, 8)))["out"]
    expected = np.zeros((32, 8), np.uint16)
    for i in range(x):
        for lane, g, t in LANE_G_T:
            for j in (0, 1):
                row, column = (2 * t + j, g) if trans else (g, 2 * t + j)
                expected[rows[8 * i + row], column] = fragment[0, 0, lane, i, j]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", [bfloat16, float16, uint16])
def test_movmatrix_is_a_trans_store_and_a_plain_load(dtype):
    data = np.arange(64).astype(dtype).reshape(8, 8)

    def body(cta, src, out):
        tile = cta.shared("tile", dtype, (8, 8))
        cta.store(tile[cta.lane % 8, 0], cta.load(src[cta.lane % 8, 0], vec=8), vec=8)
        register = cta.ldmatrix(tile[cta.lane % 8, 0], 1)[..., 0, :]
        moved = cta.movmatrix(register)
        cta.stmatrix(tile[cta.lane % 8, 0], moved[..., None, :], 1)
        cta.store(out[cta.lane % 8, 0], cta.load(tile[cta.lane % 8, 0], vec=8), vec=8)
        assert np.array_equal(cta.movmatrix(moved), register)
        assert np.array_equal(moved, warp.distribute(data.T[None, None, None], False)[..., 0, :])

    src = GlobalTensor("src", dtype, (8, 8), init=data)
    assert np.array_equal(emulate(body, src, GlobalTensor("out", dtype, (8, 8)))["out"], data.T)


def test_every_lane_may_name_the_same_row():
    def body(cta, out):
        tile = cta.shared("tile", uint16, (1, 8))
        cta.store(tile[0, 0], np.arange(8, dtype=np.uint16), vec=8)
        store_fragment(cta, out, cta.ldmatrix(tile[0, 0], 4), 4)

    found = emulate(body, GlobalTensor("out", uint16, (1, 32, 4, 2)))["out"][0]
    for lane, _, t in LANE_G_T:
        assert found[lane].tolist() == [[2 * t, 2 * t + 1]] * 4


@pytest.mark.parametrize("x", [1, 2, 4])
def test_a_warp_that_is_off_reads_no_row(x):
    """Warp 1's rows are unwritten: only reading them is refused; what it receives is 0."""

    def body(cta, out):
        tile = cta.shared("tile", uint16, (64, 8))
        with cta.where(cta.warp == 0):
            cta.store(tile[cta.tid, 0], np.full((1, 1, 1, 8), 5, np.uint16), vec=8)
            fragment = cta.ldmatrix(tile[cta.tid, 0], x)
        store_fragment(cta, out, fragment, x)

    found = emulate(body, GlobalTensor("out", uint16, (1, 64, x, 2)), block=64)["out"][0]
    assert (found[:32] == 5).all() and (found[32:] == 0).all()


def test_a_stmatrix_of_one_warp_leaves_the_others_rows():
    def body(cta, out):
        tile = cta.shared("tile", uint16, (64, 8))
        cta.store(tile[cta.tid, 0], np.zeros((1, 1, 1, 8), np.uint16), vec=8)
        with cta.where(cta.warp == 1):
            cta.stmatrix(tile[cta.tid, 0], np.ones((1, 1, 32, 4, 2), np.uint16), 4)
        cta.store(out[cta.tid, 0], cta.load(tile[cta.tid, 0], vec=8), vec=8)

    found = emulate(body, GlobalTensor("out", uint16, (64, 8)), block=64)["out"]
    assert (found[:32] == 0).all() and (found[32:] == 1).all()


# ---- mma --------------------------------------------------------------------------------------------------


def fragments(a, b, c, k):
    """Registers of a [16, k], b [k, 8] and c [16, 8] by the maps of the PTX ISA."""
    ra, rb = np.zeros((32, k // 4, 2), a.dtype), np.zeros((32, k // 8, 2), b.dtype)
    rc = np.zeros((32, 4), np.float32)
    for lane, g, t in LANE_G_T:
        for j in (0, 1):
            for half in range(k // 8):
                ra[lane, 2 * half, j] = a[g, 2 * t + j + 8 * half]
                ra[lane, 2 * half + 1, j] = a[g + 8, 2 * t + j + 8 * half]
                rb[lane, half, j] = b[2 * t + j + 8 * half, g]
            rc[lane, j], rc[lane, 2 + j] = c[g, 2 * t + j], c[g + 8, 2 * t + j]
    return ra, rb, rc


@settings(max_examples=20, deadline=None)
@given(
    k=st.sampled_from((8, 16)),
    dtype=st.sampled_from((bfloat16, float16)),
    batch=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    seed=st.integers(0, 2**32 - 1),
)
def test_mma_is_the_matrix_product_on_fragments(k, dtype, batch, seed):
    """Small integers: every product and sum is exact, so the order of summation cannot hide a mistake."""
    random = np.random.default_rng(seed)
    a, b = (random.integers(-8, 9, (*batch, *shape)).astype(dtype) for shape in ((16, k), (k, 8)))
    c = random.integers(-100, 100, (*batch, 16, 8)).astype(np.float32)
    product = a.astype(np.float32) @ b.astype(np.float32) + c
    made = [fragments(a[i], b[i], c[i], k) for i in np.ndindex(batch)]
    ra, rb, rc = (np.stack(parts).reshape(*batch, *parts[0].shape) for parts in zip(*made, strict=True))
    found = warp.mma(ra, rb, rc, k)
    for i in np.ndindex(batch):
        assert np.array_equal(found[i], fragments(a[i], b[i], product[i], k)[2])


def test_mma_sums_in_float32_what_bfloat16_cannot_hold():
    a, b, c = np.full((16, 16), 255, bfloat16), np.full((16, 8), 257, bfloat16), np.full((16, 8), 1, np.float32)
    ra, rb, rc = (part[None, None] for part in fragments(a, b, c, 16))
    assert (warp.mma(ra, rb, rc) == 16 * 255.0 * float(bfloat16.type(257)) + 1).all()


@pytest.mark.parametrize(
    ("a", "b", "c", "k", "message"),
    [
        (np.zeros((1, 1, 32, 2, 2), bfloat16), np.zeros((1, 1, 32, 2, 2), bfloat16), np.zeros((1, 1, 32, 4), float32),
         16, "fragments"),
        (np.zeros((1, 1, 32, 4, 2), bfloat16), np.zeros((1, 1, 32, 2, 2), float16), np.zeros((1, 1, 32, 4), float32),
         16, "one 16-bit type"),
        (np.zeros((1, 1, 32, 4, 2), bfloat16), np.zeros((1, 1, 32, 2, 2), bfloat16), np.zeros((1, 1, 32, 4), bfloat16),
         16, "float32 accumulators"),
        (np.zeros((1, 1, 32, 8, 2), bfloat16), np.zeros((1, 1, 32, 4, 2), bfloat16), np.zeros((1, 1, 32, 4), float32),
         32, "m16n8k32"),
    ],
)
def test_mma_refuses_other_fragments(a, b, c, k, message):
    with pytest.raises(SimError, match=message):
        emulate(lambda cta: cta.mma(a, b, c, k))


# ---- a whole GEMM -----------------------------------------------------------------------------------------


def swizzle(stage, row, column):
    return 4096 * stage + 32 * row + (column ^ (row >> 1 & 3) << 3)


def gemm(cta, a, b, c, stages, trans_b):
    """128x128x32 tiles, 8 warps as 2x4, multistage cp.async, ldmatrix and mma; b is [N, K], or [K, N] if trans_b."""
    depth = a.shape[1]
    tile_a = cta.shared("tile_a", bfloat16, (stages, 128, 32), swizzle)
    if trans_b:
        tile_b = cta.shared("tile_b", bfloat16, (stages, 32, 128), lambda s, r, x: 4096 * s + 128 * r + (x ^ r % 8 * 8))
    else:
        tile_b = cta.shared("tile_b", bfloat16, (stages, 128, 32), swizzle)
    row, column, lane = cta.tid // 4, cta.tid % 4 * 8, cta.lane
    m0, n0 = cta.warp // 4 * 64, cta.warp % 4 * 32

    def fill(stage, k0):
        for half in (0, 64):
            cta.cp_async(tile_a[stage, row + half, column], a[cta.by * 128 + row + half, k0 + column], site="a.copy")
            if trans_b:
                r, x = cta.tid // 16 + half // 4, cta.tid % 16 * 8
                cta.cp_async(tile_b[stage, r, x], b[k0 + r, cta.bx * 128 + x], site="b.copy")
            else:
                source = b[cta.bx * 128 + row + half, k0 + column]
                cta.cp_async(tile_b[stage, row + half, column], source, site="b.copy")

    steps = depth // 32
    for stage in range(stages - 1):
        if stage < steps:
            fill(stage, 32 * stage)
        cta.cp_async_commit()
    sums = {(m, n): np.zeros((1, 1, 1, 4), np.float32) for m in range(4) for n in range(4)}
    for step in range(steps):
        cta.cp_async_wait(stages - 2)
        cta.sync()
        if step + stages - 1 < steps:
            fill((step + stages - 1) % stages, 32 * (step + stages - 1))
        cta.cp_async_commit()
        stage = step % stages
        for k0 in (0, 16):
            left = [cta.ldmatrix(tile_a[stage, m0 + 16 * m + lane % 16, k0 + lane // 16 * 8], 4, site="a.ldmatrix")
                    for m in range(4)]
            for n in range(4):
                if trans_b:
                    right = cta.ldmatrix(tile_b[stage, k0 + lane % 16, n0 + 8 * n], 2, trans=True, site="b.ldmatrix")
                else:
                    rows = tile_b[stage, n0 + 8 * n + lane % 8, k0 + lane // 8 % 2 * 8]
                    right = cta.ldmatrix(rows, 2, site="b.ldmatrix")
                for m in range(4):
                    sums[m, n] = cta.mma(left[m], right, sums[m, n])
    for m, n in sums:
        for half in (0, 1):
            target = c[cta.by * 128 + m0 + 16 * m + lane // 4 + 8 * half, cta.bx * 128 + n0 + 8 * n + lane % 4 * 2]
            cta.store(target, sums[m, n][..., 2 * half : 2 * half + 2], vec=2, site="c.store")


@pytest.mark.parametrize("trans_b", [False, True])
def test_a_gemm_equals_numpy(trans_b):
    random = np.random.default_rng(0)
    a, b = (random.integers(-4, 5, shape).astype(bfloat16) for shape in ((256, 96), (128, 96)))
    tensors = (
        GlobalTensor("a", bfloat16, a.shape, init=a),
        GlobalTensor("b", bfloat16, (96, 128) if trans_b else (128, 96), init=b.T if trans_b else b),
        GlobalTensor("c", float32, (256, 128)),
    )
    launch = Launch(gemm, (1, 2), 256, (*tensors, 3, trans_b))
    found = simulate(launch, mode="values")
    assert np.array_equal(found.arrays["c"], a.astype(np.float32) @ b.astype(np.float32).T)
    assert found.table["a.ldmatrix"].excessive == found.table["b.ldmatrix"].excessive == 0
    assert found.table.work["mma.m16n8k16"] == 2 * 8 * 3 * 2 * 16  # CTAs, warps, steps, k16 halves, fragments
    assert simulate(launch, mode="addresses").table == found.table


# ---- refusals of matrices ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation",
    [
        lambda cta, tile: cta.ldmatrix(tile[cta.lane, 0], 4),
        lambda cta, tile: cta.stmatrix(tile[cta.lane, 0], np.zeros((1, 1, 32, 4, 2), np.uint16), 4),
        lambda cta, tile: cta.movmatrix(np.zeros((1, 1, 32, 2), np.uint16)),
        lambda cta, tile: cta.mma(*fragments(*(np.zeros(s, bfloat16) for s in ((16, 16), (16, 8), (16, 8))), 16)),
    ],
    ids=["ldmatrix", "stmatrix", "movmatrix", "mma"],
)
def test_a_warp_that_is_partly_off_may_not_run_it(operation):
    def body(cta):
        tile = cta.shared("tile", uint16, (32, 8))
        with cta.where((cta.lane != 5) | (cta.bx == 0)):
            operation(cta, tile)

    with pytest.raises(SimError, match=r"CTA 1, warp 0, lane 5: .* needs all 32 lanes of a warp active"):
        emulate(body, grid=2, mode="addresses")


def test_matrices_are_16_bit_and_shared():
    words = GlobalTensor("words", uint16, (32, 8))
    with pytest.raises(SimError, match="16-bit elements of shared memory"):
        emulate(lambda cta, words: cta.ldmatrix(words[cta.lane, 0], 4), words)
    with pytest.raises(SimError, match="16-bit elements of shared memory"):
        emulate(lambda cta: cta.ldmatrix(cta.shared("t", int32, (32, 4))[cta.lane, 0], 4))
    with pytest.raises(SimError, match=r"ldmatrix has no form .x3"):
        emulate(lambda cta: cta.ldmatrix(cta.shared("t", uint16, (32, 8))[cta.lane, 0], 3))
    with pytest.raises(SimError, match=r"a fragment of float32\[4, 2\] is not uint16\[4, 2\]"):
        emulate(lambda cta: cta.stmatrix(cta.shared("t", uint16, (32, 8))[cta.lane, 0], np.zeros((32, 4, 2), float32)))
