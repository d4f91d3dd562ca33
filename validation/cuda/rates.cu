// How much the units behind L1 deliver: L1, L2 and DRAM by the lines that a request touches, and colliding atomics.
//
// A case is a variant with its sizes; `time` gives microseconds, and the clocks of the CTA that took longest. load:
// every CTA reads `kb` KB, all of them the same or each its own (`own`), `passes` times over: 16 bytes a lane, or a
// sector a lane and `stride` words from lane to lane, which is 8, 16 or 32 lines a request. `l1` 1: through L1
// (ld.global.ca), 0: past it (ld.global.cg). copy: reads and writes `kb` KB once. red: adds 1 to `words` floats that
// lie `apart` floats apart, by every lane or (`lanes` 1) by one lane a warp. `ctas` of 512 threads on each of `sms`
// multiprocessors: as many as that together; few are spread one by one.
#include "common.cuh"

#define LDG32_CG(d, p) asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(d) : "l"(p) : "memory")
#define LDG128_CG(d, p)                                   \
  asm volatile("ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];" \
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(p) : "memory")
#define RED32(p, v) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory")

constexpr int kThreads = 512, kWarps = kThreads / 32, kBatch = 8;  // of a CTA; loads of a thread in flight
constexpr int kSector = 8;                                         // words

__device__ inline long long clock_now() {
  long long now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}

// STRIDE 0: 16 bytes a lane, side by side. Else 4 bytes of a sector each, the lanes STRIDE words apart: a warp takes
// blocks of 32 * STRIDE words and goes through the sectors of each.
template <int L1, int STRIDE>
__global__ __launch_bounds__(kThreads) void load(const uint32_t* data, int words, int own, int passes, uint32_t* sums,
                                                 long long* clocks) {
  constexpr int kLane = STRIDE ? kSector : 4, kPerBlock = STRIDE ? STRIDE / kSector : 1;  // words; requests
  const uint32_t* from = data + (own ? size_t(blockIdx.x) * words : 0);
  const int batches = words / (kThreads * kLane * kBatch), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Where all read the same, each CTA begins elsewhere and goes round.
  const int first = own ? 0 : static_cast<int>(batches * blockIdx.x / gridDim.x);
  uint32_t sum = 0;
  const long long start = clock_now();
  for (int pass = 0; pass < passes; ++pass)
    for (int i = 0; i < batches; ++i) {
      const int batch = i + first < batches ? i + first : i + first - batches;
      uint4 got[kBatch];
      const uint32_t* p = from + size_t(batch) * kBatch * kThreads * kLane;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int block = j / kPerBlock * kWarps + warp;
        const uint32_t* q = p + (STRIDE ? (block * 32 + lane) * STRIDE + j % kPerBlock * kSector
                                        : 4 * (j * kThreads + threadIdx.x));
        if (STRIDE && L1) {
          LDG32(got[j].x, q);
        } else if (STRIDE) {
          LDG32_CG(got[j].x, q);
        } else if (L1) {
          LDG128(got[j], q);
        } else {
          LDG128_CG(got[j], q);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) sum += STRIDE ? got[j].x : got[j].x + got[j].y + got[j].z + got[j].w;
    }
  if (threadIdx.x == 0) clocks[blockIdx.x] = clock_now() - start;
  atomicAdd(sums + blockIdx.x, sum);
}

