// KDA backward B2, the S_in side: dqd_base = do S^T, dkd_base = dvcorr S^T, kdS = kd S, dbeta's part from kdS; and p.
//
// Python twin, with the design: kernels_py/kda_b2.py; mathematics and tensors: kernels_py/kda_reference.py. One CTA of
// 256 threads a (tile, head). Warp w owns columns 16w .. 16w + 15 of every [16, 128] product, as two n8 tiles. All
// instances add the same products in the same order: dqd_base (but of sinfix 0), dkd_base and dbeta_part are the same
// bits, and p for each b0.
#include "kda_products.cuh"

// What distinguishes the variants. sinfix: S^T is read transposed, or (0) as if it were S. united: kdS over do, dvcorr
// and kd (1), all stages over S (2), nothing over anything (0). narrow: elements of dvcorr that a thread narrows at
// once. b0: elements of dS that a lane loads at once for p; 2: those that fit the fragments of S^T; 0: no p. stride:
// floats from row to row of the fp32 tiles. swizzle: S under the SW128 atoms, or (0) INTER.
struct Form {
  int sinfix, united, narrow, b0, stride, swizzle;
};

// ---- shared memory, in bytes --------------------------------------------------------------------------------------
constexpr uint32_t kRows = kC * kD * sizeof(bf16);
constexpr uint32_t kS = 0, kDo = kD * kD * sizeof(bf16), kDvcorr = kDo + kRows, kKd = kDvcorr + kRows;
constexpr uint32_t kWide = kKd + kRows;  // dvcorr in fp32

__host__ __device__ constexpr uint32_t wide_size(Form f) { return kC * f.stride * sizeof(float); }
// Stage 0 is dqd_base's, 1 dkd_base's, 2 kdS's.
__host__ __device__ constexpr uint32_t stage_at(Form f, int which) {
  return f.united == 1 && which == 2 ? kDo : (f.united == 2 ? kS : kWide + wide_size(f)) + which * wide_size(f);
}
__host__ __device__ constexpr uint32_t shared_size(Form f) {
  return kWide + wide_size(f) * (f.united == 2 ? 1 : f.united == 1 ? 3 : 4);
}

// ---- the kernel ---------------------------------------------------------------------------------------------------
struct Arguments {
  const int *tile_start, *tile_rows;
  const bf16* k;
  const float* gc;
  const bf16 *v, *dO;
  const float* dvcorr;
  const bf16 *S, *dS;
  float *dqd_base, *dkd_base, *dbeta_part, *p;
  int heads;
};

// R1: kd = k / |k| e^gc of the thread's 8 elements; 16 lanes share a row and its norm.
__device__ inline uint4 rebuild_kd(const bf16* k, const float* gc) {
  uint4 words, gate[2];
  LDG128(words, k);                                         // @site R1.k.load
#pragma unroll
  for (int i = 0; i < 2; ++i) LDG128(gate[i], gc + 4 * i);  // @site R1.gc.load
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
  const uint32_t g[8] = {gate[0].x, gate[0].y, gate[0].z, gate[0].w, gate[1].x, gate[1].y, gate[1].z, gate[1].w};
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    squares += low_float(pairs[i]) * low_float(pairs[i]) + high_float(pairs[i]) * high_float(pairs[i]);
  const float norm = rsqrtf(sum_over<16>(squares) + 1e-6f);
  uint32_t kd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    kd[i] = pack(low_float(pairs[i]) * norm * exp2f(__uint_as_float(g[2 * i])),
                 high_float(pairs[i]) * norm * exp2f(__uint_as_float(g[2 * i + 1])));
  return make_uint4(kd[0], kd[1], kd[2], kd[3]);
}

