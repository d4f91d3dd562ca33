"""KDA backward B2, the S_in side: dqd_base = do S^T, dkd_base = dvcorr S^T, kdS = kd S, dbeta's part from kdS; and B0.

Mathematics, inputs, outputs and bounds: :mod:`kernels_py.kda_reference`. CUDA twin: ``validation/cuda/kda_b2.cu``.
One CTA of 256 threads a (tile, head): blockIdx.x the tile, blockIdx.y the head; C = 16 tokens, D = 128 channels.

Roles. Warp w owns columns 16w .. 16w + 15 of every [16, 128] product, as two n8 tiles: those of dqd_base and dkd_base
are keys, those of kdS values. Row-wise work gives thread ``tid`` row tid / 16 and the 8 elements from column
(tid % 16) * 8 on. The way out gives a warp rows 2w and 2w + 1, a lane 4 columns of each.

Steps. S and do by cp.async, one group. Meanwhile R1 rebuilds kd from raw k and gc; dvcorr arrives in fp32, is kept so
for dbeta and narrowed to bf16 for the mma; v waits in 4 registers. Wait, barrier. Both products with S^T share their B
fragments; then kd S, then p (:mod:`kernels_py.kda_b0`). The three products lie staged in fp32 [16, 128] tiles, barrier;
dqd_base and dkd_base leave in whole rows, and 16 lanes sum dvcorr (v - kdS) of a row. Phantom rows are neither read nor
written in global memory: wherever one would be read, the last row that exists is read in its place. Every row of every
product is its own, so the copies hurt nobody, and no access has a predicate but the way out.

Operands. A by ldmatrix.x4: do, dvcorr and kd as they lie. B by ldmatrix.x4, two n8 tiles at once. S is stored once,
[value, key]: kd S reads it plain, through the K-INTER view; S^T is read by ``.trans`` through the MN-INTER view of the
same bytes, [key, value]. ``sinfix`` 0 is the bug that the documents tell of: all three products through the one K-INTER
view, which makes do S of do S^T. As many instructions, no conflict more: only the values tell, where S is not 0. So its
check refuses every run with values, and only ``--mode addresses`` gives the table of a small grid.

p. ``b0`` 1: a warp a key, dS in four 2-byte loads 32 apart, S 2 bytes at a time; 4 (``l13``) and 8: that many
neighbours a load. 2: no shared memory at all. The fragment of S^T gives lane (g, t) S[2t, g] and S[2t + 1, g] of every
8x8 matrix, so the lane loads the matching pair of dS and multiplies; two shuffles at the end add up a key. 0: no B0
here, the separate kernel does it.

Shared memory in bytes: S 32,768; do, dvcorr, kd 4,096 each (bf16, K-SW128: whole rows go in without conflicts); dvcorr,
dqd_base, dkd_base, kdS 64 x stage_stride each (fp32). ``union`` 0: side by side, 76.0 KB with stride 128 and 77.0 with
132. 1: kdS over do and dvcorr, which are dead after the products, at the price of a barrier: 68.0 KB. A padded kdS is
longer than those two and reaches into kd, as dead. 2: all three stages over S, only dvcorr beside it: 52.5 KB with
stride 136, and a fourth CTA fits. The documents have 78.9 and 68.1 KB. Their 10.8 KB between the two are more than one
kdS tile, 8 KB, so their unaliased kernel held something else besides, which they do not name; 0.1 KB of the union is
what 16 values of beta or dbeta take, which here stay in registers.

All variants but ``sinbug`` add the same products in the same order: dqd_base, dkd_base and dbeta_part are the same
bits. p sums in an order that follows ``b0``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from kernels_py.kda_b0 import p_by_warp
from kernels_py.kda_b1 import MOST_STRIDE
from kernels_py.kda_common import (
    STATE_VIEWS,
    THREADS,
    C,
    D,
    check_sizes,
    copy_state,
    multiply,
    packed_problem,
    stage_sums,
    tile_table,
    tiled,
    within_bounds,
    zeros,
)
from kernels_py.kda_reference import BOUND, NORM_EPS, OUTPUTS, Bounded, Problem, b2, kernel_inputs, kernel_outputs
from simgpu.errors import SimError
from simgpu.launch import Launch, kernel
from simgpu.tensor import GlobalTensor, bfloat16, float32, int32


@dataclass(frozen=True)
class Form:
    """What distinguishes the variants; the parameters of :data:`kda_b2` say what each field means.

    Raises SimError for a value the kernel does not have.

    >>> Form(**VARIANTS["scalar"]).narrow
    1
    """

    sinfix: int = 1
    union: int = 1
    narrow: int = 8
    b0: int = 1
    stage_stride: int = 128
    swizzle: int = 0

    def __post_init__(self):
        legal = {"sinfix": (0, 1), "union": (0, 1, 2), "narrow": (1, 8), "b0": (0, 1, 2, 4, 8), "swizzle": (0, 1)}
        for name, values in legal.items():
            if getattr(self, name) not in values:
                raise SimError(f"kda_b2: {name} is {getattr(self, name)}; it is one of {', '.join(map(str, values))}")
        if self.b0 == 2 and not self.sinfix:
            raise SimError("kda_b2: b0 2 takes S from the fragments of S^T, which sinfix 0 does not have")
        if not D <= self.stage_stride <= MOST_STRIDE or self.stage_stride % 4:
            raise SimError(f"kda_b2: stage_stride is {self.stage_stride}; it is a multiple of 4 (rows leave 16 bytes a "
                           f"lane) from {D} to {MOST_STRIDE}")


# kdsunion and vec are one kernel, that of the defaults: where the union, and where the narrowing, has arrived.
VARIANTS = {
    "sinbug": {"sinfix": 0, "union": 0, "narrow": 1},
    "sinfix": {"union": 0, "narrow": 1},
    "noalias": {"union": 0},
    "scalar": {"narrow": 1},
    "kdsunion": {},
    "vec": {},
    "nob0": {"b0": 0},
    "l13": {"b0": 4},
    "l13_16bytes": {"b0": 8},
    "frag": {"b0": 2},
    "pad136": {"b0": 2, "stage_stride": 136},
    "sw128": {"b0": 2, "stage_stride": 136, "swizzle": 1},
    "sunion": {"b0": 2, "stage_stride": 136, "swizzle": 1, "union": 2},
}

# Of a thread, from ptxas 13.0 for sm_90 on the CUDA twin; none of them spills.
REGISTERS = {
    Form(**VARIANTS[variant]): registers
    for registers, variants in {60: ["sinfix", "noalias", "scalar", "kdsunion", "nob0", "l13"], 68: ["l13_16bytes"],
                                63: ["sinbug"], 64: ["frag", "pad136", "sw128", "sunion"]}.items()
    for variant in variants
}


@kernel(**VARIANTS)
def kda_b2(*, tokens: int = 1000, sequences: int = 1, heads: int = 4, seed: int = 0, sinfix: int = 1, union: int = 1,
           narrow: int = 8, b0: int = 1, stage_stride: int = 128, swizzle: int = 0) -> Launch:
    """KDA backward B2, the S_in side, with B0: dqd_base, dkd_base, dbeta_part and p of one (tile, head) a CTA.

    ``sequences`` of ``tokens`` tokens each lie packed; where 16 does not divide ``tokens``, their last tiles have
    phantom rows. ``sinfix`` 0: S^T is read as if it were S. ``union`` 1: kdS lies over do, dvcorr and kd; 2: all stages
    over S; 0: nothing over anything. ``narrow``: elements of dvcorr that a thread narrows at once (1, 8). ``b0``:
    elements of dS that a lane loads at once for p (1, 4, 8; 2: pairs that fit the fragments of S^T; 0: no p).
    ``stage_stride``: floats from row to row of the fp32 tiles. ``swizzle`` 1: S under the SW128 atoms, not INTER.
    """
    form = Form(sinfix, union, narrow, b0, stage_stride, swizzle)
    check_sizes("kda_b2", tokens, sequences, heads, seed)
    problem = partial(packed_problem, tokens, sequences, heads, seed)
    tiles = tile_table(tokens, sequences)
    count, rows = len(tiles[0]), (tokens * sequences, heads, D)
    state = (count, heads, D, D)
    inputs = {"tile_start": (int32, (count,)), "tile_rows": (int32, (count,)), "k": (bfloat16, rows),
              "gc": (float32, rows), "v": (bfloat16, rows), "do": (bfloat16, rows), "dvcorr": (float32, rows),
              "S_in": (bfloat16, state), "dS": (bfloat16, state)}
    outputs = {"dqd_base": rows, "dkd_base": rows, "dbeta_part": rows[:2], "p": state[:3]}
    tensors = {name: GlobalTensor(name, dtype, shape, init=lambda name=name: kernel_inputs(problem(), "b2")[name])
               for name, (dtype, shape) in inputs.items()}
    tensors |= {name: GlobalTensor(name, float32, shape, init=lambda name=name: kernel_outputs(problem(), "b2")[name])
                for name, shape in outputs.items()}
    of_b0 = tensors.pop("dS"), tensors.pop("p")
    args = *tensors.values(), form, tiles, *(of_b0 if b0 else ())
    return Launch(S_side, grid=(count, heads), block=THREADS, args=args,
                  registers=REGISTERS.get(form),
                  check=lambda arrays: within_bounds("kda_b2", expected(problem(), b0), arrays))


def expected(problem: Problem, b0: int) -> dict[str, Bounded]:
    """What the kernel must give, a Bounded for each output; no p where it leaves B0 to another kernel.

    >>> list(expected(packed_problem(5, 1, heads=1, seed=0), b0=0))
    ['dqd_base', 'dkd_base', 'dbeta_part']
    """
    results = b2(problem, BOUND)
    return {name: results[name] for name in OUTPUTS["b2"] if b0 or name != "p"}


# ---- the CTA -----------------------------------------------------------------------------------------------------


def S_side(cta, tile_start, tile_rows, k, gc, v, do, dvcorr, S_in, dqd_base, dkd_base, dbeta_part, form: Form, tiles,
           dS=None, p=None):
    tile, head = cta.bx, cta.by
    cta.load(tile_start[tile], site="tile.start.load")
    cta.load(tile_rows[tile], site="tile.rows.load")
    # Where the tiles lie is the host's doing, so the emulator need not read memory to know it: addresses-only runs.
    start, rows = tiles[0][tile], tiles[1][tile]
    row, column = cta.tid // 16, cta.tid % 16 * 8
    token = start + np.minimum(row, rows - 1)
    smem = Smem(cta, form)

    copy_state(cta, smem.S, S_in, tile, head)
    cta.cp_async(smem.do[row, column], do[token, head, column], site="do.cp")
    cta.cp_async_commit()
    rebuild_kd(cta, smem.kd, k, gc, token, head)
    (narrow_eight if form.narrow == 8 else narrow_singly)(cta, smem, dvcorr, token, head)
    own_v = cta.load(v[token, head, column], vec=8, site="v.load").astype(float32)
    cta.cp_async_wait(0)
    cta.sync()

    dqd_sums, dkd_sums, key_sums = times_S_transposed(cta, smem, form, dS, tile, head)
    kdS_sums = times_S(cta, smem)
    if form.b0 == 2:
        store_key_sums(cta, key_sums, p, tile, head)
    elif form.b0:
        p_by_warp(cta, smem.S, dS, p, tile, head, form.b0)

    if form.union:
        cta.sync()  # every warp is done with the operands, whose bytes the stages take
    for stage, sums in zip(smem.stages, (dqd_sums, dkd_sums, kdS_sums), strict=True):
        stage_sums(cta, *stage, sums)
    cta.sync()
    for i in range(2):
        out_row, out_column = 2 * cta.warp + i, 4 * cta.lane
        with cta.where(out_row < rows):
            for (stage, which), out in zip(smem.stages, (dqd_base, dkd_base), strict=False):
                four = cta.load(stage[which, out_row, out_column], vec=4, site="stage.load")
                cta.store(out[start + out_row, head, out_column], four, vec=4, site=f"{out.name}.store")
    with cta.where(2 * cta.warp < rows):  # warps whose rows are both phantom are done
        part = dbeta_of_eight(cta, smem, own_v, row, column)
        with cta.where((cta.tid % 16 == 0) & (row < rows)):
            cta.store(dbeta_part[token, head], part, site="dbeta_part.store")


class Smem:
    """The shared tensors. ``S`` is [value, key]; ``S_t``, [key, value], is the same bytes seen transposed."""

    def __init__(self, cta, form: Form):
        plain, transposed = (tiled(atom, (D, D), order) for atom, order in STATE_VIEWS[form.swizzle])
        self.S = cta.shared("S", bfloat16, (D, D), plain, align=1024)
        self.S_t = cta.shared("S_t", bfloat16, (D, D), transposed, alias_of=self.S)
        narrow = tiled("K-SW128", (C, D))
        self.do, self.dvcorr, self.kd = (cta.shared(name, bfloat16, (C, D), narrow, align=1024)
                                         for name in ("do", "dvcorr", "kd"))
        wide = C, form.stage_stride
        self.dvcorr_wide = cta.shared("dvcorr_wide", float32, wide)
        if form.union == 1:
            pair = cta.shared("stage", float32, (2, *wide))
            single = cta.shared("kdS", float32, (1, *wide), alias_of=(self.do, self.dvcorr, self.kd))
            self.stages = (pair, 0), (pair, 1), (single, 0)  # of dqd_base, dkd_base and kdS
        else:
            triple = cta.shared("stage", float32, (3, *wide), alias_of=self.S if form.union else ())
            self.stages = tuple((triple, i) for i in range(3))


# ---- into shared memory ------------------------------------------------------------------------------------------


def rebuild_kd(cta, to, k, gc, token, head):
    """R1: kd = k / |k| e^gc of the thread's 8 elements; 16 lanes share a row and its norm."""
    row, column = cta.tid // 16, cta.tid % 16 * 8
    x = cta.load(k[token, head, column], vec=8, site="R1.k.load").astype(float32)
    gates = [cta.load(gc[token, head, column + 4 * i], vec=4, site="R1.gc.load") for i in range(2)]
    squares = cta.warp_sum((x * x).sum(-1), 16)
    norm = np.float32(1) / np.sqrt(squares + np.float32(NORM_EPS))
    kd = x * norm[..., None] * np.exp2(np.concatenate(gates, -1))
    cta.store(to[row, column], kd.astype(bfloat16), vec=8, site="R1.kd.store")


