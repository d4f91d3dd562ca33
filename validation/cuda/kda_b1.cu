// KDA backward B1, the dS side: dkr = U dS^T, dU = M^T do + kr dS, dvcorr = INV^T dU, dv = dvcorr beta.
//
// Python twin, with the design: kernels_py/kda_b1.py; mathematics and tensors: kernels_py/kda_reference.py. One CTA of
// 256 threads a (tile, head). Warp w owns columns 16w .. 16w + 15 of every [16, 128] product, as two n8 tiles. All
// instances add the same products in the same order: their outputs are the same bits.
#include "kda_products.cuh"

// What distinguishes the variants. movm: dU is transposed by movmatrix, or (0) through shared memory. stride: floats
// from row to row of a stage; vec: floats that a store into it moves. swizzle: dS under the SW128 atoms, or (0) INTER.
// diagonal: its copy into INTER atoms is cp.async.ca along diagonals, or (0) cp.async.cg along rows. united: the stages
// lie over dS. b0: p as well, from dS as it lies and S streaming.
struct Form {
  int movm, stride, vec, swizzle, diagonal, united, b0;
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

// ---- the kernel ---------------------------------------------------------------------------------------------------
struct Arguments {
  const int *tile_start, *tile_rows;
  const bf16* k;
  const float* gc;
  const bf16 *beta, *dO, *U, *M, *INV, *dS, *S;
  float *dkr, *dvcorr, *dv, *p;
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
  const float norm = rsqrtf(sum_over<16>(squares) + 1e-6f);
  uint32_t kr[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    kr[i] = pack(low_float(pairs[i]) * norm * exp2f(__uint_as_float(l[2 * i]) - __uint_as_float(g[2 * i])),
                 high_float(pairs[i]) * norm * exp2f(__uint_as_float(l[2 * i + 1]) - __uint_as_float(g[2 * i + 1])));
  return make_uint4(kr[0], kr[1], kr[2], kr[3]);
}

// No minimum of CTAs a multiprocessor: what ptxas takes by itself allows as many as shared memory does.
template <int MOVM, int STRIDE, int VEC, int SWIZZLE, int DIAGONAL, int UNITED, int B0>
__global__ __launch_bounds__(kThreads) void dS_side(const Arguments x) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr Form form{MOVM, STRIDE, VEC, SWIZZLE, DIAGONAL, UNITED, B0};
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
      CP_ASYNC_CA(shared + kdS + at_state<SWIZZLE>(key, value), dS + key * kD + value);  // @site dS.cp
    } else {
      COPY_STATE(SWIZZLE, shared + kdS, dS, i);  // @site dS.cp
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
    beta[half] = to_float(bits);
  }
  CP_ASYNC_WAIT(0);
  __syncthreads();

