// KDA backward B1, the dS side: dkr = U dS^T, dU = M^T do + kr dS, dvcorr = INV^T dU, dv = dvcorr beta.
//
// Python twin, with the design: kernels_py/kda_b1.py; mathematics and tensors: kernels_py/kda_reference.py. One CTA of
// 256 threads a (tile, head). Warp w owns columns 16w .. 16w + 15 of every [16, 128] product, as two n8 tiles. All
// instances add the same products in the same order: their outputs are the same bits.
#include "kda_common.cuh"

// What distinguishes the variants. movm: dU is transposed by movmatrix, or (0) through shared memory. stride: floats
// from row to row of a stage; vec: floats that a store into it moves. swizzle: dS under the SW128 atoms, or (0) INTER.
// diagonal: its copy into INTER atoms is cp.async.ca along diagonals, or (0) cp.async.cg along rows. united: the stages
// lie over dS.
struct Form {
  int movm, stride, vec, swizzle, diagonal, united;
};

// ---- shared memory, in bytes --------------------------------------------------------------------------------------
constexpr uint32_t kRows = kC * kD * sizeof(bf16), kSquare = kC * kC * sizeof(bf16);
constexpr uint32_t kdS = 0, kU = kD * kD * sizeof(bf16), kDo = kU + kRows, kKr = kDo + kRows, kM = kKr + kRows;
constexpr uint32_t kINV = kM + kSquare, kdU = kINV + kSquare;  // dU only where it makes the round trip

__host__ __device__ constexpr uint32_t stages_at(Form f) { return f.united ? kdS : f.movm ? kdU : kdU + kRows; }
__host__ __device__ constexpr uint32_t stages_size(Form f) { return 3 * kC * f.stride * sizeof(float); }
__host__ __device__ constexpr uint32_t shared_size(Form f) {
  return f.united ? (f.movm ? kdU : kdU + kRows) : stages_at(f) + stages_size(f);
}

template <int SWIZZLE>
__device__ constexpr uint32_t dS_at(int key, int value) {
  return kdS + (SWIZZLE ? at_sw128<kD>(key, value) : at_inter<kD>(key, value));
}

// ---- the kernel ---------------------------------------------------------------------------------------------------
struct Arguments {
  const int *tile_start, *tile_rows;
  const bf16* k;
  const float* gc;
  const bf16 *beta, *dO, *U, *M, *INV, *dS;
  float *dkr, *dvcorr, *dv;
  int heads;
};

