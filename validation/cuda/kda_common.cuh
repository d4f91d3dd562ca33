// What the KDA backward twins add to common.cuh on the device: instructions, bf16 tiles of 16 rows and their layouts.
#pragma once
#include <cuda_bf16.h>

#include "common.cuh"

using bf16 = __nv_bfloat16;

constexpr int kC = 16, kD = 128, kThreads = 256;  // tokens of a tile, channels of key and value, threads of a CTA

// ---- instructions -------------------------------------------------------------------------------------------------
#define LDG16(d, p) asm volatile("ld.global.b16 %0, [%1];" : "=h"(d) : "l"(p) : "memory")
#define LDG64(d0, d1, p) asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(d0), "=r"(d1) : "l"(p) : "memory")
#define STS16(a, v) asm volatile("st.shared.b16 [%0], %1;" ::"r"(a), "h"(v) : "memory")
#define STS64(a, x, y) asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory")
// Volatile: ptxas merges two neighbouring words into one STS.64 otherwise, asm volatile or not.
#define STS32_ALONE(a, v) asm volatile("st.volatile.shared.b32 [%0], %1;" ::"r"(a), "r"(v) : "memory")
#define CP_ASYNC_CA(a, p) asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(a), "l"(p) : "memory")
#define LDSM_X4_TRANS(d0, d1, d2, d3, a) \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" \
               : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3) : "r"(a) : "memory")
#define MOVMATRIX_TRANS(d, s) asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(s))
#define MMA_BF16(c, a, b0, b1)                                                                                    \
  asm volatile(                                                                                                   \
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                            \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ inline float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_float(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline float to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

// The sum over groups of LANES neighbouring lanes, in each of them.
template <int LANES>
__device__ inline float sum_over(float x) {
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// ---- layouts: byte offset of element (r, c) of a bf16 tile of ROWS rows, the grid of atoms column-first -----------
// K-INTER: 8x8 atoms of eight 16-byte rows. As MN-INTER, row-first, the same bytes are the transpose.
template <int ROWS>
__host__ __device__ constexpr uint32_t at_inter(int r, int c) {
  return 128 * (r / 8 + ROWS / 8 * (c / 8)) + 16 * (r % 8) + 2 * (c % 8);
}

// K-SW128: 8x64 atoms of eight 128-byte rows whose 16-byte chunks are XORed with the row. As MN-SW128, row-first, the
// same bytes are the transpose.
template <int ROWS>
__host__ __device__ constexpr uint32_t at_sw128(int r, int c) {
  return 1024 * (r / 8 + ROWS / 8 * (c / 64)) + 128 * (r % 8) + 16 * (c / 8 % 8 ^ r % 8) + 2 * (c % 8);
}
