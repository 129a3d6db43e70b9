#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/cpu/kernels.h"
#include "model/activation.h"
#include "support/expect_error.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

// Every instruction set that this CPU has against scalar oracles, on bytes.
namespace uniep::cpu {
namespace {

using Generator = std::mt19937_64;

std::vector<InstructionSet> supported_sets() {
  std::vector<InstructionSet> sets;
  for (const auto set : {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (is_supported(set)) sets.push_back(set);
  }
  return sets;
}

int64_t uniform(Generator& generator, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

// kOrdinary: magnitudes around 1. kWide: any finite number. kTiny: products around the smallest fp32 numbers. kSpecial:
// ordinary with some NaNs of random payload, infinities, zeros and huge numbers. kAny: any bits.
enum class Values { kOrdinary, kWide, kTiny, kSpecial, kAny };
constexpr Values kAllValues[] = {Values::kOrdinary, Values::kWide, Values::kTiny, Values::kSpecial, Values::kAny};

uint32_t random_float_bits(Generator& generator, Values values) {
  const auto bits = static_cast<uint32_t>(generator());
  const auto with_exponent = [bits](int64_t exponent) {
    return (bits & 0x807fffffu) | static_cast<uint32_t>(exponent) << 23;
  };
  switch (values) {
    case Values::kOrdinary:
      return with_exponent(uniform(generator, 120, 130));
    case Values::kWide:
      return with_exponent(uniform(generator, 0, 254));
    case Values::kTiny:
      return with_exponent(uniform(generator, 0, 1) * uniform(generator, 40, 70));
    case Values::kSpecial:
      switch (uniform(generator, 0, 400)) {
        case 0:
          return bits | 0x7f810000u;  // a NaN, signalling or quiet
        case 1:
          return 0x7f800000u | (bits & 0x80000000u);  // an infinity
        case 2:
          return bits & 0x80000000u;  // a zero
        case 3:
          return with_exponent(254);
        default:
          return with_exponent(uniform(generator, 120, 130));
      }
    case Values::kAny:
      return bits;
  }
  return bits;
}

std::vector<BFloat16> random_bfloat16(Generator& generator, Values values, int64_t count) {
  std::vector<BFloat16> result(static_cast<std::size_t>(count));
  for (BFloat16& value : result) value.bits = static_cast<uint16_t>(random_float_bits(generator, values) >> 16);
  return result;
}

std::vector<float> random_floats(Generator& generator, Values values, int64_t count) {
  std::vector<float> result(static_cast<std::size_t>(count));
  for (float& value : result) value = float_from_bits(random_float_bits(generator, values));
  return result;
}

float canonical(float value) {
  return std::isnan(value) ? float_from_bits(0x7fc00000u) : value;
}
BFloat16 rounded(float value) {
  return std::isnan(value) ? BFloat16{0x7fc0} : to_bfloat16(value);
}

// Index of the first element whose bytes differ.
template <class T>
std::optional<std::size_t> first_difference(const std::vector<T>& x, const std::vector<T>& y) {
  if (x.size() != y.size()) return 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::memcmp(&x[i], &y[i], sizeof(T)) != 0) return i;
  }
  return std::nullopt;
}

template <class T>
void expect_same_bytes(const std::vector<T>& got, const std::vector<T>& expected, const std::string& what) {
  const auto difference = first_difference(got, expected);
  EXPECT_FALSE(difference.has_value()) << what << ": element " << *difference << " of " << expected.size();
}

// ---- gemm

// Memory ends with the last element that may be read; what lies between the lines of the matrix is NaN.
struct Matrix {
  std::vector<BFloat16> data;
  int64_t stride;
  bool k_major;
  GemmOperand operand() const { return {data.data(), stride, k_major}; }
  float at(int64_t i, int64_t k) const { return to_float(data[k_major ? i * stride + k : k * stride + i]); }
};

Matrix random_matrix(Generator& generator, Values values, int64_t rows, int64_t depth) {
  const bool k_major = uniform(generator, 0, 1) == 1;
  const int64_t lines = k_major ? rows : depth, width = k_major ? depth : rows;
  const int64_t stride = width + uniform(generator, 0, 1) * uniform(generator, 1, 40);
  if (lines == 0 || width == 0) return {{}, stride, k_major};
  std::vector<BFloat16> data((lines - 1) * stride + width, BFloat16{0x7fff});
  const std::vector<BFloat16> content = random_bfloat16(generator, values, lines * width);
  for (int64_t line = 0; line < lines; ++line) {
    std::memcpy(&data[line * stride], &content[line * width], width * sizeof(BFloat16));
  }
  return {std::move(data), stride, k_major};
}

// Runs all sets on random operands and compares with the chain as the contract words it, and what lies between the rows
// of c with what was there.
void check_gemm(Generator& generator, Values values, int64_t m, int64_t n, int64_t k, int64_t k_block) {
  const Matrix a = random_matrix(generator, values, m, k), b = random_matrix(generator, values, n, k);
  const int64_t ldc = n + uniform(generator, 0, 20);
  const std::size_t size = m == 0 || n == 0 ? 0 : (m - 1) * ldc + n;
  const std::vector<float> before(size, float_from_bits(0x7fdeadbeu));
  std::vector<float> expected = before;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0.0f;
      for (int64_t step = 0; step < k; ++step) sum = std::fma(a.at(i, step), b.at(j, step), sum);
      expected[i * ldc + j] = canonical(sum);
    }
  }
  GemmScratch scratch;
  for (const InstructionSet set : supported_sets()) {
    std::vector<float> c = before;
    kernels(set).gemm({a.operand(), b.operand(), m, n, k, k_block, c.data(), ldc}, scratch);
    expect_same_bytes(c, expected,
                      std::string(instruction_set_name(set)) + " m " + std::to_string(m) + " n " + std::to_string(n) +
                          " k " + std::to_string(k) + " k_block " + std::to_string(k_block) + " values " +
                          std::to_string(static_cast<int>(values)) + " k_major " + std::to_string(a.k_major) +
                          std::to_string(b.k_major));
  }
}

