// B3 of the Kimi Delta Attention backward pass: chunk space, then K1 (L2-norm backward, reverse cumulative sum).
//
// The Python twin is kernels_py/kda_b3.py; the kernel is in kda_b3_chunk.cuh. A case has `sequences` of `tokens` tokens
// and `heads`; the variants are the rungs of a ladder, of which a case may override single steps. Inputs are seeded and
// need not come from B1 and B2: the check computes the same outputs from them on the CPU, in double precision.
#include "kda_b3_chunk.cuh"
#include "kda_program.cuh"

// In the order of the template's parameters.
const char* const kNames[] = {"union", "opt2",         "opt7",   "epilogue", "k1",
                              "fold",  "warp_atomics", "native", "tile",     "scratch_stride"};

constexpr Variant<10> kVariants[] = {
    {"l6", {0, 0, 1, 0, 0, 0, 0, 0, 2, 128}},      {"opt2", {0, 1, 1, 0, 0, 0, 0, 0, 2, 128}},
    {"l7", {1, 1, 1, 0, 0, 0, 0, 0, 2, 128}},      {"fold", {1, 1, 1, 0, 0, 1, 0, 0, 2, 128}},
    {"vec8", {1, 1, 1, 0, 1, 1, 0, 0, 2, 128}},    {"l7c", {1, 1, 1, 0, 2, 1, 0, 0, 2, 128}},
    {"l8", {1, 1, 1, 1, 2, 1, 0, 0, 2, 128}},      {"atomics", {1, 1, 1, 1, 2, 1, 1, 0, 2, 128}},
    {"a1d", {1, 1, 1, 1, 2, 1, 1, 1, 2, 128}},
};

#define INSTANCE(U, O2, O7, E, K, F, W, N, L, S)                                                             \
  {                                                                                                          \
    {U, O2, O7, E, K, F, W, N, L, S}, reinterpret_cast<const void*>(kda_b3<U, O2, O7, E, K, F, W, N, L, S>), \
        Map<U, O2, O7, L, S>::kBytes                                                                         \
  }

const Instance<10> kInstances[] = {
    // the rungs
    INSTANCE(0, 0, 1, 0, 0, 0, 0, 0, 2, 128), INSTANCE(0, 1, 1, 0, 0, 0, 0, 0, 2, 128),
    INSTANCE(1, 1, 1, 0, 0, 0, 0, 0, 2, 128), INSTANCE(1, 1, 1, 0, 0, 1, 0, 0, 2, 128),
    INSTANCE(1, 1, 1, 0, 1, 1, 0, 0, 2, 128), INSTANCE(1, 1, 1, 0, 2, 1, 0, 0, 2, 128),
    INSTANCE(1, 1, 1, 1, 2, 1, 0, 0, 2, 128), INSTANCE(1, 1, 1, 1, 2, 1, 1, 0, 2, 128),
    INSTANCE(1, 1, 1, 1, 2, 1, 1, 1, 2, 128),
    // a1d, a step taken back at a time: the union, opt7, l8, l7c (vec8, stride8), fold
    INSTANCE(0, 1, 1, 1, 2, 1, 1, 1, 2, 128), INSTANCE(1, 1, 0, 1, 2, 1, 1, 1, 2, 128),
    INSTANCE(1, 1, 1, 0, 2, 1, 1, 1, 2, 128), INSTANCE(1, 1, 1, 1, 1, 1, 1, 1, 2, 128),
    INSTANCE(1, 1, 1, 1, 0, 1, 1, 1, 2, 128), INSTANCE(1, 1, 1, 1, 2, 0, 1, 1, 2, 128),
    // other layouts: row-major and K-INTER tiles, fp32 rows 132 words apart
    INSTANCE(1, 1, 1, 1, 2, 1, 1, 1, 0, 128), INSTANCE(1, 1, 1, 1, 2, 1, 1, 1, 1, 128),
    INSTANCE(1, 1, 1, 0, 0, 1, 0, 0, 2, 132), INSTANCE(1, 1, 1, 0, 1, 1, 0, 0, 2, 132),
    INSTANCE(1, 1, 1, 1, 2, 1, 1, 1, 2, 132),
};

