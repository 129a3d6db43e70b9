#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "reference/check.h"
#include "reference/layer.h"
#include "reference/multiply.h"
#include "reference/parallel.h"
#include "reference/sample.h"
#include "uniep/error.h"

namespace uniep::reference {
namespace {

using Doubles = std::vector<double>;

BFloat16 round_to_bfloat16(double value) {
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  return BFloat16{static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
double widen(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Ids without repetition in a token. Some slots and tokens are unused, and the expert `empty` gets no row.
std::vector<int32_t> random_ids(const LayerShape& shape, int64_t tokens, int64_t empty, std::mt19937_64* random) {
  std::vector<int32_t> ids;
  std::vector<int32_t> experts(shape.experts);
  std::iota(experts.begin(), experts.end(), 0);
  for (int64_t token = 0; token < tokens; ++token) {
    std::shuffle(experts.begin(), experts.end(), *random);
    for (int64_t slot = 0; slot < shape.topk; ++slot) {
      const bool unused = token == 1 || experts[slot] == empty || (*random)() % 8 == 0;
      ids.push_back(unused ? -1 : experts[slot]);
    }
  }
  return ids;
}

// A layer with its own storage: Value and Prob as in BasicLayerInput.
template <typename Value, typename Prob>
struct Layer {
  LayerShape shape;
  int64_t tokens = 0;
  std::vector<Value> x, dy, w1, w2, b1, b2;
  std::vector<int32_t> ids;
  std::vector<Prob> probs;
  Numerics numerics;

  BasicLayerInput<Value, Prob> input() const {
    return {shape,     tokens,    x.data(), dy.data(), ids.data(), probs.data(),
            w1.data(), w2.data(), numerics, b1.data(), b2.data()};
  }
};

Layer<double, double> random_layer(const LayerShape& shape, int64_t tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(-1, 1);
  const auto values = [&](int64_t count, double scale) {
    Doubles result(count);
    for (double& value : result) value = scale * uniform(random);
    return result;
  };
  const int64_t weights = shape.experts * shape.intermediate * shape.hidden;
  Layer<double, double> layer;
  layer.shape = shape;
  layer.tokens = tokens;
  layer.x = values(tokens * shape.hidden, 1);
  layer.dy = values(tokens * shape.hidden, 1);
  layer.probs = values(tokens * shape.topk, 1);
  layer.w1 = values(2 * weights, 3 / std::sqrt(static_cast<double>(shape.hidden)));
  layer.w2 = values(weights, 3 / std::sqrt(static_cast<double>(shape.intermediate)));
  layer.ids = random_ids(shape, tokens, shape.experts / 2, &random);
  layer.b1 = values(2 * shape.experts * shape.intermediate, 1);
  layer.b2 = values(shape.experts * shape.hidden, 1);
  return layer;
}

Layer<BFloat16, float> rounded(const Layer<double, double>& layer) {
  const auto round_all = [](const Doubles& values) {
    std::vector<BFloat16> result;
    for (const double value : values) result.push_back(round_to_bfloat16(value));
    return result;
  };
  Layer<BFloat16, float> result;
  result.shape = layer.shape;
  result.tokens = layer.tokens;
  result.x = round_all(layer.x);
  result.dy = round_all(layer.dy);
  result.w1 = round_all(layer.w1);
  result.w2 = round_all(layer.w2);
  result.b1 = round_all(layer.b1);
  result.b2 = round_all(layer.b2);
  result.numerics = layer.numerics;
  result.ids = layer.ids;
  result.probs.assign(layer.probs.begin(), layer.probs.end());
  return result;
}

// The reference rounded as an engine stores it: what a perfect engine would give.
struct Stored {
  std::vector<BFloat16> y, z, dx, dw1, dw2;
  std::vector<float> dprobs;
  EngineOutput output() const {
    return {y.data(), z.data(), dx.data(), dprobs.data(), WeightGradient::kBFloat16, dw1.data(), dw2.data()};
  }
};

Stored stored(const LayerOutput& output) {
  const auto round_all = [](const Doubles& values) {
    std::vector<BFloat16> result;
    for (const double value : values) result.push_back(round_to_bfloat16(value));
    return result;
  };
  Stored result;
  result.y = round_all(output.y);
  result.z = round_all(output.z);
  result.dx = round_all(output.dx);
  result.dw1 = round_all(output.dw1);
  result.dw2 = round_all(output.dw2);
  result.dprobs.assign(output.dprobs.begin(), output.dprobs.end());
  return result;
}

const Comparison& named(const CheckReport& report, const std::string& name) {
  for (const auto& [key, comparison] : report.tensors) {
    if (key == name) return comparison;
  }
  throw std::runtime_error("the report has no tensor " + name);
}

const LayerShape kTiny{.hidden = 8, .intermediate = 8, .experts = 4, .topk = 2};

// ---- The layer ----

TEST(ReferenceLayer, OneByOneLayerByHand) {
  const double x = 1, dy = 1, prob = 0.5, w2 = 3;
  const double w1[] = {1, 2};
  const int32_t id = 0;
  const DoubleLayerInput input{{1, 1, 1, 1}, 1, &x, &dy, &id, &prob, w1, &w2};
  const LayerOutput output = evaluate(input);
  const double s = 0.73105857863000487925;  // sigmoid(1)
  EXPECT_DOUBLE_EQ(output.z[0], 1);
  EXPECT_DOUBLE_EQ(output.z[1], 2);
  EXPECT_NEAR(output.y[0], 3 * s * 2 * 0.5, 1e-15);
  EXPECT_NEAR(output.dprobs[0], 3 * s * 2, 1e-15);
  EXPECT_NEAR(output.dw2[0], s * 2 * 0.5, 1e-15);
  EXPECT_NEAR(output.dw1[1], 3 * 0.5 * s, 1e-15);
  EXPECT_NEAR(output.dw1[0], 3 * 0.5 * 2 * (s + s * (1 - s)), 1e-15);
  EXPECT_NEAR(output.dx[0], output.dw1[0] * 1 + output.dw1[1] * 2, 1e-15);
}

TEST(ReferenceLayer, ForwardIsTheFormulaTokenByToken) {
  const LayerShape shape{.hidden = 72, .intermediate = 40, .experts = 5, .topk = 3};
  const Layer<double, double> layer = random_layer(shape, 150, 7);
  const LayerOutput output = evaluate(layer.input());
  Doubles y(output.y.size(), 0.0);
  Doubles z;
  for (int32_t expert = 0; expert < shape.experts; ++expert) {
    for (int64_t entry = 0; entry < layer.tokens * shape.topk; ++entry) {
      if (layer.ids[entry] != expert) continue;
      const double* x = &layer.x[entry / shape.topk * shape.hidden];
      const double* w1 = &layer.w1[expert * 2 * shape.intermediate * shape.hidden];
      const double* w2 = &layer.w2[expert * shape.intermediate * shape.hidden];
      Doubles row(2 * shape.intermediate);
      for (size_t j = 0; j < row.size(); ++j) row[j] = std::inner_product(x, x + shape.hidden, &w1[j * 72], 0.0);
      for (int64_t h = 0; h < shape.hidden; ++h) {
        for (int64_t i = 0; i < shape.intermediate; ++i) {
          const double activation = row[i] / (1 + std::exp(-row[i])) * row[i + 40] * layer.probs[entry];
          y[entry / shape.topk * shape.hidden + h] += w2[h * 40 + i] * activation;
        }
      }
      z.insert(z.end(), row.begin(), row.end());
    }
  }
  ASSERT_EQ(output.z.size(), z.size());
  for (size_t i = 0; i < z.size(); ++i) ASSERT_NEAR(output.z[i], z[i], 1e-12) << i;
  for (size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(output.y[i], y[i], 1e-12) << i;
}

TEST(ReferenceLayer, RowsAreByExpertThenTokenThenSlot) {
  const std::vector<int32_t> ids = {2, 0, -1, 2, 0, 3, -1, -1, 3, 0};
  const RoutedRows routed = route(kTiny, 5, ids.data());
  EXPECT_EQ(routed.expert_begin, (std::vector<int64_t>{0, 3, 3, 5, 7}));
  EXPECT_EQ(routed.slots, (std::vector<int64_t>{1, 4, 9, 0, 3, 5, 8}));
}

TEST(ReferenceLayer, RefusesWhatItCanNotIndex) {
  for (const int32_t bad : {-2, 4}) {
    const std::vector<int32_t> ids = {0, 1, 2, bad};
    try {
      route(kTiny, 2, ids.data());
      ADD_FAILURE() << bad << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("ids[1, 1] is " + std::to_string(bad)), std::string::npos);
    }
  }
  EXPECT_THROW(route({8, 0, 4, 2}, 0, nullptr), Error);
  EXPECT_THROW(route(kTiny, -1, nullptr), Error);
}

// The derivative of the loss sum(dy * y) by one value, from a five-point central difference (error of order step^4).
double numerical_derivative(const Layer<double, double>& layer, double* value) {
  constexpr double kStep = 2e-3;
  DoubleLayerInput forward_only = layer.input();
  forward_only.dy = nullptr;
  const double start = *value;
  const auto loss = [&](double offset) {
    *value = start + offset;
    const Doubles y = evaluate(forward_only).y;
    return std::inner_product(y.begin(), y.end(), layer.dy.begin(), 0.0);
  };
  const double near = loss(kStep) - loss(-kStep);
  const double far = loss(2 * kStep) - loss(-2 * kStep);
  *value = start;
  return (8 * near - far) / (12 * kStep);
}

TEST(ReferenceLayer, GradientsAreFiniteDifferences) {
  const std::tuple<uint64_t, RouterWeight, bool> cases[] = {
      {1, RouterWeight::kActivation, false}, {2, RouterWeight::kActivation, true}, {3, RouterWeight::kOutput, true}};
  for (const auto& [seed, router_weight, bias] : cases) {
    Layer<double, double> layer = random_layer(kTiny, 5, seed);
    layer.numerics.router_weight = router_weight;
    layer.numerics.bias = bias;
    ASSERT_TRUE(std::count(layer.ids.begin(), layer.ids.end(), -1) > 0);
    const LayerOutput analytic = evaluate(layer.input());
    const auto expect_agreement = [&](const char* name, Doubles* values, const Doubles& gradient) {
      ASSERT_EQ(values->size(), gradient.size()) << name;
      const double square = std::inner_product(gradient.begin(), gradient.end(), gradient.begin(), 0.0);
      const double root_mean_square = std::sqrt(square / static_cast<double>(gradient.size()));
      ASSERT_GT(root_mean_square, 1e-3) << name;
      for (size_t i = 0; i < values->size(); ++i) {
        const double scale = std::max(std::abs(gradient[i]), 1e-2 * root_mean_square);
        const double numerical = numerical_derivative(layer, &(*values)[i]);
        ASSERT_NEAR(numerical, gradient[i], 1e-6 * scale) << name << " " << i;
      }
    };
    expect_agreement("x", &layer.x, analytic.dx);
    expect_agreement("probs", &layer.probs, analytic.dprobs);
    expect_agreement("w1", &layer.w1, analytic.dw1);
    expect_agreement("w2", &layer.w2, analytic.dw2);
    if (!bias) continue;
    expect_agreement("b1", &layer.b1, analytic.db1);
    expect_agreement("b2", &layer.b2, analytic.db2);
  }
}

TEST(ReferenceLayer, UnusedSlotsAndEmptyExpertsGiveZeros) {
  Layer<double, double> layer = random_layer(kTiny, 5, 3);
  for (size_t entry = 0; entry < layer.ids.size(); ++entry) {
    if (layer.ids[entry] < 0) layer.probs[entry] = std::numeric_limits<double>::quiet_NaN();
  }
  const LayerOutput output = evaluate(layer.input());
  for (size_t entry = 0; entry < layer.ids.size(); ++entry) {
    EXPECT_EQ(output.dprobs[entry] == 0, layer.ids[entry] < 0) << entry;
  }
  for (int64_t h = 0; h < 8; ++h) {  // token 1 has no slot
    EXPECT_EQ(output.y[8 + h], 0);
    EXPECT_EQ(output.dx[8 + h], 0);
  }
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(output.dw2[2 * 64 + i], 0);  // expert 2 has no row
  for (int64_t i = 0; i < 128; ++i) EXPECT_EQ(output.dw1[2 * 128 + i], 0);
}

TEST(ReferenceLayer, NoTokens) {
  const Layer<double, double> layer = random_layer(kTiny, 0, 3);
  DoubleLayerInput input = layer.input();
  input.dy = layer.w1.data();  // any address
  const LayerOutput output = evaluate(input);
  EXPECT_TRUE(output.y.empty() && output.z.empty() && output.dx.empty() && output.dprobs.empty());
  EXPECT_EQ(output.dw1, Doubles(4 * 16 * 8, 0.0));
  EXPECT_EQ(output.dw2, Doubles(4 * 8 * 8, 0.0));
}

// The plain function of the same values, but for the rounding of what the contract stores between stages.
TEST(ReferenceLayer, BFloat16LayersDifferFromThePlainFunctionByStoredRoundingsOnly) {
  const Layer<BFloat16, float> layer = rounded(random_layer(kTiny, 9, 5));
  Layer<double, double> wide;
  wide.shape = layer.shape;
  wide.tokens = layer.tokens;
  wide.ids = layer.ids;
  wide.probs.assign(layer.probs.begin(), layer.probs.end());
  for (const BFloat16 value : layer.x) wide.x.push_back(widen(value));
  for (const BFloat16 value : layer.dy) wide.dy.push_back(widen(value));
  for (const BFloat16 value : layer.w1) wide.w1.push_back(widen(value));
  for (const BFloat16 value : layer.w2) wide.w2.push_back(widen(value));
  const LayerOutput narrow_output = evaluate(layer.input());
  const LayerOutput wide_output = evaluate(wide.input());
  EXPECT_EQ(narrow_output.z, wide_output.z);
  const auto expect_near = [](const Doubles& narrow, const Doubles& plain) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < plain.size(); ++i) {
      difference += (narrow[i] - plain[i]) * (narrow[i] - plain[i]);
      size += plain[i] * plain[i];
    }
    EXPECT_GT(difference, 0);
    EXPECT_LT(std::sqrt(difference / size), 0x1p-8);
  };
  expect_near(narrow_output.y, wide_output.y);
  expect_near(narrow_output.dx, wide_output.dx);
  expect_near(narrow_output.dprobs, wide_output.dprobs);
  expect_near(narrow_output.dw1, wide_output.dw1);
  expect_near(narrow_output.dw2, wide_output.dw2);
}

// ---- The sample ----

TEST(ReferenceSample, EqualsTheWholeInEveryBit) {
  const LayerShape shape{.hidden = 88, .intermediate = 72, .experts = 6, .topk = 3};
  for (const uint64_t seed : {1, 2, 3}) {
    Layer<BFloat16, float> layer = rounded(random_layer(shape, 300, seed));
    layer.numerics.bias = seed != 1;
    layer.numerics.router_weight = seed == 2 ? RouterWeight::kOutput : RouterWeight::kActivation;
    const LayerInput input = layer.input();
    const LayerOutput whole = evaluate(input);
    const RoutedRows routed = route(shape, layer.tokens, layer.ids.data());
    const Sample sample = choose_sample(input, routed, seed, 1e7);
    const SampleOutput part = evaluate_sample(input, routed, sample);
    ASSERT_GT(sample.tokens.size(), 5u);
    ASSERT_LT(sample.tokens.size(), 300u);
    ASSERT_GT(sample.weight_columns.size(), 5u);

    size_t next_z = 0;
    for (size_t i = 0; i < sample.tokens.size(); ++i) {
      const int64_t token = sample.tokens[i];
      for (int64_t h = 0; h < 88; ++h) {
        ASSERT_EQ(part.y[i * 88 + h], whole.y[token * 88 + h]);
        ASSERT_EQ(part.dx[i * 88 + h], whole.dx[token * 88 + h]);
      }
      for (int64_t k = 0; k < 3; ++k) ASSERT_EQ(part.dprobs[i * 3 + k], whole.dprobs[token * 3 + k]);
    }
    std::set<int64_t> tokens_with_rows;
    for (const int64_t row : part.z_rows) {
      tokens_with_rows.insert(routed.slots[row] / 3);
      for (int64_t j = 0; j < 144; ++j) ASSERT_EQ(part.z[next_z++], whole.z[row * 144 + j]);
    }
    ASSERT_EQ(next_z, part.z.size());
    for (const int64_t token : tokens_with_rows) {
      ASSERT_TRUE(std::binary_search(sample.tokens.begin(), sample.tokens.end(), token));
    }
    for (size_t i = 0; i < sample.weight_columns.size(); ++i) {
      const auto [expert, column] = sample.weight_columns[i];
      for (int64_t h = 0; h < 88; ++h) {
        ASSERT_EQ(part.dw1[(2 * i) * 88 + h], whole.dw1[(expert * 144 + column) * 88 + h]);
        ASSERT_EQ(part.dw1[(2 * i + 1) * 88 + h], whole.dw1[(expert * 144 + 72 + column) * 88 + h]);
        ASSERT_EQ(part.dw2[i * 88 + h], whole.dw2[(expert * 88 + h) * 72 + column]);
        if (input.numerics.bias) {
          ASSERT_EQ(part.db2[i * 88 + h], whole.db2[expert * 88 + h]);
        }
      }
      if (!input.numerics.bias) continue;
      ASSERT_EQ(part.db1[2 * i], whole.db1[expert * 144 + column]);
      ASSERT_EQ(part.db1[2 * i + 1], whole.db1[expert * 144 + 72 + column]);
    }
  }
}

TEST(ReferenceSample, KeepsToItsBudgetAndToItsSeed) {
  const LayerShape shape{.hidden = 64, .intermediate = 32, .experts = 16, .topk = 2};
  const Layer<BFloat16, float> layer = rounded(random_layer(shape, 2000, 11));
  const LayerInput input = layer.input();
  const RoutedRows routed = route(shape, layer.tokens, layer.ids.data());
  for (const double budget : {4e5, 1e6, 3e6, 1e8}) {
    const Sample sample = choose_sample(input, routed, 5, budget);
    double flops = static_cast<double>(sample.tokens.size()) * 12.0 * 64 * 32 * 2;
    for (const WeightColumn& chosen : sample.weight_columns) {
      flops += 12.0 * 64 * static_cast<double>(routed.rows_of(chosen.expert));
      EXPECT_LT(chosen.column, 32);
    }
    EXPECT_LE(flops, budget);
    EXPECT_TRUE(std::is_sorted(sample.tokens.begin(), sample.tokens.end()));
    EXPECT_TRUE(std::adjacent_find(sample.tokens.begin(), sample.tokens.end()) == sample.tokens.end());
    EXPECT_TRUE(std::any_of(sample.weight_columns.begin(), sample.weight_columns.end(), [](const WeightColumn& chosen) {
      return chosen.expert == 8;
    })) << "expert 8 has no rows and is part of every sample";
    const Sample again = choose_sample(input, routed, 5, budget);
    EXPECT_EQ(sample.tokens, again.tokens);
    EXPECT_EQ(sample.weight_columns, again.weight_columns);
  }
  EXPECT_NE(choose_sample(input, routed, 5, 1e6).tokens, choose_sample(input, routed, 6, 1e6).tokens);

  const Sample least = choose_sample(input, routed, 5, 1);
  EXPECT_EQ(least.tokens.size(), 1u);
  EXPECT_EQ(least.weight_columns.size(), 2u) << "the expert without rows and the one with the fewest";
}

// ---- What they stand on ----

TEST(ReferenceMultiply, IsOneAscendingChainPerElementWhateverTheBlocks) {
  std::mt19937_64 random(31);
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (const auto& [rows, columns, depth] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {1, 1, 1}, {3, 5, 257}, {65, 130, 600}, {4, 64, 256}, {7, 2, 0}, {0, 9, 9}}) {
    Doubles left(rows * depth), right(depth * columns), out(rows * columns, 7.0);
    for (double& value : left) value = uniform(random);
    for (double& value : right) value = uniform(random);
    multiply(
        {rows, columns, depth}, [&, d = depth](int64_t i, int64_t k) { return left[i * d + k]; },
        [&, n = columns](int64_t k, int64_t j) { return right[k * n + j]; }, out.data());
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < depth; ++k) sum += left[i * depth + k] * right[k * columns + j];
        ASSERT_EQ(out[i * columns + j], sum) << rows << " " << columns << " " << depth << ": " << i << " " << j;
      }
    }
  }
}

