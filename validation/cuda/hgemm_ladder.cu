// C = A B in bf16 with fp32 accumulation, one template for the whole shared-memory-to-register ladder.
//
// A [M][K]; B [K][N] or, with B_LAYOUT 1, [N][K]; C [M][N] in bf16; M and N multiples of 128, K of 32. Every variant
// adds the same products in the same order, so all of them give the same bits. One CTA a 128x128 tile of C, blockIdx.x
// along N.
#include <type_traits>

#include "gemm_tile.cuh"

// LOAD_MODE 0: 16-byte global load and 16-byte shared store; 1: cp.async.cg of 16 bytes. STAGES k-tiles of shared
// memory; with one stage the copy of a k-tile and its use take turns. STAGED: C goes through shared memory to be stored
// in whole rows. Two CTAs a multiprocessor for every instance, so that registers do not blur the comparison.
template <int LOAD_MODE, int READ_MODE, int B_LAYOUT, int STAGES, int SWIZZLE, int STAGED>
__global__ __launch_bounds__(kThreads, 2) void hgemm(const bf16* A, const bf16* B, bf16* C, int N, int K) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const int m0 = blockIdx.y * kTileM, n0 = blockIdx.x * kTileN;
  const int tiles = K / kTileK;
  TileCopy<B_LAYOUT, SWIZZLE> copy(A, B, m0, n0, N, K);
  const FragmentReader<READ_MODE, B_LAYOUT, SWIZZLE> reader(warp_row(threadIdx.x), warp_column(threadIdx.x));
  uint4 registers[4];
  float c[4][4][4] = {};

  auto consume = [&](uint32_t stage) {
#pragma unroll
    for (int k0 = 0; k0 < kTileK; k0 += 16) {
      Fragments f;
      reader.read(f, stage, k0);
      multiply(c, f);
    }
  };

  // One k-tile: `into` takes the k-tile STAGES - 1 ahead, while `more` says that there is one, and `from` is used.
  auto step = [&](uint32_t into, uint32_t from, auto more) {
    [[maybe_unused]] constexpr bool kMore = decltype(more)::value;
    if constexpr (STAGES == 1) {
      if (LOAD_MODE == 0) copy.load(registers);
      __syncthreads();
      if (LOAD_MODE == 0) {
        copy.store(into, registers);
      } else {
        copy.copy_async(into);
        CP_ASYNC_COMMIT();
        CP_ASYNC_WAIT(0);
      }
      __syncthreads();
      consume(from);
    } else {
      if (LOAD_MODE == 1) CP_ASYNC_WAIT(STAGES - 2);
      __syncthreads();  // the k-tile is there, and everyone is done with the stage that will be overwritten
      if (LOAD_MODE == 0 && kMore) copy.load(registers);
      if (LOAD_MODE == 1 && kMore) copy.copy_async(into);
      if (LOAD_MODE == 1) CP_ASYNC_COMMIT();  // also when empty: the wait counts groups
      consume(from);
      if (LOAD_MODE == 0 && kMore) copy.store(into, registers);
    }
  };

  // Fill STAGES - 1 stages, run, and drain. Three loops rather than one with conditions: a condition on a few copies
  // becomes their predicate, and Nsight Compute (2025.3) miscounts predicated cp.async instructions.
  constexpr int kAhead = STAGES - 1;
#pragma unroll
  for (int tile = 0; tile < kAhead; ++tile) {
    if (LOAD_MODE == 1) {
      copy.copy_async(shared + tile * kStage);
      CP_ASYNC_COMMIT();
    } else {
      copy.load(registers);
      copy.store(shared + tile * kStage, registers);
    }
  }
  int tile = 0;
#pragma unroll 1
  for (; tile < tiles - kAhead; ++tile)
    step(shared + (tile + kAhead) % STAGES * kStage, shared + tile % STAGES * kStage, std::true_type());
#pragma unroll
  for (int left = 0; left < kAhead; ++left, ++tile) step(0, shared + tile % STAGES * kStage, std::false_type());

  // Each lane holds pairs of neighbouring columns. Direct: it stores them. Staged: Cs[128][128] takes the place of the
  // k-tiles, and thread i then moves 16-byte chunks i, i + 256, ... of it.
  const int thread = threadIdx.x, g = thread % 32 / 4, t = thread % 4;
  const int warp_m = warp_row(thread), warp_n = warp_column(thread);
  if (STAGED) __syncthreads();
