// KDA backward B0: p[k] = sum_d dS[k][d] S_in[d][k] of one (tile, head) a CTA, by itself.
// Python twin, with the design: kernels_py/kda_b0.py. One of the two states lies in shared memory, K-INTER; the other
// streams from global memory.
#include "kda_state.cuh"

struct Arguments {
  const bf16 *S, *dS;
  float* p;
  int heads;
};

// WIDTH: elements of dS that a lane loads at once. L12: dS is the state in shared memory, and S streams.
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
  if (L12) {
    p_from_dS<0>(shared, S, p);
  } else {
    p_by_warp<WIDTH, 0>(shared, dS, p);
  }
}

// In the order of the template's parameters.
const char* const kNames[] = {"width", "l12"};

constexpr Variant<2> kVariants[] = {
    {"b0alone", {1, 0}}, {"l13", {4, 0}}, {"l13_16bytes", {8, 0}}, {"l12", {1, 1}},
};

#define INSTANCE(...) {{__VA_ARGS__}, reinterpret_cast<const void*>(states<__VA_ARGS__>), kD * kD * sizeof(bf16)}
const Instance<2> kInstances[] = {INSTANCE(1, 0), INSTANCE(4, 0), INSTANCE(8, 0), INSTANCE(1, 1)};

struct Problem {
  Tiles tiles;
  Arguments arguments;
  Output p;
};

void fill(Problem& x, const Sizes& size) {
  x.tiles = tile_table(size);
  const size_t squares = x.tiles.start.size() * size.heads;
  const std::vector<bf16> S = uniform_bf16(squares * kD * kD, 16 * size.seed);
  const std::vector<bf16> dS = uniform_bf16(S.size(), 16 * size.seed + 1);
  x.p = output("p", squares * kD);
  for (size_t i = 0; i < squares; ++i) reference_p(x.p, i, &S[i * kD * kD], &dS[i * kD * kD]);
  x.arguments = {to_device(S), to_device(dS), x.p.device, size.heads};
}

Experiment prepare(Case& c) {
  const Instance<2>& instance = chosen(c, kNames, kVariants, kInstances);
  Problem& x = problem_of(sizes(c), fill);
  forget(x.p);
  return experiment(instance, x.tiles, x.arguments, [&, width = instance.choices[0]] {
    const std::string wrong = compare(x.p, x.p.expected, x.p.bound, width);
    forget(x.p);  // the next variant must write every element
    return wrong;
  });
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
