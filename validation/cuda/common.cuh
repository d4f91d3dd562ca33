// What every CUDA twin shares: memory instructions that the compiler must keep, and the little program around a kernel.
//
// A twin is a program `NAME (check|time) CASE...`, a CASE being `variant[,key=value]...`: `pad1,rows=2048,cols=2048`.
// `check` launches each case once, inside the profiler's range, and compares the result; `time` launches the cases in
// turns (A B A B ...) and reports medians. Both print one JSON object a line, in the order of the cases. Exit status:
// 0, or 1 for a wrong result or a CUDA error, or 2 for a bad argument.
#pragma once
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

// ---- memory instructions ------------------------------------------------------------------------------------------
// Macros, not functions: the line table then names the line of the use, which carries the `// @site NAME` comment.
// `asm volatile` keeps the compiler from merging, splitting or hoisting them. Registers are 32-bit words; global
// addresses are pointers, shared addresses 32-bit bytes in the shared window (see shared_address).
#define LDG32(d, p) asm volatile("ld.global.b32 %0, [%1];" : "=r"(d) : "l"(p) : "memory")
#define LDG128(d, p) \
  asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "l"(p) : "memory")
#define STG32(p, v) asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory")
#define STG64(p, a, b) asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(p), "r"(a), "r"(b) : "memory")
#define STG128(p, v) \
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory")
#define LDS16(d, a) asm volatile("ld.shared.b16 %0, [%1];" : "=h"(d) : "r"(a) : "memory")
#define LDS32(d, a) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(d) : "r"(a) : "memory")
#define LDS128(d, a) \
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "r"(a) : "memory")
#define STS32(a, v) asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(v) : "memory")
#define STS128(a, v) \
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory")
#define LDSM_X4(d0, d1, d2, d3, a) \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" \
               : "=r"(d0), "=r"(d1), "=r"(d2), "=r"(d3) : "r"(a) : "memory")
#define LDSM_X2(d0, d1, a) \
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(d0), "=r"(d1) : "r"(a) : "memory")
#define LDSM_X2_TRANS(d0, d1, a) \
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(d0), "=r"(d1) : "r"(a) : "memory")
#define CP_ASYNC_CG(a, p) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(a), "l"(p) : "memory")
#define CP_ASYNC_COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define CP_ASYNC_WAIT(groups) asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory")

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- the program around a kernel ----------------------------------------------------------------------------------
[[noreturn]] inline void fail(int status, const std::string& message) {
  fprintf(stderr, "error: %s\n", message.c_str());
  exit(status);
}