TEST(Gemm, IsOneChainOnEveryInstructionSet) {
  Generator generator(1);
  for (int round = 0; round < 60; ++round) {
    for (const Values values : kAllValues) {
      const int64_t m = uniform(generator, 0, 100), n = uniform(generator, 0, 100), k = uniform(generator, 0, 100);
      check_gemm(generator, values, m, n, k, uniform(generator, 0, 2) == 0 ? 0 : uniform(generator, 1, 110));
    }
  }
}

TEST(Gemm, EveryPanelHeightAndColumnTail) {
  Generator generator(2);
  for (int64_t m = 1; m <= 30; ++m) check_gemm(generator, Values::kOrdinary, m, uniform(generator, 1, 70), 37, 20);
  for (int64_t n = 1; n <= 70; ++n) check_gemm(generator, Values::kOrdinary, uniform(generator, 1, 30), n, 37, 20);
}

TEST(Gemm, CrossesItsInternalTilesAndDepth) {
  Generator generator(3);
  check_gemm(generator, Values::kOrdinary, 270, 530, 21, 8);
  check_gemm(generator, Values::kWide, 530, 270, 17, 0);
  check_gemm(generator, Values::kOrdinary, 19, 45, 1100, 0);
}

TEST(Gemm, DepthZeroGivesPlusZero) {
  GemmScratch scratch;
  for (const InstructionSet set : supported_sets()) {
    std::vector<float> c(12, -1.0f);
    kernels(set).gemm({{nullptr, 0, true}, {nullptr, 0, false}, 3, 4, 0, 0, c.data(), 4}, scratch);
    expect_same_bytes(c, std::vector<float>(12, 0.0f), instruction_set_name(set));
  }
}