TEST(ReferenceParallel, RunsEveryTaskOnceAndPassesExceptionsOn) {
  std::vector<int> runs(1000, 0);
  parallel_for(1000, 1e12, [&](int64_t i) { ++runs[i]; });
  EXPECT_EQ(runs, std::vector<int>(1000, 1));
  EXPECT_THROW(parallel_for(1000, 1e12,
                            [](int64_t i) {
                              if (i == 500) throw std::runtime_error("500");
                            }),
               std::runtime_error);
}

// ---- The check ----

class ReferenceCheck : public testing::TestWithParam<bool> {
 protected:
  ReferenceCheck() {
    if (GetParam()) {
      options_.whole_flops = 0;
      options_.sample_flops = 1e12;  // every token, and as many columns as a sample may have
    }
  }
  CheckReport report() const { return check(layer_.input(), got_.output(), options_); }

  const LayerShape shape_{.hidden = 24, .intermediate = 16, .experts = 4, .topk = 2};
  const Layer<BFloat16, float> layer_ = rounded(random_layer(shape_, 100, 21));
  Stored got_ = stored(evaluate(layer_.input()));
  CheckOptions options_;
};

TEST_P(ReferenceCheck, PassesWhatIsRight) {
  const CheckReport checked = report();
  EXPECT_EQ(checked.sampled, GetParam());
  EXPECT_EQ(checked.sampled_tokens, GetParam() ? 100 : 0);
  EXPECT_EQ(checked.sampled_weight_columns > 8, GetParam());
  std::vector<std::string> names;
  for (const auto& [name, comparison] : checked.tensors) {
    names.push_back(name);
    EXPECT_TRUE(comparison.passed) << name << ": " << comparison.message;
    EXPECT_EQ(comparison.error > 1e-4, name != "dprobs") << name;  // all but dprobs were rounded to bf16
    EXPECT_GE(comparison.worst_row, comparison.error) << name;
  }
  EXPECT_EQ(names, (std::vector<std::string>{"y", "z", "dx", "dprobs", "dw1", "dw2"}));
  EXPECT_TRUE(checked.passed());
}

