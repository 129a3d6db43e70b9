#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "train/config.h"
#include "train/head.h"
#include "train/kernels.h"
#include "train/mixer.h"
#include "train/model.h"
#include "train/rms_norm.h"
#include "train/router.h"

// The dense parts' gradients against central differences, and the wiring of the whole model.
namespace uniep::train {
namespace {

std::vector<float> random_values(std::mt19937& random, int64_t count, float scale = 1.0f) {
  std::uniform_real_distribution<float> distribution(-scale, scale);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(random);
  return values;
}

double weighted_sum(const std::vector<float>& values, const std::vector<float>& weights) {
  double sum = 0;
  for (std::size_t i = 0; i < values.size(); ++i) sum += static_cast<double>(values[i]) * weights[i];
  return sum;
}

std::vector<float> transposed(const std::vector<float>& matrix, int64_t rows, int64_t columns) {
  std::vector<float> out(matrix.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) out[j * rows + i] = matrix[i * columns + j];
  }
  return out;
}

// `gradient` must be that of loss() with respect to `values`, every element within 0.5 % of the largest.
void expect_gradient(const char* name, std::vector<float>& values, const std::vector<float>& gradient,
                     const std::function<double()>& loss) {
  constexpr float kStep = 0x1p-7f;
  ASSERT_EQ(values.size(), gradient.size());
  double largest = 0;
  for (const float g : gradient) largest = std::max(largest, std::abs(static_cast<double>(g)));
  ASSERT_GT(largest, 0) << name;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float value = values[i];
    const float above = value + kStep, below = value - kStep;
    values[i] = above;
    const double loss_above = loss();
    values[i] = below;
    const double loss_below = loss();
    values[i] = value;
    const double numeric = (loss_above - loss_below) / (static_cast<double>(above) - below);
    EXPECT_NEAR(gradient[i], numeric, 5e-3 * largest) << name << " element " << i;
  }
}

TEST(TrainKernels, MultiplyIsOneChainAlongK) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t m = 1 + random() % 13, n = 1 + random() % 75, k = random() % 40;
    const std::vector<float> a = random_values(random, m * k), b = random_values(random, k * n);
    const std::vector<float> a_transposed = transposed(a, m, k);
    std::vector<float> expected(m * n), added = random_values(random, m * n), expected_added(m * n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        volatile float sum = 0;  // one rounding a step, whatever the compiler would like
        for (int64_t step = 0; step < k; ++step) {
          volatile float product = a[i * k + step] * b[step * n + j];
          sum = sum + product;
        }
        expected[i * n + j] = sum;
        expected_added[i * n + j] = added[i * n + j] + sum;
      }
    }
    std::vector<float> c(m * n, NAN), c_transposed(m * n, NAN);
    multiply(a.data(), b.data(), c.data(), {m, n, k});
    multiply_transposed(a_transposed.data(), b.data(), c_transposed.data(), {m, n, k});
    multiply(a.data(), b.data(), added.data(), {m, n, k}, Store::kAdd);
    EXPECT_EQ(c, expected) << m << " x " << n << " x " << k;
    EXPECT_EQ(c_transposed, expected) << m << " x " << n << " x " << k;
    EXPECT_EQ(added, expected_added) << m << " x " << n << " x " << k;
  }
}

TEST(TrainKernels, SoftmaxMatchesLibm) {
  std::mt19937 random(2);
  for (const int64_t count : {1, 2, 7, 8, 9, 64, 256}) {
    const std::vector<float> logits = random_values(random, count, 20.0f);
    std::vector<float> probabilities = logits;
    const SoftmaxSummary summary = softmax(probabilities.data(), probabilities.data(), count);
    double largest = logits[0], sum = 0;
    for (const float logit : logits) largest = std::max<double>(largest, logit);
    for (const float logit : logits) sum += std::exp(logit - largest);
    EXPECT_EQ(summary.largest, static_cast<float>(largest));
    EXPECT_NEAR(summary.sum, sum, 1e-5 * sum);
    for (int64_t i = 0; i < count; ++i) EXPECT_NEAR(probabilities[i], std::exp(logits[i] - largest) / sum, 1e-6);
  }
}

