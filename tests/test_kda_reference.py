"""The KDA backward reference: against the token-by-token recurrence, central differences, and its own bounds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_py.kda_reference import (
    BOUND,
    EXACT,
    INPUTS,
    KERNEL,
    LN2,
    NORM_EPS,
    OUTPUTS,
    SINGLE,
    TILES_AT_ONCE,
    Bounded,
    b1,
    b2,
    b3,
    backward,
    forward,
    kernel_inputs,
    kernel_outputs,
    make_problem,
)
from simgpu.errors import SimError

KERNELS = {"b1": b1, "b2": b2, "b3": b3}
GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "S": "dS_in"}


def chunk_inputs(seed, tokens, D):
    random = np.random.default_rng(seed)
    x = {name: random.standard_normal((tokens, D)) for name in ("q", "k", "v", "do")}
    x["g"] = -0.3 * np.abs(random.standard_normal((tokens, D)))
    x["beta"], x["S"] = random.uniform(size=tokens), random.standard_normal((D, D))
    return x, random.standard_normal((D, D))


def token_by_token(q, k, v, g, beta, S):
    """KDA as it is defined, one token at a time: o [T, D] and the last state."""
    o = np.empty_like(v)
    for t in range(len(q)):
        q_t, k_t = (x[t] / np.sqrt(x[t] @ x[t] + NORM_EPS) for x in (q, k))
        S = np.exp(g[t])[:, None] * S
        S = S + beta[t] * np.outer(k_t, v[t] - k_t @ S)
        o[t] = q_t @ S / np.sqrt(q.shape[-1])
    return o, S


def gradients(x, dS):
    gc = np.cumsum(x["g"], -2) / LN2
    return backward(x["q"], x["k"], x["v"], gc, x["beta"], x["S"], x["do"], dS)


def loss(x, dS):
    f = forward(x["q"], x["k"], x["v"], np.cumsum(x["g"], -2) / LN2, x["beta"], x["S"])
    return (f["o"] * x["do"]).sum((-1, -2)) + (f["S_out"] * dS).sum((-1, -2))


def close(got, expected, relative):
    return np.abs(got - expected).max() <= relative * max(1, np.abs(expected).max())


# ---- the mathematics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("chunks", "C", "D"), [((1,), 1, 3), ((4, 4, 2), 4, 6), ((16, 16, 9), 16, 128)])
def test_chunks_equal_the_token_recurrence(seed, chunks, C, D):
    x, _ = chunk_inputs(seed, sum(chunks), D)
    expected, last = token_by_token(x["q"], x["k"], x["v"], x["g"], x["beta"], x["S"])
    S, first = x["S"], 0
    for rows in chunks:
        part = {name: x[name][first : first + rows] for name in ("q", "k", "v", "g", "beta")}
        f = forward(part["q"], part["k"], part["v"], np.cumsum(part["g"], 0) / LN2, part["beta"], S)
        assert close(f["o"], expected[first : first + rows], 1e-11)
        S, first = f["S_out"], first + rows
    assert close(S, last, 1e-11)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("C", "D"), [(1, 2), (4, 6), (7, 5)])
def test_every_gradient_element_by_central_differences(seed, C, D):
    x, dS = chunk_inputs(seed, C, D)
    got, step = gradients(x, dS), 1e-5
    for name, gradient in GRADIENTS.items():
        nudge = step * np.eye(x[name].size).reshape(-1, *x[name].shape)  # one element per leading index
        every = {other: np.broadcast_to(y, (len(nudge), *y.shape)) for other, y in x.items()}
        slopes = (loss(every | {name: x[name] + nudge}, dS) - loss(every | {name: x[name] - nudge}, dS)) / (2 * step)
        assert got[gradient].shape == x[name].shape
        assert close(got[gradient], slopes.reshape(x[name].shape), 1e-8), name


@pytest.mark.parametrize("seed", range(3))
def test_gradients_along_directions_at_full_size(seed):
    x, dS = chunk_inputs(seed, 16, 128)
    got, random = gradients(x, dS), np.random.default_rng(seed)
    for name, gradient in GRADIENTS.items():
        for _ in range(3):
            direction = random.standard_normal(x[name].shape)
            up, down = (loss(x | {name: x[name] + step * direction}, dS) for step in (1e-5, -1e-5))
            assert close((got[gradient] * direction).sum(), (up - down) / 2e-5, 1e-6), name


def test_dS_in_carries_the_gradient_to_the_chunk_before():
    x, dS = chunk_inputs(5, 10, 6)
    parts = [{**{n: y[rows] for n, y in x.items() if n != "S"}} for rows in (slice(4), slice(4, 8), slice(8, 10))]
    S, states = x["S"], []
    for part in parts:
        states.append(S)
        gc = np.cumsum(part["g"], 0) / LN2
        S = forward(part["q"], part["k"], part["v"], gc, part["beta"], S)["S_out"]
    carried, pieces = dS, []
    for part, S in zip(reversed(parts), reversed(states), strict=True):
        pieces.insert(0, gradients(part | {"S": S}, carried))
        carried = pieces[0]["dS_in"]

    def whole(x):
        o, S = token_by_token(*(x[name] for name in ("q", "k", "v", "g", "beta", "S")))
        return (o * x["do"]).sum() + (S * dS).sum()

    for name, gradient in GRADIENTS.items():
        got = carried if name == "S" else np.concatenate([piece[gradient] for piece in pieces])
        direction = np.random.default_rng(1).standard_normal(x[name].shape)
        up, down = (whole(x | {name: x[name] + step * direction}) for step in (1e-5, -1e-5))
        assert close((got * direction).sum(), (up - down) / 2e-5, 1e-8), name


@pytest.mark.parametrize("seed", range(3))
def test_gate_parameter(seed):
    x, dS = chunk_inputs(seed, 5, 6)
    got = gradients(x, dS)
    assert close(got["dA_log"], (got["dg"] * x["g"]).sum(), 1e-12)
    up, down = (loss(x | {"g": np.exp(step) * x["g"]}, dS) for step in (1e-5, -1e-5))  # g = -e^A_log x
    assert close(got["dA_log"], (up - down) / 2e-5, 1e-8)


def test_float32_stays_float32_and_close():
    x, dS = chunk_inputs(0, 16, 128)
    expected = gradients(x, dS)
    got = gradients({name: y.astype(np.float32) for name, y in x.items()}, dS.astype(np.float32))
    for gradient in (*GRADIENTS.values(), "dA_log"):
        assert got[gradient].dtype == np.float32
        assert np.linalg.norm(got[gradient] - expected[gradient]) <= 1e-4 * np.linalg.norm(expected[gradient])


# ---- the kernels' inputs -------------------------------------------------------------------------------------


def test_tensors_have_the_shapes_and_types_of_the_interface():
    problem = make_problem([33, 5], heads=3, seed=0)
    T, H, D, C, tiles = 38, 3, 128, 16, 4
    by_shape = {
        ("int32", (tiles,)): {"tile_start", "tile_rows"},
        ("bfloat16", (T, H, D)): {"q", "k", "v", "do", "U"},
        ("bfloat16", (T, H)): {"beta"},
        ("bfloat16", (tiles, H, D, D)): {"S_in", "dS"},
        ("bfloat16", (tiles, H, C, C)): {"M", "INV"},
        ("float32", (T, H, D)): {"gc", "dvcorr", "dkr", "dv", "dqd_base", "dkd_base"},
        ("float32", (T, H)): {"dbeta_part"},
        ("float32", (tiles, H, D)): {"p"},
    }
    expected = {name: key for key, names in by_shape.items() for name in names}
    assert {name: (x.dtype.name, x.shape) for name, x in problem.tensors.items()} == expected
    assert problem.tensors["tile_start"].tolist() == [0, 16, 32, 33]
    assert problem.tensors["tile_rows"].tolist() == [16, 16, 1, 5]
    read = {name for kernel in KERNELS for name in kernel_inputs(problem, kernel)}
    assert read == set(expected) - {"dv"}


def test_inputs_are_finite_and_states_do_not_vanish():
    tensors = make_problem([40, 7], heads=2, seed=1).tensors
    assert all(np.isfinite(x.astype(np.float64)).all() for x in tensors.values())
    for name in ("S_in", "dS"):
        size = np.sqrt((tensors[name].astype(np.float64) ** 2).mean((-1, -2)))
        assert size.min() > 0.02, name


def test_seed_decides():
    one, same, other = (make_problem([9], 2, seed, C=4, D=8).tensors for seed in (3, 3, 4))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["q"], other["q"])


def test_states_follow_the_recurrence_within_each_sequence():
    problem = make_problem([40, 20], heads=2, seed=2)
    names = ("q", "k", "v", "gc", "beta", "do")
    q, k, v, gc, beta, do = (EXACT.load(problem.tiled(name)) for name in names)
    S, dS = EXACT.load(problem.tensors["S_in"]).swapaxes(-1, -2), EXACT.load(problem.tensors["dS"])
    got = backward(q, k, v, gc, beta[..., 0], S, do, dS)
    for tile in (0, 1, 3):  # tiles 0-2 are the first sequence, 3-4 the second
        assert close(S[tile + 1], got["S_out"][tile], 2**-8)
        assert close(dS[tile], got["dS_in"][tile + 1], 2**-8)
    assert not close(S[3], got["S_out"][2], 0.1)


@pytest.mark.parametrize(("arguments", "message"), [
    (([], 1, 0), "number of sequences is 0"),
    (([4, 0], 1, 0), "length of sequence 1 is 0"),
    (([4], 0, 0), "heads is 0"),
    (([4], 1, 0, -1), "C is -1"),
    (([4], 1, 0, 4, 0), "D is 0"),
])  # fmt: skip
def test_bad_sizes_are_refused(arguments, message):
    with pytest.raises(SimError, match=message):
        make_problem(*arguments)


# ---- what the kernels must give ------------------------------------------------------------------------------


def test_outputs_have_the_shapes_the_kernels_write():
    problem = make_problem([9, 4], heads=2, seed=0, C=4, D=8)
    for kernel, formulas in KERNELS.items():
        results, outputs = formulas(problem), kernel_outputs(problem, kernel)
        assert {name: results[name].shape for name in OUTPUTS[kernel]} == {n: x.shape for n, x in outputs.items()}
        assert all(x.dtype == np.float32 for x in outputs.values())
        assert all(np.isnan(x).all() for name, x in outputs.items() if name != "dA_log")
        assert not outputs.get("dA_log", np.zeros(1)).any()


def test_handed_on_tensors_are_the_expected_outputs_rounded_to_fp32():
    problem = make_problem([20], heads=2, seed=0)
    for kernel in ("b1", "b2"):
        results = KERNELS[kernel](problem)
        for name in OUTPUTS[kernel]:
            assert np.array_equal(problem.tensors[name], results[name].astype(np.float32))


def test_the_split_gives_the_whole_gradient():
    """Rounding of U, M and INV aside, B1, B2, B3 in a row give each sequence's gradient, phantom rows or not."""
    problem = make_problem([37, 3], heads=2, seed=3)
    x = {name: EXACT.load(y) for name, y in problem.tensors.items()}
    results = {**b1(problem), **b2(problem), **b3(problem)}
    dA_log = np.zeros(2)
    for tile, (start, rows) in enumerate(zip(x["tile_start"].astype(int), x["tile_rows"].astype(int), strict=True)):
        of_tile = {name: x[name][start : start + rows].swapaxes(0, 1) for name in ("q", "k", "v", "gc", "do", "beta")}
        S, dS = x["S_in"][tile].swapaxes(-1, -2), x["dS"][tile]  # a chunk of exactly the rows that exist
        whole = backward(**{n: y for n, y in of_tile.items() if n != "do"}, S=S, do=of_tile["do"], dS=dS)
        dA_log += whole["dA_log"]
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            got = results[name][start : start + rows].swapaxes(0, 1)
            assert np.linalg.norm(got - whole[name]) <= 0.01 * np.linalg.norm(whole[name]), (tile, name)
    assert close(results["dA_log"], dA_log, 0.01)


