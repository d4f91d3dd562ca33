"""One CTA's share of a bf16 GEMM: how tiles enter shared memory and how fragments leave it.

Tile 128x128x32, 256 threads = 8 warps as 2 (along M) x 4 (along N), warp tile 64x32, mma.m16n8k16, float32 sums. A
stage of shared memory holds As[128][32], then Bs[32][128] (``b_layout`` 0, global B is [K][N]) or Bs[128][32]
(``b_layout`` 1, global B is [N][K]). ``swizzle`` permutes the 16-byte chunks of a row. CUDA twin:
``validation/cuda/gemm_tile.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simgpu.errors import SimError
from simgpu.tensor import bfloat16

TILE_M, TILE_N, TILE_K, THREADS = 128, 128, 32, 256


@dataclass(frozen=True)
class Rung:
    """How tiles are loaded (0: through registers, 1: cp.async), fragments read (0: ld.shared, 1: ldmatrix), B stored.

    Raises SimError for a value the ladder does not have.
    """

    load_mode: int = 1
    read_mode: int = 0
    b_layout: int = 0
    stages: int = 3
    swizzle: int = 1
    staged: int = 0

    def __post_init__(self):
        for name, value in vars(self).items():
            low, high = (1, 4) if name == "stages" else (0, 1)
            if not low <= value <= high:
                raise SimError(f"{name} is {value}; it is {low} to {high}")


# The ablation A1 to A3, and the older form of the ladder.
RUNGS = {
    "A1": {},
    "A2": {"b_layout": 1},
    "A2L": {"read_mode": 1, "b_layout": 1},
    "A3": {"read_mode": 1},
    "naive": {"load_mode": 0, "stages": 1, "swizzle": 0},
    "bcf": {"load_mode": 0, "stages": 1},
    "bcf_dbf": {"load_mode": 0, "stages": 2},
    "bcf_dbf_rw": {"load_mode": 0, "stages": 2, "staged": 1},
}


def rows_of_32(swizzle: int):
    """Layout of rows of 32 elements (64 bytes): the chunk is XORed with bits 1 and 2 of the row."""
    return (lambda row, column: 32 * row + (column ^ (row >> 1 & 3) << 3)) if swizzle else None


def rows_of_128(swizzle: int):
    """Layout of rows of 128 elements (256 bytes): the chunk is XORed with the lowest three bits of the row."""
    return (lambda row, column: 128 * row + (column ^ (row & 7) << 3)) if swizzle else None


class Tiles:
    """The k-tiles in shared memory, and what a thread moves of them.

    16-byte chunks ``tid`` and ``tid + 256`` of A, then of B, in row-major order of the unswizzled tile.
    """

    def __init__(self, cta, a, b, m0, n0, rung: Rung):
        self.cta, self.a, self.b, self.m0, self.n0, self.rung = cta, a, b, m0, n0, rung
        self.stages = []
        for stage in range(rung.stages):
            tile_a = cta.shared(f"As{stage}", bfloat16, (TILE_M, TILE_K), rows_of_32(rung.swizzle))
            if rung.b_layout:
                tile_b = cta.shared(f"Bs{stage}", bfloat16, (TILE_N, TILE_K), rows_of_32(rung.swizzle))
            else:
                tile_b = cta.shared(f"Bs{stage}", bfloat16, (TILE_K, TILE_N), rows_of_128(rung.swizzle))
            self.stages.append((tile_a, tile_b))

    def _chunks(self, stage: int, k0: int, operand: str):
        """(shared, global) references of the two chunks of one operand's tile at k-tile ``k0 / 32``."""
        for i in range(2):
            chunk = self.cta.tid + THREADS * i
            row, column = chunk // 4, chunk % 4 * 8
            if operand == "A":
                yield self.stages[stage][0][row, column], self.a[self.m0 + row, k0 + column]
            elif self.rung.b_layout:
                yield self.stages[stage][1][row, column], self.b[self.n0 + row, k0 + column]
            else:
                row, column = chunk // 16, chunk % 16 * 8
                yield self.stages[stage][1][row, column], self.b[k0 + row, self.n0 + column]

    def copy_async(self, stage: int, k0: int) -> None:
        for to, source in self._chunks(stage, k0, "A"):
            self.cta.cp_async(to, source, site="A.cp")
        for to, source in self._chunks(stage, k0, "B"):
            self.cta.cp_async(to, source, site="B.cp")

    def load(self, k0: int) -> list:
        a = [self.cta.load(source, vec=8, site="A.ldg") for _, source in self._chunks(0, k0, "A")]
        return a + [self.cta.load(source, vec=8, site="B.ldg") for _, source in self._chunks(0, k0, "B")]

    def store(self, stage: int, registers: list) -> None:
        for (to, _), value in zip(self._chunks(stage, 0, "A"), registers[:2], strict=True):
            self.cta.store(to, value, vec=8, site="A.sts")
        for (to, _), value in zip(self._chunks(stage, 0, "B"), registers[2:], strict=True):
            self.cta.store(to, value, vec=8, site="B.sts")

    # ---- fragments ---------------------------------------------------------------------------------------------

    def fragments(self, stage: int, k0: int) -> tuple[list, list]:
        """A warp's operands of one k16 step: four of A [c, w, 32, 4, 2] and four of B [c, w, 32, 2, 2].

        With g = lane // 4 and t = lane % 4, a fragment of A holds the k pairs at (g, 2t), (g + 8, 2t), (g, 2t + 8),
        (g + 8, 2t + 8); one of B the k pairs 2t and 2t + 8 of column g.
        """
        warp_m, warp_n = self.warp_origin()
        read_a = self._ldmatrix_a if self.rung.read_mode else self._lds_a
        read_b = {(0, 0): self._lds_b, (0, 1): self._lds_bt, (1, 0): self._ldmatrix_b, (1, 1): self._ldmatrix_bt}[
            self.rung.read_mode, self.rung.b_layout]
        tile_a, tile_b = self.stages[stage]
        return ([read_a(tile_a, warp_m + 16 * mi, k0) for mi in range(4)],
                [read_b(tile_b, warp_n + 8 * ni, k0) for ni in range(4)])

    def warp_origin(self):
        """Row and column of the warp's 64x32 tile in the CTA's."""
        return self.cta.warp // 4 * 64, self.cta.warp % 4 * 32

    def _lds_a(self, tile, m, k0):
        g, t = self.cta.lane // 4, self.cta.lane % 4
        return np.stack([self.cta.load(tile[m + g + i % 2 * 8, k0 + 2 * t + i // 2 * 8], vec=2, site="A.lds")
                         for i in range(4)], -2)

    def _ldmatrix_a(self, tile, m, k0):
        lane = self.cta.lane
        return self.cta.ldmatrix(tile[m + lane % 16, k0 + lane // 16 * 8], 4, site="A.ldsm")

    def _lds_b(self, tile, n, k0):
        """k = 2t, 2t + 1, 2t + 8, 2t + 9 of one column lie in four rows, so four loads of 16 bits."""
        g, t = self.cta.lane // 4, self.cta.lane % 4
        half = [self.cta.load(tile[k0 + 2 * t + i % 2 + i // 2 * 8, n + g], site="B.lds") for i in range(4)]
        return np.stack([np.stack(half[:2], -1), np.stack(half[2:], -1)], -2)

    def _lds_bt(self, tile, n, k0):
        g, t = self.cta.lane // 4, self.cta.lane % 4
        return np.stack([self.cta.load(tile[n + g, k0 + 2 * t + i * 8], vec=2, site="B.lds") for i in range(2)], -2)

    def _ldmatrix_b(self, tile, n, k0):
        return self.cta.ldmatrix(tile[k0 + self.cta.lane % 16, n], 2, trans=True, site="B.ldsm")

    def _ldmatrix_bt(self, tile, n, k0):
        lane = self.cta.lane
        return self.cta.ldmatrix(tile[n + lane % 8, k0 + lane // 8 % 2 * 8], 2, site="B.ldsm")


def multiply(cta, sums: list, fragments: tuple[list, list]) -> None:
    """Add the products of all 4 x 4 tiles to ``sums``, a list [mi][ni] of float32 [c, w, 32, 4]."""
    a, b = fragments
    for mi in range(4):
        for ni in range(4):
            sums[mi][ni] = cta.mma(a[mi], b[ni], sums[mi][ni])