// Where separate multiplication and addition, or another order, would give other bits.
TEST(Gemm, FusesAndKeepsTheOrder) {
  const auto one_element = [](InstructionSet set, const std::vector<float>& x, const std::vector<float>& y) {
    std::vector<BFloat16> a, b;
    for (const float value : x) a.push_back(to_bfloat16(value));
    for (const float value : y) b.push_back(to_bfloat16(value));
    GemmScratch scratch;
    float c = -1.0f;
    const auto k = static_cast<int64_t>(a.size());
    kernels(set).gemm({{a.data(), k, true}, {b.data(), k, true}, 1, 1, k, 1, &c, 1}, scratch);
    return c;
  };
  const float smallest = std::ldexp(1.0f, -149);
  for (const InstructionSet set : supported_sets()) {
    SCOPED_TRACE(instruction_set_name(set));
    EXPECT_EQ(one_element(set, {0x1p64f, 0x1p64f}, {-0x1.fep63f, 0x1p64f}),
              0x1p120f);                                              // the second product alone is inf
    EXPECT_EQ(one_element(set, {0x1p-75f}, {0x1.8p-75f}), smallest);  // 0.75 of the smallest subnormal, rounded up
    EXPECT_EQ(one_element(set, {0x1p-100f, 0x1p-100f}, {0x1p-48f, 0x1p-49f}), 3 * smallest);
    EXPECT_EQ(one_element(set, {1.0f, 0x1p24f, -0x1p24f}, {1.0f, 1.0f, 1.0f}), 0.0f);
    EXPECT_EQ(one_element(set, {0x1p24f, -0x1p24f, 1.0f}, {1.0f, 1.0f, 1.0f}), 1.0f);
  }
}

TEST(GemmScratch, GrowsAndStaysAligned) {
  GemmScratch scratch;
  for (const int64_t count : {1, 1000, 17, 100000}) {
    float* memory = scratch.reserve(count);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u);
    memory[0] = memory[count - 1] = 1.0f;
    EXPECT_EQ(scratch.reserve(count), memory);
  }
  test::expect_error(Status::kOutOfMemory, "gemm packing buffers", [&] { scratch.reserve(int64_t{1} << 62); });
  EXPECT_NE(scratch.reserve(1), nullptr);
}

// ---- rows

constexpr int64_t kRowSizes[] = {0, 1, 8, 15, 63, 64, 65, 72, 128, 200, 1000};

// Calls check(set, values, n, generator) over all of them.
template <class Check>
void for_all_rows(uint64_t seed, const Check& check) {
  Generator generator(seed);
  for (const InstructionSet set : supported_sets()) {
    for (const Values values : kAllValues) {
      for (const int64_t n : kRowSizes) {
        SCOPED_TRACE(std::string(instruction_set_name(set)) + " values " + std::to_string(static_cast<int>(values)) +
                     " n " + std::to_string(n));
        check(kernels(set), values, n, generator);
      }
    }
  }
}

TEST(Rows, RoundToNearestEven) {
  for_all_rows(11, [](const Kernels& table, Values values, int64_t n, Generator& generator) {
    const std::vector<float> in = random_floats(generator, values, n);
    std::vector<BFloat16> out(n), expected;
    for (const float value : in) expected.push_back(to_bfloat16(value));
    table.round_row(in.data(), out.data(), n);
    expect_same_bytes(out, expected, "round_row");
  });
}

TEST(Rows, RoundKeepsEveryBFloat16AndBreaksTiesToEven) {
  for (const InstructionSet set : supported_sets()) {
    std::vector<float> exact, ties;
    std::vector<BFloat16> out(65536), expected_exact, expected_ties;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const bool is_nan = (bits & 0x7fffu) > 0x7f80u;
      exact.push_back(float_from_bits(bits << 16));
      expected_exact.push_back({static_cast<uint16_t>(is_nan ? bits | 0x40u : bits)});
      if ((bits & 0x7fffu) >= 0x7f80u) continue;
      ties.push_back(float_from_bits(bits << 16 | 0x8000u));
      expected_ties.push_back({static_cast<uint16_t>(bits + (bits & 1u))});
    }
    kernels(set).round_row(exact.data(), out.data(), 65536);
    expect_same_bytes(out, expected_exact, instruction_set_name(set));
    out.resize(ties.size());
    kernels(set).round_row(ties.data(), out.data(), static_cast<int64_t>(ties.size()));
    expect_same_bytes(out, expected_ties, instruction_set_name(set));
  }
}

TEST(Rows, SwigluEqualsTheScalarFunction) {
  for_all_rows(12, [](const Kernels& table, Values values, int64_t n, Generator& generator) {
    std::vector<BFloat16> gate = random_bfloat16(generator, values, n), up = random_bfloat16(generator, values, n);
    const float prob = random_floats(generator, values, 1)[0];
    std::vector<BFloat16> a(n), expected;
    for (int64_t j = 0; j < n; ++j) expected.push_back(rounded(swiglu(to_float(gate[j]), to_float(up[j]), prob)));
    table.activations[0][0].activate({}, {gate.data(), up.data(), prob, n}, a.data());
    expect_same_bytes(a, expected, "swiglu_row");
    table.activations[0][0].activate({}, {gate.data(), up.data(), prob, n}, gate.data());
    expect_same_bytes(gate, expected, "swiglu_row in place");
  });
}