def test_phantom_rows_read_nothing():
    problem = make_problem([5, 6], heads=2, seed=4, C=4, D=8)
    alone = make_problem([5], heads=2, seed=4, C=4, D=8)
    shared = {name: problem.tensors[name] for name in problem.tensors}
    for name, x in alone.tensors.items():  # the first sequence of `problem`, without what lies behind it
        shared[name] = problem.tensors[name][: len(x)]
    cut = replace(alone, tensors=shared)
    for kernel, formulas in KERNELS.items():
        for name in set(OUTPUTS[kernel]) - {"dA_log"}:
            expected = formulas(cut)[name]
            assert np.array_equal(formulas(problem)[name][: len(expected)], expected), name


# ---- the bounds ----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    heads=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
    D=st.sampled_from([8, 32, 128]),
)
def test_kernel_arithmetic_stays_within_the_bounds(lengths, heads, seed, D):
    problem = make_problem(lengths, heads, seed, D=D)
    for formulas in KERNELS.values():
        exact, bound = formulas(problem), formulas(problem, BOUND)
        for arithmetic in (KERNEL, SINGLE):
            for name, actual in formulas(problem, arithmetic).items():
                assert actual.dtype == np.float32
                assert np.array_equal(bound[name].value, exact[name]) or close(bound[name].value, exact[name], 1e-12)
                assert bound[name].holds(actual).all(), name


