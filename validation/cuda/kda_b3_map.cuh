// B3 of the KDA backward pass: its memory instructions, where everything lies in shared memory, a thread's 8 columns.
#pragma once
#include "kda_common.cuh"

// ---- memory instructions of floats, and a reduction ----------------------------------------------------------------
#define LDG_F32(d, p) asm volatile("ld.global.f32 %0, [%1];" : "=f"(d) : "l"(p) : "memory")
#define LDG_F128(d, p)                                                         \
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];"                         \
               : "=f"((d)[0]), "=f"((d)[1]), "=f"((d)[2]), "=f"((d)[3]) : "l"(p) : "memory")
#define STG_F32(p, v) asm volatile("st.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory")
#define STG_F128(p, v)                                                         \
  asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};"                         \
               ::"l"(p), "f"((v)[0]), "f"((v)[1]), "f"((v)[2]), "f"((v)[3]) : "memory")
#define LDS_F32(d, a) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(d) : "r"(a) : "memory")
#define LDS_F128(d, a)                                                         \
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"                         \
               : "=f"((d)[0]), "=f"((d)[1]), "=f"((d)[2]), "=f"((d)[3]) : "r"(a) : "memory")
#define STS_F32(a, v) asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory")
#define STS_F32X2(a, v0, v1) asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(a), "f"(v0), "f"(v1) : "memory")
#define STS_F128(a, v)                                                         \
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};"                         \
               ::"r"(a), "f"((v)[0]), "f"((v)[1]), "f"((v)[2]), "f"((v)[3]) : "memory")
#define RED_F32(p, v) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory")

// What a thread of K1 moves at once: four neighbouring floats, one by one (K1 = 0) or as a float4. gridDim.z is 1, but
// the compiler cannot know: it would make four shared accesses side by side into one, volatile or not.
#define K1_FOUR(scalar, vector)                                   \
  do {                                                                         \
    if (K1) {                                                                  \
      vector;                                                                  \
    } else {                                                                   \
      _Pragma("unroll") for (int n = 0; n < 4; ++n) scalar;                    \
    }                                                                          \
  } while (0)
#define K1_LDS(d, a) K1_FOUR(LDS_F32((d)[n], (a) + 4 * n * gridDim.z), LDS_F128(d, a))
#define K1_STS(a, v) K1_FOUR(STS_F32((a) + 4 * n * gridDim.z, (v)[n]), STS_F128(a, v))
#define K1_LDG(d, p) K1_FOUR(LDG_F32((d)[n], (p) + n), LDG_F128(d, p))
#define K1_STG(p, v) K1_FOUR(STG_F32((p) + n, (v)[n]), STG_F128(p, v))
// The thread's 8 bf16 of a row that begins at p, in the order of its two quads.
#define K1_LDG_BF16(d, p)                                                                                     \
  do {                                                                                                        \
    if (K1 == 1) LDG128((d), (p) + quad_column<K1>(0));                                                       \
    if (K1 == 2) LDG64((d).x, (d).y, (p) + quad_column<K1>(0));                                               \
    if (K1 == 2) LDG64((d).z, (d).w, (p) + quad_column<K1>(1));                                               \
    if (K1 == 0) {                                                                                            \
      uint16_t h[8];                                                                                          \
      _Pragma("unroll") for (int j = 0; j < 8; ++j) LDG16(h[j], (p) + quad_column<K1>(0) + j);                \
      (d) = make_uint4(words(h[0], h[1]), words(h[2], h[3]), words(h[4], h[5]), words(h[6], h[7]));           \
    }                                                                                                         \
  } while (0)

// ---- names and places --------------------------------------------------------------------------------------------
enum { kDo, kU, kQ, kDvcorr, kKd, kKi, kQdCopy, kKrCopy };  // bf16 tiles
enum { kGc, kDqd, kDki, kDkd, kDkr };                       // fp32 tiles
enum { kDM, kDL, kF, kDF };                                 // [16][16]; kDF is dL beta
enum { kQdOperand, kKdOperand, kKiOperand };

struct Arguments {
  const int *tile_start, *tile_rows;
  const bf16 *q, *k, *beta, *do_, *u;
  const float *gc, *dvcorr, *dkr, *dqd_base, *dkd_base, *dbeta_part, *p;
  float *dq, *dk, *dg, *dbeta, *dA_log;
  int tokens, heads;  // of all sequences together
};

// Shared memory, bytes from its start: the bf16 tiles, the fp32 operands over or after them, then the rest.
template <int UNION, int OPT2, int OPT7, int TILE, int STRIDE>
struct Map {
  static constexpr int kTiles = (OPT2 ? 6 : 8) * kC * kD * 2, kOperandBytes = 3 * kC * kD * 4;
  static constexpr int kOperands = UNION ? 0 : kTiles;
  static constexpr int kScratch = UNION ? kTiles : kTiles + kOperandBytes;
  static constexpr int kSmall = kScratch + 4 * (5 * kC * STRIDE - (STRIDE - kD));
  static constexpr int kP = kSmall + 4 * kC * kC * 4, kBeta = kP + 4 * kD, kDbeta = kBeta + 4 * kC;
  static constexpr int kNorms = kDbeta + 4 * kC, kBytes = kNorms + (OPT7 ? 2 * 4 * kC : 0);

  __device__ static uint32_t tile(int t, int r, int c) {
    return 2 * t * kC * kD + (TILE == 0 ? 2 * (r * kD + c) : TILE == 1 ? at_inter<kC>(r, c) : at_sw128<kC>(r, c));
  }
  __device__ static uint32_t operand(int t, int r, int c) { return kOperands + 4 * ((t * kC + r) * kD + c); }
  __device__ static uint32_t scratch(int t, int r, int c) { return kScratch + 4 * ((t * kC + r) * STRIDE + c); }
  __device__ static uint32_t small(int m, int r, int c) { return kSmall + 4 * ((m * kC + r) * kC + c); }
};

// The first column of a thread's quad (0 or 1) in K1.
template <int K1>
__device__ inline int quad_column(int quad) {
  const int i = threadIdx.x % 16;
  return K1 == 2 ? 4 * i + 64 * quad : 8 * i + 4 * quad;
}

// ---- eight columns of a row --------------------------------------------------------------------------------------
__device__ inline uint32_t words(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

__device__ inline void unpack(float (&x)[8], const uint4& raw) {
  const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = j % 2 ? high_float(pairs[j / 2]) : low_float(pairs[j / 2]);
}

__device__ inline uint4 narrow(const float (&x)[8]) {
  return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

__device__ inline float reciprocal_norm(const float (&x)[8]) {
  float sum = x[0] * x[0];
#pragma unroll
  for (int j = 1; j < 8; ++j) sum += x[j] * x[j];
  return rsqrtf(sum_over<16>(sum) + 1e-6f);
}