// ---- the reference -------------------------------------------------------------------------------------------------

// A number and the magnitude it is made of: the sum of its terms' magnitudes, to which rounding is in proportion.
struct Term {
  double v = 0, m = 0;
};
inline Term term(double v) { return {v, std::fabs(v)}; }
inline Term operator+(Term a, Term b) { return {a.v + b.v, a.m + b.m}; }
inline Term operator-(Term a, Term b) { return {a.v - b.v, a.m + b.m}; }
inline Term operator*(Term a, Term b) { return {a.v * b.v, a.m * b.m}; }
inline Term& operator+=(Term& a, Term b) { return a = a + b; }

constexpr double kRounding = 1 / 65536.;  // far above what 128 terms of fp32 lose, far below what an error makes
constexpr double kNarrowed = 512;         // times kRounding: two operands rounded to bf16

struct Inputs {
  int T, H;
  Tiles tiles;
  std::vector<bf16> q, k, beta, do_, u;
  std::vector<float> gc, dvcorr, dkr, dqd_base, dkd_base, dbeta_part, p;
};

struct Gradients {
  std::vector<Term> dq, dk, dg, dbeta, dA_log;
};

std::vector<float> uniform_floats(size_t count, uint32_t seed) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = 2 * uniform(i, seed);
  return values;
}

using Rows = std::vector<std::array<Term, kD>>;

// x / sqrt(sum of squares + 1e-6) of each row that exists; the factor in `scale`.
Rows normalised(const std::vector<bf16>& x, const std::vector<size_t>& at, std::vector<double>& scale) {
  Rows rows(at.size());
  for (size_t r = 0; r < at.size(); ++r) {
    double sum = 1e-6;
    for (int d = 0; d < kD; ++d) sum += std::pow(value_of(x[at[r] * kD + d]), 2.);
    scale.push_back(1 / std::sqrt(sum));
    for (int d = 0; d < kD; ++d) rows[r][d] = term(value_of(x[at[r] * kD + d]) * scale[r]);
  }
  return rows;
}