TEST(TrainKernels, DotTakesEveryElementOnce) {
  for (int64_t count = 0; count < 40; ++count) {
    std::vector<float> x(count), ones(count, 1.0f);
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(i + 1);
    const int64_t sum = count * (count + 1) / 2;
    EXPECT_EQ(dot(x.data(), ones.data(), count), static_cast<float>(sum));
  }
}

TEST(TrainGradient, RmsNorm) {
  constexpr int64_t kRows = 3, kColumns = 10;
  std::mt19937 random(3);
  std::vector<float> x = random_values(random, kRows * kColumns), gain = random_values(random, kColumns);
  const std::vector<float> weights = random_values(random, kRows * kColumns);
  std::vector<float> out(x.size()), inverse_rms(kRows);
  const auto loss = [&] {
    rms_norm_forward({x.data(), gain.data(), kRows, kColumns, out.data(), inverse_rms.data()});
    return weighted_sum(out, weights);
  };
  loss();
  std::vector<float> x_gradient(x.size()), gain_gradient(kColumns, NAN);
  rms_norm_backward({.x = x.data(),
                     .gain = gain.data(),
                     .inverse_rms = inverse_rms.data(),
                     .out_gradient = weights.data(),
                     .rows = kRows,
                     .columns = kColumns,
                     .x_gradient = x_gradient.data(),
                     .gain_gradient = gain_gradient.data()});
  expect_gradient("x", x, x_gradient, loss);
  expect_gradient("gain", gain, gain_gradient, loss);
}

void check_mixer(int64_t sequence) {
  constexpr int64_t kHidden = 8;
  std::mt19937 random(4);
  std::vector<float> x = random_values(random, sequence * kHidden), norm = random_values(random, kHidden);
  std::vector<float> in = random_values(random, kHidden * 2 * kHidden, 0.6f),
                     out = random_values(random, kHidden * kHidden);
  std::vector<float> filter = random_values(random, kMixerTaps * kHidden);
  const std::vector<float> weights = random_values(random, sequence * kHidden);
  std::vector<float> normed(x.size()), inverse_rms(sequence), value(x.size()), gate(x.size()), convolved(x.size()),
      gated(x.size()), y(x.size()), scratch(mixer_scratch(sequence, kHidden));
  const MixerActivations activations{normed.data(), inverse_rms.data(), value.data(),
                                     gate.data(),   convolved.data(),   gated.data()};
  const MixerWeights mixer{norm.data(), in.data(), filter.data(), out.data()};
  const auto loss = [&] {
    mixer_forward({mixer, sequence, kHidden, x.data(), activations, y.data(), scratch.data()});
    return weighted_sum(y, weights);
  };
  loss();
  const std::vector<float> in_transposed = transposed(in, kHidden, 2 * kHidden),
                           out_transposed = transposed(out, kHidden, kHidden);
  const MixerWeights backward{norm.data(), in_transposed.data(), filter.data(), out_transposed.data()};
  std::vector<float> gradient = weights, norm_gradient(norm.size(), NAN), in_gradient(in.size(), NAN),
                     filter_gradient(filter.size(), NAN), out_gradient(out.size(), NAN);
  mixer_backward({.weights = mixer,
                  .transposed = backward,
                  .sequence = sequence,
                  .hidden = kHidden,
                  .x = x.data(),
                  .activations = activations,
                  .gradient = gradient.data(),
                  .gradients = {norm_gradient.data(), in_gradient.data(), filter_gradient.data(), out_gradient.data()},
                  .scratch = scratch.data()});
  expect_gradient("x", x, gradient, loss);
  expect_gradient("norm", norm, norm_gradient, loss);
  expect_gradient("in", in, in_gradient, loss);
  expect_gradient("filter", filter, filter_gradient, loss);
  expect_gradient("out", out, out_gradient, loss);
}