def test_bounds_are_tight_enough_to_mean_something():
    problem = make_problem([50], heads=2, seed=0)
    for kernel, formulas in KERNELS.items():
        bound = formulas(problem, BOUND)
        for name in set(OUTPUTS[kernel]) - {"dA_log"}:  # a sum over all tokens and channels: loose
            size = np.sqrt((bound[name].value ** 2).mean())
            assert np.median(bound[name].error) <= 0.03 * size, name


def broken(problem, **tensors):
    return replace(problem, tensors=problem.tensors | tensors)


@pytest.mark.parametrize(("kernel", "change", "outputs"), [
    ("b2", lambda x: {"S_in": x["S_in"].swapaxes(-1, -2)}, ("dqd_base", "dkd_base", "kdS", "p")),
    ("b1", lambda x: {"dS": x["dS"].swapaxes(-1, -2)}, ("dkr", "dU", "dvcorr", "dv")),
    ("b1", lambda x: {"INV": x["INV"].swapaxes(-1, -2)}, ("dvcorr", "dv")),
    ("b1", lambda x: {"gc": x["gc"] * np.float32(LN2)}, ("dU", "dvcorr", "dv")),
    ("b1", lambda x: {"beta": np.roll(x["beta"], 1, 0)}, ("dv",)),
    ("b3", lambda x: {"dkd_base": -x["dkd_base"]}, ("dk", "dg")),
    ("b3", lambda x: {"p": 0 * x["p"]}, ("dg",)),
    ("b3", lambda x: {"dkr": 0 * x["dkr"]}, ("dk", "dg")),
])  # fmt: skip
def test_a_wrong_kernel_breaks_the_bounds(kernel, change, outputs):
    problem = make_problem([48], heads=2, seed=0)
    bound = KERNELS[kernel](problem, BOUND)
    actual = KERNELS[kernel](broken(problem, **change(problem.tensors)), KERNEL)
    for name in outputs:
        assert bound[name].holds(actual[name]).mean() < 0.5, name