// dvcorr into its fp32 and its bf16 tile: the thread's 8 elements as vectors, or one column at a time.
template <int NARROW>
__device__ inline void narrow(uint32_t wide, uint32_t tile, const float* dvcorr) {
  if (NARROW == 8) {
    uint4 half[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) LDG128(half[i], dvcorr + 4 * i);                       // @site dvcorr.load
#pragma unroll
    for (int i = 0; i < 2; ++i) STS128(wide + 16 * i, half[i]);                        // @site dvcorr.wide.store
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pairs[2 * i] = pack(__uint_as_float(half[i].x), __uint_as_float(half[i].y));
      pairs[2 * i + 1] = pack(__uint_as_float(half[i].z), __uint_as_float(half[i].w));
    }
    const uint4 words = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    STS128(tile, words);                                                               // @site dvcorr.bf16.store
  } else {
    uint32_t x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) LDG32(x[j], dvcorr + j);                   // @site dvcorr.load
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      STS32(wide + 4 * j, x[j]);                                           // @site dvcorr.wide.store
      const uint16_t bits = static_cast<uint16_t>(pack(__uint_as_float(x[j]), 0.f));
      STS16(tile + 2 * j, bits);                                           // @site dvcorr.bf16.store
    }
  }
}

template <int SINFIX, int UNITED, int NARROW, int B0, int STRIDE, int SWIZZLE>
__global__ __launch_bounds__(kThreads) void S_side(const Arguments x) {
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr Form form{SINFIX, UNITED, NARROW, B0, STRIDE, SWIZZLE};
  const uint32_t shared = shared_address(memory);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, head = blockIdx.y;
  int start, rows;
  LDG32(start, x.tile_start + blockIdx.x);  // @site tile.start.load
  LDG32(rows, x.tile_rows + blockIdx.x);    // @site tile.rows.load
  const size_t square = static_cast<size_t>(blockIdx.x) * x.heads + head;
  const bf16 *S = x.S + square * kD * kD, *dS = x.dS + square * kD * kD;
  const int row = tid / 16, column = tid % 16 * 8;  // 8 consecutive elements of a row
  auto global = [&](int r, int c) { return (static_cast<size_t>(start + r) * x.heads + head) * kD + c; };
  const size_t own = global(min(row, rows - 1), column);  // a phantom row reads the last one that exists

#pragma unroll
  for (int i = 0; i < 8; ++i) COPY_STATE(SWIZZLE, shared + kS, S, i);  // @site S_in.cp
  const uint32_t tile_at = shared + at_sw128<kC>(row, column);         // of a bf16 tile
  CP_ASYNC_CG(tile_at + kDo, x.dO + own);                              // @site do.cp
  CP_ASYNC_COMMIT();
  const uint4 kd = rebuild_kd(x.k + own, x.gc + own);
  STS128(tile_at + kKd, kd);                                           // @site R1.kd.store
  const uint32_t wide_at = shared + kWide + 4 * (row * STRIDE + column);
  narrow<NARROW>(wide_at, tile_at + kDvcorr, x.dvcorr + own);
  uint4 v;
  LDG128(v, x.v + own);                                                // @site v.load
  CP_ASYNC_WAIT(0);
  __syncthreads();

  // dqd_base = do S^T, dkd_base = dvcorr S^T: k runs along S's values, which are its rows, so the read is transposed.
  uint32_t a[4], b[4];
  float dqd[2][4] = {}, dkd[2][4] = {}, kdS[2][4] = {}, part[2] = {};
  constexpr int kAtOnce = B0 == 2 ? 4 : 8;  // all of dS at once would not fit the registers
#pragma unroll kAtOnce
  for (int k0 = 0; k0 < kD; k0 += 16) {
    if (SINFIX) {
      const uint32_t from = shared + kS + at_state<SWIZZLE>(k0 + lane % 16, 16 * warp + lane / 16 * 8);
      LDSM_X4_TRANS(b[0], b[1], b[2], b[3], from);  // @site S.base.ldsm
    } else {
      const int key = 16 * warp + lane / 16 * 8 + lane % 8;
      const uint32_t from = shared + kS + at_state<SWIZZLE>(key, k0 + lane / 8 % 2 * 8);
      LDSM_X4(b[0], b[1], b[2], b[3], from);        // @site S.base.ldsm
    }
    const uint32_t from = shared + at_sw128<kC>(lane % 16, k0 + lane / 16 * 8);
    LDSM_X4(a[0], a[1], a[2], a[3], from + kDo);      // @site do.ldsm
    multiply(dqd, a, b);
    LDSM_X4(a[0], a[1], a[2], a[3], from + kDvcorr);  // @site dvcorr.ldsm
    multiply(dkd, a, b);
    if (B0 == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // register i of the fragment: key 8 (i / 2) + g, values 8 (i % 2) + 2t and + 1
        uint32_t pair;
        LDG32(pair, dS + (16 * warp + i / 2 * 8 + g) * kD + k0 + i % 2 * 8 + 2 * t);  // @site p.dS.load
        part[i / 2] += low_float(pair) * low_float(b[i]) + high_float(pair) * high_float(b[i]);
      }
    }
  }
  // kdS = kd S: k runs along S's keys, which are contiguous, so the read is plain. Without the fix it is the read of
  // above once more, which ptxas would drop; an offset of 0 that it cannot know keeps the instruction.
  const uint32_t opaque = SINFIX ? 0 : gridDim.z - 1;