TEST(TrainGradient, MixerLongerThanItsFilter) {
  check_mixer(kMixerTaps + 5);
}
TEST(TrainGradient, MixerShorterThanItsFilter) {
  check_mixer(3);
}

TEST(TrainMixer, IsCausal) {
  constexpr int64_t kSequence = 20, kHidden = 8, kChanged = 9;
  std::mt19937 random(5);
  std::vector<float> x = random_values(random, kSequence * kHidden);
  const std::vector<float> norm(kHidden, 1.0f), in = random_values(random, kHidden * 2 * kHidden),
                                                filter = random_values(random, kMixerTaps * kHidden),
                                                out = random_values(random, kHidden * kHidden);
  std::vector<float> buffers[6], before(x.size()), after(x.size()), scratch(mixer_scratch(kSequence, kHidden));
  for (auto& buffer : buffers) buffer.resize(x.size());
  const MixerActivations activations{buffers[0].data(), buffers[1].data(), buffers[2].data(),
                                     buffers[3].data(), buffers[4].data(), buffers[5].data()};
  const MixerWeights mixer{norm.data(), in.data(), filter.data(), out.data()};
  mixer_forward({mixer, kSequence, kHidden, x.data(), activations, before.data(), scratch.data()});
  for (int64_t i = 0; i < kHidden; ++i) x[kChanged * kHidden + i] += static_cast<float>(i);
  mixer_forward({mixer, kSequence, kHidden, x.data(), activations, after.data(), scratch.data()});
  for (int64_t t = 0; t < kSequence; ++t) {
    const bool same =
        std::equal(before.begin() + t * kHidden, before.begin() + (t + 1) * kHidden, after.begin() + t * kHidden);
    EXPECT_EQ(same, t < kChanged) << "position " << t;
  }
}

TEST(TrainGradient, RouterAndBalance) {
  constexpr int64_t kTokens = 9, kHidden = 8, kExperts = 6, kTopk = 2;
  constexpr double kBalanceWeight = 3;
  std::mt19937 random(6);
  std::vector<float> weight = random_values(random, kHidden * kExperts), x;
  // Only tokens whose choice small steps leave alone: the three most probable experts lie apart.
  while (x.size() < kTokens * kHidden) {
    const std::vector<float> token = random_values(random, kHidden);
    std::vector<float> row(kExperts);
    multiply(token.data(), weight.data(), row.data(), {1, kExperts, kHidden});
    std::sort(row.rbegin(), row.rend());
    if (row[0] - row[1] > 0.1f && row[1] - row[2] > 0.1f) x.insert(x.end(), token.begin(), token.end());
  }
  const std::vector<float> prob_weights = random_values(random, kTokens * kTopk);
  std::vector<float> probabilities(kTokens * kExperts), probs(kTokens * kTopk), balance_gradients(kExperts);
  std::vector<int32_t> ids(kTokens * kTopk);
  const RouterActivations activations{probabilities.data(), ids.data(), probs.data()};
  std::vector<int32_t> first_ids;
  const auto loss = [&] {
    router_forward({x.data(), weight.data(), kTokens, kHidden, kExperts, kTopk, activations});
    if (first_ids.empty()) first_ids = ids;
    EXPECT_EQ(ids, first_ids) << "the seed must leave the choice alone";
    std::vector<int64_t> slots(kExperts);
    std::vector<double> sums(kExperts);
    add_router_load(activations, kTokens, kExperts, kTopk, {slots, sums});
    return weighted_sum(probs, prob_weights) +
           kBalanceWeight * balance_loss({slots, sums}, kTokens, kTopk, balance_gradients);
  };
  loss();
  for (float& gradient : balance_gradients) gradient *= static_cast<float>(kBalanceWeight);
  const std::vector<float> scaled_balance = balance_gradients,
                           weight_transposed = transposed(weight, kHidden, kExperts);
  std::vector<float> x_gradient(x.size()), weight_gradient(weight.size(), NAN), scratch(kTokens * kExperts);
  router_backward({.x = x.data(),
                   .transposed = weight_transposed.data(),
                   .tokens = kTokens,
                   .hidden = kHidden,
                   .experts = kExperts,
                   .topk = kTopk,
                   .activations = activations,
                   .prob_gradients = prob_weights.data(),
                   .balance_gradients = scaled_balance.data(),
                   .x_gradient = x_gradient.data(),
                   .weight_gradient = weight_gradient.data(),
                   .scratch = scratch.data()});
  expect_gradient("x", x, x_gradient, loss);
  expect_gradient("weight", weight, weight_gradient, loss);
}