TEST(Rows, SwigluOfEveryGate) {
  std::vector<BFloat16> gate(65536), up(65536), a(65536), expected;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    gate[bits].bits = static_cast<uint16_t>(bits);
    up[bits] = to_bfloat16(1.5f);
    expected.push_back(rounded(swiglu(to_float(gate[bits]), 1.5f, 0.75f)));
  }
  for (const InstructionSet set : supported_sets()) {
    kernels(set).activations[0][0].activate({}, {gate.data(), up.data(), 0.75f, 65536}, a.data());
    expect_same_bytes(a, expected, instruction_set_name(set));
  }
}

// For every bf16 value, which is what gates are.
TEST(Rows, SigmoidIsCloserThanBf16CanTell) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float x = to_float(BFloat16{static_cast<uint16_t>(bits)});
    if (!(std::fabs(x) <= 44.0f)) continue;
    const double exact = 1.0 / (1.0 + std::exp(-static_cast<double>(x)));
    const double error = std::fabs(sigmoid(x) - exact) / exact;
    ASSERT_LT(error, 1e-5) << x;
  }
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(sigmoid(infinity), sigmoid(44.5f));
  EXPECT_EQ(sigmoid(-infinity), sigmoid(-44.5f));
  EXPECT_NEAR(sigmoid(infinity), 1.0f, 1e-5);
  EXPECT_GT(sigmoid(-infinity), 0.0f);
  EXPECT_LT(sigmoid(-infinity), 1e-19f);
}

// The sum over one chunk, column by column as the contract words it.
float chunk_sum(const std::vector<float>& da, const std::vector<float>& unweighted) {
  float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (std::size_t column = 0; column < da.size(); ++column) {
    partial[column % 8 / 2] = std::fma(da[column], unweighted[column], partial[column % 8 / 2]);
  }
  return canonical(join_prob_partials(partial[0], partial[1], partial[2], partial[3]));
}

TEST(Rows, SwigluGradientEqualsTheScalarFunction) {
  for_all_rows(13, [](const Kernels& table, Values values, int64_t n, Generator& generator) {
    std::vector<BFloat16> gate = random_bfloat16(generator, values, n), up = random_bfloat16(generator, values, n);
    const std::vector<float> da = random_floats(generator, values, n);
    const float prob = random_floats(generator, values, 1)[0];
    std::vector<BFloat16> a, dgate, dup;
    std::vector<float> sums, chunk_da, unweighted;
    for (int64_t j = 0; j < n; ++j) {
      const ActivationGradient gradient = swiglu_gradient(to_float(gate[j]), to_float(up[j]), prob, da[j]);
      a.push_back(rounded(gradient.activation));
      dgate.push_back(rounded(gradient.gate));
      dup.push_back(rounded(gradient.up));
      chunk_da.push_back(da[j]);
      unweighted.push_back(gradient.prob_term);
      if (unweighted.size() == 64 || j == n - 1) {
        sums.push_back(chunk_sum(chunk_da, unweighted));
        chunk_da.clear();
        unweighted.clear();
      }
    }
    std::vector<BFloat16> got_a(n), got_dgate(n), got_dup(n);
    std::vector<float> got_sums(sums.size());
    table.activations[0][0].gradient({}, {gate.data(), up.data(), prob, n},
                                     {da.data(), got_a.data(), got_dgate.data(), got_dup.data(), got_sums.data()});
    expect_same_bytes(got_a, a, "a");
    expect_same_bytes(got_dgate, dgate, "dgate");
    expect_same_bytes(got_dup, dup, "dup");
    expect_same_bytes(got_sums, sums, "chunk sums");
    std::vector<BFloat16> forward(n);
    table.activations[0][0].activate({}, {gate.data(), up.data(), prob, n}, forward.data());
    expect_same_bytes(got_a, forward, "a of backward against forward");

    table.activations[0][0].gradient({}, {gate.data(), up.data(), prob, n},
                                     {da.data(), got_a.data(), gate.data(), up.data(), got_sums.data()});
    expect_same_bytes(gate, dgate, "dgate in place");
    expect_same_bytes(up, dup, "dup in place");
    expect_same_bytes(got_sums, sums, "chunk sums in place");
  });
}

