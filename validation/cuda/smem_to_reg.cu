// The shared-memory-to-register micro-benchmark: the GEMM ladder's fragment reads in a loop, with and without the mma.
//
// Every CTA copies two k-tiles (A 128x64, B 64x128, small integers in bf16) into shared memory once and then reads the
// fragments of one k-tile after the other, `iterations` times. mma=1 multiplies them; mma=0 adds the fragment registers
// as integers, which costs 24 adds (12 instructions) a k16 step and keeps the loads alive. The clock runs around the
// loop of every warp; both results are exact, and compared. `ctas` CTAs share a multiprocessor.
#include "gemm_tile.cuh"

constexpr int kDepth = 2 * kTileK;

template <int READ_MODE, int B_LAYOUT, int SWIZZLE, int MMA>
__global__ __launch_bounds__(kThreads, 2) void smem_to_reg(const bf16* A, const bf16* B, float* C, uint32_t* sums,
                                                           long long* clocks, int iterations) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp_row(threadIdx.x), warp_n = warp_column(threadIdx.x);
  const FragmentReader<READ_MODE, B_LAYOUT, SWIZZLE> reader(warp_m, warp_n);
  TileCopy<B_LAYOUT, SWIZZLE> copy(A, B, 0, 0, kTileN, kDepth);
#pragma unroll 1
  for (int stage = 0; stage < 2; ++stage) copy.copy_async(shared + stage * kStage);
  CP_ASYNC_COMMIT();
  CP_ASYNC_WAIT(0);
  float c[4][4][4] = {};
  uint32_t sum = 0;

  __syncthreads();
  const long long start = clock64();
#pragma unroll 1
  for (int i = 0; i < iterations; ++i) {
    const uint32_t stage = shared + i % 2 * kStage;
#pragma unroll
    for (int k0 = 0; k0 < kTileK; k0 += 16) {
      Fragments f;
      reader.read(f, stage, k0);
      if (MMA) {
        multiply(c, f);
      } else {
#pragma unroll
        for (int j = 0; j < 16; ++j) sum += f.a[j / 4][j % 4];
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += f.b[j / 2][j % 2];
      }
    }
  }
  __syncthreads();
  const long long elapsed = clock64() - start;
  if (lane == 0)
    STG64(clocks + blockIdx.x * 8 + warp, uint32_t(elapsed), uint32_t(elapsed >> 32));  // @site clocks.stg

  if constexpr (MMA == 0) {
    STG32(sums + blockIdx.x * kThreads + threadIdx.x, sum);  // @site sum.stg
  } else {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int mi = i / 8, ni = i / 2 % 4, half = i % 2;
      const int row = warp_m + 16 * mi + 8 * half + lane / 4, column = warp_n + 8 * ni + lane % 4 * 2;
      float* to = C + (static_cast<size_t>(blockIdx.x) * kTileM + row) * kTileN + column;
      const float* pair = &c[mi][ni][2 * half];
      STG64(to, __float_as_uint(pair[0]), __float_as_uint(pair[1]));  // @site C.stg
    }
  }
}

// [read_mode][b_layout][swizzle][mma]
#define INSTANCE(read, layout, swizzle, mma) reinterpret_cast<const void*>(smem_to_reg<read, layout, swizzle, mma>)
#define BOTH(read, layout, swizzle) {INSTANCE(read, layout, swizzle, 0), INSTANCE(read, layout, swizzle, 1)}
#define EVERY(read, layout) {BOTH(read, layout, 0), BOTH(read, layout, 1)}
const void* const kKernels[2][2][2][2] = {{EVERY(0, 0), EVERY(0, 1)}, {EVERY(1, 0), EVERY(1, 1)}};

// ---- inputs and the reference, on the host -------------------------------------------------------------------------

int element_a(int m, int k) { return (m * 7 + k * 5 + m * k) % 9 - 4; }
int element_b(int k, int n) { return (k * 3 + n * 11 + k * n) % 9 - 4; }

uint32_t bits(int value) { return __bfloat16_as_ushort(__float2bfloat16(static_cast<float>(value))); }

// Two k-neighbours in one register, the lower k in the lower half.
uint32_t pair_a(int m, int k) { return bits(element_a(m, k)) | bits(element_a(m, k + 1)) << 16; }
uint32_t pair_b(int k, int n) { return bits(element_b(k, n)) | bits(element_b(k + 1, n)) << 16; }

// What thread `thread` adds up over both k-tiles, once each.
uint32_t fragment_sum(int thread) {
  const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  uint32_t sum = 0;
  for (int k = 2 * t; k < kDepth; k += 8) {
    for (int i = 0; i < 8; ++i) sum += pair_a(warp / 4 * 64 + 8 * i + g, k);
    for (int i = 0; i < 4; ++i) sum += pair_b(k, warp % 4 * 32 + 8 * i + g);
  }
  return sum;
}

