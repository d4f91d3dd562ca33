"""Kimi Delta Attention backward in numpy: the mathematics, its split into B1, B2 and B3, how far bf16 may stray.

Names. C tokens a chunk, D channels of key and value, H heads, T tokens of all sequences, packed one after another. A
*tile* is one chunk of one sequence; the rows of a last tile past its sequence's end are *phantom*: not in memory, read
as zero, never written. One CTA does one (tile, head); tile i holds ``tile_rows[i]`` tokens from ``tile_start[i]`` on.

Forward of a chunk, q and k first divided by sqrt(sum x^2 + 1e-6), s = D^-1/2: kd = k e^gc, qd = q e^gc s,
ki = k e^-gc, kr = k e^(gT-gc); F = tril(kd ki^T, -1), L = F beta, INV = (I+L)^-1, M = tril(qd ki^T);
U = INV ((v - kd S) beta), o = qd S + M U, S' = e^gT S + kr^T U. S is [key, value]. dS is the gradient with respect to
S', the state a chunk hands on; dS_in = e^gT dS + qd^T do - kd^T dv is the dS of the chunk before. Settled here:

* Exponents. ``gc`` is stored in log2 units: cumsum(g) log2(e) within the tile, fp32, so e^gc is ``exp2(gc)`` as it
  stands. ``gT`` is gc of the last row that exists, and phantom rows read it too. dgc and dg are gradients with respect
  to natural gc and g, so they carry no ln 2.
* States. ``dS`` lies as [key, value], ``S_in`` as [value, key], row-major: only so are kd S and U dS^T the K-major
  reads, do S^T and kr dS the MN-major ones, and p[k] = sum_d dS[k,d] S_in[d,k]. B3 multiplies p by e^gT.
* Signs. dL = -tril(dvcorr U^T, -1). dkd_base = dvcorr S^T lacks -beta: B3 has dkd = (dL beta) ki - beta dkd_base.
* dL needs dvcorr, which B1 makes, so B3 forms dM, dL and F itself, from bf16 tiles do, U, dvcorr, kd, ki.
* Rounding. What an mma reads is bf16: kr, dU, kd, ki and dvcorr are rounded once, from fp32, just before. Everything
  else stays fp32, also B3's products of dM, dL with ki, qd, kd.
* Gate. g = -e^A_log[h] x, so dA_log[h] = sum of dg g over tokens and channels; summed by parts it is, per tile,
  ln 2 sum_d (sum_c gc dgc + gT dgT), which needs no differences of gc.

===================  =====  ================  =========================================================================
tensor               dtype  shape             read by, written by
===================  =====  ================  =========================================================================
tile_start, .._rows  int32  [tiles]           all read them; 1 <= tile_rows <= C
q, k, v, do          bf16   [T, H, D]         q b3; k b1 b2 b3; v b2; do b1 b2 b3 (q and k as given, not normalised)
beta                 bf16   [T, H]            b1 b3
gc                   fp32   [T, H, D]         b1 b2 b3
S_in, dS             bf16   [tiles, H, D, D]  S_in [value, key]: b2; dS [key, value]: b1 b2
U                    bf16   [T, H, D]         b1 b3
M, INV               bf16   [tiles, H, C, C]  b1: phantom rows are 0, and those of the identity
dvcorr, dkr          fp32   [T, H, D]         from b1; dvcorr to b2 b3, dkr to b3
dqd_base, dkd_base   fp32   [T, H, D]         from b2 to b3
dbeta_part, dbeta    fp32   [T, H]            from b2 to b3; from b3
p                    fp32   [tiles, H, D]     from b2 to b3
dv; dq, dk, dg       fp32   [T, H, D]         from b1; from b3
dA_log               fp32   [H]               from b3, which adds to it atomically: zero before
===================  =====  ================  =========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from ml_dtypes import bfloat16

from kernels_py.bounded import LN2, Bounded
from simgpu.errors import SimError

NORM_EPS = 1e-6
INPUTS = MappingProxyType({  # what a kernel reads, besides tile_start and tile_rows
    "b1": ("k", "gc", "beta", "do", "U", "M", "INV", "dS"),
    "b2": ("k", "gc", "v", "do", "dvcorr", "S_in", "dS"),
    "b3": ("q", "k", "gc", "beta", "do", "U", "dvcorr", "dkr", "dqd_base", "dkd_base", "dbeta_part", "p"),
})
OUTPUTS = MappingProxyType({  # what it writes; b1() .. b3() give more: what the CTA holds on the way
    "b1": ("dkr", "dvcorr", "dv"),
    "b2": ("dqd_base", "dkd_base", "dbeta_part", "p"),
    "b3": ("dq", "dk", "dg", "dbeta", "dA_log"),
})
TILES_AT_ONCE = 64  # in float64, the states of a tile and head and their products take half a megabyte
PER_TILE = ("S_in", "dS", "M", "INV", "p", "dM", "dL", "F")


@dataclass(frozen=True)
class Arithmetic:
    """How the formulas below are evaluated: ``load`` a stored array, ``narrow`` an mma operand to bf16."""

    load: Callable
    narrow: Callable = lambda x: x
    exp2: Callable = np.exp2
    rsqrt: Callable = lambda x: x**-0.5


EXACT = Arithmetic(lambda x: np.asarray(x, np.float64))
SINGLE = Arithmetic(lambda x: np.asarray(x, np.float32))
KERNEL = Arithmetic(SINGLE.load, lambda x: x.astype(bfloat16).astype(np.float32))
BOUND = Arithmetic(Bounded, lambda x: x._rounded(Bounded.BF16), Bounded.exp2, Bounded.rsqrt)


# ---- the chunk, forward and backward; every array may have leading dimensions ----------------------------------


def forward(q, k, v, gc, beta, S) -> dict[str, np.ndarray]:
    """One chunk. q, k, v, gc [..., C, D]; beta [..., C]; S [..., key, value]; all float32 or all float64.

    ``gc`` is cumsum(g, -2) / ln 2 of the natural log-decay g. Gives ``o`` and ``U`` [..., C, D], ``M`` and ``INV``
    [..., C, C], ``S_out`` [..., key, value].

    >>> x = np.ones((1, 2))
    >>> forward(x, x, x, 0 * x, np.ones(1), np.zeros((2, 2)))["o"].round(3).tolist()
    [[0.707, 0.707]]
    """
    a, beta = SINGLE if q.dtype == np.float32 else EXACT, beta[..., None]
    q, k = _normalised(a, q)[0], _normalised(a, k)[0]
    gT = gc[..., -1:, :]
    kd, qd, ki, kr = k * np.exp2(gc), q * np.exp2(gc) * q.shape[-1] ** -0.5, k * np.exp2(-gc), k * np.exp2(gT - gc)
    upto, before = (a.load(np.tri(q.shape[-2], k=diagonal)) for diagonal in (0, -1))
    M = qd @ _t(ki) * upto
    INV = np.linalg.inv(upto - before + kd @ _t(ki) * before * beta) * upto
    U = INV @ ((v - kd @ S) * beta)
    return {"o": qd @ S + M @ U, "U": U, "M": M, "INV": INV, "S_out": _t(np.exp2(gT)) * S + _t(kr) @ U}


def backward(q, k, v, gc, beta, S, do, dS) -> dict[str, np.ndarray]:
    """Gradients of sum(o do) + sum(S_out dS), by way of B1, B2 and B3; shapes as for :func:`forward`.

    ``dq``, ``dk``, ``dv`` and ``dg`` (of the natural g) [..., C, D], ``dbeta`` [..., C], ``dS_in`` [..., key, value],
    ``dA_log`` [...]; and, beside them, what the three kernels read and hold on the way.
    """
    a = SINGLE if q.dtype == np.float32 else EXACT
    x = {"q": q, "k": k, "v": v, "gc": gc, "beta": beta[..., None], "do": do, "S_in": _t(S), "dS": dS}
    x |= forward(q, k, v, gc, beta, S)
    for kernel, formulas in (("b1", _b1), ("b2", _b2), ("b3", _b3)):
        x |= formulas(a, **{name: x[name] for name in INPUTS[kernel]})
    kd, qd = (_normalised(a, y)[0] * np.exp2(gc) for y in (k, q))
    dS_in = _t(np.exp2(gc[..., -1:, :])) * dS + _t(qd) @ do * q.shape[-1] ** -0.5 - _t(kd) @ x["dv"]
    return x | {"beta": beta, "dbeta": x["dbeta"][..., 0], "dS_in": dS_in}


def _t(x):
    return x.swapaxes(-1, -2)


def _normalised(a: Arithmetic, x):
    """x / norm and 1 / norm of each row."""
    r = a.rsqrt((x * x).sum(-1, keepdims=True) + NORM_EPS)
    return x * r, r


def _b1(a, *, k, gc, beta, do, U, M, INV, dS):
    """The dS side."""
    kr = a.narrow(_normalised(a, k)[0] * a.exp2(gc[..., -1:, :] - gc))
    dU = _t(M) @ do + kr @ dS
    dvcorr = _t(INV) @ a.narrow(dU)
    return {"dkr": U @ _t(dS), "dU": dU, "dvcorr": dvcorr, "dv": dvcorr * beta}


def _b2(a, *, k, gc, v, do, dvcorr, S_in, dS):
    """The S_in side, and B0: p."""
    kdS = a.narrow(_normalised(a, k)[0] * a.exp2(gc)) @ _t(S_in)
    return {
        "dqd_base": do @ S_in,
        "dkd_base": a.narrow(dvcorr) @ S_in,
        "kdS": kdS,
        "dbeta_part": (dvcorr * (v - kdS)).sum(-1, keepdims=True),
        "p": (dS * _t(S_in)).sum(-1)[..., None, :],
    }


def _b3(a, *, q, k, gc, beta, do, U, dvcorr, dkr, dqd_base, dkd_base, dbeta_part, p):
    """Chunk space, then K1: reverse cumsum and the L2-norm backward."""
    (q, rq), (k, rk) = _normalised(a, q), _normalised(a, k)
    gT, scale = gc[..., -1:, :], q.shape[-1] ** -0.5
    up, down, rest = a.exp2(gc), a.exp2(-gc), a.exp2(gT - gc)
    qd, kd, ki, kr = q * up * scale, k * up, k * down, k * rest
    upto, before = (a.load(np.tri(q.shape[-2], k=diagonal)) for diagonal in (0, -1))

    dM = do @ _t(U) * upto
    dL = -(a.narrow(dvcorr) @ _t(U) * before)
    F = a.narrow(kd) @ _t(a.narrow(ki)) * before
    dF = dL * beta
    dqd = dqd_base + dM @ ki
    dki = _t(dM) @ qd + _t(dF) @ kd
    dkd = dF @ ki - dkd_base * beta
    dgT = a.exp2(gT) * p + (dkr * kr).sum(-2, keepdims=True)
    dgc = dkd * kd + dqd * qd - dki * ki - dkr * kr
    dq = dqd * up * scale
    dk = dkd * up + dki * down + dkr * rest
    return {
        "dM": dM, "dL": dL, "F": F, "dqd": dqd, "dki": dki, "dkd": dkd, "dgc": dgc,
        "dq": (dq - q * (q * dq).sum(-1, keepdims=True)) * rq,
        "dk": (dk - k * (k * dk).sum(-1, keepdims=True)) * rk,
        "dg": _t(upto) @ dgc + dgT,
        "dbeta": dbeta_part + (dL * F).sum(-1, keepdims=True),
        "dA_log": ((gc * dgc).sum(-2) + (gT * dgT)[..., 0, :]).sum(-1) * LN2,
    }  # fmt: skip


# ---- seeded inputs in the kernels' storage, and what each kernel must give --------------------------------------


@dataclass(frozen=True)
class Problem:
    """Inputs of the three kernels as they lie in memory: ``tensors`` by name, as in the table above.

    The states come from the recurrence over each sequence's chunks, the intermediates from the kernel before, each
    rounded to its storage type; what a kernel must give follows from what it reads, as rounded.
    """

    sequence_lengths: tuple[int, ...]
    C: int
    tensors: Mapping[str, np.ndarray]

    @property
    def exists(self) -> np.ndarray:
        """bool [tiles, C]: False for phantom rows."""
        return np.arange(self.C) < self.tensors["tile_rows"][:, None]

    def tiled(self, name: str) -> np.ndarray:
        """A tensor by tile: [tiles, H, C, D], beta [tiles, H, C, 1], p [tiles, H, 1, D]; phantom rows of gc are gT."""
        x, exists = self.tensors[name], self.exists
        if name in PER_TILE:
            return x[..., None, :] if name == "p" else x
        last = self.tensors["tile_rows"][:, None] - 1
        x = x.reshape(*x.shape[:2], -1)[self.tensors["tile_start"][:, None] + np.minimum(np.arange(self.C), last)]
        return (x if name == "gc" else np.where(exists[..., None, None], x, x.dtype.type(0))).swapaxes(1, 2)


def make_problem(sequence_lengths: Sequence[int], heads: int, seed: int, C: int = 16, D: int = 128) -> Problem:
    """Seeded :class:`Problem` for sequences of ``sequence_lengths`` tokens; a sequence's first S_in is not zero.

    Raises SimError for a length, ``heads``, ``C`` or ``D`` below 1, or no sequence.

    >>> tensors = make_problem([20], heads=2, seed=0).tensors
    >>> tensors["tile_rows"].tolist(), tensors["S_in"].shape, tensors["S_in"].dtype.name
    ([16, 4], (2, 2, 128, 128), 'bfloat16')
    """
    sizes = {"number of sequences": len(sequence_lengths), "heads": heads, "C": C, "D": D}
    sizes |= {f"length of sequence {i}": length for i, length in enumerate(sequence_lengths)}
    for name, value in sizes.items():
        if value < 1:
            raise SimError(f"kda problem: {name} is {value}, below 1")
    ends = np.cumsum(sequence_lengths)
    start = np.concatenate([np.arange(end - n, end, C) for n, end in zip(sequence_lengths, ends, strict=True)])
    rows = np.minimum(C, ends[np.searchsorted(ends, start, "right")] - start)
    shape, small, states = (int(ends[-1]), heads, D), (len(start), heads, C, C), (len(start), heads, D, D)
    random = np.random.default_rng(seed)
    q, k, v, do = (random.standard_normal(shape).astype(bfloat16) for _ in range(4))
    beta = (1 / (1 + np.exp(-random.standard_normal(shape[:2])))).astype(bfloat16)
    # A chunk decays by e^-0.3 to e^-3: enough to matter, not enough for a state to vanish.
    g = -random.uniform(0.02, 0.2, (heads, 1)) * np.log1p(np.exp(random.standard_normal(shape)))
    gc = np.concatenate([np.cumsum(g[s : s + n], 0) / LN2 for s, n in zip(start, rows, strict=True)])
    tensors = {
        "tile_start": start.astype(np.int32), "tile_rows": rows.astype(np.int32), "q": q, "k": k, "v": v, "do": do,
        "beta": beta, "gc": gc.astype(np.float32), "U": np.zeros(shape, bfloat16),
        "M": np.zeros(small, bfloat16), "INV": np.zeros(small, bfloat16),
        "S_in": np.zeros(states, bfloat16), "dS": np.zeros(states, bfloat16),
    }  # fmt: skip
    problem = Problem(tuple(sequence_lengths), C, tensors)
    _recur(problem, random, first=np.isin(start, ends - sequence_lengths), last=np.isin(start + rows, ends))
    for kernel, formulas in (("b1", b1), ("b2", b2)):
        outputs = kernel_outputs(problem, kernel)  # tiles at a time: float64 of all would be six times the tensors
        for first in range(0, len(start), TILES_AT_ONCE):
            part, tiles, tokens = _part(problem, first)
            for name, found in formulas(part).items():
                if name in outputs:
                    outputs[name][tiles if name in PER_TILE else tokens] = found
        tensors.update(outputs)
    return problem


def _part(problem: Problem, first: int) -> tuple[Problem, slice, slice]:
    """The problem of the tiles from ``first`` on, TILES_AT_ONCE at most; those tiles, and their tokens."""
    x = problem.tensors
    tiles = slice(first, first + TILES_AT_ONCE)
    own = {name: x[name][tiles] for name in ("tile_start", "tile_rows", *PER_TILE) if name in x}
    tokens = slice(own["tile_start"][0], own["tile_start"][-1] + own["tile_rows"][-1])
    return replace(problem, tensors={**x, **own}), tiles, tokens


def _recur(problem: Problem, random: np.random.Generator, first: np.ndarray, last: np.ndarray) -> None:
    """Walk each sequence's chunks: states, U, M and INV forwards, dS backwards, all into ``problem.tensors``."""
    x, state = problem.tensors, problem.tensors["S_in"].shape[1:]
    q, k, v, gc, beta, do = (EXACT.load(problem.tiled(name)) for name in ("q", "k", "v", "gc", "beta", "do"))
    for tile in range(len(first)):
        if first[tile]:
            S = 0.5 * random.standard_normal(state)
        x["S_in"][tile] = _t(S)
        S = EXACT.load(_t(x["S_in"][tile]))
        f = forward(q[tile], k[tile], v[tile], gc[tile], beta[tile, ..., 0], S)
        x["M"][tile], x["INV"][tile], S = f["M"], f["INV"], f["S_out"]
        begin, rows = x["tile_start"][tile], x["tile_rows"][tile]
        x["U"][begin : begin + rows] = f["U"][:, :rows].swapaxes(0, 1)
    for tile in reversed(range(len(last))):
        if last[tile]:
            dS = random.standard_normal(state)
        x["dS"][tile] = dS
        S, dS = EXACT.load(_t(x["S_in"][tile])), EXACT.load(x["dS"][tile])
        dS = backward(q[tile], k[tile], v[tile], gc[tile], beta[tile, ..., 0], S, do[tile], dS)["dS_in"]