def test_dA_log_follows_the_dg_that_was_written():
    """The tight check on dA_log: fp32 error only, where its own bound admits all of bf16's."""
    problem = make_problem([37, 21], heads=3, seed=0)
    gc = EXACT.load(problem.tiled("gc")) * LN2
    g = np.diff(gc, axis=-2, prepend=0).swapaxes(1, 2)[problem.exists]
    got = b3(problem, KERNEL)
    terms = got["dg"] * g
    assert (np.abs(got["dA_log"] - terms.sum((0, 2))) <= 1e-6 * np.abs(terms).sum((0, 2))).all()


def test_every_input_matters():
    """A kernel that ignored one of its inputs would not pass."""
    problem = make_problem([20], heads=1, seed=0)
    for kernel, formulas in KERNELS.items():
        bound = formulas(problem, BOUND)
        for name in INPUTS[kernel]:
            x = problem.tensors[name]
            actual = formulas(broken(problem, **{name: (x.astype(np.float32) * 0.5).astype(x.dtype)}), KERNEL)
            if name in ("q", "k"):  # normalised: a factor would cancel
                actual = formulas(broken(problem, **{name: x[..., ::-1]}), KERNEL)
            assert not all(bound[out].holds(actual[out]).all() for out in OUTPUTS[kernel]), (kernel, name)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), depth=st.integers(1, 40), scale=st.floats(-6, 6))
def test_bounded_contains_fp32_and_bf16_evaluation(seed, rows, depth, scale):
    random = np.random.default_rng(seed)
    a, b = (np.float32(2**scale * random.standard_normal(shape)) for shape in ((rows, depth), (depth, rows)))
    A, B = Bounded(a), Bounded(b)
    cases = [
        (A @ B, a @ b),
        (BOUND.narrow(A) @ BOUND.narrow(B), KERNEL.narrow(a) @ KERNEL.narrow(b)),
        (BOUND.narrow(BOUND.narrow(A) @ B), KERNEL.narrow(KERNEL.narrow(a) @ b)),
        (A.sum(-1), a[..., ::-1].cumsum(-1, dtype=np.float32)[..., -1]),
        (BOUND.narrow(A) * B.swapaxes(0, 1) - A, KERNEL.narrow(a) * b.T - a),
        (BOUND.rsqrt((A * A).sum(-1) + NORM_EPS), ((a * a).sum(-1) + np.float32(NORM_EPS)) ** np.float32(-0.5)),
        (BOUND.exp2(-A * 2.0**-scale), np.exp2(-a * np.float32(2.0**-scale))),
    ]
    for bounded, actual in cases:
        assert actual.dtype == np.float32
        assert bounded.holds(actual).all()


def test_bounded_refuses_what_lies_outside():
    x = Bounded(np.array([1.0, 1.0, 1.0]), 0.25)
    assert x.holds([0.75, 1.26, np.nan]).tolist() == [True, False, False]


def test_intermediates_made_a_few_tiles_at_a_time_are_those_of_all_tiles_at_once():
    problem = make_problem([150, 7, 61], heads=2, seed=1, C=2, D=8)  # 110 tiles, two of a single row
    assert len(problem.exists) > TILES_AT_ONCE
    for kernel, formulas in (("b1", b1), ("b2", b2)):
        whole = formulas(problem)
        for name in OUTPUTS[kernel]:
            assert np.array_equal(problem.tensors[name], whole[name].astype(np.float32)), name
