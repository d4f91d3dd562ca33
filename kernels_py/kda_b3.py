"""B3 of the Kimi Delta Attention backward pass: chunk space, then K1 (L2-norm backward, reverse cumulative sum).

One CTA of 256 threads does one (chunk tile, head): C = 16 tokens, D = 128. What it computes, and from what, is
:func:`kernels_py.kda_reference.b3`; the CUDA twin is ``validation/cuda/kda_b3.cu``. In order:

* stage: cp.async of do, U, q (bf16) and gc into shared memory, as one group; dqd_base, dkr and p as a second.
* R1, before the wait: thread i owns row i / 16 and the 8 columns from 8 (i % 16). It loads k, gc and dvcorr from global
  memory, takes the row's norm by shuffles among 16 lanes and stores kd, ki and dvcorr as bf16 tiles; after the wait it
  takes its q from the tile. Raw q and k stay in registers.
* products: warp w < 6 makes columns 8 (w % 2) .. + 8 of dM = do U^T, -dL = dvcorr U^T or F = kd ki^T (w / 2): 8 mma
  over D, operands by ldmatrix.x4, masked (triangle and phantom rows) on the way to shared memory.
* R1b: qd, kd, ki in fp32. ``union``: over the bf16 tiles, which are dead now; otherwise beside them.
* epilogue: dqd = dqd_base + dM ki, dki = dM^T qd + dF^T kd and dF ki, all fp32, 2,048 outputs each.
* K1: 16 lanes a row; then a thread a column adds up dg, and dA_log goes to global memory by atomics.

Phantom rows: wherever a row is read, the last row that exists is read in its place, so gc[15] is gT; the masks and K1
turn what follows from the copies into zeros, and stores are predicated.

Bytes. Six bf16 tiles or three fp32 ones 24 KB; gc, dqd, dki, dkd, dkr in fp32 40 KB; dM, dL, F, dL beta 4 KB; p, beta,
dbeta and the norms 768 B: 68.75 KB, the documents' number. Without the union 24 KB more. The documents' 100.75 KB have
8 KB beyond that: here they are bf16 copies of qd and kr, which nobody reads and ``opt2`` removes. The sixth tile is q,
which registers could hold; the union would not shrink, its three fp32 tiles set its size.

The rungs, each with everything before it: ``l6``; ``opt2``; ``l7`` (union); ``fold`` (dkd finished in K1, not in a pass
of its own); ``vec8``, ``l7c`` (K1's accesses); ``l8`` (epilogue of 4 columns a thread); ``atomics`` (8, not 256);
``a1d`` (outputs [T, H, D], not [H, T, D]). Up to ``vec8`` dq, dk, dg and dbeta are the same bits; ``l7c`` sums a row in
another order (dq, dk change), and from there on they are the same bits again. dA_log follows the order of its atomics.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kernels_py.kda_b3_chunk import Plan, chunk_space
from kernels_py.kda_common import THREADS, D, check_sizes, packed_problem, tile_table, within_bounds
from kernels_py.kda_reference import BOUND, OUTPUTS, Problem, b3, kernel_inputs
from simgpu.launch import Launch, kernel
from simgpu.tensor import GlobalTensor, bfloat16, float32, int32

# Registers per thread, by ``union`` (ptxas of CUDA 13.0 for sm_90, no spills): what the compiler takes, and what
# __launch_bounds__ leaves it where 3 CTAs are to fit.
REGISTERS = (96, 80)


def ladder() -> dict[str, dict[str, int]]:
    """The rungs: each takes one more step of the table below.

    >>> ladder()["l7"]["union"], ladder()["l6"]["union"]
    (1, 0)
    """
    rung = dict.fromkeys(("union", "opt2", "epilogue", "k1", "fold", "warp_atomics", "native"), 0)
    steps = {"l6": {}, "opt2": {"opt2": 1}, "l7": {"union": 1}, "fold": {"fold": 1}, "vec8": {"k1": 1},
             "l7c": {"k1": 2}, "l8": {"epilogue": 1}, "atomics": {"warp_atomics": 1}, "a1d": {"native": 1}}
    return {name: dict(rung := rung | step) for name, step in steps.items()}


@kernel(**ladder())
def kda_b3(*, tokens: int = 1000, sequences: int = 1, heads: int = 4, seed: int = 0, union: int = 1, opt2: int = 1,
           opt7: int = 1, epilogue: int = 1, k1: int = 2, fold: int = 1, warp_atomics: int = 1, native: int = 1,
           tile: int = 2, scratch_stride: int = 128) -> Launch:
    """KDA backward, chunk space and K1: dq, dk, dg, dbeta, dA_log from what B1 and B2 leave.

    ``sequences`` of ``tokens`` tokens each. ``union`` 1: fp32 operands over the dead bf16 tiles. ``opt2`` 0: with the
    unused bf16 copies. ``opt7`` 0: K1 computes the norms again. ``epilogue`` 0: one output a thread and step, 1: four.
    ``k1`` 0: scalars 8 columns apart, 1: two float4 at 8i, 2: two float4 at 4i and 4i + 64. ``fold`` 0: a pass of its
    own ends dkd. ``warp_atomics`` 0: an atomic a thread. ``native`` 0: outputs [H, T, D]. ``tile``, the bf16 tiles: 0
    row-major, 1 K-INTER, 2 K-SW128. ``scratch_stride``: words from row to row of the fp32 tiles gc, dqd, dki, dkd, dkr.
    Raises SimError for a size below 1 and for a choice there is no code for.
    """
    plan = Plan(union, opt2, opt7, epilogue, k1, fold, warp_atomics, native, tile, scratch_stride)
    check_sizes("kda_b3", tokens, sequences, heads, seed)
    problem = partial(packed_problem, tokens, sequences, heads, seed)
    start, rows = tile_table(tokens, sequences)
    T, H, tiles = tokens * sequences, heads, len(start)
    shapes = {"tile_start": (tiles,), "tile_rows": (tiles,), "beta": (T, H), "dbeta_part": (T, H), "p": (tiles, H, D)}
    kinds = {"tile_start": int32, "tile_rows": int32} | dict.fromkeys(("q", "k", "beta", "do", "U"), bfloat16)
    names = ("tile_start", "tile_rows", "q", "k", "gc", "beta", "do", "U", "dvcorr", "dkr", "dqd_base", "dkd_base",
             "dbeta_part", "p")
    inputs = [GlobalTensor(name, kinds.get(name, float32), shapes.get(name, (T, H, D)),
                           init=partial(_input, problem, name)) for name in names]
    outputs = [GlobalTensor(name, float32, (T, H, D) if native else (H, T, D)) for name in ("dq", "dk", "dg")]
    outputs += [GlobalTensor("dbeta", float32, (T, H)),
                GlobalTensor("dA_log", float32, (H,), init=lambda: np.zeros(H, np.float32))]
    return Launch(chunk_space, grid=(tiles, heads), block=THREADS, args=(plan, start, rows, *inputs, *outputs),
                  registers=REGISTERS[union], check=lambda arrays: is_gradient(problem(), native, arrays))


def _input(problem, name: str) -> np.ndarray:
    return kernel_inputs(problem(), "b3")[name]


def is_gradient(problem: Problem, native: int, arrays) -> bool:
    """Whether every output is within the reference's rounding bound."""
    turned = () if native else ("dq", "dk", "dg")
    found = {name: arrays[name].swapaxes(0, 1) if name in turned else arrays[name] for name in OUTPUTS["b3"]}
    results = b3(problem, BOUND)
    return within_bounds("kda_b3", {name: results[name] for name in OUTPUTS["b3"]}, found)