// Every kind and place of the weight, on every instruction set, beside the scalar functions.
template <ActivationKind kKind, bool kWeighsZ>
void check_activation_rows() {
  using Expert = ExpertActivation<kKind, kWeighsZ>;
  const ActivationParameters parameters{1.702f, 0.75f, 1.25f, 1.0f};
  const Expert expert(parameters);
  for_all_rows(16 + static_cast<int>(kKind), [&](const Kernels& table, Values values, int64_t n, Generator& generator) {
    const ActivationRows& rows = table.activations[static_cast<int>(kKind)][kWeighsZ ? 1 : 0];
    const std::vector<BFloat16> gate = random_bfloat16(generator, values, n),
                                up = random_bfloat16(generator, values, n);
    const std::vector<float> da = random_floats(generator, values, n);
    const float prob = random_floats(generator, values, 1)[0];
    const int64_t chunks = (n + 63) / 64;
    std::vector<BFloat16> a, dgate, dup;
    std::vector<float> partials(4 * static_cast<std::size_t>(chunks), 0.0f), sums;
    for (int64_t j = 0; j < n; ++j) {
      const float own_up = Expert::kGated ? to_float(up[j]) : 0.0f;
      const ActivationGradient gradient = expert.gradient(to_float(gate[j]), own_up, prob, da[j]);
      a.push_back(rounded(gradient.activation));
      ASSERT_EQ(a.back().bits, rounded(expert.activate(to_float(gate[j]), own_up, prob)).bits);
      dgate.push_back(rounded(gradient.gate));
      dup.push_back(rounded(gradient.up));
      float& partial = partials[static_cast<std::size_t>(j / 64 * 4 + j % 8 / 2)];
      partial = Expert::add_prob(partial, da[j], gradient.prob_term);
    }
    for (std::size_t chunk = 0; chunk < static_cast<std::size_t>(chunks); ++chunk) {
      const float* const own = &partials[4 * chunk];
      sums.push_back(canonical(join_prob_partials(own[0], own[1], own[2], own[3])));
    }
    std::vector<BFloat16> got_a(n), got_dgate(n), got_dup(n), forward(n);
    std::vector<float> got_sums(sums.size());
    const BFloat16* const given_up = Expert::kGated ? up.data() : nullptr;
    const ActivationRow row{gate.data(), given_up, prob, n};
    rows.activate(parameters, row, forward.data());
    rows.gradient(
        parameters, row,
        {da.data(), got_a.data(), got_dgate.data(), Expert::kGated ? got_dup.data() : nullptr, got_sums.data()});
    expect_same_bytes(forward, a, "a of forward");
    expect_same_bytes(got_a, a, "a");
    expect_same_bytes(got_dgate, dgate, "dgate");
    if (Expert::kGated) expect_same_bytes(got_dup, dup, "dup");
    expect_same_bytes(got_sums, sums, "chunk sums");
  });
}

template <ActivationKind kKind>
void check_activation_kind() {
  check_activation_rows<kKind, false>();
  check_activation_rows<kKind, true>();
}

TEST(Rows, ActivationsEqualTheScalarFunctions) {
  check_activation_kind<ActivationKind::kSwiglu>();
  check_activation_kind<ActivationKind::kGegluTanh>();
  check_activation_kind<ActivationKind::kGegluErf>();
  check_activation_kind<ActivationKind::kRelu2>();
  check_activation_kind<ActivationKind::kSilu>();
  check_activation_kind<ActivationKind::kShapedSwiglu>();
}

TEST(Rows, WeighingRoundsTwice) {
  for_all_rows(17, [](const Kernels& table, Values values, int64_t n, Generator& generator) {
    const std::vector<float> in = random_floats(generator, values, n);
    const float weight = random_floats(generator, values, 1)[0];
    std::vector<BFloat16> out(n), expected;
    for (const float value : in) expected.push_back(rounded(mul(weight, to_float(to_bfloat16(value)))));
    table.weigh_row(in.data(), weight, out.data(), n);
    expect_same_bytes(out, expected, "weigh_row");
  });
}