TEST(TrainRouter, ChoosesTheMostProbableAndTheLowerIndexAmongEquals) {
  const std::vector<float> x = {1}, weight = {0.5f, 2, 2, -1, 2};
  std::vector<float> probabilities(5), probs(4);
  std::vector<int32_t> ids(4);
  router_forward({x.data(), weight.data(), 1, 1, 5, 4, {probabilities.data(), ids.data(), probs.data()}});
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 2, 4, 0}));
  for (int slot = 0; slot < 4; ++slot) EXPECT_EQ(probs[slot], probabilities[ids[slot]]);
}

TEST(TrainRouter, BalanceLossIsOneWhenBalancedAndEWhenOneExpertTakesAll) {
  std::vector<float> gradients(4);
  std::vector<int64_t> slots = {6, 6, 6, 6};
  std::vector<double> sums = {3, 3, 3, 3};
  EXPECT_DOUBLE_EQ(balance_loss({slots, sums}, 12, 2, gradients), 1);
  slots = {24, 0, 0, 0};
  sums = {12, 0, 0, 0};
  EXPECT_DOUBLE_EQ(balance_loss({slots, sums}, 12, 2, gradients), 4);
}

TEST(TrainGradient, Head) {
  constexpr int64_t kTokens = 4, kHidden = 8;
  constexpr float kScale = 0.25f;
  std::mt19937 random(7);
  std::vector<float> x = random_values(random, kTokens * kHidden), norm = random_values(random, kHidden),
                     projection = random_values(random, kHidden * kVocabulary);
  const std::vector<uint8_t> targets = {3, 200, 255, 3};
  std::vector<float> normed(x.size()), inverse_rms(kTokens), probabilities(kTokens * kVocabulary);
  const HeadActivations activations{normed.data(), inverse_rms.data(), probabilities.data()};
  const auto loss = [&] {
    return kScale *
           head_forward({{norm.data(), projection.data()}, x.data(), targets.data(), kTokens, kHidden, activations});
  };
  loss();
  const std::vector<float> projection_transposed = transposed(projection, kHidden, kVocabulary);
  std::vector<float> x_gradient(x.size(), NAN), norm_gradient(norm.size(), NAN), gradient(projection.size(), NAN),
      scratch(x.size());
  head_backward({.weights = {norm.data(), projection.data()},
                 .transposed = projection_transposed.data(),
                 .x = x.data(),
                 .targets = targets.data(),
                 .tokens = kTokens,
                 .hidden = kHidden,
                 .scale = kScale,
                 .activations = activations,
                 .x_gradient = x_gradient.data(),
                 .gradients = {norm_gradient.data(), gradient.data()},
                 .scratch = scratch.data()});
  expect_gradient("x", x, x_gradient, loss);
  expect_gradient("norm", norm, norm_gradient, loss);
  expect_gradient("projection", projection, gradient, loss);
}

