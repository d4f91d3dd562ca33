// KDA backward B0: p[k] = sum_d dS[k][d] S_in[d][k] of one (tile, head) a CTA, by itself.
//
// Python twin, with the design: kernels_py/kda_b0.py. One of the two states lies in shared memory, K-INTER; the other
// streams from global memory.
#include "kda_state.cuh"

struct Form {
  int width, l12;  // elements of dS that a lane loads at once; 1: dS is the state in shared memory, S streams
};

struct Arguments {
  const bf16 *S, *dS;
  float* p;
  int heads;
};

template <int WIDTH, int L12>
__global__ __launch_bounds__(kThreads) void states(const Arguments x) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const size_t square = static_cast<size_t>(blockIdx.x) * x.heads + blockIdx.y;
  const bf16 *S = x.S + square * kD * kD, *dS = x.dS + square * kD * kD;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (L12) {
      COPY_STATE(0, shared, dS, i);  // @site dS.cp
    } else {
      COPY_STATE(0, shared, S, i);   // @site S_in.cp
    }
  }
  CP_ASYNC_COMMIT();
  CP_ASYNC_WAIT(0);
  __syncthreads();
  float* p = x.p + square * kD;
  if (!L12) {
    p_by_warp<WIDTH, 0>(shared, dS, p);
    return;
  }
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kKeys;
  float mine = 0;
#pragma unroll 1
  for (int begin = 0; begin < kKeys; begin += 4) {
    float s[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint16_t bits;
        LDG16(bits, S + (lane + 32 * j) * kD + first + begin + i);  // @site p.S.load
        s[i][j] = to_float(bits);
      }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float total = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint16_t bits;
        LDS16(bits, shared + at_state<0>(first + begin + i, lane + 32 * j));  // @site p.dS.load
        total += to_float(bits) * s[i][j];
      }
      total = sum_over<32>(total);
      if (lane == begin + i) mine = total;
    }
  }
  if (lane < kKeys) STG32(p + first + lane, __float_as_uint(mine));  // @site p.store
}

#define INSTANCE(width, l12) {{width, l12}, reinterpret_cast<const void*>(states<width, l12>)}
const struct {
  Form form;
  const void* kernel;
} kInstances[] = {INSTANCE(1, 0), INSTANCE(4, 0), INSTANCE(8, 0), INSTANCE(1, 1)};

struct Variant {
  const char* name;
  Form form;
};

constexpr Variant kVariants[] = {
    {"b0alone", {1, 0}}, {"l13", {4, 0}}, {"l13_16bytes", {8, 0}}, {"l12", {1, 1}},
};

struct Problem {
  size_t tiles;
  Arguments arguments;
  Output p;
};

Problem& problem(int tokens, int sequences, int heads, int seed) {
  static std::map<std::vector<int>, Problem> problems;
  const auto [entry, fresh] = problems.try_emplace({tokens, sequences, heads, seed});
  Problem& x = entry->second;
  if (!fresh) return x;
  x.tiles = tile_table(tokens, sequences).start.size();
  const size_t squares = x.tiles * heads;
  const std::vector<bf16> S = uniform_bf16(squares * kD * kD, 16 * seed), dS = uniform_bf16(S.size(), 16 * seed + 1);
  x.p = output("p", squares * kD);
  for (size_t i = 0; i < squares; ++i) reference_p(x.p, i, &S[i * kD * kD], &dS[i * kD * kD]);
  x.arguments = {to_device(S), to_device(dS), x.p.device, heads};
  return x;
}

Experiment prepare(Case& c) {
  const Variant* variant = nullptr;
  for (const Variant& v : kVariants)
    if (c.variant == v.name) variant = &v;
  if (!variant) fail(2, "variant '" + c.variant + "' is none of b0alone, l13, l13_16bytes, l12");
  const int tokens = c.get("tokens", 1000), sequences = c.get("sequences", 1), heads = c.get("heads", 4);
  const int seed = c.get("seed", 0);
  const Form form{c.get("width", variant->form.width), c.get("l12", variant->form.l12)};
  if (tokens < 1 || sequences < 1 || heads < 1 || heads > 65535 ||
      static_cast<int64_t>(tokens) * sequences * heads > 1 << 20)
    fail(2, c.text + ": tokens, sequences and heads must be at least 1, their product at most 2^20");
  const void* kernel = nullptr;
  for (const auto& i : kInstances)
    if (i.form.width == form.width && i.form.l12 == form.l12) kernel = i.kernel;
  if (!kernel) fail(2, c.text + ": this combination is not instantiated");

  Problem& p = problem(tokens, sequences, heads, seed);
  forget(p.p);
  Experiment e{kernel, dim3(p.tiles, heads), dim3(kThreads), kD * kD * sizeof(bf16)};
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, e.dynamic_shared));
  e.launch = [=, &p] {
    const void* arguments[] = {&p.arguments};
    CUDA_CHECK(cudaLaunchKernel(kernel, e.grid, e.block, const_cast<void**>(arguments), e.dynamic_shared, 0));
  };
  e.check = [=, &p] {
    const std::string wrong = compare(p.p, p.p.expected, p.p.bound, form.width);
    forget(p.p);  // the next variant must write every element
    return wrong;
  };
  return e;
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
