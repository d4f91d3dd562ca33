"""Shuffles, votes, reductions and UNKNOWN, against what the PTX ISA says lane by lane."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simgpu.errors import DataDependent, SimError
from simgpu.launch import Launch
from simgpu.run import simulate
from simgpu.tensor import GlobalTensor, bfloat16, float32, int32
from simgpu.unknown import UNKNOWN, Unknown


def inside(body, grid=1, block=32, mode="values"):
    """Run ``body(cta)`` and return what it returned for the last batch."""
    kept = []
    simulate(Launch(lambda cta: kept.append(body(cta)), grid, block), mode=mode)
    return kept[-1]


# ---- shuffles ---------------------------------------------------------------------------------------------


def shfl_source(mode, lane, operand, width):
    """The pseudocode of shfl.sync (PTX ISA): the lane read, with the clamp that CUDA's intrinsics pass."""
    operand &= 31
    segment = ~(width - 1) & 31
    low, high = lane & segment, (lane & segment) | (width - 1)
    source, valid = {
        "up": (lane - operand, lane - operand >= low),
        "down": (lane + operand, lane + operand <= high),
        "xor": (lane ^ operand, lane ^ operand <= high),
        "idx": (low | (operand & ~segment & 31), True),
    }[mode]
    return source if valid else lane


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(("idx", "up", "down", "xor")),
    width=st.sampled_from((1, 2, 4, 8, 16, 32)),
    per_lane=st.booleans(),
    dtype=st.sampled_from((int32, float32, bfloat16)),
    seed=st.integers(0, 2**32 - 1),
)
def test_shuffles_read_the_lane_ptx_says(mode, width, per_lane, dtype, seed):
    random = np.random.default_rng(seed)
    operand = random.integers(0, 40, 32) if per_lane else int(random.integers(0, 40))
    value = random.integers(-99, 99, (2, 3, 32)).astype(dtype)
    call = {"idx": "shfl"}.get(mode, f"shfl_{mode}")
    found = inside(lambda cta: getattr(cta, call)(value, operand, width), grid=2, block=96)
    for lane in range(32):
        source = shfl_source(mode, lane, int(operand[lane]) if per_lane else operand, width)
        assert np.array_equal(found[..., lane], value[..., source])


@pytest.mark.parametrize("value", [np.arange(32), UNKNOWN], ids=["values", "addresses"])
def test_a_shuffle_within_a_branch_reads_only_lanes_of_the_branch(value):
    def body(cta):
        with cta.where(cta.lane < 16):
            cta.shfl_xor(value, 8)
        with cta.where(cta.lane < 12):
            cta.shfl_xor(value, 8)

    with pytest.raises(SimError, match=r"test_emulator_warp.py:\d+: CTA 0, warp 0, lane 4: shfl reads lane 12, which"):
        inside(body)


def test_a_shuffle_takes_one_register_per_lane():
    with pytest.raises(SimError, match=r"one value per lane, \[1, 1, 32\], not shape \[1, 1, 32, 4\]"):
        inside(lambda cta: cta.shfl_xor(np.zeros((1, 1, 32, 4)), 1))
    with pytest.raises(SimError, match="shuffle width 3"):
        inside(lambda cta: cta.shfl(cta.lane, 0, 3))


@pytest.mark.parametrize("width", [2, 8, 32])
def test_warp_sum_leaves_the_segments_sum_in_every_lane(width):
    value = np.random.default_rng(1).integers(0, 1000, (1, 2, 32))
    found = inside(lambda cta: cta.warp_sum(value, width), block=64)
    assert np.array_equal(found, value.reshape(2, -1, width).sum(-1).repeat(width).reshape(1, 2, 32))


# ---- reductions and votes ---------------------------------------------------------------------------------

FOLDS = {"add": sum, "min": min, "max": max}
BITS = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