__global__ __launch_bounds__(kThreads) void copy(const uint4* from, uint4* to, size_t quads, long long* clocks) {
  const long long start = clock_now();
  const size_t threads = size_t(gridDim.x) * kThreads, thread = size_t(blockIdx.x) * kThreads + threadIdx.x;
  for (size_t i = thread; i < quads; i += kBatch * threads) {
    uint4 got[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (i + j * threads < quads) LDG128(got[j], from + i + j * threads);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (i + j * threads < quads) STG128(to + i + j * threads, got[j]);
  }
  if (threadIdx.x == 0) clocks[blockIdx.x] = clock_now() - start;
}

__global__ __launch_bounds__(kThreads) void red(float* to, int words, int apart, int lanes, int repeats,
                                                long long* clocks) {
  const long long start = clock_now();
  const int thread = blockIdx.x * kThreads + threadIdx.x;
  // One lane a warp: the warps take the words in turn; all lanes: they do.
  float* p = to + (lanes == 1 ? thread / 32 : thread) % words * apart;
  if (thread % 32 < lanes)
    for (int i = 0; i < repeats; ++i) RED32(p, 1.f);
  if (threadIdx.x == 0) clocks[blockIdx.x] = clock_now() - start;
}

// ---- data and cases, on the host -----------------------------------------------------------------------------------

uint32_t word(size_t i) { return static_cast<uint32_t>((i + 1) * 0x9e3779b97f4a7c15ull >> 40); }

// `words` words of device memory, and their sums; made once for each size.
struct Data {
  uint32_t* device;
  uint32_t sum, sector_sum;  // of all words, of the first of each sector
};

const Data& data_of(size_t words) {
  static std::map<size_t, Data> made;
  const auto [entry, fresh] = made.try_emplace(words);
  if (fresh) {
    std::vector<uint32_t> values(words);
    for (size_t i = 0; i < words; ++i) {
      entry->second.sum += values[i] = word(i);
      if (i % kSector == 0) entry->second.sector_sum += values[i];
    }
    entry->second.device = device_array<uint32_t>(words);
    CUDA_CHECK(cudaMemcpy(entry->second.device, values.data(), 4 * words, cudaMemcpyHostToDevice));
  }
  return entry->second;
}

std::string largest_clocks(const long long* clocks, int ctas) {
  const std::vector<long long> all = to_host(clocks, ctas);
  return ", \"clocks\": " + std::to_string(*std::max_element(all.begin(), all.end()));
}

// [l1][stride: 0, 8, 16, 32, 64 words]
#define INSTANCE(l1, stride) reinterpret_cast<const void*>(load<l1, stride>)
#define EVERY(l1) {INSTANCE(l1, 0), INSTANCE(l1, 8), INSTANCE(l1, 16), INSTANCE(l1, 32), INSTANCE(l1, 64)}
const void* const kLoads[2][5] = {EVERY(0), EVERY(1)};

Experiment prepare_load(Case& c, int ctas, long long* clocks) {
  const int kb = c.get("kb", 32768), own = c.get("own", 0), l1 = c.get("l1", 0), stride = c.get("stride", 0);
  const int passes = c.get("passes", 1);
  const int which = stride == 0 ? 0 : stride == 8 ? 1 : stride == 16 ? 2 : stride == 32 ? 3 : 4;
  const int words = 256 * kb;
  if (kb < 1 || kb > 1 << 20 || passes < 1 || own > 1 || l1 > 1 || (which == 4 && stride != 64) ||
      words % (kThreads * kBatch * (stride ? kSector : 4)))
    fail(2, c.text + ": kb fills whole batches of 64 KB, of 128 KB with a stride, which is 8, 16, 32 or 64");
  const Data& data = data_of(own ? size_t(words) * ctas : words);
  uint32_t* sums = device_array<uint32_t>(ctas);
  Experiment e{kLoads[l1][which], dim3(ctas), dim3(kThreads), 0};
  CUDA_CHECK(cudaFuncSetAttribute(e.kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 0));  // all the L1 there is
  CUDA_CHECK(cudaMemset(sums, 0, 4 * ctas));
  e.launch = [=, kernel = e.kernel] {
    const void* arguments[] = {&data.device, &words, &own, &passes, &sums, &clocks};
    CUDA_CHECK(cudaLaunchKernel(kernel, dim3(ctas), dim3(kThreads), const_cast<void**>(arguments), 0, 0));
  };
  e.check = [=, &data] {
    uint32_t sum = 0;
    for (const uint32_t part : to_host(sums, ctas)) sum += part;
    CUDA_CHECK(cudaMemset(sums, 0, 4 * ctas));
    const uint32_t expected = (stride ? data.sector_sum : data.sum) * passes * (own ? 1 : ctas);
    return std::string(sum == expected ? "" : "the sum is wrong");
  };
  return e;
}

Experiment prepare_copy(Case& c, int ctas, long long* clocks) {
  const int kb = c.get("kb", 1 << 19);
  const size_t quads = 64u * kb;
  const Data& data = data_of(4 * quads);
  uint32_t* to = device_array<uint32_t>(4 * quads);
  Experiment e{reinterpret_cast<const void*>(copy), dim3(ctas), dim3(kThreads), 0};
  e.launch = [=, &data] {
    const void* arguments[] = {&data.device, &to, &quads, &clocks};
    CUDA_CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(copy), dim3(ctas), dim3(kThreads),
                                const_cast<void**>(arguments), 0, 0));
  };
  e.check = [=] {
    const std::vector<uint32_t> got = to_host(to, 4 * quads);
    for (size_t i = 0; i < got.size(); ++i)
      if (got[i] != word(i)) return "word " + std::to_string(i) + " is wrong";
    return std::string();
  };
  return e;
}

Experiment prepare_red(Case& c, int ctas, long long* clocks) {
  const int words = c.get("words", 1), apart = c.get("apart", 1), lanes = c.get("lanes", 32);
  const int repeats = c.get("repeats", 16), threads = ctas * kThreads, adders = threads / 32 * lanes;
  if (words < 1 || apart < 1 || (lanes != 1 && lanes != 32) || adders % words || adders / words * repeats > 1 << 24)
    fail(2, c.text + ": lanes is 1 or 32; as many add to every word, at most 2^24 times together");
  float* to = device_array<float>(size_t(words) * apart);
  auto forget = [=] { CUDA_CHECK(cudaMemset(to, 0, sizeof(float) * words * apart)); };
  forget();
  Experiment e{reinterpret_cast<const void*>(red), dim3(ctas), dim3(kThreads), 0};
  e.launch = [=] {
    const void* arguments[] = {&to, &words, &apart, &lanes, &repeats, &clocks};
    CUDA_CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(red), dim3(ctas), dim3(kThreads),
                                const_cast<void**>(arguments), 0, 0));
  };
  e.check = [=] {
    const std::vector<float> got = to_host(to, size_t(words) * apart);
    forget();
    for (int i = 0; i < words; ++i)
      if (got[size_t(i) * apart] != static_cast<float>(adders / words * repeats))
        return "word " + std::to_string(i) + " is wrong";
    return std::string();
  };
  return e;
}

Experiment prepare(Case& c) {
  cudaDeviceProp device;
  CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
  const int sms = c.get("sms", device.multiProcessorCount), ctas = c.get("ctas", 2) * sms;
  long long* clocks = device_array<long long>(ctas);
  if (ctas < 1 || ctas > 1 << 14) fail(2, c.text + ": not 1 to 2^14 CTAs");
  if (c.variant != "load" && c.variant != "copy" && c.variant != "red")
    fail(2, "variant '" + c.variant + "' is none of load, copy, red");
  Experiment e = c.variant == "load"   ? prepare_load(c, ctas, clocks)
                 : c.variant == "copy" ? prepare_copy(c, ctas, clocks)
                                       : prepare_red(c, ctas, clocks);
  e.results = [=] { return largest_clocks(clocks, ctas); };
  return e;
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
