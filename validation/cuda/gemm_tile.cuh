// One CTA's share of a bf16 GEMM: how tiles enter shared memory and how fragments leave it.
//
// Tile 128x128x32, 256 threads = 8 warps as 2 (along M) x 4 (along N), warp tile 64x32, mma.m16n8k16, fp32 sums. A
// stage of shared memory holds As[128][32], then Bs[32][128] (B_LAYOUT 0, global B is [K][N]) or Bs[128][32] (B_LAYOUT
// 1, global B is [N][K]): 8 KB each. SWIZZLE permutes the 16-byte chunks of a row.
#pragma once
#include <cuda_bf16.h>

#include "common.cuh"

using bf16 = __nv_bfloat16;

constexpr int kTileM = 128, kTileN = 128, kTileK = 32, kThreads = 256;
constexpr int kStageA = kTileM * kTileK * sizeof(bf16), kStage = 2 * kStageA;  // bytes

// Row and column of a warp's 64x32 tile in the CTA's.
__device__ inline int warp_row(int thread) { return thread / 128 * 64; }
__device__ inline int warp_column(int thread) { return thread / 32 % 4 * 32; }

// The byte offset of element (r, c) in rows of 32 elements (64 bytes) ...
template <int SWIZZLE>
__device__ uint32_t at32(int r, int c) {
  return sizeof(bf16) * (r * 32 + (SWIZZLE ? c ^ (r >> 1 & 3) << 3 : c));
}

// ... and in rows of 128 elements (256 bytes).
template <int SWIZZLE>
__device__ uint32_t at128(int r, int c) {
  return sizeof(bf16) * (r * 128 + (SWIZZLE ? c ^ (r & 7) << 3 : c));
}

// What a thread moves of a tile: 16-byte chunks tid and tid + 256 of A, then of B, in row-major order of the unswizzled
// tile. A row of 32 elements is 4 chunks (a warp covers 8 rows), a row of 128 is 16 (a warp covers 2). The second chunk
// lies 64 (or 16) rows below the first, a whole number of swizzle periods: half a tile further on in shared memory.
template <int B_LAYOUT, int SWIZZLE>
struct TileCopy {
  const bf16 *a, *b;          // global source of the first chunks; step() moves on by one k-tile
  size_t a_half, b_half, b_step;  // elements from a first chunk to the second, from k-tile to k-tile
  uint32_t to_a, to_b;        // byte offset of the first chunks in a stage

  __device__ TileCopy(const bf16* A, const bf16* B, int m0, int n0, int N, int K) {
    const int r = threadIdx.x / 4, c = threadIdx.x % 4 * 8;
    a = A + static_cast<size_t>(m0 + r) * K + c;
    a_half = static_cast<size_t>(64) * K;
    to_a = at32<SWIZZLE>(r, c);
    if (B_LAYOUT == 0) {
      const int k = threadIdx.x / 16, n = threadIdx.x % 16 * 8;
      b = B + static_cast<size_t>(k) * N + n0 + n;
      b_half = static_cast<size_t>(16) * N;
      b_step = static_cast<size_t>(kTileK) * N;
      to_b = kStageA + at128<SWIZZLE>(k, n);
    } else {
      b = B + static_cast<size_t>(n0 + r) * K + c;
      b_half = a_half;
      b_step = kTileK;
      to_b = kStageA + to_a;
    }
  }

  __device__ void step() { a += kTileK, b += b_step; }

  __device__ void copy_async(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) CP_ASYNC_CG(stage + to_a + i * kStageA / 2, a + i * a_half);  // @site A.cp
#pragma unroll
    for (int i = 0; i < 2; ++i) CP_ASYNC_CG(stage + to_b + i * kStageA / 2, b + i * b_half);  // @site B.cp
    step();
  }

  __device__ void load(uint4 (&registers)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) LDG128(registers[i], a + i * a_half);      // @site A.ldg
#pragma unroll
    for (int i = 0; i < 2; ++i) LDG128(registers[2 + i], b + i * b_half);  // @site B.ldg
    step();
  }

  __device__ void store(uint32_t stage, const uint4 (&registers)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) STS128(stage + to_a + i * kStageA / 2, registers[i]);      // @site A.sts
#pragma unroll
    for (int i = 0; i < 2; ++i) STS128(stage + to_b + i * kStageA / 2, registers[2 + i]);  // @site B.sts
  }
};

// A warp's operands of one k16 step: four m16 tiles of A, four n8 tiles of B. With g = lane/4, t = lane%4, a[mi] is
// the k pairs at (g,2t) (g+8,2t) (g,2t+8) (g+8,2t+8), and b[ni] the k pairs 2t, 2t+8 of column g.
struct Fragments {
  uint32_t a[4][4], b[4][2];
};

