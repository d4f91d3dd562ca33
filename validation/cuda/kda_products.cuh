// What the twins of B1 and B2 share: the products of [16, 128] tiles, and their way out through fp32 stages.
#pragma once
#include "kda_state.cuh"

// Accumulators: sums[j] = (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1) of n8 tile j, columns 16w + 8j .. + 7.
__device__ inline void multiply(float (&sums)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  MMA_BF16(sums[0], a, b[0], b[1]);
  MMA_BF16(sums[1], a, b[2], b[3]);
}

// Into a stage, rows STRIDE floats apart, VEC floats a store.
template <int STRIDE, int VEC>
__device__ inline void stage(uint32_t to, const float (&sums)[2][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, column = threadIdx.x / 32 * 16 + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = to + 4 * ((g + 8 * half) * STRIDE + column + 8 * j);
      const uint32_t x = __float_as_uint(sums[j][2 * half]), y = __float_as_uint(sums[j][2 * half + 1]);
      if (VEC == 2) {
        STS64(at, x, y);         // @site stage.store
      } else {
        STS32_ALONE(at, x);      // @site stage.store
        STS32_ALONE(at + 4, y);  // @site stage.store
      }
    }
}