  // dkr = U dS^T: k runs along dS's values, which are contiguous, so the read is plain.
  uint32_t a[4], b[4];
  float dkr[2][4] = {}, dU[2][4] = {}, dvcorr[2][4] = {};
#pragma unroll
  for (int k0 = 0; k0 < kD; k0 += 16) {
    LDSM_X4(a[0], a[1], a[2], a[3], shared + kU + at_sw128<kC>(lane % 16, k0 + lane / 16 * 8));  // @site U.ldsm
    const uint32_t from = kdS + at_state<SWIZZLE>(16 * warp + lane / 16 * 8 + lane % 8, k0 + lane / 8 % 2 * 8);
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
    const uint32_t from = shared + kdS + at_state<SWIZZLE>(k0 + lane % 16, own_column);
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

  if (B0) p_from_dS<SWIZZLE>(shared + kdS, x.S + tile * kD * kD, x.p + tile * kD);

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

// In the order of Form.
const char* const kNames[] = {"movm", "stage_stride", "stage_vec", "swizzle", "diagonal", "union", "b0"};

constexpr Variant<7> kVariants[] = {
    {"roundtrip", {0, 128, 1, 0, 0, 0, 0}}, {"movm", {1, 128, 1, 0, 0, 0, 0}},
    {"pad132", {1, 132, 1, 0, 0, 0, 0}},    {"float2", {1, 136, 2, 0, 0, 0, 0}},
    {"sw128", {1, 136, 2, 1, 0, 0, 0}},     {"diagonal", {1, 136, 2, 0, 1, 0, 0}},
    {"union", {1, 136, 2, 0, 0, 1, 0}},     {"union_sw128", {1, 136, 2, 1, 0, 1, 0}},
    {"l12", {1, 128, 1, 0, 0, 0, 1}},
};

#define INSTANCE(...) {{__VA_ARGS__}, reinterpret_cast<const void*>(dS_side<__VA_ARGS__>), shared_size({__VA_ARGS__})}
#define EVERY_STAGE(movm)                                                                                     \
  INSTANCE(movm, 128, 1, 0, 0, 0, 0), INSTANCE(movm, 132, 1, 0, 0, 0, 0), INSTANCE(movm, 136, 1, 0, 0, 0, 0), \
      INSTANCE(movm, 128, 2, 0, 0, 0, 0), INSTANCE(movm, 132, 2, 0, 0, 0, 0), INSTANCE(movm, 136, 2, 0, 0, 0, 0)

const Instance<7> kInstances[] = {
    EVERY_STAGE(0), EVERY_STAGE(1),
    INSTANCE(1, 136, 2, 1, 0, 0, 0), INSTANCE(1, 136, 2, 0, 1, 0, 0), INSTANCE(1, 136, 2, 0, 0, 1, 0),
    INSTANCE(1, 136, 2, 1, 0, 1, 0), INSTANCE(1, 136, 2, 0, 1, 1, 0), INSTANCE(1, 128, 1, 0, 0, 0, 1),
    INSTANCE(1, 136, 2, 1, 0, 0, 1), INSTANCE(1, 136, 2, 0, 0, 1, 1),
};

// ---- inputs and the reference -------------------------------------------------------------------------------------

enum { kDkrOut, kDvcorrOut, kDvOut, kPOut, kOutputs };

struct Problem {
  Tiles tiles;
  Arguments arguments;
  Output outputs[kOutputs];
};

struct HostInputs {
  std::vector<bf16> k, beta, dO, U, M, INV, dS, S;
  std::vector<float> gc;
};

void reference(Problem& p, const HostInputs& in, int heads, size_t tile, int head) {
  using Rows = std::vector<double>;
  const int start = p.tiles.start[tile], rows = p.tiles.rows[tile];
  const size_t square = tile * heads + head;
  const bf16 *dS = &in.dS[square * kD * kD], *M = &in.M[square * kC * kC], *INV = &in.INV[square * kC * kC];
  reference_p(p.outputs[kPOut], square, &in.S[square * kD * kD], dS);
  auto at = [&](int r, int c) { return (static_cast<size_t>(start + r) * heads + head) * kD + c; };
  auto put = [&](int output, int r, int c, double expected, double bound) {
    p.outputs[output].expected[at(r, c)] = expected, p.outputs[output].bound[at(r, c)] = bound;
  };
  Rows dU(kC * kD), dU_size(kC * kD), dU_bound(kC * kD), from_kr(kC * kD);
  for (int r = 0; r < rows; ++r) {
    double squares = 0;
    for (int e = 0; e < kD; ++e) squares += value_of(in.k[at(r, e)]) * value_of(in.k[at(r, e)]);
    for (int e = 0; e < kD; ++e) {
      const double gate = static_cast<double>(in.gc[at(rows - 1, e)]) - in.gc[at(r, e)];
      const double kr = value_of(in.k[at(r, e)]) / std::sqrt(squares + 1e-6) * std::exp2(gate);
      double dkr = 0, dkr_size = 0;
      for (int d = 0; d < kD; ++d) {
        const double s = value_of(dS[e * kD + d]), u = value_of(in.U[at(r, d)]);
        dkr += u * s, dkr_size += std::abs(u * s);
        dU[r * kD + d] += kr * s, from_kr[r * kD + d] += std::abs(kr * s);
      }
      put(kDkrOut, r, e, dkr, kFp32 * kD * dkr_size);
    }
    for (int d = 0; d < kD; ++d) {
      double& size = dU_size[r * kD + d];
      size = from_kr[r * kD + d];
      for (int i = 0; i < rows; ++i) {
        const double term = value_of(M[i * kC + r]) * value_of(in.dO[at(i, d)]);
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
        const double inverse = value_of(INV[i * kC + r]), error = dU_bound[i * kD + d];
        sum += inverse * dU[i * kD + d];
        bound += std::abs(inverse) * (error + kFp32 * kC * (std::abs(dU[i * kD + d]) + error));
      }
      const double beta = value_of(in.beta[static_cast<size_t>(start + r) * heads + head]);
      put(kDvcorrOut, r, d, sum, bound);
      put(kDvOut, r, d, sum * beta, bound * beta + kFp32 * (std::abs(sum) + bound) * beta);
    }
}

void fill(Problem& p, const Sizes& size) {
  p.tiles = tile_table(size);
  const int heads = size.heads;
  const size_t tiles = p.tiles.start.size(), squares = tiles * heads, count = size.rows() * kD;
  HostInputs in;
  const uint32_t base = 16 * size.seed;
  in.k = uniform_bf16(count, base), in.dO = uniform_bf16(count, base + 1), in.U = uniform_bf16(count, base + 2);
  in.dS = uniform_bf16(squares * kD * kD, base + 3), in.S = uniform_bf16(squares * kD * kD, base + 8);
  in.gc = gate_sums(p.tiles, heads, base + 4);
  for (size_t i = 0; i < size.rows(); ++i) in.beta.push_back(__float2bfloat16(0.5f + 0.5f * uniform(i, base + 5)));
  // M is lower triangular, INV besides with a unit diagonal; phantom rows are those of zero and of the identity.
  for (size_t i = 0; i < squares * kC * kC; ++i) {
    const int r = i / kC % kC, c = i % kC, rows = p.tiles.rows[i / (kC * kC) / heads];
    in.M.push_back(__float2bfloat16(r < rows && c <= r ? uniform(i, base + 6) : 0.f));
    in.INV.push_back(__float2bfloat16(r == c ? 1.f : r < rows && c < r ? 0.25f * uniform(i, base + 7) : 0.f));
  }
  p.outputs[kDkrOut] = output("dkr", count), p.outputs[kDvcorrOut] = output("dvcorr", count);
  p.outputs[kDvOut] = output("dv", count), p.outputs[kPOut] = output("p", squares * kD);
  for (size_t tile = 0; tile < tiles; ++tile)
    for (int head = 0; head < heads; ++head) reference(p, in, heads, tile, head);
  p.arguments = {to_device(p.tiles.start), to_device(p.tiles.rows), to_device(in.k), to_device(in.gc),
                 to_device(in.beta), to_device(in.dO), to_device(in.U), to_device(in.M), to_device(in.INV),
                 to_device(in.dS), to_device(in.S), p.outputs[kDkrOut].device, p.outputs[kDvcorrOut].device,
                 p.outputs[kDvOut].device, p.outputs[kPOut].device, heads};
}

std::string check(Problem& p, bool b0) {
  for (int i = 0; i < kOutputs; ++i) {
    Output& o = p.outputs[i];
    const std::string wrong = i == kPOut && !b0 ? untouched(o) : compare(o, o.expected, o.bound, 0);
    if (!wrong.empty()) return wrong;
  }
  for (Output& o : p.outputs) forget(o);  // the next variant must write every element
  return "";
}

Experiment prepare(Case& c) {
  const Instance<7>& instance = chosen(c, kNames, kVariants, kInstances);
  Problem& p = problem_of(sizes(c), fill);
  for (Output& o : p.outputs) forget(o);
  return experiment(instance, p.tiles, p.arguments, [&, b0 = instance.choices[6]] { return check(p, b0); });
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