def kernel_inputs(problem: Problem, kernel: str) -> dict[str, np.ndarray]:
    """The arrays that ``kernel`` ("b1", "b2" or "b3") reads, by name, in their storage types and shapes."""
    return {name: problem.tensors[name] for name in ("tile_start", "tile_rows", *INPUTS[kernel])}


def kernel_outputs(problem: Problem, kernel: str) -> dict[str, np.ndarray]:
    """Where ``kernel`` writes: fp32 arrays of the right shape, NaN so that an unwritten element shows; dA_log zero.

    >>> {name: x.shape for name, x in kernel_outputs(make_problem([5], 2, seed=0, C=4, D=8), "b2").items()}
    {'dqd_base': (5, 2, 8), 'dkd_base': (5, 2, 8), 'dbeta_part': (5, 2), 'p': (2, 2, 8)}
    """
    T, H, D = problem.tensors["k"].shape
    shapes = {"dbeta": (T, H), "dbeta_part": (T, H), "p": (len(problem.exists), H, D), "dA_log": (H,)}
    fill = {name: 0 if name == "dA_log" else np.nan for name in OUTPUTS[kernel]}
    return {name: np.full(shapes.get(name, (T, H, D)), value, np.float32) for name, value in fill.items()}


def b1(problem: Problem, arithmetic: Arithmetic = EXACT) -> dict[str, np.ndarray]:
    """B1 from its rounded inputs: ``dkr``, ``dvcorr``, ``dv``; and ``dU``, which stays on chip. All [T, H, D].

    ``arithmetic``: EXACT, float64; SINGLE, float32; KERNEL, float32 with bf16 mma operands; BOUND, a
    :class:`Bounded` per tensor, whose ``holds`` any faithful kernel satisfies.

    >>> problem = make_problem([5], heads=1, seed=0, C=4, D=8)
    >>> bool(b1(problem, BOUND)["dv"].holds(b1(problem, KERNEL)["dv"]).all())
    True
    """
    return _evaluate("b1", _b1, problem, arithmetic)