void add_tile(const Inputs& x, size_t tile, int head, Gradients& to) {
  const int rows = x.tiles.rows[tile];
  std::vector<size_t> at;  // the rows of [T][H]
  for (int r = 0; r < rows; ++r) at.push_back(static_cast<size_t>(x.tiles.start[tile] + r) * x.H + head);
  std::vector<double> rq, rk;
  const Rows q = normalised(x.q, at, rq), k = normalised(x.k, at, rk);
  auto float_at = [&](const std::vector<float>& from, int r, int d) { return from[at[r] * kD + d]; };
  auto bf16_at = [&](const std::vector<bf16>& from, int r, int d) { return value_of(from[at[r] * kD + d]); };

  Rows up(rows), down(rows), rest(rows), qd(rows), kd(rows), ki(rows), dqd(rows), dki(rows), dkd(rows);
  for (int r = 0; r < rows; ++r)
    for (int d = 0; d < kD; ++d) {
      const double gc = float_at(x.gc, r, d), gT = float_at(x.gc, rows - 1, d);
      up[r][d] = term(std::exp2(gc)), down[r][d] = term(std::exp2(-gc)), rest[r][d] = term(std::exp2(gT - gc));
      qd[r][d] = q[r][d] * up[r][d] * term(1 / std::sqrt(double(kD)));
      kd[r][d] = k[r][d] * up[r][d], ki[r][d] = k[r][d] * down[r][d];
      dqd[r][d] = term(float_at(x.dqd_base, r, d));
      dkd[r][d] = term(-1) * term(value_of(x.beta[at[r]])) * term(float_at(x.dkd_base, r, d));
    }
  for (int i = 0; i < rows; ++i) {
    const Term beta = term(value_of(x.beta[at[i]]));
    Term dbeta = term(x.dbeta_part[at[i]]);
    for (int j = 0; j <= i; ++j) {
      Term dM, dL, f;
      for (int d = 0; d < kD; ++d) {
        const Term u = term(bf16_at(x.u, j, d));
        dM += term(bf16_at(x.do_, i, d)) * u;
        if (j == i) continue;
        dL = dL - term(value_of(__float2bfloat16(float_at(x.dvcorr, i, d)))) * u;
        f += kd[i][d] * ki[j][d];
      }
      f.m *= kNarrowed;
      dbeta += dL * f;
      for (int d = 0; d < kD; ++d) {
        dqd[i][d] += dM * ki[j][d];
        dki[j][d] += dM * qd[i][d] + dL * beta * kd[i][d];
        dkd[i][d] += dL * beta * ki[j][d];
      }
    }
    to.dbeta[at[i]] = dbeta;
  }
  Rows dq(rows), dk(rows);
  for (int d = 0; d < kD; ++d) {
    Term moved, running;
    std::vector<Term> dgc(rows);
    for (int r = 0; r < rows; ++r) {
      const Term one = term(float_at(x.dkr, r, d)) * k[r][d] * rest[r][d];
      moved += one;
      dgc[r] = dkd[r][d] * kd[r][d] + dqd[r][d] * qd[r][d] - dki[r][d] * ki[r][d] - one;
      dq[r][d] = dqd[r][d] * up[r][d] * term(1 / std::sqrt(double(kD)));
      dk[r][d] = dkd[r][d] * up[r][d] + dki[r][d] * down[r][d] + term(float_at(x.dkr, r, d)) * rest[r][d];
      to.dA_log[head] += term(std::log(2.)) * term(float_at(x.gc, r, d)) * dgc[r];
    }
    const double gT = float_at(x.gc, rows - 1, d);
    const Term dgT = term(std::exp2(gT)) * term(x.p[(tile * x.H + head) * kD + d]) + moved;
    to.dA_log[head] += term(std::log(2.)) * term(gT) * dgT;
    for (int r = rows - 1; r >= 0; --r) to.dg[at[r] * kD + d] = (running += dgc[r]) + dgT;
  }
  for (int r = 0; r < rows; ++r) {
    Term q_dq, k_dk;
    for (int d = 0; d < kD; ++d) q_dq += q[r][d] * dq[r][d], k_dk += k[r][d] * dk[r][d];
    for (int d = 0; d < kD; ++d) {
      to.dq[at[r] * kD + d] = (dq[r][d] - q[r][d] * q_dq) * term(rq[r]);
      to.dk[at[r] * kD + d] = (dk[r][d] - k[r][d] * k_dk) * term(rk[r]);
    }
  }
}

Gradients gradients(const Inputs& x) {
  const size_t rows = static_cast<size_t>(x.T) * x.H;
  Gradients to{std::vector<Term>(rows * kD), std::vector<Term>(rows * kD), std::vector<Term>(rows * kD),
               std::vector<Term>(rows), std::vector<Term>(x.H)};
  for (size_t tile = 0; tile < x.tiles.start.size(); ++tile)
    for (int head = 0; head < x.H; ++head) add_tile(x, tile, head, to);
  return to;
}

// "" when every element is near enough; NaN is not. `head_major`: found is [H][T][D], expected [T][H][D].
std::string compare(const char* name, const std::vector<float>& found, const std::vector<Term>& expected, int T, int H,
                    bool head_major) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const size_t row = i / kD, where = head_major ? (row % H * T + row / H) * kD + i % kD : i;
    if (std::fabs(found[where] - expected[i].v) <= kRounding * expected[i].m) continue;
    return std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(found[where]) + ", not " +
           std::to_string(expected[i].v) + " within " + std::to_string(kRounding * expected[i].m);
  }
  return "";
}