#pragma unroll
  for (int k0 = 0; k0 < kD; k0 += 16) {
    LDSM_X4(a[0], a[1], a[2], a[3], shared + kKd + at_sw128<kC>(lane % 16, k0 + lane / 16 * 8));  // @site kd.ldsm
    const uint32_t from = at_state<SWIZZLE>(16 * warp + lane / 16 * 8 + lane % 8, k0 + lane / 8 % 2 * 8);
    LDSM_X4(b[0], b[1], b[2], b[3], shared + kS + from + opaque);                                 // @site S.kdS.ldsm
    multiply(kdS, a, b);
  }

  float* p = x.p + square * kD;
  if (B0 == 2) {
    const float first = sum_over<4>(part[0]), second = sum_over<4>(part[1]);
    if (t < 2) STG32(p + 16 * warp + 8 * t + g, __float_as_uint(t ? second : first));  // @site p.store
  } else if (B0) {
    p_by_warp<B0 ? B0 : 1, SWIZZLE>(shared + kS, dS, p);
  }

  if (UNITED) __syncthreads();  // every warp is done with the operands, whose bytes the stages take
  stage<STRIDE, 2>(shared + stage_at(form, 0), dqd);
  stage<STRIDE, 2>(shared + stage_at(form, 1), dkd);
  stage<STRIDE, 2>(shared + stage_at(form, 2), kdS);
  __syncthreads();
#pragma unroll 1  // branches, not predicates, which a warp of phantom rows would execute
  for (int r = 2 * warp; r < min(2 * warp + 2, rows); ++r) {
    const uint32_t from = shared + 4 * (r * STRIDE + 4 * lane);
    const size_t to = global(r, 4 * lane);
    uint4 words;
    LDS128(words, from + stage_at(form, 0));  // @site stage.load
    STG128(x.dqd_base + to, words);           // @site dqd_base.store
    LDS128(words, from + stage_at(form, 1));  // @site stage.load
    STG128(x.dkd_base + to, words);           // @site dkd_base.store
  }
  if (2 * warp >= rows) return;
  const uint32_t kdS_at = shared + stage_at(form, 2) + 4 * (row * STRIDE + column), pairs[4] = {v.x, v.y, v.z, v.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint4 wide, product;
    LDS128(wide, wide_at + 16 * i);    // @site dbeta.dvcorr.load
    LDS128(product, kdS_at + 16 * i);  // @site dbeta.kdS.load
    sum += __uint_as_float(wide.x) * (low_float(pairs[2 * i]) - __uint_as_float(product.x));
    sum += __uint_as_float(wide.y) * (high_float(pairs[2 * i]) - __uint_as_float(product.y));
    sum += __uint_as_float(wide.z) * (low_float(pairs[2 * i + 1]) - __uint_as_float(product.z));
    sum += __uint_as_float(wide.w) * (high_float(pairs[2 * i + 1]) - __uint_as_float(product.w));
  }
  sum = sum_over<16>(sum);
  if (tid % 16 == 0 && row < rows) {
    const size_t token = static_cast<size_t>(start + row) * x.heads + head;
    STG32(x.dbeta_part + token, __float_as_uint(sum));  // @site dbeta_part.store
  }
}

