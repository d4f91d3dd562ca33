// The host side that the KDA backward twins share: the instance that a case asks for, seeded inputs, and outputs that
// are held against float64.
#pragma once
#include <array>
#include <tuple>

#include "kda_common.cuh"

// ---- a program's kernels ------------------------------------------------------------------------------------------
// A variant, and an instance of the kernel template, by the values of its N parameters.
template <size_t N>
struct Variant {
  const char* name;
  std::array<int, N> choices;
};

template <size_t N>
struct Instance {
  std::array<int, N> choices;
  const void* kernel;
  uint32_t shared_bytes;
};

// The instance that a case asks for: its variant's choices, of which it may override single ones by `names`.
template <size_t N, size_t VARIANTS, size_t INSTANCES>
const Instance<N>& chosen(Case& c, const char* const (&names)[N], const Variant<N> (&variants)[VARIANTS],
                          const Instance<N> (&instances)[INSTANCES]) {
  const Variant<N>* variant = nullptr;
  std::string known;
  for (const Variant<N>& v : variants) {
    if (c.variant == v.name) variant = &v;
    known += (known.empty() ? "" : ", ") + std::string(v.name);
  }
  if (!variant) fail(2, "variant '" + c.variant + "' is none of " + known);
  std::array<int, N> choices;
  for (size_t i = 0; i < N; ++i) choices[i] = c.get(names[i], variant->choices[i]);
  for (const Instance<N>& instance : instances)
    if (instance.choices == choices) return instance;
  fail(2, c.text + ": this combination is not instantiated");
}

// ---- sizes --------------------------------------------------------------------------------------------------------
struct Sizes {
  int tokens, sequences, heads, seed;

  bool operator<(const Sizes& o) const {
    return std::tie(tokens, sequences, heads, seed) < std::tie(o.tokens, o.sequences, o.heads, o.seed);
  }
  size_t rows() const { return static_cast<size_t>(tokens) * sequences * heads; }
};

inline Sizes sizes(Case& c) {
  const Sizes size{c.get("tokens", 1000), c.get("sequences", 1), c.get("heads", 4), c.get("seed", 0)};
  if (size.tokens < 1 || size.sequences < 1 || size.heads < 1 || size.heads > 65535 ||
      1.0 * size.tokens * size.sequences * size.heads > 1 << 20)
    fail(2, c.text + ": tokens, sequences and heads must be at least 1, their product at most 2^20");
  return size;
}

// First token and rows of every tile of `sequences` packed sequences of `tokens` tokens.
struct Tiles {
  std::vector<int> start, rows;
};

inline Tiles tile_table(const Sizes& size) {
  Tiles tiles;
  for (int s = 0; s < size.sequences; ++s)
    for (int first = 0; first < size.tokens; first += kC) {
      tiles.start.push_back(s * size.tokens + first);
      tiles.rows.push_back(std::min(kC, size.tokens - first));
    }
  return tiles;
}

// The problem of these sizes, which `fill` makes when it is first asked for: a program's cases share it.
template <typename Problem>
Problem& problem_of(const Sizes& size, void (*fill)(Problem&, const Sizes&)) {
  static std::map<Sizes, Problem> problems;
  const auto [entry, fresh] = problems.try_emplace(size);
  if (fresh) fill(entry->second, size);
  return entry->second;
}

// The launch of an instance on these tiles with one argument, which outlives it.
template <size_t N, typename Arguments>
Experiment experiment(const Instance<N>& instance, const Tiles& tiles, const Arguments& arguments,
                      std::function<std::string()> check) {
  Experiment e{instance.kernel, dim3(tiles.start.size(), arguments.heads), dim3(kThreads), instance.shared_bytes};
  CUDA_CHECK(cudaFuncSetAttribute(e.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, instance.shared_bytes));
  e.launch = [=, kernel = e.kernel, grid = e.grid, block = e.block, &arguments] {
    const void* pointers[] = {&arguments};
    CUDA_CHECK(cudaLaunchKernel(kernel, grid, block, const_cast<void**>(pointers), instance.shared_bytes, 0));
  };
  e.check = std::move(check);
  return e;
}

// ---- seeded inputs ------------------------------------------------------------------------------------------------