// R1: kr = k / |k| e^(gT - gc) of the thread's 8 elements; 16 lanes share a row and its norm. A phantom row is zeros.
__device__ inline uint4 rebuild_kr(const bf16* k, const float* gc, const float* gT, bool exists) {
  uint4 words = make_uint4(0, 0, 0, 0), gate[2] = {words, words}, last[2] = {words, words};
  if (exists) {
    LDG128(words, k);                                                       // @site R1.k.load
#pragma unroll
    for (int i = 0; i < 2; ++i) LDG128(gate[i], gc + 4 * i);                // @site R1.gc.load
#pragma unroll
    for (int i = 0; i < 2; ++i) LDG128(last[i], gT + 4 * i);                // @site R1.gT.load
  }
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
  const uint32_t g[8] = {gate[0].x, gate[0].y, gate[0].z, gate[0].w, gate[1].x, gate[1].y, gate[1].z, gate[1].w};
  const uint32_t l[8] = {last[0].x, last[0].y, last[0].z, last[0].w, last[1].x, last[1].y, last[1].z, last[1].w};
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    squares += low_float(pairs[i]) * low_float(pairs[i]) + high_float(pairs[i]) * high_float(pairs[i]);
#pragma unroll
  for (int step = 8; step; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  const float norm = rsqrtf(squares + 1e-6f);
  uint32_t kr[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    kr[i] = pack(low_float(pairs[i]) * norm * exp2f(__uint_as_float(l[2 * i]) - __uint_as_float(g[2 * i])),
                 high_float(pairs[i]) * norm * exp2f(__uint_as_float(l[2 * i + 1]) - __uint_as_float(g[2 * i + 1])));
  return make_uint4(kr[0], kr[1], kr[2], kr[3]);
}

// Accumulators: sums[j] = (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1) of n8 tile j, columns 16w + 8j .. + 7.
__device__ inline void multiply(float (&sums)[2][4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  MMA_BF16(sums[0], a, b[0], b[1]);
  MMA_BF16(sums[1], a, b[2], b[3]);
}

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

// No minimum of CTAs a multiprocessor: what ptxas takes by itself allows as many as shared memory does.
template <int MOVM, int STRIDE, int VEC, int SWIZZLE, int DIAGONAL, int UNITED>
__global__ __launch_bounds__(kThreads) void dS_side(const Arguments x) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr Form form{MOVM, STRIDE, VEC, SWIZZLE, DIAGONAL, UNITED};
  const uint32_t shared = shared_address(memory);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, head = blockIdx.y;
  int start, rows;
  LDG32(start, x.tile_start + blockIdx.x);  // @site tile.start.load
  LDG32(rows, x.tile_rows + blockIdx.x);    // @site tile.rows.load
  const size_t tile = static_cast<size_t>(blockIdx.x) * x.heads + head;
  const int row = tid / 16, column = tid % 16 * 8;  // 8 consecutive elements of a row
  auto global = [&](int r, int c) { return (static_cast<size_t>(start + r) * x.heads + head) * kD + c; };

  // Operands by cp.async. A full tile takes no predicates, under which Nsight Compute 2025.3 loses some of the counts.
  const bf16* dS = x.dS + tile * kD * kD;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (DIAGONAL) {
      const int key = 8 * (warp + i / 4 * 8) + lane % 8;
      const int value = 64 * (i / 2 % 2) + 8 * (lane % 8 ^ (lane / 8 + i % 2 * 4));
      CP_ASYNC_CA(shared + dS_at<SWIZZLE>(key, value), dS + key * kD + value);  // @site dS.cp
    } else {
      const int key = 16 * i + row;
      CP_ASYNC_CG(shared + dS_at<SWIZZLE>(key, column), dS + key * kD + column);  // @site dS.cp
    }
  }
  const uint32_t square_to = at_inter<kC>(lane / 2, lane % 2 * 8);
  const size_t square_from = tile * kC * kC + lane * 8;
  if (warp == 0) {
    CP_ASYNC_CG(shared + kM + square_to, x.M + square_from);      // @site M.cp
  } else if (warp == 1) {
    CP_ASYNC_CG(shared + kINV + square_to, x.INV + square_from);  // @site INV.cp
  }
  const uint32_t row_to = shared + at_sw128<kC>(row, column);
  if (rows == kC) {
    CP_ASYNC_CG(row_to + kU, x.U + global(row, column));     // @site U.cp
    CP_ASYNC_CG(row_to + kDo, x.dO + global(row, column));   // @site do.cp
  } else if (row < rows) {
    CP_ASYNC_CG(row_to + kU, x.U + global(row, column));     // @site U.cp
    CP_ASYNC_CG(row_to + kDo, x.dO + global(row, column));   // @site do.cp
  } else {
    const uint4 zeros = make_uint4(0, 0, 0, 0);
#pragma unroll 1  // a branch, not a predicate: every warp of the tile would execute that
    for (uint32_t to = row_to + kU; to <= row_to + kDo; to += kRows) {
      STS128(to, zeros);                                     // @site phantom.zero
    }
  }
  CP_ASYNC_COMMIT();

  const size_t own = global(row, column);
  const uint4 kr = rebuild_kr(x.k + own, x.gc + own, x.gc + global(rows - 1, column), row < rows);
  STS128(row_to + kKr, kr);  // @site R1.kr.store
  float beta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint16_t bits;  // a phantom row takes the last row's: nobody stores its dv
    const int last = min(g + 8 * half, rows - 1);
    LDG16(bits, x.beta + static_cast<size_t>(start + last) * x.heads + head);  // @site beta.load
    beta[half] = __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
  CP_ASYNC_WAIT(0);
  __syncthreads();

  // dkr = U dS^T: k runs along dS's values, which are contiguous, so the read is plain.
  uint32_t a[4], b[4];
  float dkr[2][4] = {}, dU[2][4] = {}, dvcorr[2][4] = {};
#pragma unroll
  for (int k0 = 0; k0 < kD; k0 += 16) {
    LDSM_X4(a[0], a[1], a[2], a[3], shared + kU + at_sw128<kC>(lane % 16, k0 + lane / 16 * 8));  // @site U.ldsm
    const uint32_t from = dS_at<SWIZZLE>(16 * warp + lane / 16 * 8 + lane % 8, k0 + lane / 8 % 2 * 8);
    LDSM_X4(b[0], b[1], b[2], b[3], shared + from);                                              // @site dS.ldsm
    multiply(dkr, a, b);
  }

  // dU = M^T do + kr dS: k runs along rows of do and of dS, so both are read transposed.
  const int own_column = 16 * warp + lane / 16 * 8;
  const uint32_t square_from_shared = shared + at_inter<kC>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
  LDSM_X4_TRANS(b[0], b[1], b[2], b[3], shared + kDo + at_sw128<kC>(lane % 16, own_column));  // @site do.ldsm.trans
  LDSM_X4_TRANS(a[0], a[1], a[2], a[3], square_from_shared + kM);                             // @site M.ldsm.trans
  multiply(dU, a, b);
#pragma unroll
  for (int k0 = 0; k0 < kD; k0 += 16) {
    LDSM_X4(a[0], a[1], a[2], a[3], shared + kKr + at_sw128<kC>(lane % 16, k0 + lane / 16 * 8));  // @site kr.ldsm
    const uint32_t from = shared + dS_at<SWIZZLE>(k0 + lane % 16, own_column);
    LDSM_X4_TRANS(b[0], b[1], b[2], b[3], from);                                                  // @site dS.ldsm.trans
    multiply(dU, a, b);
  }

  // dvcorr = INV^T dU: a warp needs only the columns of dU that it holds itself, narrowed and transposed 8x8 by 8x8.
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = pack(dU[j][2 * half], dU[j][2 * half + 1]);
      if (MOVM) {
        MOVMATRIX_TRANS(b[2 * j + half], pair);
      } else {
        STS32(shared + kdU + 2 * ((g + 8 * half) * kD + 16 * warp + 8 * j + 2 * t), pair);  // @site dU.store
      }
    }
  if (!MOVM) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint16_t element[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t from = shared + kdU + 2 * ((2 * t + 8 * half + i) * kD + 16 * warp + 8 * j + g);
          LDS16(element[i], from);  // @site dU.load
        }
        b[2 * j + half] = element[0] | static_cast<uint32_t>(element[1]) << 16;
      }
  }
  LDSM_X4_TRANS(a[0], a[1], a[2], a[3], square_from_shared + kINV);  // @site INV.ldsm.trans
  multiply(dvcorr, a, b);

  // The three results through fp32 stages, to leave in whole rows.
  constexpr uint32_t stage_size = kC * STRIDE * sizeof(float);
  const uint32_t stages = shared + stages_at(form);
  if (UNITED) __syncthreads();  // every warp is done with dS, whose bytes the stages take
  stage<STRIDE, VEC>(stages, dkr);
  stage<STRIDE, VEC>(stages + stage_size, dvcorr);
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) dvcorr[j][i] *= beta[i / 2];
  stage<STRIDE, VEC>(stages + 2 * stage_size, dvcorr);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = 2 * warp + i;
    if (r < rows) {
      const uint32_t from = stages + 4 * (r * STRIDE + 4 * lane);
      const size_t to = global(r, 4 * lane);
      uint4 words;
      LDS128(words, from);                   // @site stage.load
      STG128(x.dkr + to, words);             // @site dkr.store
      LDS128(words, from + stage_size);      // @site stage.load
      STG128(x.dvcorr + to, words);          // @site dvcorr.store
      LDS128(words, from + 2 * stage_size);  // @site stage.load
      STG128(x.dv + to, words);              // @site dv.store
    }
  }
}

