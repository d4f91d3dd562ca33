"""KDA backward B1, the dS side: dkr = U dS^T, dU = M^T do + kr dS, dvcorr = INV^T dU, dv = dvcorr beta.

Mathematics, inputs, outputs and bounds: :mod:`kernels_py.kda_reference`. CUDA twin: ``validation/cuda/kda_b1.cu``.
One CTA of 256 threads a (tile, head): blockIdx.x the tile, blockIdx.y the head; C = 16 tokens, D = 128 channels.

Roles. Warp w owns columns 16w .. 16w + 15 of every [16, 128] product, as two n8 tiles: dkr's are keys, dU's and
dvcorr's values. Row-wise work gives thread ``tid`` row tid / 16 and the 8 elements from column (tid % 16) * 8 on. The
way out gives a warp rows 2w and 2w + 1, a lane 4 columns of each.

Steps. dS, M, INV, U and do by cp.async, one group. Meanwhile R1 rebuilds kr from raw k and gc, and each lane fetches
beta of its accumulators' rows. Wait, barrier, the four products; the results are staged in fp32 [16, 128] tiles,
barrier, and leave in whole rows. Phantom rows are neither read nor written in global memory; those of U, do and kr
are zeros in shared memory (0 times whatever lay there could be NaN).

Operands. A by ldmatrix.x4: U and kr as they lie; M and INV transposed by ``.trans``. B by ldmatrix.x4, two n8 tiles
at once: do and, for kr dS, dS by ``.trans``; for U dS^T, dS plain. dS is stored once: the plain read sees the K-INTER
atom tiled column-first, [key, value], the transposed read the MN-INTER atom tiled row-first, [value, key]. dU is in
registers as an accumulator; as B of the next product it is narrowed to bf16 and transposed 8x8 by 8x8.

Shared memory in bytes: dS 32,768; U, do, kr 4,096 each (K-SW128: whole rows go in without conflicts); M, INV 512 each
(K-INTER); dU 4,096 unless ``movm``; three stages of 16 x stage_stride floats, over dS if ``union``. The documents'
"about 74 KB" is ``roundtrip``: 73.0 KB, and 73.75 with the stride of 132 that they padded to.

B0. ``l12`` folds it in: p from dS while it is resident, S streaming (:func:`kernels_py.kda_b0.p_from_dS`).

All variants add the same products in the same order: their outputs are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from kernels_py.kda_b0 import p_from_dS
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
from kernels_py.kda_reference import BOUND, NORM_EPS, OUTPUTS, Bounded, Problem, b1, b2, kernel_inputs, kernel_outputs
from simgpu.errors import SimError
from simgpu.launch import Launch, kernel
from simgpu.tensor import GlobalTensor, bfloat16, float32, int32

MOST_STRIDE = 1024  # of a stage, in floats: past it three stages exceed any block's shared memory

@dataclass(frozen=True)
class Form:
    """What distinguishes the variants; the parameters of :data:`kda_b1` say what each field means.

    Raises SimError for a value the kernel does not have.
    """

    movm: int = 1
    stage_stride: int = 136
    stage_vec: int = 2
    swizzle: int = 0
    diagonal: int = 0
    union: int = 0
    b0: int = 0

    def __post_init__(self):
        for name in ("movm", "stage_vec", "swizzle", "diagonal", "union", "b0"):
            legal = (1, 2) if name == "stage_vec" else (0, 1)
            if getattr(self, name) not in legal:
                raise SimError(f"kda_b1: {name} is {getattr(self, name)}; it is {legal[0]} or {legal[1]}")
        if self.diagonal and self.swizzle:
            raise SimError("kda_b1: diagonal 1 is the copy into INTER atoms; with swizzle 1 there are none")
        if not D <= self.stage_stride <= MOST_STRIDE or self.stage_stride % 4:
            raise SimError(f"kda_b1: stage_stride is {self.stage_stride}; it is a multiple of 4 (rows leave 16 bytes a "
                           f"lane) from {D} to {MOST_STRIDE}")


VARIANTS = {
    "roundtrip": {"movm": 0, "stage_stride": 128, "stage_vec": 1},
    "movm": {"stage_stride": 128, "stage_vec": 1},
    "pad132": {"stage_stride": 132, "stage_vec": 1},
    "float2": {},
    "sw128": {"swizzle": 1},
    "diagonal": {"diagonal": 1},
    "union": {"union": 1},
    "union_sw128": {"union": 1, "swizzle": 1},
    "l12": {"stage_stride": 128, "stage_vec": 1, "b0": 1},
}

# Of a thread, from ptxas 13.0 for sm_90 on the CUDA twin; none of them spills.
REGISTERS = {
    Form(**VARIANTS[variant]): registers
    for registers, variants in {52: ["diagonal"], 54: ["roundtrip", "float2", "union", "l12"], 56: ["movm", "pad132"],
                                60: ["sw128", "union_sw128"]}.items()
    for variant in variants
}


@kernel(**VARIANTS)
def kda_b1(*, tokens: int = 1000, sequences: int = 1, heads: int = 4, seed: int = 0, movm: int = 1,
           stage_stride: int = 136, stage_vec: int = 2, swizzle: int = 0, diagonal: int = 0, union: int = 0,
           b0: int = 0) -> Launch:
    """KDA backward B1, the dS side: dkr, dvcorr and dv of one (tile, head) a CTA, and with B0 folded in p as well.

    ``sequences`` of ``tokens`` tokens each lie packed; where 16 does not divide ``tokens``, their last tiles have
    phantom rows. ``movm`` 1: dU is transposed in registers by movmatrix, 0: through shared memory, read back 2 bytes
    at a time. ``stage_stride``: floats from row to row of a stage; ``stage_vec``: floats that a store of accumulators
    into it moves (1, 2). ``swizzle`` 1: dS under the SW128 atoms, not INTER. ``diagonal`` 1: its copy into
    INTER atoms is cp.async.ca along diagonals, not cp.async.cg along rows. ``union`` 1: the stages lie over dS, at the
    price of one barrier more. ``b0`` 1: p too, from dS where it lies and S_in streaming.
    """
    form = Form(movm, stage_stride, stage_vec, swizzle, diagonal, union, b0)
    check_sizes("kda_b1", tokens, sequences, heads, seed)
    problem = partial(packed_problem, tokens, sequences, heads, seed)
    tiles = tile_table(tokens, sequences)
    count, rows = len(tiles[0]), (tokens * sequences, heads, D)
    small, state = (count, heads, C, C), (count, heads, D, D)
    inputs = {"tile_start": (int32, (count,)), "tile_rows": (int32, (count,)), "k": (bfloat16, rows),
              "gc": (float32, rows), "beta": (bfloat16, rows[:2]), "do": (bfloat16, rows), "U": (bfloat16, rows),
              "M": (bfloat16, small), "INV": (bfloat16, small), "dS": (bfloat16, state)}
    args = [GlobalTensor(name, dtype, shape, init=lambda name=name: kernel_inputs(problem(), "b1")[name])
            for name, (dtype, shape) in inputs.items()]
    args += [GlobalTensor(name, float32, rows, init=lambda name=name: kernel_outputs(problem(), "b1")[name])
             for name in OUTPUTS["b1"]]
    of_b0 = [GlobalTensor("S_in", bfloat16, state, init=lambda: kernel_inputs(problem(), "b2")["S_in"]),
             GlobalTensor("p", float32, state[:3], init=lambda: kernel_outputs(problem(), "b2")["p"])]
    return Launch(dS_side, grid=(count, heads), block=THREADS, args=(*args, form, tiles, *(of_b0 if b0 else ())),
                  registers=REGISTERS.get(form),
                  check=lambda arrays: within_bounds("kda_b1", expected(problem(), b0), arrays))


def expected(problem: Problem, b0: int) -> dict[str, Bounded]:
    """What the kernel must give, a Bounded for each output; p where B0 is folded in.

    >>> list(expected(packed_problem(5, 1, heads=1, seed=0), b0=1))
    ['dkr', 'dvcorr', 'dv', 'p']
    """
    results = b1(problem, BOUND)
    return {name: results[name] for name in OUTPUTS["b1"]} | ({"p": b2(problem, BOUND)["p"]} if b0 else {})


# ---- the CTA -----------------------------------------------------------------------------------------------------


def dS_side(cta, tile_start, tile_rows, k, gc, beta, do, U, M, INV, dS, dkr, dvcorr, dv, form: Form, tiles,
            S_in=None, p=None):
    tile, head = cta.bx, cta.by
    cta.load(tile_start[tile], site="tile.start.load")
    cta.load(tile_rows[tile], site="tile.rows.load")
    # Where the tiles lie is the host's doing, so the emulator need not read memory to know it: addresses-only runs.
    start, rows = tiles[0][tile], tiles[1][tile]
    smem = Smem(cta, form)

    (copy_diagonals if form.diagonal else copy_state)(cta, smem.dS, dS, tile, head)
    copy_square(cta, smem.M, M, tile, head, warp=0)
    copy_square(cta, smem.INV, INV, tile, head, warp=1)
    copy_rows(cta, ((smem.U, U), (smem.do, do)), start, rows, head)
    cta.cp_async_commit()
    rebuild_kr(cta, smem.kr, k, gc, start, rows, head)
    betas = []
    for half in range(2):  # the rows of a lane's accumulators; a phantom row takes the last row's: nobody stores its dv
        row = np.minimum(cta.lane // 4 + 8 * half, rows - 1)
        betas.append(cta.load(beta[start + row, head], site="beta.load").astype(float32)[..., None])
    cta.cp_async_wait(0)
    cta.sync()

    dkr_sums = times_dS_transposed(cta, smem)
    dU_sums = times_dS(cta, smem)
    dvcorr_sums = times_dU(cta, smem, dU_sums, form.movm)
    dv_sums = [np.concatenate([sums[..., :2] * betas[0], sums[..., 2:] * betas[1]], -1) for sums in dvcorr_sums]

    if form.b0:
        p_from_dS(cta, smem.dS, S_in, p, tile, head)

    if form.union:
        cta.sync()  # every warp is done with dS, whose bytes the stages take
    for which, sums in enumerate((dkr_sums, dvcorr_sums, dv_sums)):
        stage_sums(cta, smem.stage, which, sums, form.stage_vec)
    cta.sync()
    for i in range(2):
        row, column = 2 * cta.warp + i, 4 * cta.lane
        with cta.where(row < rows):
            for which, out in enumerate((dkr, dvcorr, dv)):
                four = cta.load(smem.stage[which, row, column], vec=4, site="stage.load")
                cta.store(out[start + row, head, column], four, vec=4, site=f"{out.name}.store")


class Smem:
    """The shared tensors. ``dS`` is [key, value]; ``dS_t``, [value, key], is the same bytes seen transposed."""

    def __init__(self, cta, form: Form):
        plain, transposed = (tiled(atom, (D, D), order) for atom, order in STATE_VIEWS[form.swizzle])
        self.dS = cta.shared("dS", bfloat16, (D, D), plain, align=1024)
        self.dS_t = cta.shared("dS_t", bfloat16, (D, D), transposed, alias_of=self.dS)
        rows, square = tiled("K-SW128", (C, D)), tiled("K-INTER", (C, C))
        self.U, self.do, self.kr = (cta.shared(name, bfloat16, (C, D), rows, align=1024) for name in ("U", "do", "kr"))
        self.M, self.INV = (cta.shared(name, bfloat16, (C, C), square) for name in ("M", "INV"))
        self.dU = None if form.movm else cta.shared("dU", bfloat16, (C, D))
        self.stage = cta.shared("stage", float32, (3, C, form.stage_stride), alias_of=self.dS if form.union else ())


# ---- into shared memory ------------------------------------------------------------------------------------------


def copy_diagonals(cta, to, source, tile, head):
    """dS into INTER atoms: eight lanes take eight chunks of as many rows, and of as many columns.

    The eight rows of an atom share a 128-byte line of shared memory, where the eight chunks of a row's 128 bytes share
    its banks; cp.async.ca moves eight lanes at once when neither repeats. The XOR keeps the warp's four chunks of a row
    neighbours: whole sectors.
    """
    lane = cta.lane
    for i in range(D * D // 8 // THREADS):
        key = 8 * (cta.warp + i // 4 * 8) + lane % 8
        value = 64 * (i // 2 % 2) + 8 * (lane % 8 ^ (lane // 8 + i % 2 * 4))
        cta.cp_async(to[key, value], source[tile, head, key, value], cache="ca", site="dS.cp")


def copy_square(cta, to, source, tile, head, warp: int):
    """A [16, 16] tile is 32 chunks: one a lane of one warp."""
    with cta.where(cta.warp == warp):
        row, column = cta.lane // 2, cta.lane % 2 * 8
        cta.cp_async(to[row, column], source[tile, head, row, column], site=f"{source.name}.cp")


def copy_rows(cta, pairs, start, rows, head):
    """U and do; phantom rows become zeros."""
    row, column = cta.tid // 16, cta.tid % 16 * 8
    with cta.where(row < rows):
        for to, source in pairs:
            cta.cp_async(to[row, column], source[start + row, head, column], site=f"{source.name}.cp")
    with cta.where(row >= rows):
        for to, _ in pairs:
            cta.store(to[row, column], np.zeros(8, bfloat16), vec=8, site="phantom.zero")


def rebuild_kr(cta, to, k, gc, start, rows, head):
    """R1: kr = k / |k| e^(gT - gc) of the thread's 8 elements; 16 lanes share a row and its norm."""
    row, column = cta.tid // 16, cta.tid % 16 * 8
    with cta.where(row < rows):
        x = cta.load(k[start + row, head, column], vec=8, site="R1.k.load").astype(float32)
        gates = [cta.load(gc[start + row, head, column + 4 * i], vec=4, site="R1.gc.load") for i in range(2)]
        lasts = [cta.load(gc[start + rows - 1, head, column + 4 * i], vec=4, site="R1.gT.load") for i in range(2)]
    squares = cta.warp_sum((x * x).sum(-1), 16)
    norm = np.float32(1) / np.sqrt(squares + np.float32(NORM_EPS))
    decay = np.exp2(np.concatenate(lasts, -1) - np.concatenate(gates, -1))
    kr = x * norm[..., None] * decay
    cta.store(to[row, column], kr.astype(bfloat16), vec=8, site="R1.kr.store")  # a phantom row is zeros