// Uniform in [-1, 1) from a counter: element `i` of the tensor that `seed` names.
inline float uniform(uint64_t i, uint32_t seed) {
  uint64_t h = (i + 1) * 0x9e3779b97f4a7c15ull + seed * 0xd1342543de82ef95ull;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ h >> 27) * 0x94d049bb133111ebull;
  return static_cast<float>((h ^ h >> 31) >> 40) / 8388608.f - 1.f;
}

inline std::vector<bf16> uniform_bf16(size_t count, uint32_t seed) {
  std::vector<bf16> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = __float2bfloat16(uniform(i, seed));
  return values;
}

template <typename T>
T* to_device(const std::vector<T>& values) {
  T* p = device_array<T>(values.size());
  CUDA_CHECK(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

// gc [T][heads][D]: within a tile the running sum, in log2 units, of decays between 0 and 0.3 a token.
inline std::vector<float> gate_sums(const Tiles& tiles, int heads, uint32_t seed) {
  const size_t row = static_cast<size_t>(heads) * kD;
  std::vector<float> gc((tiles.start.back() + tiles.rows.back()) * row);
  for (size_t tile = 0; tile < tiles.start.size(); ++tile)
    for (int r = 0; r < tiles.rows[tile]; ++r)
      for (size_t i = 0; i < row; ++i) {
        const size_t at = (tiles.start[tile] + r) * row + i;
        gc[at] = (r ? gc[at - row] : 0.f) - 0.15f * (1.f + uniform(at, seed));
      }
  return gc;
}

// ---- outputs ------------------------------------------------------------------------------------------------------

// How far fp32 and bf16 may lead from float64: narrowing adds 2^-8 of the magnitude, every fp32 operation and every
// term of a sum 2^-22 (four times fp32's rounding: an mma's accumulator truncates, ex2.approx and rsqrt.approx are off
// by two units).
constexpr double kBf16 = 1 / 256., kFp32 = 1 / 4194304.;

inline double value_of(bf16 x) { return __bfloat162float(x); }

struct Output {
  const char* name;
  size_t count;  // kGuard further elements lie behind, which nobody may touch
  float* device;
  std::vector<double> expected, bound;
  std::map<int, std::vector<float>> first;  // what the first run of a kind left: all of a kind must be the same bits
};

constexpr size_t kGuard = 1 << 16;

inline Output output(const char* name, size_t count) {
  return {name, count, device_array<float>(count + kGuard), std::vector<double>(count), std::vector<double>(count), {}};
}

inline void forget(Output& o) {
  CUDA_CHECK(cudaMemset(o.device, 0xff, (o.count + kGuard) * sizeof(float)));  // NaN
}

// "" or what is wrong: an element beyond its bound (a NaN is), other bits than the first of its kind, a touched guard.
inline std::string compare(Output& o, const std::vector<double>& expected, const std::vector<double>& bound, int kind) {
  const std::vector<float> got = to_host(o.device, o.count + kGuard);
  for (size_t i = 0; i < o.count; ++i)
    if (!(std::abs(got[i] - expected[i]) <= bound[i])) {
      char line[200];
      snprintf(line, sizeof line, "%s element %zu is %.9g, expected %.9g within %.3g", o.name, i, got[i], expected[i],
               bound[i]);
      return line;
    }
  auto bits = [](float x) { return reinterpret_cast<const uint32_t&>(x); };
  for (size_t i = o.count; i < got.size(); ++i)
    if (bits(got[i]) != 0xffffffffu)
      return std::string(o.name) + " was written " + std::to_string(i - o.count) + " elements past its end";
  std::vector<float>& first = o.first.try_emplace(kind, got).first->second;
  for (size_t i = 0; i < o.count; ++i)
    if (bits(got[i]) != bits(first[i]))
      return std::string(o.name) + " element " + std::to_string(i) + " differs in its bits from the first of its kind";
  return "";
}

// "" or what is wrong: an element that somebody wrote since forget().
inline std::string untouched(const Output& o) {
  for (const float got : to_host(o.device, o.count + kGuard))
    if (reinterpret_cast<const uint32_t&>(got) != 0xffffffffu) return std::string(o.name) + " was written";
  return "";
}