TEST(TrainGradient, EmbeddingSumsOverEqualBytes) {
  const std::vector<uint8_t> bytes = {7, 255, 7};
  const std::vector<float> gradient = {1, 2, 3, 4, 5, 6};
  std::vector<float> table(kVocabulary * 2), table_gradient(kVocabulary * 2, NAN), out(6);
  table[7 * 2] = 8;
  table[255 * 2 + 1] = 9;
  embed(table.data(), bytes.data(), 3, 2, out.data());
  EXPECT_EQ(out, (std::vector<float>{8, 0, 0, 9, 8, 0}));
  embed_backward(bytes.data(), gradient.data(), 3, 2, table_gradient.data());
  std::vector<float> expected(kVocabulary * 2);
  expected[7 * 2] = 6;
  expected[7 * 2 + 1] = 8;
  expected[255 * 2] = 3;
  expected[255 * 2 + 1] = 4;
  EXPECT_EQ(table_gradient, expected);
}

// Along each tensor's own gradient the loss must rise by the gradient's norm. The experts compute in bf16, so steps are
// long and the tolerance wide; a path that is forgotten or counted twice shows all the same. All experts take every
// token, so that no choice jumps.
void expect_gradients_of_whole_model(const Numerics& numerics) {
  TrainConfig config;
  config.model = {.hidden = 16, .intermediate = 16, .experts = 4, .topk = 4, .layers = 2, .sequence = 24};
  config.model.numerics = numerics;
  config.batch = 6;
  config.balance_weight = 0;
  const ParameterLayout layout(config.model);
  ParallelConfig parallel;
  parallel.ranks = 2;
  ExpertLayers experts(config, parallel);
  Model model(config, layout);
  Parameters parameters(layout);
  parameters.initialise(8);
  std::mt19937 random(8);
  for (const ParameterTensor& tensor : layout.tensors()) {  // a head and routers that say something
    if (tensor.bound > 0.1f || tensor.bound == 0) continue;
    for (int64_t i = 0; i < tensor.count; ++i) parameters.values()[tensor.offset + i] *= 10.0f;
  }
  parameters.refresh();
  std::vector<uint8_t> bytes(config.batch * (config.model.sequence + 1));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>('a' + random() % 6);
  std::vector<const uint8_t*> windows;
  for (int64_t i = 0; i < config.batch; ++i) windows.push_back(bytes.data() + i * (config.model.sequence + 1));

  model.forward(parameters, windows, experts);
  std::vector<float> gradients(layout.count(), NAN);
  model.backward(parameters, experts, gradients);
  const std::vector<float> start = parameters.values();
  for (const ParameterTensor& tensor : layout.tensors()) {
    double square = 0;
    for (int64_t i = 0; i < tensor.count; ++i) square += std::pow(static_cast<double>(gradients[tensor.offset + i]), 2);
    const double norm = std::sqrt(square);
    ASSERT_GT(norm, 1e-4) << tensor.name;
    const double length = 0.02 / norm;  // so that the loss changes by about 0.02
    const auto loss_at = [&](double distance) {
      parameters.values() = start;
      for (int64_t i = tensor.offset; i < tensor.offset + tensor.count; ++i) {
        parameters.values()[i] += static_cast<float>(distance / norm * gradients[i]);
      }
      parameters.refresh();
      return model.forward(parameters, windows, experts).cross_entropy;
    };
    const double slope = (loss_at(length) - loss_at(-length)) / (2 * length);
    EXPECT_NEAR(slope / norm, 1.0, 0.05) << tensor.name << ", gradient norm " << norm;
  }
}

TEST(TrainGradient, WholeModelAlongEveryTensor) {
  expect_gradients_of_whole_model({});
}

TEST(TrainGradient, WholeModelWithBiases) {
  Numerics numerics;
  numerics.bias = true;
  numerics.router_weight = RouterWeight::kOutput;
  expect_gradients_of_whole_model(numerics);
}

}  // namespace
}  // namespace uniep::train