struct Instance {
  Form form;
  const void* kernel;
};

#define INSTANCE(movm, stride, vec, swizzle, diagonal, united)      \
  {{movm, stride, vec, swizzle, diagonal, united},                    \
   reinterpret_cast<const void*>(dS_side<movm, stride, vec, swizzle, diagonal, united>)}
#define EVERY_STAGE(movm)                                                                            \
  INSTANCE(movm, 128, 1, 0, 0, 0), INSTANCE(movm, 132, 1, 0, 0, 0), INSTANCE(movm, 136, 1, 0, 0, 0), \
      INSTANCE(movm, 128, 2, 0, 0, 0), INSTANCE(movm, 132, 2, 0, 0, 0), INSTANCE(movm, 136, 2, 0, 0, 0)

const Instance kInstances[] = {
    EVERY_STAGE(0),
    EVERY_STAGE(1),
    INSTANCE(1, 136, 2, 1, 0, 0),
    INSTANCE(1, 136, 2, 0, 1, 0),
    INSTANCE(1, 136, 2, 0, 0, 1),
    INSTANCE(1, 136, 2, 1, 0, 1),
    INSTANCE(1, 136, 2, 0, 1, 1),
};

struct Variant {
  const char* name;
  Form form;
};

constexpr Variant kVariants[] = {
    {"roundtrip", {0, 128, 1, 0, 0, 0}}, {"movm", {1, 128, 1, 0, 0, 0}},     {"pad132", {1, 132, 1, 0, 0, 0}},
    {"float2", {1, 136, 2, 0, 0, 0}},    {"sw128", {1, 136, 2, 1, 0, 0}},    {"diagonal", {1, 136, 2, 0, 1, 0}},
    {"union", {1, 136, 2, 0, 0, 1}},     {"union_sw128", {1, 136, 2, 1, 0, 1}},
};