// In the order of Form.
const char* const kNames[] = {"sinfix", "union", "narrow", "b0", "stage_stride", "swizzle"};

constexpr Variant<6> kVariants[] = {
    {"sinbug", {0, 0, 1, 1, 128, 0}}, {"sinfix", {1, 0, 1, 1, 128, 0}}, {"noalias", {1, 0, 8, 1, 128, 0}},
    {"scalar", {1, 1, 1, 1, 128, 0}}, {"kdsunion", {1, 1, 8, 1, 128, 0}}, {"vec", {1, 1, 8, 1, 128, 0}},
    {"nob0", {1, 1, 8, 0, 128, 0}}, {"l13", {1, 1, 8, 4, 128, 0}}, {"l13_16bytes", {1, 1, 8, 8, 128, 0}},
    {"frag", {1, 1, 8, 2, 128, 0}}, {"pad136", {1, 1, 8, 2, 136, 0}}, {"sw128", {1, 1, 8, 2, 136, 1}},
    {"sunion", {1, 2, 8, 2, 136, 1}},
};

#define INSTANCE(...) {{__VA_ARGS__}, reinterpret_cast<const void*>(S_side<__VA_ARGS__>), shared_size({__VA_ARGS__})}

const Instance<6> kInstances[] = {
    INSTANCE(0, 0, 1, 1, 128, 0), INSTANCE(1, 0, 1, 1, 128, 0), INSTANCE(1, 0, 8, 1, 128, 0),
    INSTANCE(1, 0, 8, 1, 132, 0), INSTANCE(1, 1, 1, 1, 128, 0), INSTANCE(1, 1, 1, 1, 132, 0),
    INSTANCE(1, 1, 8, 0, 128, 0), INSTANCE(1, 1, 8, 1, 128, 0), INSTANCE(1, 1, 8, 1, 128, 1),
    INSTANCE(1, 1, 8, 1, 132, 0), INSTANCE(1, 1, 8, 1, 136, 0), INSTANCE(1, 1, 8, 2, 128, 0),
    INSTANCE(1, 1, 8, 2, 136, 0), INSTANCE(1, 1, 8, 2, 136, 1), INSTANCE(1, 1, 8, 4, 128, 0),
    INSTANCE(1, 1, 8, 8, 128, 0), INSTANCE(1, 2, 8, 2, 136, 1),
};

// ---- inputs and the reference -------------------------------------------------------------------------------------

// dqd_base and dkd_base twice: from S^T, and from S, which is what sinfix 0 must give.
enum { kDqd, kDkd, kDbeta, kP, kOutputs };

struct Problem {
  Tiles tiles;
  Arguments arguments;
  Output outputs[kOutputs];
  std::vector<double> wrong[2], wrong_bound[2];
};

struct HostInputs {
  std::vector<bf16> k, v, dO, S, dS;
  std::vector<float> gc, dvcorr;
};