def narrow_eight(cta, smem: Smem, dvcorr, token, head):
    """dvcorr into its fp32 and its bf16 tile, the thread's 8 elements as vectors."""
    row, column = cta.tid // 16, cta.tid % 16 * 8
    halves = [cta.load(dvcorr[token, head, column + 4 * i], vec=4, site="dvcorr.load") for i in range(2)]
    for i in range(2):
        cta.store(smem.dvcorr_wide[row, column + 4 * i], halves[i], vec=4, site="dvcorr.wide.store")
    cta.store(smem.dvcorr[row, column], np.concatenate(halves, -1).astype(bfloat16), vec=8, site="dvcorr.bf16.store")


def narrow_singly(cta, smem: Smem, dvcorr, token, head):
    """The same elements one column at a time: 16 lanes a row, 8 columns apart."""
    row = cta.tid // 16
    for column in (cta.tid % 16 * 8 + j for j in range(8)):
        x = cta.load(dvcorr[token, head, column], site="dvcorr.load")
        cta.store(smem.dvcorr_wide[row, column], x, site="dvcorr.wide.store")
        cta.store(smem.dvcorr[row, column], x.astype(bfloat16), site="dvcorr.bf16.store")


# ---- the products: lists of two n8 tiles, float32 [c, w, 32, 4] each ---------------------------------------------