#pragma unroll
  for (int mi = 0; mi < 4; ++mi)
#pragma unroll
    for (int ni = 0; ni < 4; ++ni)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(c[mi][ni][2 * half], c[mi][ni][2 * half + 1]);
        const uint32_t word = reinterpret_cast<const uint32_t&>(pair);
        const int row = warp_m + 16 * mi + 8 * half + g, column = warp_n + 8 * ni + 2 * t;
        if (STAGED) {
          STS32(shared + at128<SWIZZLE>(row, column), word);  // @site C.sts
        } else {
          STG32(C + static_cast<size_t>(m0 + row) * N + n0 + column, word);  // @site C.stg
        }
      }
  if (!STAGED) return;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTileM * kTileN / 8 / kThreads; ++i) {
    const int chunk = thread + kThreads * i, row = chunk / 16, column = chunk % 16 * 8;
    uint4 words;
    LDS128(words, shared + at128<SWIZZLE>(row, column));  // @site C.lds
    STG128(C + static_cast<size_t>(m0 + row) * N + n0 + column, words);  // @site C.stg
  }
}

struct Instance {
  int load_mode, read_mode, b_layout, stages, swizzle, staged;
  const void* kernel;
};

#define INSTANCE(load, read, layout, stages, swizzle, staged) \
  {load,   read,    layout,                                   \
   stages, swizzle, staged, reinterpret_cast<const void*>(hgemm<load, read, layout, stages, swizzle, staged>)}
#define EVERY_STAGE(read, layout, swizzle)                                            \
  INSTANCE(1, read, layout, 1, swizzle, 0), INSTANCE(1, read, layout, 2, swizzle, 0), \
      INSTANCE(1, read, layout, 3, swizzle, 0), INSTANCE(1, read, layout, 4, swizzle, 0)
#define EVERYTHING(read, layout)                              \
  EVERY_STAGE(read, layout, 0), EVERY_STAGE(read, layout, 1), \
      INSTANCE(0, read, layout, 3, 1, 0), INSTANCE(1, read, layout, 3, 1, 1)

const Instance kInstances[] = {
    EVERYTHING(0, 0),           EVERYTHING(0, 1),           EVERYTHING(1, 1),           EVERYTHING(1, 0),
    INSTANCE(0, 0, 0, 1, 0, 0), INSTANCE(0, 0, 0, 1, 1, 0), INSTANCE(0, 0, 0, 2, 1, 0), INSTANCE(0, 0, 0, 2, 1, 1),
};

// ---- inputs and the reference -------------------------------------------------------------------------------------

// Uniform in [-1, 1), the same for (r, c) however the matrix is stored.
__global__ void fill(bf16* p, int rows, int cols, int transposed, uint32_t seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows * cols) return;
  uint32_t h = (i ^ seed) * 2654435761u;
  h = (h ^ h >> 15) * 2246822519u;
  h ^= h >> 13;
  const int r = i / cols, c = i % cols;
  p[transposed ? static_cast<size_t>(c) * rows + r : i] = __float2bfloat16((h & 0xffff) / 32768.f - 1.f);
}

__global__ void reference(const bf16* A, const bf16* B, float* C, int M, int N, int K) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
  float sum = 0;
  for (int k = 0; k < K; ++k)
    sum += __bfloat162float(A[static_cast<size_t>(m) * K + k]) * __bfloat162float(B[static_cast<size_t>(k) * N + n]);
  C[static_cast<size_t>(m) * N + n] = sum;
}

// Counts elements further from the reference than bf16 rounding and the order of fp32 sums explain (NaN is far), and
// elements whose bits differ from those of the first variant run at this size.
__global__ void count_wrong(const bf16* C, const float* expected, const bf16* first, int count, float slack,
                            unsigned* wrong) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  if (!(fabsf(__bfloat162float(C[i]) - expected[i]) <= fabsf(expected[i]) / 256 + slack)) atomicAdd(&wrong[0], 1);
  if (__bfloat16_as_ushort(C[i]) != __bfloat16_as_ushort(first[i])) atomicAdd(&wrong[1], 1);
}

