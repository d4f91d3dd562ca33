// B3 of the KDA backward pass: one CTA's chunk tile. The Python twin kernels_py/kda_b3.py says what is computed, by
// which threads, and what the parameters mean; sites, stages and shared memory are the same.
#pragma once
#include "kda_b3_map.cuh"

constexpr float kScale = 0.08838834764831845f, kLn2 = 0.6931471805599453f;

// Three CTAs a multiprocessor where shared memory holds them: the compiler may then use 80 registers.
template <int UNION, int OPT2, int OPT7, int EPILOGUE, int K1, int FOLD, int WARP_ATOMICS, int NATIVE, int TILE,
          int STRIDE>
__global__ __launch_bounds__(kThreads, UNION ? 3 : 2) void kda_b3(const Arguments x) {
  using At = Map<UNION, OPT2, OPT7, TILE, STRIDE>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = blockIdx.y, T = x.tokens, H = x.heads;
  int start, rows;
  LDG32(start, x.tile_start + blockIdx.x);  // @site tile.ldg
  LDG32(rows, x.tile_rows + blockIdx.x);    // @site tile.ldg
  // A thread's place except in the epilogue: 8 columns of one row.
  const int row = tid / 16, column = tid % 16 * 8;
  auto token = [&](int r) { return start + min(r, rows - 1); };
  auto element = [&](int r) { return static_cast<size_t>(token(r) * H + head) * kD; };

  // ---- into shared memory ------------------------------------------------------------------------------------------
  {
    const size_t from = element(row) + column;
    CP_ASYNC_CG(shared + At::tile(kDo, row, column), x.do_ + from);  // @site do.cp
    CP_ASYNC_CG(shared + At::tile(kU, row, column), x.u + from);     // @site U.cp
    CP_ASYNC_CG(shared + At::tile(kQ, row, column), x.q + from);     // @site q.cp
    const size_t rows_of[2] = {element(warp) + 4 * lane, element(warp + 8) + 4 * lane};
    const uint32_t to = shared + At::scratch(0, warp, 4 * lane), tile = 4 * kC * STRIDE, half = 4 * 8 * STRIDE;
#pragma unroll
    for (int i = 0; i < 2; ++i) CP_ASYNC_CG(to + kGc * tile + i * half, x.gc + rows_of[i]);         // @site gc.cp
    CP_ASYNC_COMMIT();
#pragma unroll
    for (int i = 0; i < 2; ++i) CP_ASYNC_CG(to + kDqd * tile + i * half, x.dqd_base + rows_of[i]);  // @site dqd_base.cp
#pragma unroll
    for (int i = 0; i < 2; ++i) CP_ASYNC_CG(to + kDkr * tile + i * half, x.dkr + rows_of[i]);       // @site dkr.cp
  }
  if (warp == 0) {  // both halves of the warp load beta and dbeta_part: no lane is off
    const size_t p = static_cast<size_t>(blockIdx.x * H + head) * kD + 4 * lane;
    CP_ASYNC_CG(shared + At::kP + 16 * lane, x.p + p);             // @site p.cp
    const int r = lane % kC, from = token(r) * H + head;
    uint16_t beta;
    uint32_t part;
    LDG16(beta, x.beta + from);                                    // @site beta.ldg
    STS32(shared + At::kBeta + 4 * r, static_cast<uint32_t>(beta) << 16);  // @site beta.sts
    LDG32(part, x.dbeta_part + from);                              // @site dbeta.ldg
    STS32(shared + At::kDbeta + 4 * r, part);                      // @site dbeta.sts
  }
  CP_ASYNC_COMMIT();

  // ---- R1: normalise, scale by the decay, narrow -------------------------------------------------------------------
  uint4 raw_q, raw_k;
  float rq, rk;
  {
    const size_t from = element(row) + column;
    float k[8], gc[8], dvcorr[8], kd[8], ki[8];
    LDG128(raw_k, x.k + from);                                                            // @site R1.k.ldg
#pragma unroll
    for (int i = 0; i < 8; i += 4) LDG_F128(gc + i, x.gc + from + i);                     // @site R1.gc.ldg
#pragma unroll
    for (int i = 0; i < 8; i += 4) LDG_F128(dvcorr + i, x.dvcorr + from + i);             // @site R1.dvcorr.ldg
    unpack(k, raw_k);
    rk = reciprocal_norm(k);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      kd[j] = k[j] * rk * exp2f(gc[j]);
      ki[j] = k[j] * rk * exp2f(-gc[j]);
    }
    STS128(shared + At::tile(kDvcorr, row, column), narrow(dvcorr));                      // @site R1.dvcorr.sts
    STS128(shared + At::tile(kKd, row, column), narrow(kd));                              // @site R1.kd.sts
    STS128(shared + At::tile(kKi, row, column), narrow(ki));                              // @site R1.ki.sts
  }
  CP_ASYNC_WAIT(1);
  __syncthreads();
  {
    float q[8];
    LDS128(raw_q, shared + At::tile(kQ, row, column));                                    // @site R1.q.lds
    unpack(q, raw_q);
    rq = reciprocal_norm(q);
    if (OPT7 && tid % 16 == 0) {
      STS_F32(shared + At::kNorms + 4 * row, rq);                                         // @site R1.norm.sts
      STS_F32(shared + At::kNorms + 4 * (kC + row), rk);                                  // @site R1.norm.sts
    }
    if (!OPT2) {
      float k[8], gc[8], gT[8];
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        LDS_F128(gc + i, shared + At::scratch(kGc, row, column + i));  // @site R1.gc.lds
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        LDS_F128(gT + i, shared + At::scratch(kGc, kC - 1, column + i));  // @site R1.gT.lds
      unpack(k, raw_k);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        q[j] = q[j] * rq * exp2f(gc[j]) * kScale;
        k[j] = k[j] * rk * exp2f(gT[j] - gc[j]);
      }
      STS128(shared + At::tile(kQdCopy, row, column), narrow(q));                         // @site R1.qd.sts
      STS128(shared + At::tile(kKrCopy, row, column), narrow(k));                         // @site R1.kr.sts
    }
  }

  // R1b: qd, kd and ki once more, in fp32; over the bf16 tiles once they are dead, or beside them.
  auto write_operands = [&] {
    const uint32_t to = shared + At::operand(0, row, column), next = 4 * kC * kD;
    float q[8], k[8];
    unpack(q, raw_q);
    unpack(k, raw_k);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      float gc[4], qd[4], kd[4], ki[4];
      LDS_F128(gc, shared + At::scratch(kGc, row, column + i));  // @site R1b.gc.lds
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float up = exp2f(gc[j]);
        qd[j] = q[i + j] * rq * up * kScale;
        kd[j] = k[i + j] * rk * up;
        ki[j] = k[i + j] * rk * exp2f(-gc[j]);
      }
      STS_F128(to + kQdOperand * next + 4 * i, qd);  // @site R1b.qd.sts
      STS_F128(to + kKdOperand * next + 4 * i, kd);  // @site R1b.kd.sts
      STS_F128(to + kKiOperand * next + 4 * i, ki);  // @site R1b.ki.sts
    }
  };
  if (!UNION) write_operands();

  // ---- dM = do U^T, dL = -dvcorr U^T, F = kd ki^T, masked: two warps each, 8 columns a warp ----------------------
  if (warp < 6) {
    const int which = warp / 2, half = warp % 2 * 8;
    const int left = which == kDM ? kDo : which == kDL ? kDvcorr : kKd, right = which == kF ? kKi : kU;
    float sum[4] = {};
#pragma unroll
    for (int k0 = 0; k0 < kD; k0 += 32) {
      uint32_t a[4], b[4];
      LDSM_X4(b[0], b[1], b[2], b[3], shared + At::tile(right, half + lane % 8, k0 + lane / 8 * 8));  // @site B.ldsm
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t from = shared + At::tile(left, lane % 16, k0 + 16 * i + lane / 16 * 8);
        LDSM_X4(a[0], a[1], a[2], a[3], from);  // @site A.ldsm
        MMA_BF16(sum, a, b[2 * i], b[2 * i + 1]);
      }
    }
    const int c = half + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane / 4 + 8 * i, last = r < rows ? r - (which != kDM) : -1;  // the last column that is not zero
      const float sign = which == kDL ? -1.f : 1.f;
      const float v0 = c <= last ? sign * sum[2 * i] : 0.f, v1 = c + 1 <= last ? sign * sum[2 * i + 1] : 0.f;
      STS_F32X2(shared + At::small(which, r, c), v0, v1);  // @site product.sts
    }
  }
  __syncthreads();
  if (UNION) write_operands();
  {
    const int c = tid % kC;
    float dL, beta, f;
    LDS_F32(dL, shared + At::small(kDL, row, c));            // @site beta.dL.lds
    LDS_F32(beta, shared + At::kBeta + 4 * row);             // @site beta.lds
    STS_F32(shared + At::small(kDF, row, c), dL * beta);     // @site beta.dF.sts
    LDS_F32(f, shared + At::small(kF, row, c));              // @site beta.F.lds
    const float sum = sum_over<16>(dL * f);
    if (c == 0 && row < rows) {
      float part;
      LDS_F32(part, shared + At::kDbeta + 4 * row);          // @site dbeta.lds
      STG_F32(x.dbeta + (start + row) * H + head, part + sum);  // @site dbeta.stg
    }
  }
  CP_ASYNC_WAIT(0);
  __syncthreads();

  // ---- epilogue: dqd = dqd_base + dM ki, dki = dM^T qd + dF^T kd, dF ki, in fp32 ------------------------------------
  if (EPILOGUE == 0) {
#pragma unroll 1
    for (int i = 0; i < kC * kD / kThreads; ++i) {
      const int r = tid / kD + 2 * i, c = tid % kD;
      float dqd = 0, dki = 0, dkd = 0, base, dM[4], dF[4];
#pragma unroll
      for (int j = 0; j < kC; ++j) {
        float qd, kd, ki, dMt, dFt;
        LDS_F32(qd, shared + At::operand(kQdOperand, j, c));  // @site E.qd.lds
        LDS_F32(kd, shared + At::operand(kKdOperand, j, c));  // @site E.kd.lds
        LDS_F32(ki, shared + At::operand(kKiOperand, j, c));  // @site E.ki.lds
        if (j % 4 == 0) LDS_F128(dM, shared + At::small(kDM, r, j));  // @site E.dM.row.lds
        if (j % 4 == 0) LDS_F128(dF, shared + At::small(kDF, r, j));  // @site E.dF.row.lds
        LDS_F32(dMt, shared + At::small(kDM, j, r));          // @site E.dM.column.lds
        LDS_F32(dFt, shared + At::small(kDF, j, r));          // @site E.dF.column.lds
        dqd = fmaf(dM[j % 4], ki, dqd);
        dki = fmaf(dFt, kd, fmaf(dMt, qd, dki));
        dkd = fmaf(dF[j % 4], ki, dkd);
      }
      LDS_F32(base, shared + At::scratch(kDqd, r, c));        // @site E.dqd.lds
      STS_F32(shared + At::scratch(kDqd, r, c), dqd + base);  // @site E.dqd.sts
      STS_F32(shared + At::scratch(kDki, r, c), dki);         // @site E.dki.sts
      STS_F32(shared + At::scratch(kDkd, r, c), dkd);         // @site E.dkd.sts
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int r = warp + 8 * i, c = 4 * lane;
      float dqd[4] = {}, dki[4] = {}, dkd[4] = {}, base[4], dMt[kC], dFt[kC], dM[4], dF[4];
#pragma unroll
      for (int j = 0; j < kC; ++j) LDS_F32(dMt[j], shared + At::small(kDM, j, r));  // @site E.dM.column.lds
#pragma unroll
      for (int j = 0; j < kC; ++j) LDS_F32(dFt[j], shared + At::small(kDF, j, r));  // @site E.dF.column.lds
#pragma unroll
      for (int j = 0; j < kC; ++j) {
        float qd[4], kd[4], ki[4];
        LDS_F128(qd, shared + At::operand(kQdOperand, j, c));   // @site E.qd.lds
        LDS_F128(kd, shared + At::operand(kKdOperand, j, c));   // @site E.kd.lds
        LDS_F128(ki, shared + At::operand(kKiOperand, j, c));   // @site E.ki.lds
        if (j % 4 == 0) LDS_F128(dM, shared + At::small(kDM, r, j));  // @site E.dM.row.lds
        if (j % 4 == 0) LDS_F128(dF, shared + At::small(kDF, r, j));  // @site E.dF.row.lds
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          dqd[n] = fmaf(dM[j % 4], ki[n], dqd[n]);
          dki[n] = fmaf(dFt[j], kd[n], fmaf(dMt[j], qd[n], dki[n]));
          dkd[n] = fmaf(dF[j % 4], ki[n], dkd[n]);
        }
      }
      LDS_F128(base, shared + At::scratch(kDqd, r, c));         // @site E.dqd.lds
#pragma unroll
      for (int n = 0; n < 4; ++n) dqd[n] += base[n];
      STS_F128(shared + At::scratch(kDqd, r, c), dqd);          // @site E.dqd.sts
      STS_F128(shared + At::scratch(kDki, r, c), dki);          // @site E.dki.sts
      STS_F128(shared + At::scratch(kDkd, r, c), dkd);          // @site E.dkd.sts
    }
  }
  __syncthreads();
  if (!FOLD) {  // dkd = dF ki - beta dkd_base, in a pass of its own
#pragma unroll
    for (int i = 0; i < kC * kD / kThreads; ++i) {
      const int r = tid / kD + 2 * i, c = tid % kD;
      float base, dkd, beta;
      LDG_F32(base, x.dkd_base + element(r) + c);                     // @site dkd.base.ldg
      LDS_F32(dkd, shared + At::scratch(kDkd, r, c));                 // @site dkd.lds
      LDS_F32(beta, shared + At::kBeta + 4 * r);                      // @site dkd.beta.lds
      STS_F32(shared + At::scratch(kDkd, r, c), dkd - beta * base);   // @site dkd.sts
    }
    __syncthreads();
  }

  // ---- K1: 16 threads a row; each leaves dgc and dkr kr in its own places of the tiles of dqd and dkr ---------------
  float part = 0;  // of dA_log / ln 2
  {
    const size_t from = element(row);
    float q[8], k[8], dq[8], dk[8], beta = 0, q_dq = 0, k_dk = 0;
    K1_LDG_BF16(raw_q, x.q + from);                                                          // @site K1.q.ldg
    K1_LDG_BF16(raw_k, x.k + from);                                                          // @site K1.k.ldg
    unpack(q, raw_q);
    unpack(k, raw_k);
    if (OPT7) {
      LDS_F32(rq, shared + At::kNorms + 4 * row);                                            // @site K1.norm.lds
      LDS_F32(rk, shared + At::kNorms + 4 * (kC + row));                                     // @site K1.norm.lds
    } else {
      rq = reciprocal_norm(q);
      rk = reciprocal_norm(k);
    }
    if (FOLD) LDS_F32(beta, shared + At::kBeta + 4 * row);                                   // @site K1.beta.lds
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int c = quad_column<K1>(quad);
      const uint32_t here = shared + At::scratch(0, row, c), tile = 4 * kC * STRIDE;
      float gc[4], gT[4], dqd[4], dki[4], dkd[4], dkr[4], base[4], dgc[4], moved[4];
      K1_LDS(gT, shared + At::scratch(kGc, kC - 1, c));                                      // @site K1.gT.lds
      K1_LDS(gc, here + kGc * tile);                                                         // @site K1.gc.lds
      K1_LDS(dqd, here + kDqd * tile);                                                       // @site K1.dqd.lds
      K1_LDS(dki, here + kDki * tile);                                                       // @site K1.dki.lds
      K1_LDS(dkd, here + kDkd * tile);                                                       // @site K1.dkd.lds
      K1_LDS(dkr, here + kDkr * tile);                                                       // @site K1.dkr.lds
      if (FOLD) K1_LDG(base, x.dkd_base + from + c);                                         // @site K1.dkd_base.ldg
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int j = 4 * quad + n;
        const float up = exp2f(gc[n]), down = exp2f(-gc[n]), rest = exp2f(gT[n] - gc[n]);
        q[j] *= rq;
        k[j] *= rk;
        if (FOLD) dkd[n] -= beta * base[n];
        dq[j] = dqd[n] * up * kScale;
        dk[j] = dkd[n] * up + dki[n] * down + dkr[n] * rest;
        q_dq += q[j] * dq[j];
        k_dk += k[j] * dk[j];
        moved[n] = dkr[n] * (k[j] * rest);
        dgc[n] = dkd[n] * (k[j] * up) + dqd[n] * (q[j] * up * kScale) - dki[n] * (k[j] * down) - moved[n];
        if (row >= rows) dgc[n] = moved[n] = 0;
        part += gc[n] * dgc[n];
      }
      K1_STS(here + kDqd * tile, dgc);                                                       // @site K1.dgc.sts
      K1_STS(here + kDkr * tile, moved);                                                     // @site K1.moved.sts
    }
    q_dq = sum_over<16>(q_dq);
    k_dk = sum_over<16>(k_dk);
    if (row < rows) {
      const size_t to = NATIVE ? from : static_cast<size_t>(head * T + start + row) * kD;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        dq[j] = (dq[j] - q[j] * q_dq) * rq;
        dk[j] = (dk[j] - k[j] * k_dk) * rk;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) K1_STG(x.dq + to + quad_column<K1>(i), dq + 4 * i);        // @site K1.dq.stg
