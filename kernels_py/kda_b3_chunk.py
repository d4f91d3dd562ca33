"""The device side of B3: one CTA's chunk tile, stage by stage. :mod:`kernels_py.kda_b3` says what the stages do."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from kernels_py.kda_common import THREADS, C, D, tiled
from kernels_py.kda_reference import LN2, NORM_EPS
from simgpu.errors import SimError
from simgpu.layout import tabulate
from simgpu.tensor import Tensor, bfloat16, float32

DO, U, Q, DVCORR, KD, KI, QD_COPY, KR_COPY = range(8)  # bf16 tiles
GC, DQD, DKI, DKD, DKR = range(5)  # fp32 tiles
DM, DL, F, DF = range(4)  # [16, 16] matrices; DF is dL beta
OPERANDS, MASKS, SUMS = ("qd", "kd", "ki"), ((DM, "dM"), (DF, "dF")), {DQD: "dqd", DKI: "dki", DKD: "dkd"}
K1_TILES = ((GC, "gc"), (DQD, "dqd"), (DKI, "dki"), (DKD, "dkd"), (DKR, "dkr"))
TILE_LAYOUTS = (None, "K-INTER", "K-SW128")
SCALE, LN_2, EPS = np.float32(D**-0.5), np.float32(LN2), np.float32(NORM_EPS)


@dataclass(frozen=True)
class Plan:
    """The choices that make a variant. Raises SimError for a value there is no code for."""

    union: int
    opt2: int
    opt7: int
    epilogue: int
    k1: int
    fold: int
    warp_atomics: int
    native: int
    tile: int
    scratch_stride: int

    def __post_init__(self):
        for name, value in vars(self).items():
            most = 2 if name in ("k1", "tile") else 1
            if name != "scratch_stride" and not 0 <= value <= most:
                raise SimError(f"kda_b3: {name} is {value}; it is 0 to {most}")
        if self.scratch_stride < D or self.scratch_stride % 4:
            raise SimError(f"kda_b3: scratch_stride is {self.scratch_stride}, no multiple of 4 from {D} on")


def tile_layout(plan: Plan):
    """Element offsets of the bf16 tiles, [tiles, 16, 128]: 4 KB apart, each under the plan's layout."""
    name = TILE_LAYOUTS[plan.tile]
    table = tabulate(tiled(name, (C, D)) if name else None, (C, D))
    return lambda tile, row, column: C * D * tile + table[row, column]


def chunk_space(cta, plan: Plan, starts, counts, *tensors: Tensor):
    chunk = Chunk(cta, plan, starts, counts, SimpleNamespace(**{tensor.name: tensor for tensor in tensors}))
    chunk.stage()
    chunk.narrow_keys()
    cta.cp_async_wait(1)
    cta.sync()
    chunk.take_queries()
    if not plan.union:
        chunk.write_operands()
    chunk.products()
    cta.sync()  # dM, dL, F are there, and nobody reads the bf16 tiles any more
    if plan.union:
        chunk.write_operands()
    chunk.finish_beta()
    cta.cp_async_wait(0)
    cta.sync()
    (chunk.epilogue_by_four if plan.epilogue else chunk.epilogue_by_one)()
    cta.sync()
    if not plan.fold:
        chunk.finish_dkd()
        cta.sync()
    part = chunk.k1()
    cta.sync()
    chunk.columns(part)


def total(x):
    """The sum over the last axis (8 columns of a thread), first to last."""
    return sum((x[..., j] for j in range(1, 8)), x[..., 0])