struct Problem {
  bf16 *a, *b[2], *c, *first;  // b by B_LAYOUT
  float* expected;
  unsigned* wrong;
  bool has_first = false;
};

Problem& problem(int M, int N, int K) {
  static std::map<std::vector<int>, Problem> problems;
  const auto [entry, fresh] = problems.try_emplace({M, N, K});
  Problem& p = entry->second;
  if (!fresh) return p;
  p.a = device_array<bf16>(static_cast<size_t>(M) * K);
  p.c = device_array<bf16>(static_cast<size_t>(M) * N);
  p.first = device_array<bf16>(static_cast<size_t>(M) * N);
  p.expected = device_array<float>(static_cast<size_t>(M) * N);
  p.wrong = device_array<unsigned>(2);
  fill<<<(M * K + 255) / 256, 256>>>(p.a, M, K, 0, 1);
  for (int layout = 0; layout < 2; ++layout) {
    p.b[layout] = device_array<bf16>(static_cast<size_t>(K) * N);
    fill<<<(K * N + 255) / 256, 256>>>(p.b[layout], K, N, layout, 0x5bd1e995);
  }
  reference<<<dim3(N / 128, M), 128>>>(p.a, p.b[0], p.expected, M, N, K);
  CUDA_CHECK(cudaGetLastError());
  return p;
}

Experiment prepare(Case& c) {
  const Rung& rung = find_rung(c.variant);
  const int M = c.get("m", 4096), N = c.get("n", 4096), K = c.get("k", 4096);
  const int load = c.get("load_mode", rung.load_mode), stages = c.get("stages", rung.stages);
  const int swizzle = c.get("swizzle", rung.swizzle), staged = c.get("staged", rung.staged);
  const int read = c.get("read_mode", rung.read_mode), layout = c.get("b_layout", rung.b_layout);
  if (M < 1 || N < 1 || K < 1 || M % kTileM || N % kTileN || K % kTileK)
    fail(2, c.text + ": m and n must be multiples of 128, k of 32");
  if (K / kTileK < stages - 1) fail(2, c.text + ": k must fill stages - 1 k-tiles of 32");
  const void* kernel = nullptr;
  for (const Instance& i : kInstances)
    if (i.load_mode == load && i.read_mode == read && i.b_layout == layout && i.stages == stages &&
        i.swizzle == swizzle && i.staged == staged)
      kernel = i.kernel;
  if (!kernel) fail(2, c.text + ": this combination is not instantiated");

  Problem& p = problem(M, N, K);
  Experiment e{kernel, dim3(N / kTileN, M / kTileM), dim3(kThreads), static_cast<size_t>(stages) * kStage};
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, stages * kStage));
  e.launch = [=, &p] {
    const void *b = p.b[layout], *arguments[] = {&p.a, &b, &p.c, &N, &K};
    CUDA_CHECK(cudaLaunchKernel(kernel, e.grid, e.block, const_cast<void**>(arguments), e.dynamic_shared));
  };
  e.check = [=, &p] {
    const size_t bytes = sizeof(bf16) * M * N;
    if (!p.has_first) CUDA_CHECK(cudaMemcpy(p.first, p.c, bytes, cudaMemcpyDeviceToDevice));
    p.has_first = true;
    CUDA_CHECK(cudaMemset(p.wrong, 0, 2 * sizeof(unsigned)));
    count_wrong<<<(M * N + 255) / 256, 256>>>(p.c, p.expected, p.first, M * N, 1e-6f * K, p.wrong);
    const std::vector<unsigned> wrong = to_host(p.wrong, 2);
    CUDA_CHECK(cudaMemset(p.c, 0xff, bytes));  // NaN: the next variant must write every element
    if (wrong[0]) return std::to_string(wrong[0]) + " of " + std::to_string(M * N) + " elements are wrong";
    if (wrong[1]) return std::to_string(wrong[1]) + " elements differ in their bits from the first variant's";
    return std::string();
  };
  return e;
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