std::string check_product(const std::vector<float>& c, int iterations) {
  for (size_t i = 0; i < c.size(); ++i) {
    const int m = i / kTileN % kTileM, n = i % kTileN;
    int sum = 0;
    for (int k = 0; k < kDepth; ++k) sum += element_a(m, k) * element_b(k, n);
    if (c[i] != static_cast<float>(sum) * (iterations / 2))
      return "C[" + std::to_string(m) + "][" + std::to_string(n) + "] is wrong";
  }
  return "";
}

std::string check_sums(const std::vector<uint32_t>& sums, int iterations) {
  for (size_t i = 0; i < sums.size(); ++i)
    if (sums[i] != fragment_sum(i % kThreads) * static_cast<uint32_t>(iterations / 2))
      return "the fragment sum of thread " + std::to_string(i) + " is wrong";
  return "";
}

Experiment prepare(Case& c) {
  const Rung& rung = find_rung(c.variant);
  const int iterations = c.get("iterations", 64), swizzle = c.get("swizzle", 1), mma = c.get("mma", 1);
  const int ctas = c.get("ctas", 1);
  if (rung.load_mode != 1) fail(2, c.text + ": the micro-benchmark has the variants A1, A2, A2L, A3");
  if (swizzle > 1 || mma > 1 || ctas < 1 || ctas > 2) fail(2, c.text + ": swizzle and mma are 0 or 1, ctas 1 or 2");
  // Products of integers up to 4 in magnitude: 2^24 bounds what fp32 adds exactly.
  if (iterations < 2 || iterations % 2 || iterations > 32768) fail(2, c.text + ": iterations must be even, 2 to 32768");
  cudaDeviceProp device;
  CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
  const int blocks = ctas * device.multiProcessorCount;

  std::vector<bf16> host_a, host_b;
  for (int i = 0; i < kTileM * kDepth; ++i) host_a.push_back(__float2bfloat16(element_a(i / kDepth, i % kDepth)));
  for (int i = 0; i < kDepth * kTileN; ++i)
    host_b.push_back(__float2bfloat16(rung.b_layout == 0 ? element_b(i / kTileN, i % kTileN)
                                                         : element_b(i % kDepth, i / kDepth)));
  bf16 *a = device_array<bf16>(host_a.size()), *b = device_array<bf16>(host_b.size());
  CUDA_CHECK(cudaMemcpy(a, host_a.data(), host_a.size() * sizeof(bf16), cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(b, host_b.data(), host_b.size() * sizeof(bf16), cudaMemcpyHostToDevice));
  const size_t c_count = static_cast<size_t>(blocks) * kTileM * kTileN, sum_count = size_t(blocks) * kThreads;
  float* product = device_array<float>(c_count);
  uint32_t* sums = device_array<uint32_t>(sum_count);
  const int warps = blocks * kThreads / 32;
  long long* clocks = device_array<long long>(warps);
  CUDA_CHECK(cudaMemset(product, 0xff, c_count * sizeof(float)));
  CUDA_CHECK(cudaMemset(sums, 0xff, sum_count * sizeof(uint32_t)));

  const void* kernel = kKernels[rung.read_mode][rung.b_layout][swizzle][mma];
  // More shared memory than the two stages need: as much as leaves room for exactly `ctas` CTAs on a multiprocessor.
  Experiment e{kernel, dim3(blocks), dim3(kThreads), device.sharedMemPerMultiprocessor / (ctas + 1)};
  const int most = static_cast<int>(device.sharedMemPerBlockOptin);  // other cases may want more of this kernel
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  e.launch = [=] {
    const void* arguments[] = {&a, &b, &product, &sums, &clocks, &iterations};
    CUDA_CHECK(cudaLaunchKernel(kernel, e.grid, e.block, const_cast<void**>(arguments), e.dynamic_shared));
  };
  e.check = [=] {
    return mma ? check_product(to_host(product, c_count), iterations)
               : check_sums(to_host(sums, sum_count), iterations);
  };
  e.results = [=] {
    std::vector<long long> elapsed = to_host(clocks, warps);
    std::sort(elapsed.begin(), elapsed.end());
    char text[128];
    snprintf(text, sizeof text, ", \"clocks_per_iteration\": {\"median\": %.2f, \"min\": %.2f, \"max\": %.2f}",
             static_cast<double>(elapsed[warps / 2]) / iterations, static_cast<double>(elapsed.front()) / iterations,
             static_cast<double>(elapsed.back()) / iterations);
    return std::string(text);
  };
  return e;
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