TEST_P(ReferenceCheck, CatchesAPlantedErrorInEachTensor) {
  const Stored right = got_;
  const auto expect_only = [&](const std::string& wrong) {
    const CheckReport checked = report();
    EXPECT_FALSE(checked.passed());
    for (const auto& [name, comparison] : checked.tensors) {
      EXPECT_EQ(comparison.passed, name != wrong) << wrong << " planted, " << name << ": " << comparison.message;
    }
    got_ = right;
  };
  std::rotate(got_.y.begin(), got_.y.begin() + 24, got_.y.end());
  expect_only("y");
  std::swap_ranges(got_.z.begin(), got_.z.begin() + 16, got_.z.begin() + 16);
  expect_only("z");
  std::swap_ranges(got_.dx.begin(), got_.dx.begin() + 24, got_.dx.begin() + 48);
  expect_only("dx");
  got_.dprobs[std::find_if(layer_.ids.begin(), layer_.ids.end(), [](int32_t id) { return id >= 0; }) -
              layer_.ids.begin()] *= 2;
  expect_only("dprobs");
  got_.dprobs[2] = -0.0f;  // token 1 has no slot: +0 is asked for
  expect_only("dprobs");
  std::rotate(got_.dw1.begin(), got_.dw1.begin() + 1, got_.dw1.end());
  expect_only("dw1");
  std::rotate(got_.dw2.begin(), got_.dw2.begin() + 1, got_.dw2.end());
  expect_only("dw2");
  for (BFloat16* value = &got_.dw2[2 * 24 * 16]; value != &got_.dw2[3 * 24 * 16]; ++value)
    *value = round_to_bfloat16(1e-30);
  expect_only("dw2");  // expert 2 has no row
}