# ---- the products: lists of two n8 tiles, float32 [c, w, 32, 4] each ---------------------------------------------


def times_dS_transposed(cta, smem: Smem) -> list:
    """dkr = U dS^T: k runs along dS's values, which are contiguous, so the read is plain."""
    lane, sums = cta.lane, zeros(cta)
    key = 16 * cta.warp + lane // 16 * 8 + lane % 8
    for value in range(0, D, 16):
        a = cta.ldmatrix(smem.U[lane % 16, value + lane // 16 * 8], site="U.ldsm")
        b = cta.ldmatrix(smem.dS[key, value + lane // 8 % 2 * 8], site="dS.ldsm")
        sums = multiply(cta, a, b, sums)
    return sums


def times_dS(cta, smem: Smem) -> list:
    """dU = M^T do + kr dS: k runs along rows of do and dS, so both are read transposed."""
    lane = cta.lane
    value = 16 * cta.warp + lane // 16 * 8
    b = cta.ldmatrix(smem.do[lane % 16, value], trans=True, site="do.ldsm.trans")
    sums = multiply(cta, transposed_square(cta, smem.M), b, zeros(cta))
    for key in range(0, D, 16):
        a = cta.ldmatrix(smem.kr[lane % 16, key + lane // 16 * 8], site="kr.ldsm")
        b = cta.ldmatrix(smem.dS_t[value, key + lane % 16], trans=True, site="dS.ldsm.trans")
        sums = multiply(cta, a, b, sums)
    return sums


def times_dU(cta, smem: Smem, dU_sums: list, movm: int) -> list:
    """dvcorr = INV^T dU. A warp needs only the columns of dU that it holds itself."""
    narrow = [sums.astype(bfloat16) for sums in dU_sums]
    if movm:
        tiles = [[cta.movmatrix(tile[..., :2]), cta.movmatrix(tile[..., 2:])] for tile in narrow]
    else:
        tiles = round_trip(cta, smem.dU, narrow)
    b = np.stack([register for tile in tiles for register in tile], -2)
    return multiply(cta, transposed_square(cta, smem.INV), b, zeros(cta))


def round_trip(cta, dU, narrow: list) -> list:
    """Pairs along a row go in, pairs along a column are wanted: two rows, so every element is a load."""
    g, t = cta.lane // 4, cta.lane % 4
    for j, tile in enumerate(narrow):
        for half in range(2):
            pair = tile[..., 2 * half:2 * half + 2]
            cta.store(dU[g + 8 * half, 16 * cta.warp + 8 * j + 2 * t], pair, vec=2, site="dU.store")
    # The CUDA twin has __syncwarp() here: the other lanes' pairs are this warp's own.
    return [[np.stack([cta.load(dU[2 * t + 8 * half + i, 16 * cta.warp + 8 * j + g], site="dU.load")
                       for i in range(2)], -1) for half in range(2)] for j in range(2)]


def transposed_square(cta, square):
    """The A fragment of a [16, 16] tile's transpose."""
    lane = cta.lane
    return cta.ldmatrix(square[lane // 16 * 8 + lane % 8, lane // 8 % 2 * 8], trans=True,
                        site=f"{square.name}.ldsm.trans")
