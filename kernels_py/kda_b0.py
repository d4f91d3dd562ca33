"""KDA backward B0: p[k] = sum_d dS[k, d] S_in[d, k], the part of the gate's gradient that needs both states.

Mathematics, inputs and bounds: :mod:`kernels_py.kda_reference`. CUDA twins: ``validation/cuda/kda_b0.cu`` and, inside
B1 and B2, ``kda_b1.cu`` and ``kda_b2.cu``. One CTA of 256 threads a (tile, head). The diagonal of a matrix product: dS
is read along its rows, S_in along its columns, so one of the two has to be in shared memory.

By warp. Warp w owns keys 16w .. 16w + 15 and takes them one after another. A lane multiplies 4 pairs, the warp adds
them up by butterfly; lane i keeps the sum of key i, and 16 lanes store 64 bytes at the end. Where the lanes' values d
lie: ``width`` 1, four loads 32 apart, each a coalesced 64 bytes of dS; 4, one load of 4 neighbours (``l13``). Four
bf16 are 8 bytes; for the 16 bytes that the documents name, ``width`` 8 gives half a warp a key and a lane 8 pairs.
The other operand's elements are 2-byte loads in any case, and the choice moves their banks.

``b0alone``: a kernel of its own, S copied into shared memory as B2 does, dS streaming. ``l12``: dS is the resident
state, as in B1, and S streams: a lane's elements are rows apart, 256 bytes. Here that stands alone, with B1's copy of
dS in front; ``kda_b1@l12`` is the fold.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kernels_py.kda_common import (
    THREADS,
    D,
    check_sizes,
    copy_state,
    packed_problem,
    tile_table,
    tiled,
    within_bounds,
)
from kernels_py.kda_reference import BOUND, b2, kernel_inputs, kernel_outputs
from simgpu.errors import SimError
from simgpu.launch import Launch, kernel
from simgpu.tensor import GlobalTensor, bfloat16, float32

REGISTERS = 32  # of a thread in every variant, from ptxas 13.0 for sm_90 on the CUDA twin
KEYS = D * 32 // THREADS  # of a warp
VIEW = tiled("K-INTER", (D, D))  # of the state in shared memory


@kernel(b0alone={}, l13={"width": 4}, l13_16bytes={"width": 8}, l12={"l12": 1})
def kda_b0(*, tokens: int = 1000, sequences: int = 1, heads: int = 4, seed: int = 0, width: int = 1,
           l12: int = 0) -> Launch:
    """KDA backward B0 by itself: p of one (tile, head) a CTA.

    ``sequences`` of ``tokens`` tokens each. ``width``: neighbouring elements of dS that a lane loads at once (1, 4, 8).
    ``l12`` 1: dS is in shared memory and S streams, as B0 folded into B1 would have it; ``width`` is 1 then.
    Raises SimError for a size below 1 and for a choice there is no code for.
    """
    check_sizes("kda_b0", tokens, sequences, heads, seed)
    if width not in (1, 4, 8) or l12 not in (0, 1) or (l12 and width != 1):
        raise SimError(f"kda_b0: width is {width}, l12 is {l12}; width is 1, 4 or 8, l12 0 or 1, and 1 needs width 1")
    problem = partial(packed_problem, tokens, sequences, heads, seed)
    tiles = len(tile_table(tokens, sequences)[0])
    args = [GlobalTensor(name, bfloat16, (tiles, heads, D, D),
                         init=lambda name=name: kernel_inputs(problem(), "b2")[name]) for name in ("S_in", "dS")]
    args.append(GlobalTensor("p", float32, (tiles, heads, D), init=lambda: kernel_outputs(problem(), "b2")["p"]))
    return Launch(from_dS_resident if l12 else from_S_resident, grid=(tiles, heads), block=THREADS, args=(*args, width),
                  registers=REGISTERS,
                  check=lambda arrays: within_bounds("kda_b0", {"p": b2(problem(), BOUND)["p"]}, arrays))


# ---- the CTA ---------------------------------------------------------------------------------------------------------


def resident(cta, name: str, state):
    """The CTA's square of ``state``, copied to shared memory and there for all to read."""
    square = cta.shared(name, bfloat16, (D, D), VIEW, align=1024)
    copy_state(cta, square, state, cta.bx, cta.by)
    cta.cp_async_commit()
    cta.cp_async_wait(0)
    cta.sync()
    return square


def from_S_resident(cta, S_in, dS, p, width: int):
    S = resident(cta, "S", S_in)
    p_by_warp(cta, S, dS, p, cta.bx, cta.by, width)


def from_dS_resident(cta, S_in, dS, p, width: int):
    shared = resident(cta, "shared_dS", dS)
    p_from_dS(cta, shared, S_in, p, cta.bx, cta.by)


def p_from_dS(cta, dS, S_in, p, tile, head):
    """p from dS [key, value] in shared memory and S_in [.., value, key] in global memory, its rows 256 bytes apart."""
    mine = np.zeros((1, 1, 32), np.float32)
    for i in range(KEYS):
        key, total = KEYS * cta.warp + i, np.float32(0)
        for j in range(4):
            value = cta.lane + 32 * j
            x = cta.load(dS[key, value], site="p.dS.load").astype(float32)
            total = total + x * cta.load(S_in[tile, head, value, key], site="p.S.load").astype(float32)
        mine = np.where(cta.lane == i, cta.warp_sum(total), mine)
    with cta.where(cta.lane < KEYS):
        cta.store(p[tile, head, KEYS * cta.warp + cta.lane], mine, site="p.store")


def p_by_warp(cta, S, dS, p, tile, head, width: int):
    """p from S [value, key] in shared memory and dS [.., key, value] in global memory, ``width`` elements a load."""
    lanes = 32 if width < 8 else 16  # of a key
    part, slot = cta.lane // lanes, cta.lane % lanes
    mine = np.zeros((1, 1, 32), np.float32)
    for i in range(KEYS * lanes // 32):
        key, total = KEYS * cta.warp + i * 32 // lanes + part, np.float32(0)
        for first in (slot + 32 * j for j in range(4)) if width == 1 else (width * slot,):
            x = cta.load(dS[tile, head, key, first], vec=width, site="p.dS.load").astype(float32)
            for j in range(width):
                s = cta.load(S[first + j, key], site="p.S.load").astype(float32)
                total = total + (x if width == 1 else x[..., j]) * s
        mine = np.where(slot == i, cta.warp_sum(total, lanes), mine)
    with cta.where(slot < KEYS * lanes // 32):
        cta.store(p[tile, head, KEYS * cta.warp + slot * 32 // lanes + part], mine, site="p.store")
