// What the twins of B0 and B2 share: a state in shared memory, p[k] = sum_d dS[k][d] S[d][k] by warps, and outputs that
// are held against float64 on the host. Python twin of the device part: kernels_py/kda_b0.py.
#pragma once
#include "kda_common.cuh"

// ---- instructions -------------------------------------------------------------------------------------------------
#define LDG64(d, p) asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(d.x), "=r"(d.y) : "l"(p) : "memory")
#define STS16(a, v) asm volatile("st.shared.b16 [%0], %1;" ::"r"(a), "h"(v) : "memory")

__device__ inline float to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

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

// A key's sum over its LANES lanes, in each of them.
template <int LANES>
__device__ inline float sum_over(float x) {
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

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
        LDG64(words, row + 4 * slot);  // @site p.dS.load
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

// ---- outputs, on the host -----------------------------------------------------------------------------------------

// How far fp32 and bf16 may lead from float64: narrowing adds 2^-8 of the magnitude, every fp32 operation and every
// term of a sum 2^-22 (four times fp32's rounding: an mma's accumulator truncates, ex2.approx and rsqrt.approx are off
// by two units).
constexpr double kBf16 = 1 / 256., kFp32 = 1 / 4194304.;

inline double value_of(bf16 x) { return __bfloat162float(x); }

struct Output {
  const char* name;
  size_t count;  // kGuard further elements lie behind, which nobody may touch
  float* device;
  std::vector<double> expected, bound;
  std::map<int, std::vector<float>> first;  // what the first run of a kind left: all of a kind must be the same bits
};

constexpr size_t kGuard = 1 << 16;

inline Output output(const char* name, size_t count) {
  return {name, count, device_array<float>(count + kGuard), std::vector<double>(count), std::vector<double>(count), {}};
}

inline void forget(Output& o) {
  CUDA_CHECK(cudaMemset(o.device, 0xff, (o.count + kGuard) * sizeof(float)));  // NaN
}

// "" or what is wrong: an element beyond its bound (a NaN is), other bits than the first of its kind, a touched guard.
inline std::string compare(Output& o, const std::vector<double>& expected, const std::vector<double>& bound, int kind) {
  const std::vector<float> got = to_host(o.device, o.count + kGuard);
  for (size_t i = 0; i < o.count; ++i)
    if (!(std::abs(got[i] - expected[i]) <= bound[i])) {
      char line[200];
      snprintf(line, sizeof line, "%s element %zu is %.9g, expected %.9g within %.3g", o.name, i, got[i], expected[i],
               bound[i]);
      return line;
    }
  auto bits = [](float x) { return reinterpret_cast<const uint32_t&>(x); };
  for (size_t i = o.count; i < got.size(); ++i)
    if (bits(got[i]) != 0xffffffffu)
      return std::string(o.name) + " was written " + std::to_string(i - o.count) + " elements past its end";
  std::vector<float>& first = o.first.try_emplace(kind, got).first->second;
  for (size_t i = 0; i < o.count; ++i)
    if (bits(got[i]) != bits(first[i]))
      return std::string(o.name) + " element " + std::to_string(i) + " differs in its bits from the first of its kind";
  return "";
}

// p of one (tile, head) from the rounded states, [D][D] each.
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