@settings(max_examples=40, deadline=None)
@given(
    operation=st.sampled_from((*FOLDS, *BITS)),
    unsigned=st.booleans(),
    mask=st.integers(1, 2**32 - 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_reduce_folds_the_active_lanes(operation, unsigned, mask, seed):
    random = np.random.default_rng(seed)
    value = random.integers(0, 2**31, 32).astype(np.uint32 if unsigned else np.int32)
    if not unsigned:
        value -= 2**30
    on = mask >> np.arange(32) & 1 == 1

    def body(cta):
        with cta.where(on):
            return cta.reduce(value, operation)

    lanes = [int(v) for v in value[on]]
    expected = FOLDS[operation](lanes) if operation in FOLDS else lanes[0]
    if operation in BITS:
        for lane in lanes[1:]:
            expected = BITS[operation](expected, lane)
    found = inside(body)
    assert found.shape == (1, 1, 1) and found.dtype == value.dtype
    assert int(found[0, 0, 0]) % 2**32 == expected % 2**32


def test_reduce_is_integer_only():
    with pytest.raises(SimError, match=r"redux\.sync takes 32-bit integers, not float32"):
        inside(lambda cta: cta.reduce(np.zeros(32, np.float32)))
    with pytest.raises(SimError, match=r"redux\.sync has no 'mul'"):
        inside(lambda cta: cta.reduce(cta.lane, "mul"))


@given(on=st.integers(0, 2**32 - 1), condition=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_ballot_is_the_mask_of_active_lanes_that_agree(on, condition):
    lanes = np.arange(32)

    def body(cta):
        with cta.where(on >> lanes & 1):  # any integer is a condition, as in C
            return cta.ballot(condition >> lanes & 1)

    assert int(inside(body)[0, 0, 0]) == on & condition


def test_a_partial_last_warp_votes_without_the_lanes_it_lacks():
    found = inside(lambda cta: cta.ballot(True), block=40)
    assert [hex(int(m)) for m in np.broadcast_to(found, (1, 2, 1)).ravel()] == ["0xffffffff", "0xff"]


# ---- UNKNOWN ----------------------------------------------------------------------------------------------

ARRAY = np.arange(32.0)
SAME = {
    "where": lambda u: np.where(ARRAY < 3, u, 0),
    "stack": lambda u: np.stack([ARRAY, u], -1),
    "concatenate": lambda u: np.concatenate([u, u]),
    "astype": lambda u: u.astype(bfloat16),
    "reduction method": lambda u: u.sum(axis=-1, keepdims=True),
    "reduction": lambda u: np.max(u, axis=-1),
    "index": lambda u: u[..., 0],
    "broadcast": lambda u: np.broadcast_to(u, (1, 1, 32)),
    "matmul": lambda u: u @ ARRAY,
    "matmul from the left": lambda u: ARRAY @ u,
    "einsum": lambda u: np.einsum("i,i", ARRAY, u),
    "ufunc": lambda u: np.exp2(u),
    "array first": lambda u: ARRAY * u,
    "array first, in place": lambda u: _in_place(ARRAY.copy(), u),
    "scalar first": lambda u: np.float32(2) * u,
    "bfloat16 first": lambda u: bfloat16.type(2) * u,
    "python first": lambda u: 2.0**u - 1 // u,
    "comparison": lambda u: (u == 3) & (u < ARRAY),
    "zeros_like": lambda u: np.zeros_like(u),
    "clip": lambda u: np.clip(u, 0, 1),
    "divmod": lambda u: divmod(u, 3)[1],
    "view": lambda u: u.view(np.int32).reshape(-1).T,
}


def _in_place(array, u):
    array += u
    return array


@pytest.mark.parametrize("name", SAME)
def test_what_is_computed_from_unknown_is_unknown(name):
    assert SAME[name](UNKNOWN) is UNKNOWN


DECIDES = {
    "branch": lambda u: 1 if u > 0 else 2,
    "unpack": lambda u: [*u],
    "loop": lambda u: list(range(u)),
    "length": lambda u: len(u),
    "float": lambda u: float(u),
    "int": lambda u: int(u),
    "array": lambda u: np.asarray(u),
    "array of": lambda u: np.array([u, 1.0]),
    "contains": lambda u: 3 in u,
}


@pytest.mark.parametrize("name", DECIDES)
def test_what_is_decided_by_unknown_needs_values(name):
    with pytest.raises(DataDependent, match="run with values"):
        DECIDES[name](UNKNOWN)


def test_every_operation_passes_unknown_on():
    def body(cta, src):
        loaded = cta.load(src[cta.lane])
        fragment = cta.ldmatrix(cta.shared("tile", bfloat16, (32, 8))[cta.lane, 0])
        results = [
            loaded, cta.shfl(loaded, 0), cta.shfl_up(loaded, 1), cta.shfl_down(loaded, 1),
            cta.shfl_xor(cta.lane, loaded), cta.warp_sum(loaded), cta.reduce(loaded), cta.ballot(loaded > 0), fragment,
            cta.movmatrix(fragment[..., 0, :]), cta.mma(fragment, fragment[..., :2, :], np.zeros(4, np.float32)),
            cta.atomic_add(src[0], loaded), cta.atomic_exch(src[0], loaded), cta.atomic_cas(src[0], loaded, 1),
        ]  # fmt: skip
        assert all(isinstance(result, Unknown) for result in results)
        cta.store(src[cta.lane], loaded)
        cta.stmatrix(cta.shared("out", bfloat16, (32, 8))[cta.lane, 0], fragment)

    simulate(Launch(body, 1, 32, (GlobalTensor("src", int32, (32,)),)), mode="addresses")


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda cta, u, t: t[u], "indexed"),
        (lambda cta, u, t: cta.where(u > 0).__enter__(), "a branch"),
        (lambda cta, u, t: cta.any(u), "a loop"),
        (lambda cta, u, t: ARRAY.copy().__setitem__(0, u), "a Python number"),  # numpy turns it into a ValueError
        (lambda cta, u, t: cta.cp_async(cta.shared("s", int32, (32, 4))[cta.lane, 0], t[0], 4, cache="ca", src_bytes=u),
         "src_bytes"),
    ],
)
def test_an_address_or_branch_by_a_loaded_value_is_refused_without_values(use, what):
    def body(cta, t):
        use(cta, cta.load(t[cta.lane]), t)

    with pytest.raises(DataDependent, match=rf"test_emulator_warp.py:\d+: .*{what}.*run with values"):
        simulate(Launch(body, 1, 32, (GlobalTensor("t", int32, (32,)),)), mode="addresses")