void reference(Problem& x, const HostInputs& in, int heads, size_t tile, int head) {
  const int start = x.tiles.start[tile], rows = x.tiles.rows[tile];
  const size_t square = tile * heads + head;
  const bf16 *S = &in.S[square * kD * kD], *dS = &in.dS[square * kD * kD];
  reference_p(x.outputs[kP], square, S, dS);
  for (int r = 0; r < rows; ++r) {
    const size_t token = static_cast<size_t>(start + r) * heads + head, at = token * kD;
    double squares = 0, dbeta = 0, dbeta_bound = 0;
    for (int e = 0; e < kD; ++e) squares += value_of(in.k[at + e]) * value_of(in.k[at + e]);
    double kd[kD];
    for (int e = 0; e < kD; ++e)
      kd[e] = value_of(in.k[at + e]) / std::sqrt(squares + 1e-6) * std::exp2(static_cast<double>(in.gc[at + e]));
    for (int n = 0; n < kD; ++n) {
      double sum[2][2] = {}, size[2][2] = {}, kdS = 0, kdS_size = 0;  // [do, dvcorr][S^T, S]
      for (int j = 0; j < kD; ++j) {
        const double a[2] = {value_of(in.dO[at + j]), in.dvcorr[at + j]};
        const double s[2] = {value_of(S[j * kD + n]), value_of(S[n * kD + j])};
        for (int i = 0; i < 2; ++i)
          for (int way = 0; way < 2; ++way) sum[i][way] += a[i] * s[way], size[i][way] += std::abs(a[i] * s[way]);
        kdS += kd[j] * s[1], kdS_size += std::abs(kd[j] * s[1]);
      }
      for (int i = 0; i < 2; ++i) {  // dvcorr is narrowed, do is bf16 as it comes
        const double unit = (i ? kBf16 : 0) + 1.01 * kFp32 * kD;
        x.outputs[i].expected[at + n] = sum[i][0], x.outputs[i].bound[at + n] = unit * size[i][0];
        x.wrong[i][at + n] = sum[i][1], x.wrong_bound[i][at + n] = unit * size[i][1];
      }
      // kd is off by a rounding to bf16 and, before it, by its fp32 sum of squares (at most 2^-16 of itself).
      const double error = (kBf16 + 1 / 65536. + 1.01 * kFp32 * kD) * kdS_size, d = in.dvcorr[at + n];
      const double v = value_of(in.v[at + n]);
      dbeta += d * (v - kdS);
      dbeta_bound += std::abs(d) * (error + kFp32 * (kD + 2) * (std::abs(v) + std::abs(kdS) + error));
    }
    x.outputs[kDbeta].expected[token] = dbeta, x.outputs[kDbeta].bound[token] = dbeta_bound;
  }
}

void fill(Problem& x, const Sizes& size) {
  x.tiles = tile_table(size);
  const int heads = size.heads;
  const size_t squares = x.tiles.start.size() * heads, states = squares * kD * kD, count = size.rows() * kD;
  const uint32_t base = 16 * size.seed;
  HostInputs in;
  in.k = uniform_bf16(count, base), in.v = uniform_bf16(count, base + 1), in.dO = uniform_bf16(count, base + 2);
  in.S = uniform_bf16(states, base + 3), in.dS = uniform_bf16(states, base + 4);
  in.gc = gate_sums(x.tiles, heads, base + 5);
  for (size_t i = 0; i < count; ++i) in.dvcorr.push_back(uniform(i, base + 6));
  x.outputs[kDqd] = output("dqd_base", count), x.outputs[kDkd] = output("dkd_base", count);
  x.outputs[kDbeta] = output("dbeta_part", size.rows()), x.outputs[kP] = output("p", squares * kD);
  for (int i = 0; i < 2; ++i) x.wrong[i].resize(count), x.wrong_bound[i].resize(count);
  for (size_t tile = 0; tile < x.tiles.start.size(); ++tile)
    for (int head = 0; head < heads; ++head) reference(x, in, heads, tile, head);
  x.arguments = {to_device(x.tiles.start), to_device(x.tiles.rows), to_device(in.k), to_device(in.gc),
                 to_device(in.v), to_device(in.dO), to_device(in.dvcorr), to_device(in.S), to_device(in.dS),
                 x.outputs[kDqd].device, x.outputs[kDkd].device, x.outputs[kDbeta].device, x.outputs[kP].device, heads};
}

std::string check(Problem& x, bool sinfix, int b0) {
  for (int i = 0; i < kOutputs; ++i) {
    Output& o = x.outputs[i];
    const std::string wrong = i == kP && !b0            ? untouched(o)
                              : i <= kDkd && !sinfix ? compare(o, x.wrong[i], x.wrong_bound[i], 1)
                                                     : compare(o, o.expected, o.bound, i == kP ? b0 : 0);
    if (!wrong.empty()) return wrong;
  }
  for (Output& o : x.outputs) forget(o);  // the next variant must write every element
  return "";
}

Experiment prepare(Case& c) {
  const Instance<6>& instance = chosen(c, kNames, kVariants, kInstances);
  Problem& x = problem_of(sizes(c), fill);
  for (Output& o : x.outputs) forget(o);
  return experiment(instance, x.tiles, x.arguments,
                    [&, sinfix = instance.choices[0], b0 = instance.choices[3]] { return check(x, sinfix, b0); });
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