def times_S_transposed(cta, smem: Smem, form: Form, dS, tile, head) -> tuple[list, list, list]:
    """dqd_base = do S^T and dkd_base = dvcorr S^T: k runs along S's values, which are its rows, so the read is
    transposed. Also, for ``b0`` 2, each lane's part of p of the two keys that its fragments belong to."""
    lane, g, t = cta.lane, cta.lane // 4, cta.lane % 4
    dqd, dkd, parts = zeros(cta), zeros(cta), [np.float32(0)] * 2
    for value in range(0, D, 16):
        key = 16 * cta.warp + lane // 16 * 8
        if form.sinfix:
            b = cta.ldmatrix(smem.S_t[key, value + lane % 16], trans=True, site="S.base.ldsm")
        else:  # the plain view takes the keys for rows
            b = cta.ldmatrix(smem.S[key + lane % 8, value + lane // 8 % 2 * 8], site="S.base.ldsm")
        at = lane % 16, value + lane // 16 * 8
        dqd = multiply(cta, cta.ldmatrix(smem.do[at], site="do.ldsm"), b, dqd)
        dkd = multiply(cta, cta.ldmatrix(smem.dvcorr[at], site="dvcorr.ldsm"), b, dkd)
        if form.b0 == 2:
            for j in range(2):
                for half in range(2):
                    own = 16 * cta.warp + 8 * j + g, value + 8 * half + 2 * t
                    x = cta.load(dS[(tile, head, *own)], vec=2, site="p.dS.load").astype(float32)
                    x = x * b[..., 2 * j + half, :].astype(float32)
                    parts[j] = parts[j] + x[..., 0] + x[..., 1]
    return dqd, dkd, parts


def times_S(cta, smem: Smem) -> list:
    """kdS = kd S: k runs along S's keys, which are contiguous, so the read is plain."""
    lane, sums = cta.lane, zeros(cta)
    value = 16 * cta.warp + lane // 16 * 8 + lane % 8
    for key in range(0, D, 16):
        a = cta.ldmatrix(smem.kd[lane % 16, key + lane // 16 * 8], site="kd.ldsm")
        b = cta.ldmatrix(smem.S[value, key + lane // 8 % 2 * 8], site="S.kdS.ldsm")
        sums = multiply(cta, a, b, sums)
    return sums


def store_key_sums(cta, parts: list, p, tile, head):
    """p of key 8j + g of the warp: four lanes hold parts of it; lane t = j stores."""
    g, t = cta.lane // 4, cta.lane % 4
    first, second = (cta.warp_sum(part, 4) for part in parts)
    with cta.where(t < 2):
        cta.store(p[tile, head, 16 * cta.warp + 8 * np.minimum(t, 1) + g], np.where(t == 0, first, second),
                  site="p.store")


# ---- out of shared memory ----------------------------------------------------------------------------------------


def dbeta_of_eight(cta, smem: Smem, v, row, column):
    """The row's sum of dvcorr (v - kdS), in every one of its 16 lanes."""
    kdS, which = smem.stages[2]
    total = np.float32(0)
    for i in range(2):
        wide = cta.load(smem.dvcorr_wide[row, column + 4 * i], vec=4, site="dbeta.dvcorr.load")
        product = wide * (v[..., 4 * i:4 * i + 4] - cta.load(kdS[which, row, column + 4 * i], vec=4,
                                                             site="dbeta.kdS.load"))
        for j in range(4):
            total = total + product[..., j]
    return cta.warp_sum(total, 16)
