// What the twins of B0, B1 and B2 share: a state in shared memory, and p[k] = sum_d dS[k][d] S[d][k] by warps.
// Python twin: kernels_py/kda_b0.py.
#pragma once
#include "kda_program.cuh"

// ---- a state in shared memory -------------------------------------------------------------------------------------
template <int SWIZZLE>
__host__ __device__ constexpr uint32_t at_state(int r, int c) {
  return SWIZZLE ? at_sw128<kD>(r, c) : at_inter<kD>(r, c);
}

// In row-major order of its 16-byte chunks: a warp takes two rows at a time. The copy's line is its use's.
#define COPY_STATE(SWIZZLE, to, from, i)                                          \
  CP_ASYNC_CG((to) + at_state<SWIZZLE>(16 * (i) + threadIdx.x / 16, threadIdx.x % 16 * 8), \
              (from) + (16 * (i) + threadIdx.x / 16) * kD + threadIdx.x % 16 * 8)

// ---- p, a warp a key ----------------------------------------------------------------------------------------------
constexpr int kKeys = kD * 32 / kThreads;  // of a warp

// dS [key][value] streams from global memory, WIDTH elements a load; S [value][key] lies at `S` in shared memory.
template <int WIDTH, int SWIZZLE>
__device__ inline void p_by_warp(uint32_t S, const bf16* dS, float* p) {
  constexpr int kLanes = WIDTH == 8 ? 16 : 32, kRounds = kKeys * kLanes / 32, kBatch = WIDTH == 8 ? 2 : 4;
  constexpr int kElements = WIDTH == 1 ? 4 : WIDTH;  // of a lane and key
  const int lane = threadIdx.x % 32, part = lane / kLanes, slot = lane % kLanes;
  const int first = threadIdx.x / 32 * kKeys + part;
  float mine = 0;
#pragma unroll 1
  for (int begin = 0; begin < kRounds; begin += kBatch) {
    float x[kBatch][kElements];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bf16* row = dS + (first + (begin + i) * 32 / kLanes) * kD;
      if (WIDTH == 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          uint16_t bits;
          LDG16(bits, row + slot + 32 * j);  // @site p.dS.load
          x[i][j] = to_float(bits);
        }
      } else if (WIDTH == 4) {
        uint2 words;
        LDG64(words.x, words.y, row + 4 * slot);  // @site p.dS.load
        x[i][0] = low_float(words.x), x[i][1] = high_float(words.x);
        x[i][2] = low_float(words.y), x[i][3] = high_float(words.y);
      } else {
        uint4 words;
        LDG128(words, row + 8 * slot);  // @site p.dS.load
        const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < kElements; ++j) x[i][j] = j % 2 ? high_float(pairs[j / 2]) : low_float(pairs[j / 2]);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int key = first + (begin + i) * 32 / kLanes;
      float total = 0;
#pragma unroll
      for (int j = 0; j < kElements; ++j) {
        const int value = WIDTH == 1 ? slot + 32 * j : WIDTH * slot + j;
        uint16_t bits;
        LDS16(bits, S + at_state<SWIZZLE>(value, key));  // @site p.S.load
        total += x[i][j] * to_float(bits);
      }
      total = sum_over<kLanes>(total);
      if (slot == begin + i) mine = total;
    }
  }
  if (slot < kRounds) STG32(p + first + slot * 32 / kLanes, __float_as_uint(mine));  // @site p.store
}

// The same where dS [key][value] lies at `dS` in shared memory and S [value][key] streams: the elements of a lane are
// rows apart.
template <int SWIZZLE>
__device__ inline void p_from_dS(uint32_t dS, const bf16* S, float* p) {
  constexpr int kBatch = 4;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kKeys;
  float mine = 0;
#pragma unroll 1
  for (int begin = 0; begin < kKeys; begin += kBatch) {
    float s[kBatch][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint16_t bits;
        LDG16(bits, S + (lane + 32 * j) * kD + first + begin + i);  // @site p.S.load
        s[i][j] = to_float(bits);
      }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float total = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint16_t bits;
        LDS16(bits, dS + at_state<SWIZZLE>(first + begin + i, lane + 32 * j));  // @site p.dS.load
        total += to_float(bits) * s[i][j];
      }
      total = sum_over<32>(total);
      if (lane == begin + i) mine = total;
    }
  }
  if (lane < kKeys) STG32(p + first + lane, __float_as_uint(mine));  // @site p.store
}

// p of one (tile, head), in float64 from the rounded states, [D][D] each.
inline void reference_p(Output& p, size_t square, const bf16* S, const bf16* dS) {
  for (int k = 0; k < kD; ++k) {
    double sum = 0, size = 0;
    for (int d = 0; d < kD; ++d) {
      const double term = value_of(dS[k * kD + d]) * value_of(S[d * kD + k]);
      sum += term, size += std::abs(term);
    }
    p.expected[square * kD + k] = sum, p.bound[square * kD + k] = kFp32 * kD * size;
  }
}