def b2(problem: Problem, arithmetic: Arithmetic = EXACT) -> dict[str, np.ndarray]:
    """B2, B0 folded in: ``dqd_base``, ``dkd_base``, ``dbeta_part``, ``p``; ``kdS`` [T, H, D] stays on chip."""
    return _evaluate("b2", _b2, problem, arithmetic)


def b3(problem: Problem, arithmetic: Arithmetic = EXACT) -> dict[str, np.ndarray]:
    """B3: ``dq``, ``dk``, ``dg``, ``dbeta``, ``dA_log``; on chip ``dM``, ``dL``, ``F`` [tiles, H, C, C] and
    ``dqd``, ``dki``, ``dkd``, ``dgc`` [T, H, D]. The bound of ``dA_log`` is loose, being a sum over all tokens and
    channels; hold a kernel's also against sum(dg g) of the dg it wrote."""
    return _evaluate("b3", _b3, problem, arithmetic)


def _evaluate(kernel: str, formulas: Callable, problem: Problem, a: Arithmetic) -> dict:
    results = formulas(a, **{name: a.load(problem.tiled(name)) for name in INPUTS[kernel]})
    return {name: _stored(problem, name, x) for name, x in results.items()}


def _stored(problem: Problem, name: str, x):
    """A result by tile as the kernel stores it: rows that exist, packed; dA_log summed over the tiles."""
    if name == "dA_log":
        return x.sum(0)
    if name in PER_TILE:
        return x[..., 0, :] if name == "p" else x
    x = x.swapaxes(1, 2)[problem.exists]
    return x[..., 0] if name in ("dbeta", "dbeta_part") else x