TEST_P(ReferenceCheck, ReadsFp32GradientsAndLeavesOutWhatIsNotGiven) {
  const LayerOutput exact = evaluate(layer_.input());
  const std::vector<float> dw1(exact.dw1.begin(), exact.dw1.end());
  const std::vector<float> dw2(exact.dw2.begin(), exact.dw2.end());
  EngineOutput output;
  output.weight_gradient = WeightGradient::kFloat32;
  output.dw1 = dw1.data();
  output.dw2 = dw2.data();
  const CheckReport checked = check(layer_.input(), output, options_);
  ASSERT_EQ(checked.tensors.size(), 2u);
  EXPECT_LT(named(checked, "dw1").worst_row, 1e-6);
  EXPECT_LT(named(checked, "dw2").worst_row, 1e-6);

  LayerInput forward_only = layer_.input();
  forward_only.dy = nullptr;
  EXPECT_EQ(check(forward_only, got_.output(), options_).tensors.size(), 2u);
  EXPECT_TRUE(check(forward_only, got_.output(), options_).passed());
}

// What a main_grad of order 1 held, as an engine with gradients a million times smaller leaves it: its rounding is as
// large as they are, and no fault.
TEST_P(ReferenceCheck, SmallGradientsMayDrownInMainGrad) {
  Layer<BFloat16, float> layer = layer_;
  for (BFloat16& value : layer.dy) value = round_to_bfloat16(widen(value) * 1e-6);
  const LayerOutput exact = evaluate(layer.input());
  const auto start = [](uint64_t index) { return 1.0f + static_cast<float>(index % 7) / 8; };
  const auto summed = [&](const Doubles& gradient) {
    std::vector<float> sums;
    for (const double value : gradient) {
      sums.push_back(start(sums.size()) + static_cast<float>(value));
    }
    return sums;
  };
  const std::vector<float> dw1 = summed(exact.dw1);
  std::vector<float> dw2 = summed(exact.dw2);
  EngineOutput output;
  output.weight_gradient = WeightGradient::kMainGrad;
  output.main_grad = start;
  output.dw1 = dw1.data();
  output.dw2 = dw2.data();
  const CheckReport checked = check(layer.input(), output, options_);
  EXPECT_TRUE(checked.passed()) << named(checked, "dw1").message << named(checked, "dw2").message;
  for (float& value : dw2) value = std::nextafter(std::nextafter(value, 9.0f), 9.0f);
  const CheckReport wrong = check(layer.input(), output, options_);
  EXPECT_TRUE(named(wrong, "dw1").passed);
  EXPECT_FALSE(named(wrong, "dw2").passed);
}

TEST_P(ReferenceCheck, NoTokens) {
  LayerInput input = layer_.input();
  input.tokens = 0;
  EXPECT_FALSE(check(input, got_.output(), options_).passed()) << "gradients of no rows must be zero";
  std::fill(got_.dw1.begin(), got_.dw1.end(), BFloat16{0});
  std::fill(got_.dw2.begin(), got_.dw2.end(), BFloat16{0});
  EXPECT_TRUE(check(input, got_.output(), options_).passed());
}

INSTANTIATE_TEST_SUITE_P(WholeAndSampled, ReferenceCheck, testing::Bool(),
                         [](const auto& parameter) { return parameter.param ? "Sampled" : "Whole"; });

}  // namespace
}  // namespace uniep::reference