#define CUDA_CHECK(call)                                                                                           \
  do {                                                                                                             \
    cudaError_t status_ = (call);                                                                                  \
    if (status_ != cudaSuccess)                                                                                    \
      fail(1, std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " + cudaGetErrorString(status_));       \
  } while (0)

template <typename T>
T* device_array(size_t count) {
  T* p;
  CUDA_CHECK(cudaMalloc(&p, count * sizeof(T)));
  return p;
}

template <typename T>
std::vector<T> to_host(const T* p, size_t count) {
  std::vector<T> values(count);
  CUDA_CHECK(cudaMemcpy(values.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

struct Case {
  std::string text, variant;
  std::map<std::string, int> params;

  // The value of `key`, which is `otherwise` (and remembered as such) where the case does not give it.
  int get(const std::string& key, int otherwise) { return params.emplace(key, otherwise).first->second; }
};

struct Experiment {
  const void* kernel;
  dim3 grid, block;
  size_t dynamic_shared;
  std::function<void()> launch;
  std::function<std::string()> check;                                   // "" when the result is right
  std::function<std::string()> results = [] { return std::string(); };  // further JSON members of the last launch
};

inline Case parse_case(const std::string& text) {
  Case parsed{text, "", {}};
  for (size_t begin = 0, comma; begin <= text.size(); begin = comma + 1) {
    comma = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, comma - begin);
    const size_t equals = item.find('=');
    if (begin == 0) {
      parsed.variant = item;
    } else if (equals == std::string::npos || item.find_first_not_of("0123456789", equals + 1) != std::string::npos) {
      fail(2, "case '" + text + "': '" + item + "' is not key=number");
    } else {
      parsed.params[item.substr(0, equals)] = atoi(item.c_str() + equals + 1);
    }
  }
  return parsed;
}

inline void launch_once(const Experiment& e) {
  e.launch();
  CUDA_CHECK(cudaGetLastError());
}

// The median time of a launch, in microseconds, of each experiment, and how the rounds spread around it: the smallest,
// the first and the last decile and the largest. Rounds go through all experiments, so that a change of clocks meets
// every variant alike; short kernels run several times between two events.
inline std::vector<std::string> time_in_turns(const std::vector<Experiment>& experiments, int rounds) {
  cudaEvent_t start, stop;
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&stop));
  auto microseconds = [&](const Experiment& e, int launches) {
    CUDA_CHECK(cudaEventRecord(start));
    for (int i = 0; i < launches; ++i) launch_once(e);
    CUDA_CHECK(cudaEventRecord(stop));
    CUDA_CHECK(cudaEventSynchronize(stop));
    float milliseconds;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
    return 1000.0 * milliseconds / launches;
  };
  std::vector<int> launches;
  std::vector<std::vector<double>> times(experiments.size());
  for (const Experiment& e : experiments) {
    microseconds(e, 3);
    launches.push_back(std::max(1, static_cast<int>(300.0 / microseconds(e, 3))));
  }
  for (int round = 0; round < rounds; ++round)
    for (size_t i = 0; i < experiments.size(); ++i) times[i].push_back(microseconds(experiments[i], launches[i]));
  std::vector<std::string> lines;
  for (size_t i = 0; i < experiments.size(); ++i) {
    std::sort(times[i].begin(), times[i].end());
    char line[256];
    snprintf(line, sizeof line,
             ", \"time\": {\"median_us\": %.5g, \"min_us\": %.5g, \"low_us\": %.5g, \"high_us\": %.5g, "
             "\"max_us\": %.5g, \"rounds\": %d, \"launches_per_round\": %d}",
             times[i][rounds / 2], times[i].front(), times[i][rounds / 10], times[i][rounds - 1 - rounds / 10],
             times[i].back(), rounds, launches[i]);
    lines.push_back(line);
  }
  return lines;
}

inline void print_line(const Case& c, const Experiment& e, const std::string& more) {
  cudaFuncAttributes attributes;
  int blocks_per_sm;
  CUDA_CHECK(cudaFuncGetAttributes(&attributes, e.kernel));
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, e.kernel, e.block.x * e.block.y,
                                                           e.dynamic_shared));
  printf("{\"case\": \"%s\", \"variant\": \"%s\", \"params\": {", c.text.c_str(), c.variant.c_str());
  const char* separator = "";
  for (const auto& [key, value] : c.params) {
    printf("%s\"%s\": %d", separator, key.c_str(), value);
    separator = ", ";
  }
  printf("}, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], ", e.grid.x, e.grid.y, e.grid.z, e.block.x, e.block.y,
         e.block.z);
  printf("\"registers\": %d, \"static_shared_bytes\": %zu, \"dynamic_shared_bytes\": %zu, \"local_bytes\": %zu, ",
         attributes.numRegs, attributes.sharedSizeBytes, e.dynamic_shared, attributes.localSizeBytes);
  printf("\"blocks_per_sm\": %d%s%s}\n", blocks_per_sm, more.c_str(), e.results().c_str());
}

inline int run_program(int argc, char** argv, const std::function<Experiment(Case&)>& prepare) {
  constexpr int kRounds = 31;
  setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // whole lines, where a profiler writes in between
  const std::string mode = argc > 1 ? argv[1] : "";
  if (argc < 3 || (mode != "check" && mode != "time"))
    fail(2, std::string("usage: ") + argv[0] + " (check|time) CASE...");
  std::vector<Case> cases;
  std::vector<Experiment> experiments;
  for (int i = 2; i < argc; ++i) {
    cases.push_back(parse_case(argv[i]));
    experiments.push_back(prepare(cases.back()));
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    CUDA_CHECK(cudaDeviceSynchronize());
    if (mode == "check") CUDA_CHECK(cudaProfilerStart());
    launch_once(experiments[i]);
    CUDA_CHECK(cudaDeviceSynchronize());
    if (mode == "check") CUDA_CHECK(cudaProfilerStop());
    const std::string wrong = experiments[i].check();
    if (!wrong.empty()) fail(1, std::string(argv[0]) + " " + cases[i].text + ": " + wrong);
    if (mode == "check") print_line(cases[i], experiments[i], ", \"check\": \"ok\"");
  }
  if (mode == "time") {
    const std::vector<std::string> times = time_in_turns(experiments, kRounds);
    for (size_t i = 0; i < cases.size(); ++i) print_line(cases[i], experiments[i], times[i]);
  }
  return 0;
}