// ---- inputs and the reference -------------------------------------------------------------------------------------

struct Output {
  const char* name;
  float* device;
  std::vector<double> expected, bound;
  std::vector<float> first;  // of the first variant run at this size
};

struct Problem {
  Tiles tiles;
  size_t count;  // elements of an output; kGuard further ones lie behind, which nobody may touch
  Arguments arguments;
  Output outputs[3];
};

// In float64 from the rounded inputs, with a bound per element: narrowing to bf16 adds 2^-8 of the magnitude, every
// fp32 operation and every term of a sum 2^-22 (four times fp32's rounding: an mma's accumulator truncates, and
// ex2.approx and rsqrt.approx are off by two units).
constexpr double kBf16 = 1 / 256., kFp32 = 1 / 4194304.;

struct HostInputs {
  std::vector<bf16> k, beta, dO, U, M, INV, dS;
  std::vector<float> gc;
};

inline double value(bf16 x) { return __bfloat162float(x); }

void reference(Problem& p, const HostInputs& in, int heads, size_t tile, int head) {
  using Rows = std::vector<double>;
  const int start = p.tiles.start[tile], rows = p.tiles.rows[tile];
  const bf16 *dS = &in.dS[(tile * heads + head) * kD * kD], *M = &in.M[(tile * heads + head) * kC * kC];
  const bf16* INV = &in.INV[(tile * heads + head) * kC * kC];
  auto at = [&](int r, int c) { return (static_cast<size_t>(start + r) * heads + head) * kD + c; };
  auto put = [&](int output, int r, int c, double expected, double bound) {
    p.outputs[output].expected[at(r, c)] = expected, p.outputs[output].bound[at(r, c)] = bound;
  };
  Rows dU(kC * kD), dU_size(kC * kD), dU_bound(kC * kD), from_kr(kC * kD);
  for (int r = 0; r < rows; ++r) {
    double squares = 0;
    for (int e = 0; e < kD; ++e) squares += value(in.k[at(r, e)]) * value(in.k[at(r, e)]);
    for (int e = 0; e < kD; ++e) {
      const double gate = static_cast<double>(in.gc[at(rows - 1, e)]) - in.gc[at(r, e)];
      const double kr = value(in.k[at(r, e)]) / std::sqrt(squares + 1e-6) * std::exp2(gate);
      double dkr = 0, dkr_size = 0;
      for (int d = 0; d < kD; ++d) {
        const double s = value(dS[e * kD + d]), u = value(in.U[at(r, d)]);
        dkr += u * s, dkr_size += std::abs(u * s);
        dU[r * kD + d] += kr * s, from_kr[r * kD + d] += std::abs(kr * s);
      }
      put(0, r, e, dkr, kFp32 * kD * dkr_size);
    }
    for (int d = 0; d < kD; ++d) {
      double& size = dU_size[r * kD + d];
      size = from_kr[r * kD + d];
      for (int i = 0; i < rows; ++i) {
        const double term = value(M[i * kC + r]) * value(in.dO[at(i, d)]);
        dU[r * kD + d] += term, size += std::abs(term);
      }
      // kr is off by a rounding to bf16 and, before it, by its fp32 sum of squares (at most 2^-16 of itself).
      const double error = (kBf16 + 1 / 65536.) * from_kr[r * kD + d] + kFp32 * (kD + kC) * 1.01 * size;
      dU_bound[r * kD + d] = error + kBf16 * (std::abs(dU[r * kD + d]) + error);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int d = 0; d < kD; ++d) {
      double sum = 0, bound = 0;
      for (int i = 0; i < rows; ++i) {
        const double inverse = value(INV[i * kC + r]), error = dU_bound[i * kD + d];
        sum += inverse * dU[i * kD + d];
        bound += std::abs(inverse) * (error + kFp32 * kC * (std::abs(dU[i * kD + d]) + error));
      }
      const double beta = value(in.beta[static_cast<size_t>(start + r) * heads + head]);
      put(1, r, d, sum, bound);
      put(2, r, d, sum * beta, bound * beta + kFp32 * (std::abs(sum) + bound) * beta);
    }
}

constexpr size_t kGuard = 1 << 16;

Problem& problem(int tokens, int sequences, int heads, int seed) {
  static std::map<std::vector<int>, Problem> problems;
  const auto [entry, fresh] = problems.try_emplace({tokens, sequences, heads, seed});
  Problem& p = entry->second;
  if (!fresh) return p;
  p.tiles = tile_table(tokens, sequences);
  const size_t tiles = p.tiles.start.size(), squares = tiles * heads;
  p.count = static_cast<size_t>(tokens) * sequences * heads * kD;
  HostInputs in;
  const uint32_t base = 16 * seed;
  in.k = uniform_bf16(p.count, base), in.dO = uniform_bf16(p.count, base + 1), in.U = uniform_bf16(p.count, base + 2);
  in.dS = uniform_bf16(squares * kD * kD, base + 3);
  in.gc = gate_sums(p.tiles, heads, base + 4);
  for (size_t i = 0; i < p.count / kD; ++i) in.beta.push_back(__float2bfloat16(0.5f + 0.5f * uniform(i, base + 5)));
  // M is lower triangular, INV besides with a unit diagonal; phantom rows are those of zero and of the identity.
  for (size_t i = 0; i < squares * kC * kC; ++i) {
    const int r = i / kC % kC, c = i % kC, rows = p.tiles.rows[i / (kC * kC) / heads];
    in.M.push_back(__float2bfloat16(r < rows && c <= r ? uniform(i, base + 6) : 0.f));
    in.INV.push_back(__float2bfloat16(r == c ? 1.f : r < rows && c < r ? 0.25f * uniform(i, base + 7) : 0.f));
  }
  const char* names[3] = {"dkr", "dvcorr", "dv"};
  for (int i = 0; i < 3; ++i)
    p.outputs[i] = {names[i], device_array<float>(p.count + kGuard), std::vector<double>(p.count),
                    std::vector<double>(p.count), {}};
  for (size_t tile = 0; tile < tiles; ++tile)
    for (int head = 0; head < heads; ++head) reference(p, in, heads, tile, head);
  p.arguments = {to_device(p.tiles.start), to_device(p.tiles.rows), to_device(in.k), to_device(in.gc),
                 to_device(in.beta), to_device(in.dO), to_device(in.U), to_device(in.M), to_device(in.INV),
                 to_device(in.dS), p.outputs[0].device, p.outputs[1].device, p.outputs[2].device, heads};
  return p;
}

void forget_outputs(Problem& p) {
  for (Output& o : p.outputs) CUDA_CHECK(cudaMemset(o.device, 0xff, (p.count + kGuard) * sizeof(float)));  // NaN
}

// "" or what is wrong: an element beyond its bound (a NaN is), other bits than the first variant's, a touched guard.
std::string compare(Output& o, size_t count) {
  const std::vector<float> got = to_host(o.device, count + kGuard);
  for (size_t i = 0; i < count; ++i)
    if (!(std::abs(got[i] - o.expected[i]) <= o.bound[i])) {
      char line[200];
      snprintf(line, sizeof line, "%s element %zu is %.9g, expected %.9g within %.3g", o.name, i, got[i], o.expected[i],
               o.bound[i]);
      return line;
    }
  for (size_t i = count; i < count + kGuard; ++i)
    if (reinterpret_cast<const uint32_t&>(got[i]) != 0xffffffffu)
      return std::string(o.name) + " was written " + std::to_string(i - count) + " elements past its end";
  if (o.first.empty()) o.first.assign(got.begin(), got.begin() + count);
  for (size_t i = 0; i < count; ++i)
    if (reinterpret_cast<const uint32_t&>(got[i]) != reinterpret_cast<const uint32_t&>(o.first[i]))
      return std::string(o.name) + " element " + std::to_string(i) + " differs in its bits from the first variant's";
  return "";
}

Experiment prepare(Case& c) {
  const Variant* variant = nullptr;
  for (const Variant& v : kVariants)
    if (c.variant == v.name) variant = &v;
  if (!variant)
    fail(2, "variant '" + c.variant +
                "' is none of roundtrip, movm, pad132, float2, sw128, diagonal, union, union_sw128");
  const int tokens = c.get("tokens", 1000), sequences = c.get("sequences", 1), heads = c.get("heads", 4);
  const int seed = c.get("seed", 0);
  const Form& f = variant->form;
  const Form form{c.get("movm", f.movm), c.get("stage_stride", f.stride), c.get("stage_vec", f.vec),
                  c.get("swizzle", f.swizzle), c.get("diagonal", f.diagonal), c.get("union", f.united)};
  if (tokens < 1 || sequences < 1 || heads < 1 || heads > 65535 ||
      static_cast<int64_t>(tokens) * sequences * heads > 1 << 18)
    fail(2, c.text + ": tokens, sequences and heads must be at least 1, their product at most 2^18");
  const void* kernel = nullptr;
  for (const Instance& i : kInstances)
    if (i.form.movm == form.movm && i.form.stride == form.stride && i.form.vec == form.vec &&
        i.form.swizzle == form.swizzle && i.form.diagonal == form.diagonal && i.form.united == form.united)
      kernel = i.kernel;
  if (!kernel) fail(2, c.text + ": this combination is not instantiated");

  Problem& p = problem(tokens, sequences, heads, seed);
  forget_outputs(p);
  Experiment e{kernel, dim3(p.tiles.start.size(), heads), dim3(kThreads), shared_size(form)};
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_size(form)));
  e.launch = [=, &p] {
    const void* arguments[] = {&p.arguments};
    CUDA_CHECK(cudaLaunchKernel(kernel, e.grid, e.block, const_cast<void**>(arguments), e.dynamic_shared, 0));
  };
  e.check = [&p] {
    for (Output& o : p.outputs)
      if (const std::string wrong = compare(o, p.count); !wrong.empty()) return wrong;
    forget_outputs(p);  // the next variant must write every element
    return std::string();
  };
  return e;
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