// Reads them, in the order A then B, mi or ni outermost. Tiles a swizzle period (8 rows) apart differ by a constant, so
// the lane's part of the addresses is computed once: `a` and `b`, byte offsets in a stage.
template <int READ_MODE, int B_LAYOUT, int SWIZZLE>
struct FragmentReader {
  uint32_t a[4], b[4][2];

  __device__ FragmentReader(int m0, int n0) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if (READ_MODE == 0) a[q] = at32<SWIZZLE>(m0 + g, 8 * q + 2 * t);
      if (READ_MODE == 1) a[q] = at32<SWIZZLE>(m0 + lane % 16, 16 * (q % 2) + lane / 16 * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (READ_MODE == 0 && B_LAYOUT == 0) b[q][i] = kStageA + at128<SWIZZLE>(2 * t + i, n0 + 8 * q + g);
        if (READ_MODE == 1 && B_LAYOUT == 0) b[q][i] = kStageA + at128<SWIZZLE>(lane % 16, n0 + 8 * q);
        if (READ_MODE == 0 && B_LAYOUT == 1) b[q][i] = kStageA + at32<SWIZZLE>(n0 + g, 8 * q + 2 * t);
        if (READ_MODE == 1 && B_LAYOUT == 1)
          b[q][i] = kStageA + at32<SWIZZLE>(n0 + lane % 8, 16 * (q % 2) + lane / 8 % 2 * 8);
      }
    }
  }

  __device__ void read(Fragments& f, uint32_t stage, int k0) const {
#pragma unroll
    for (int mi = 0; mi < 4; ++mi) {
      if (READ_MODE == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          LDS32(f.a[mi][i], stage + a[k0 / 8 + i / 2] + 64 * (16 * mi + i % 2 * 8));  // @site A.lds
      } else {
        LDSM_X4(f.a[mi][0], f.a[mi][1], f.a[mi][2], f.a[mi][3], stage + a[k0 / 16] + 64 * 16 * mi);  // @site A.ldsm
      }
    }
#pragma unroll
    for (int ni = 0; ni < 4; ++ni) {
      if (READ_MODE == 0 && B_LAYOUT == 0) {
        uint16_t half[4];  // k = 2t, 2t+1, 2t+8, 2t+9 of one column: four rows, so four loads
#pragma unroll
        for (int i = 0; i < 4; ++i) LDS16(half[i], stage + b[ni][i % 2] + 256 * (k0 + i / 2 * 8));  // @site B.lds
#pragma unroll
        for (int i = 0; i < 2; ++i) f.b[ni][i] = half[2 * i] | static_cast<uint32_t>(half[2 * i + 1]) << 16;
      } else if (READ_MODE == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) LDS32(f.b[ni][i], stage + b[k0 / 8 + i][0] + 64 * 8 * ni);  // @site B.lds
      } else if (B_LAYOUT == 0) {
        LDSM_X2_TRANS(f.b[ni][0], f.b[ni][1], stage + b[ni][0] + 256 * k0);  // @site B.ldsm
      } else {
        LDSM_X2(f.b[ni][0], f.b[ni][1], stage + b[k0 / 16][0] + 64 * 8 * ni);  // @site B.ldsm
      }
    }
  }
};

// Accumulators c[mi][ni] = (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1) of the 16x8 tile.
__device__ inline void multiply(float (&c)[4][4][4], const Fragments& f) {
#pragma unroll
  for (int mi = 0; mi < 4; ++mi)
#pragma unroll
    for (int ni = 0; ni < 4; ++ni)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[mi][ni][0]), "+f"(c[mi][ni][1]), "+f"(c[mi][ni][2]), "+f"(c[mi][ni][3])
          : "r"(f.a[mi][0]), "r"(f.a[mi][1]), "r"(f.a[mi][2]), "r"(f.a[mi][3]), "r"(f.b[ni][0]), "r"(f.b[ni][1]));
}

// The rungs of the ladder: how tiles are loaded, how fragments are read, how B lies in memory. A1 to A3 are the
// ablation, the others its older form. Parameters of a case override single columns.
struct Rung {
  const char* name;
  int load_mode, read_mode, b_layout, stages, swizzle, staged;
};

constexpr Rung kRungs[] = {
    {"A1", 1, 0, 0, 3, 1, 0},         {"A2", 1, 0, 1, 3, 1, 0},
    {"A2L", 1, 1, 1, 3, 1, 0},        {"A3", 1, 1, 0, 3, 1, 0},
    {"naive", 0, 0, 0, 1, 0, 0},      {"bcf", 0, 0, 0, 1, 1, 0},
    {"bcf_dbf", 0, 0, 0, 2, 1, 0},    {"bcf_dbf_rw", 0, 0, 0, 2, 1, 1},
};

inline const Rung& find_rung(const std::string& name) {
  for (const Rung& rung : kRungs)
    if (name == rung.name) return rung;
  fail(2, "variant '" + name + "' is none of A1, A2, A2L, A3, naive, bcf, bcf_dbf, bcf_dbf_rw");
}