TEST(Rows, SumStartsAtPlusZeroAndRoundsOnce) {
  for_all_rows(14, [](const Kernels& table, Values values, int64_t n, Generator& generator) {
    for (const int64_t count : {0, 1, 2, 8}) {
      std::vector<std::vector<BFloat16>> rows;
      std::vector<const BFloat16*> addresses;
      for (int64_t i = 0; i < count; ++i) rows.push_back(random_bfloat16(generator, values, n));
      for (const auto& row : rows) addresses.push_back(row.data());
      std::vector<BFloat16> y(n, BFloat16{0x1234}), expected;
      for (int64_t j = 0; j < n; ++j) {
        float sum = 0.0f;
        for (const auto& row : rows) sum = add(sum, to_float(row[j]));
        expected.push_back(rounded(sum));
      }
      table.sum_rows(addresses.data(), count, y.data(), n);
      expect_same_bytes(y, expected, "sum_rows of " + std::to_string(count));
    }
  });
}

TEST(Rows, AddIsOneRoundedAddition) {
  for_all_rows(15, [](const Kernels& table, Values values, int64_t n, Generator& generator) {
    const std::vector<float> c = random_floats(generator, values, n);
    std::vector<float> main_grad = random_floats(generator, values, n), expected;
    for (int64_t j = 0; j < n; ++j) expected.push_back(canonical(add(main_grad[j], c[j])));
    table.add_row(c.data(), main_grad.data(), n);
    expect_same_bytes(main_grad, expected, "add_row");
  });
}

TEST(Rows, AddWeightedRoundsOnce) {
  for_all_rows(16, [](const Kernels& table, Values values, int64_t n, Generator& generator) {
    const std::vector<BFloat16> in = random_bfloat16(generator, values, n);
    for (const float weight : {1.0f, random_floats(generator, values, 1)[0]}) {
      std::vector<float> sums = random_floats(generator, values, n), expected;
      for (int64_t j = 0; j < n; ++j) {
        expected.push_back(canonical(fused_multiply_add(weight, to_float(in[j]), sums[j])));
        if (weight == 1.0f) {
          const float plain = canonical(add(sums[j], to_float(in[j])));
          ASSERT_EQ(bits_of_float(plain), bits_of_float(expected.back()));  // a bias is one plain addition
        }
      }
      table.add_weighted(in.data(), weight, sums.data(), n);
      expect_same_bytes(sums, expected, "add_weighted");
    }
  });
}

// ---- choice of the instruction set

class ChosenInstructionSet : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* value = std::getenv(kName)) before_ = value;
  }
  void TearDown() override {
    if (before_) {
      setenv(kName, before_->c_str(), 1);
    } else {
      unsetenv(kName);
    }
  }
  static constexpr const char* kName = "UNIEP_INSTRUCTION_SET";

 private:
  std::optional<std::string> before_;
};

TEST_F(ChosenInstructionSet, IsTheBestUnlessTheEnvironmentNamesAnother) {
  unsetenv(kName);
  EXPECT_EQ(best_instruction_set(), supported_sets().back());
  setenv(kName, "", 1);
  EXPECT_EQ(best_instruction_set(), supported_sets().back());
  for (const InstructionSet set : {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    setenv(kName, instruction_set_name(set), 1);
    if (is_supported(set)) {
      EXPECT_EQ(best_instruction_set(), set);
    } else {
      test::expect_error(Status::kUnsupported, instruction_set_name(set), [] { best_instruction_set(); });
      test::expect_error(Status::kUnsupported, instruction_set_name(set), [set] { kernels(set); });
    }
  }
}

TEST_F(ChosenInstructionSet, RefusesAnotherWord) {
  setenv(kName, "sse9", 1);
  test::expect_error(Status::kInvalidArgument, "UNIEP_INSTRUCTION_SET is 'sse9', legal are portable, avx2 and avx512",
                     [] { best_instruction_set(); });
}

TEST(ExactArithmetic, RestoresRoundingAndSubnormals) {
  std::fesetround(FE_UPWARD);
#ifdef __x86_64__
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040u);  // flush to zero, denormals are zero
#endif
  set_exact_arithmetic();
  EXPECT_EQ(std::fegetround(), FE_TONEAREST);
  volatile float smallest_normal = 0x1p-126f;
  volatile float half = smallest_normal * 0.5f;
  EXPECT_EQ(half, 0x1p-127f);
  EXPECT_EQ(half + half, smallest_normal);
}

}  // namespace
}  // namespace uniep::cpu