class Chunk:
    """A CTA's tile: shared memory, the thread's place, and the stages in the order they run."""

    def __init__(self, cta, plan: Plan, starts, counts, g):
        self.cta, self.plan, self.g = cta, plan, g
        # Data that addresses follow from; the host knows them, so that a run without values can go on.
        for table in (g.tile_start, g.tile_rows):
            cta.load(table[cta.bx], site="tile.ldg")
        self.start, self.rows, self.head = starts[cta.bx], counts[cta.bx], cta.by
        self.row, self.column = cta.tid // 16, cta.tid % 16 * 8
        self.exists, self.leader = self.row < self.rows, cta.tid % 16 == 0

        tiles = 6 if plan.opt2 else 8
        self.tiles = cta.shared("tiles", bfloat16, (tiles, C, D), tile_layout(plan), align=1024)
        self.operands = cta.shared("operands", float32, (3, C, D), alias_of=self.tiles if plan.union else ())
        stride = plan.scratch_stride
        self.scratch = cta.shared("scratch", float32, (5, C, D), lambda tile, r, c: (C * tile + r) * stride + c)
        self.small = cta.shared("small", float32, (4, C, C))
        self.p = cta.shared("p", float32, (D,))
        self.beta, self.dbeta = cta.shared("beta", float32, (C,)), cta.shared("dbeta", float32, (C,))
        self.norms = cta.shared("norms", float32, (2, C)) if plan.opt7 else None

    def token(self, row):
        """The token of a row of the tile; the tile's last for a phantom row."""
        return self.start + np.minimum(row, self.rows - 1)

    # ---- into shared memory ----------------------------------------------------------------------------------------

    def stage(self):
        cta, g = self.cta, self.g
        token = self.token(self.row)
        for tile, source in ((DO, g.do), (U, g.U), (Q, g.q)):
            cta.cp_async(self.tiles[tile, self.row, self.column], source[token, self.head, self.column],
                         site=f"{source.name}.cp")
        self._stage_float(GC, g.gc)
        cta.cp_async_commit()
        self._stage_float(DQD, g.dqd_base)
        self._stage_float(DKR, g.dkr)
        with cta.where(cta.warp == 0):  # both halves of the warp load beta and dbeta_part: no lane is off
            cta.cp_async(self.p[4 * cta.tid], g.p[cta.bx, self.head, 4 * cta.tid % D], site="p.cp")
            row = cta.tid % C
            beta = cta.load(g.beta[self.token(row), self.head], site="beta.ldg")
            cta.store(self.beta[row], beta.astype(np.float32), site="beta.sts")
            part = cta.load(g.dbeta_part[self.token(row), self.head], site="dbeta.ldg")
            cta.store(self.dbeta[row], part, site="dbeta.sts")
        cta.cp_async_commit()

    def _stage_float(self, tile: int, source):
        for i in range(2):
            chunk = self.cta.tid + THREADS * i
            row, column = chunk // 32, chunk % 32 * 4
            self.cta.cp_async(self.scratch[tile, row, column], source[self.token(row), self.head, column],
                              site=f"{source.name}.cp")

    # ---- R1: normalise, scale by the decay, narrow -----------------------------------------------------------------

    def narrow_keys(self):
        cta, at = self.cta, (self.token(self.row), self.head, self.column)
        self.k = cta.load(self.g.k[at], vec=8, site="R1.k.ldg").astype(np.float32)
        gc = self._eight(lambda c: cta.load(self.g.gc[at[0], self.head, c], vec=4, site="R1.gc.ldg"))
        dvcorr = self._eight(lambda c: cta.load(self.g.dvcorr[at[0], self.head, c], vec=4, site="R1.dvcorr.ldg"))
        self.rk = self._reciprocal_norm(self.k)
        k = self.k * self.rk[..., None]
        self._narrow(DVCORR, dvcorr, "R1.dvcorr.sts")
        self._narrow(KD, k * np.exp2(gc), "R1.kd.sts")
        self._narrow(KI, k * np.exp2(-gc), "R1.ki.sts")

    def take_queries(self):
        """After the wait: the thread's q from its tile."""
        cta = self.cta
        self.q = cta.load(self.tiles[Q, self.row, self.column], vec=8, site="R1.q.lds").astype(np.float32)
        self.rq = self._reciprocal_norm(self.q)
        if self.plan.opt7:
            with cta.where(self.leader):
                for which, norm in enumerate((self.rq, self.rk)):
                    cta.store(self.norms[which, self.row], norm, site="R1.norm.sts")
        if not self.plan.opt2:
            gc = self._eight(lambda c: cta.load(self.scratch[GC, self.row, c], vec=4, site="R1.gc.lds"))
            gT = self._eight(lambda c: cta.load(self.scratch[GC, C - 1, c], vec=4, site="R1.gT.lds"))
            self._narrow(QD_COPY, self.q * self.rq[..., None] * np.exp2(gc) * SCALE, "R1.qd.sts")
            self._narrow(KR_COPY, self.k * self.rk[..., None] * np.exp2(gT - gc), "R1.kr.sts")

    def write_operands(self):
        """R1b: qd, kd and ki once more, in fp32."""
        cta = self.cta
        gc = self._eight(lambda c: cta.load(self.scratch[GC, self.row, c], vec=4, site="R1b.gc.lds"))
        up, q, k = np.exp2(gc), self.q * self.rq[..., None], self.k * self.rk[..., None]
        for operand, value in enumerate((q * up * SCALE, k * up, k * np.exp2(-gc))):
            for i in (0, 4):
                cta.store(self.operands[operand, self.row, self.column + i], value[..., i:i + 4], vec=4,
                          site=f"R1b.{('qd', 'kd', 'ki')[operand]}.sts")

    def _eight(self, load):
        """Two float4 of the thread's 8 columns."""
        return np.concatenate([load(self.column + i) for i in (0, 4)], -1)

    def _narrow(self, tile: int, value, site: str):
        self.cta.store(self.tiles[tile, self.row, self.column], value.astype(bfloat16), vec=8, site=site)

    def _reciprocal_norm(self, x):
        return 1 / np.sqrt(self.cta.warp_sum(total(x * x), 16) + EPS)

    # ---- [16, 16] matrices -----------------------------------------------------------------------------------------

    def products(self):
        cta, lane = self.cta, self.cta.lane
        with cta.where(cta.warp < 6):
            which, half = np.minimum(cta.warp // 2, 2), cta.warp % 2 * 8
            left, right = np.array([DO, DVCORR, KD])[which], np.array([U, U, KI])[which]
            sums = np.zeros((*cta.shape, 4), np.float32)
            for k0 in range(0, D, 32):
                b = matrix(cta, self.tiles, right, half + lane % 8, k0 + lane // 8 * 8, "B.ldsm")
                for i in (0, 1):
                    a = matrix(cta, self.tiles, left, lane % 16, k0 + 16 * i + lane // 16 * 8, "A.ldsm")
                    sums = cta.mma(a, b[..., 2 * i:2 * i + 2, :], sums)
            column = half + lane % 4 * 2
            for i in (0, 1):
                row = lane // 4 + 8 * i
                pair = np.stack([np.where((column + j <= row - (which > 0)) & (row < self.rows),
                                          sums[..., 2 * i + j] * np.where(which == DL, np.float32(-1), np.float32(1)),
                                          np.float32(0)) for j in (0, 1)], -1)
                cta.store(self.small[which, row, column], pair, vec=2, site="product.sts")

    def finish_beta(self):
        """dF = dL beta, and dbeta; a thread an element."""
        cta, row, column = self.cta, self.row, self.cta.tid % C
        dL = cta.load(self.small[DL, row, column], site="beta.dL.lds")
        cta.store(self.small[DF, row, column], dL * cta.load(self.beta[row], site="beta.lds"), site="beta.dF.sts")
        dbeta = cta.warp_sum(dL * cta.load(self.small[F, row, column], site="beta.F.lds"), 16)
        with cta.where(self.leader & self.exists):
            dbeta = dbeta + cta.load(self.dbeta[row], site="dbeta.lds")
            cta.store(self.g.dbeta[self.token(row), self.head], dbeta, site="dbeta.stg")

    # ---- epilogue: [16, 16] x [16, 128] in fp32 --------------------------------------------------------------------

    def epilogue_by_one(self):
        """Output tid + 256 i: a warp on 32 columns of one row. Operands one by one, the row's dM and dF by float4."""
        cta = self.cta
        for i in range(C * D // THREADS):
            row, column = (cta.tid + THREADS * i) // D, cta.tid % D
            dqd = dki = dkd = np.zeros((1, 1, 32), np.float32)
            for j in range(C):
                qd, kd, ki = (cta.load(self.operands[x, j, column], site=f"E.{n}.lds") for x, n in enumerate(OPERANDS))
                if j % 4 == 0:
                    rows = [cta.load(self.small[x, row, j], vec=4, site=f"E.{n}.row.lds") for x, n in MASKS]
                dM, dF = (four[..., j % 4] for four in rows)
                dMt, dFt = (cta.load(self.small[x, j, row], site=f"E.{n}.column.lds") for x, n in MASKS)
                dqd, dki, dkd = dqd + dM * ki, dki + dMt * qd + dFt * kd, dkd + dF * ki
            dqd = dqd + cta.load(self.scratch[DQD, row, column], site="E.dqd.lds")
            for tile, value in ((DQD, dqd), (DKI, dki), (DKD, dkd)):
                cta.store(self.scratch[tile, row, column], value, site=f"E.{SUMS[tile]}.sts")

    def epilogue_by_four(self):
        """Row warp + 8 i, columns 4 lane .. + 4; the columns of dM and dF that the row needs stay in registers."""
        cta, column = self.cta, 4 * self.cta.lane
        for i in range(2):
            row = cta.warp + 8 * i
            columns = [[cta.load(self.small[x, j, row], site=f"E.{n}.column.lds") for x, n in MASKS] for j in range(C)]
            dqd = dki = dkd = np.zeros((1, 1, 32, 4), np.float32)
            for j in range(C):
                qd, kd, ki = (cta.load(self.operands[x, j, column], vec=4, site=f"E.{n}.lds")
                              for x, n in enumerate(OPERANDS))
                if j % 4 == 0:
                    rows = [cta.load(self.small[x, row, j], vec=4, site=f"E.{n}.row.lds") for x, n in MASKS]
                dM, dF = (four[..., j % 4, None] for four in rows)
                dMt, dFt = (value[..., None] for value in columns[j])
                dqd, dki, dkd = dqd + dM * ki, dki + dMt * qd + dFt * kd, dkd + dF * ki
            dqd = dqd + cta.load(self.scratch[DQD, row, column], vec=4, site="E.dqd.lds")
            for tile, value in ((DQD, dqd), (DKI, dki), (DKD, dkd)):
                cta.store(self.scratch[tile, row, column], value, vec=4, site=f"E.{SUMS[tile]}.sts")

    def finish_dkd(self):
        """dkd = dF ki - beta dkd_base, in a pass of its own."""
        cta = self.cta
        for i in range(C * D // THREADS):
            row, column = (cta.tid + THREADS * i) // D, cta.tid % D
            base = cta.load(self.g.dkd_base[self.token(row), self.head, column], site="dkd.base.ldg")
            dkd = cta.load(self.scratch[DKD, row, column], site="dkd.lds")
            dkd = dkd - cta.load(self.beta[row], site="dkd.beta.lds") * base
            cta.store(self.scratch[DKD, row, column], dkd, site="dkd.sts")

    # ---- K1 --------------------------------------------------------------------------------------------------------

    def k1(self):
        """dq and dk; dgc and dkr kr, into the tiles of dqd and dkr. Gives the thread's part of dA_log."""
        cta, plan, g, row = self.cta, self.plan, self.g, self.row
        token = self.token(row)
        x = {name: self._load(g_tensor, (token, self.head), f"K1.{name}.ldg").astype(np.float32)
             for name, g_tensor in (("q", g.q), ("k", g.k))}
        if plan.opt7:
            rq, rk = (cta.load(self.norms[i, row], site="K1.norm.lds") for i in (0, 1))
        else:
            rq, rk = self._reciprocal_norm(x["q"]), self._reciprocal_norm(x["k"])
        gT = self._load(self.scratch, (GC, C - 1), "K1.gT.lds")
        gc, dqd, dki, dkd, dkr = (self._load(self.scratch, (tile, row), f"K1.{name}.lds") for tile, name in K1_TILES)
        if plan.fold:
            base = self._load(g.dkd_base, (token, self.head), "K1.dkd_base.ldg")
            dkd = dkd - cta.load(self.beta[row], site="K1.beta.lds")[..., None] * base
        rq, rk = rq[..., None], rk[..., None]
        q, k, up, down, rest = x["q"] * rq, x["k"] * rk, np.exp2(gc), np.exp2(-gc), np.exp2(gT - gc)
        dq, dk = dqd * up * SCALE, dkd * up + dki * down + dkr * rest
        moved = dkr * (k * rest)
        dgc = dkd * (k * up) + dqd * (q * up * SCALE) - dki * (k * down) - moved
        dgc, moved = (np.where(self.exists[..., None], y, np.float32(0)) for y in (dgc, moved))
        self._store(self.scratch, (DQD, row), dgc, "K1.dgc.sts")
        self._store(self.scratch, (DKR, row), moved, "K1.moved.sts")
        dq, dk = ((dx - y * cta.warp_sum(total(y * dx), 16)[..., None]) * r for dx, y, r in ((dq, q, rq), (dk, k, rk)))
        with cta.where(self.exists):
            self._store(g.dq, self._output(token), dq, "K1.dq.stg")
            self._store(g.dk, self._output(token), dk, "K1.dk.stg")
        return total(gc * dgc)

    def columns(self, part):
        """Thread d < 128: dg of column d, from the last row that exists upwards; then dA_log."""
        cta, g, column = self.cta, self.g, self.cta.tid % D
        with cta.where(cta.warp < 4):
            moved = np.zeros((1, 1, 32), np.float32)
            for row in range(C):
                moved = moved + cta.load(self.scratch[DKR, row, column], site="dg.moved.lds")
            gT = cta.load(self.scratch[GC, C - 1, column], site="dg.gT.lds")
            dgT = np.exp2(gT) * cta.load(self.p[column], site="dg.p.lds") + moved
            running = np.zeros((1, 1, 32), np.float32)
            for row in reversed(range(C)):
                with cta.where(row < self.rows):
                    running = running + cta.load(self.scratch[DQD, row, column], site="dg.dgc.lds")
                    cta.store(g.dg[(*self._output(self.start + row), column)], running + dgT, site="dg.stg")
        part = (part + np.where(cta.warp < 4, gT * dgT, np.float32(0))) * LN_2
        if self.plan.warp_atomics:
            part = cta.warp_sum(part)
            with cta.where(cta.lane == 0):
                cta.red_add(g.dA_log[self.head], part, site="dA_log.red")
        else:
            cta.red_add(g.dA_log[self.head], part, site="dA_log.red")

    def _output(self, token):
        return (token, self.head) if self.plan.native else (self.head, token)

    def _chunks(self, tensor):
        """The first column and the length of each access to a thread's 8 columns in K1."""
        i = self.cta.tid % 16
        if self.plan.k1 == 0:
            return [(8 * i + j, 1) for j in range(8)]
        if self.plan.k1 == 1:
            step = min(8, 16 // tensor.dtype.itemsize)
            return [(8 * i + j, step) for j in range(0, 8, step)]
        return [(4 * i, 4), (4 * i + D // 2, 4)]

    def _load(self, tensor, at, site: str):
        parts = [self.cta.load(tensor[(*at, c)], n, site=site) for c, n in self._chunks(tensor)]
        return np.stack(parts, -1) if self.plan.k1 == 0 else np.concatenate(parts, -1)

    def _store(self, tensor, at, value, site: str):
        first = 0
        for column, n in self._chunks(tensor):
            piece = value[..., first] if n == 1 else value[..., first:first + n]
            self.cta.store(tensor[(*at, column)], piece, n, site=site)
            first += n


def matrix(cta, tiles, tile, row, column, site: str):
    """ldmatrix.x4 of bf16 tiles: each lane points at a row of 8 elements."""
    return cta.ldmatrix(tiles[tile, row, column], 4, site=site)