#pragma unroll
      for (int i = 0; i < 2; ++i) K1_STG(x.dk + to + quad_column<K1>(i), dk + 4 * i);        // @site K1.dk.stg
    }
  }
  __syncthreads();

  // ---- dg: a thread a column, from the last row that exists upwards; dA_log -----------------------------------------
  if (tid < kD) {
    const uint32_t to = shared + At::scratch(0, 0, tid), tile = 4 * kC * STRIDE;
    float moved = 0, running = 0, gT, p;
#pragma unroll
    for (int r = 0; r < kC; ++r) {
      float one;
      LDS_F32(one, to + kDkr * tile + 4 * r * STRIDE);                        // @site dg.moved.lds
      moved += one;
    }
    LDS_F32(gT, to + kGc * tile + 4 * (kC - 1) * STRIDE);                     // @site dg.gT.lds
    LDS_F32(p, shared + At::kP + 4 * tid);                                    // @site dg.p.lds
    const float dgT = exp2f(gT) * p + moved;
    part += gT * dgT;
#pragma unroll 4
    for (int r = rows - 1; r >= 0; --r) {
      const size_t row_of = NATIVE ? (start + r) * H + head : head * T + start + r;
      float dgc;
      LDS_F32(dgc, to + kDqd * tile + 4 * r * STRIDE);                        // @site dg.dgc.lds
      running += dgc;
      STG_F32(x.dg + row_of * kD + tid, running + dgT);                       // @site dg.stg
    }
  }
  part *= kLn2;
  if (WARP_ATOMICS) part = sum_over<32>(part);
  if (!WARP_ATOMICS || lane == 0) RED_F32(x.dA_log + head, part);             // @site dA_log.red
}