// ---- cases ---------------------------------------------------------------------------------------------------------

struct Problem {
  Inputs inputs;
  Arguments arguments;
  Gradients expected;
};

void clear_outputs(const Problem& p) {
  const Arguments& a = p.arguments;
  const size_t rows = static_cast<size_t>(a.tokens) * a.heads;
  for (float* output : {a.dq, a.dk, a.dg}) CUDA_CHECK(cudaMemset(output, 0xff, 4 * rows * kD));
  CUDA_CHECK(cudaMemset(a.dbeta, 0xff, 4 * rows));
  CUDA_CHECK(cudaMemset(a.dA_log, 0, 4 * a.heads));
}

void fill(Problem& p, const Sizes& size) {
  Inputs& x = p.inputs;
  x.T = size.tokens * size.sequences, x.H = size.heads, x.tiles = tile_table(size);
  const size_t rows = size.rows();
  const uint32_t base = 16 * size.seed;
  x.q = uniform_bf16(rows * kD, base + 1), x.k = uniform_bf16(rows * kD, base + 2);
  x.beta = uniform_bf16(rows, base + 3);
  for (bf16& beta : x.beta) beta = __float2bfloat16(0.5f + 0.5f * __bfloat162float(beta));
  x.do_ = uniform_bf16(rows * kD, base + 4), x.u = uniform_bf16(rows * kD, base + 5);
  x.gc = gate_sums(x.tiles, size.heads, base + 6);
  x.dvcorr = uniform_floats(rows * kD, base + 7), x.dkr = uniform_floats(rows * kD, base + 8);
  x.dqd_base = uniform_floats(rows * kD, base + 9), x.dkd_base = uniform_floats(rows * kD, base + 10);
  x.dbeta_part = uniform_floats(rows, base + 11);
  x.p = uniform_floats(x.tiles.start.size() * size.heads * kD, base + 12);
  p.expected = gradients(x);
  p.arguments = {to_device(x.tiles.start), to_device(x.tiles.rows), to_device(x.q), to_device(x.k), to_device(x.beta),
                 to_device(x.do_), to_device(x.u), to_device(x.gc), to_device(x.dvcorr), to_device(x.dkr),
                 to_device(x.dqd_base), to_device(x.dkd_base), to_device(x.dbeta_part), to_device(x.p),
                 device_array<float>(rows * kD), device_array<float>(rows * kD), device_array<float>(rows * kD),
                 device_array<float>(rows), device_array<float>(size.heads), x.T, x.H};
}

std::string check(const Problem& p, bool native) {
  const Arguments& a = p.arguments;
  const Gradients& e = p.expected;
  const int T = a.tokens, H = a.heads;
  const size_t rows = static_cast<size_t>(T) * H;
  std::string wrong = compare("dq", to_host(a.dq, rows * kD), e.dq, T, H, !native);
  if (wrong.empty()) wrong = compare("dk", to_host(a.dk, rows * kD), e.dk, T, H, !native);
  if (wrong.empty()) wrong = compare("dg", to_host(a.dg, rows * kD), e.dg, T, H, !native);
  if (wrong.empty()) wrong = compare("dbeta", to_host(a.dbeta, rows), e.dbeta, T, H, false);
  if (wrong.empty()) wrong = compare("dA_log", to_host(a.dA_log, H), e.dA_log, T, H, false);
  clear_outputs(p);  // NaN: the next variant must write every element
  return wrong;
}

Experiment prepare(Case& c) {
  const Instance<10>& instance = chosen(c, kNames, kVariants, kInstances);
  Problem& p = problem_of(sizes(c), fill);
  clear_outputs(p);
  const bool native = instance.choices[7];
  return experiment(instance, p.inputs.tiles, p.arguments, [&p, native] { return check(p, native); });
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
