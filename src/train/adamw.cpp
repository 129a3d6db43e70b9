#include "train/adamw.h"

#include <algorithm>
#include <cmath>

#include "reference/parallel.h"

namespace uniep::train {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr float kEpsilon = 1e-8f;
constexpr double kWeightDecay = 0.1;
constexpr double kMaxNorm = 1.0;
constexpr int64_t kChunk = 1 << 14;  // elements that one task takes, and that are summed together
constexpr int kPartialSums = 8;

double sum_of_squares(const float* values, int64_t count) {
  double sums[kPartialSums] = {};
  int64_t i = 0;
  for (; i + kPartialSums <= count; i += kPartialSums) {
    for (int lane = 0; lane < kPartialSums; ++lane) {
      sums[lane] += static_cast<double>(values[i + lane]) * static_cast<double>(values[i + lane]);
    }
  }
  for (int lane = 0; i < count; ++i, ++lane) sums[lane] += static_cast<double>(values[i]) * values[i];
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

struct Factors {
  float gradient_scale, first_scale, second_scale, rate;
};

struct Arrays {
  const float* gradients;
  float* first;
  float* second;
  float* values;
  int64_t count;
};

void update_chunk(const Factors& f, float decay, const Arrays& arrays) {
  const auto [gradients, first, second, values, count] = arrays;
  constexpr float kKeep1 = static_cast<float>(kBeta1), kAdd1 = static_cast<float>(1 - kBeta1);
  constexpr float kKeep2 = static_cast<float>(kBeta2), kAdd2 = static_cast<float>(1 - kBeta2);
  for (int64_t i = 0; i < count; ++i) {
    const float gradient = gradients[i] * f.gradient_scale;
    first[i] = kKeep1 * first[i] + kAdd1 * gradient;
    second[i] = kKeep2 * second[i] + kAdd2 * (gradient * gradient);
    const float direction = (first[i] * f.first_scale) / (std::sqrt(second[i] * f.second_scale) + kEpsilon);
    values[i] = values[i] - f.rate * direction - decay * values[i];
  }
}

}  // namespace

AdamW::AdamW(const ParameterLayout& layout) : first_(layout.count()), second_(layout.count()) {
  for (const ParameterTensor& tensor : layout.tensors()) {
    for (int64_t begin = 0; begin < tensor.count; begin += kChunk) {
      chunks_.push_back({tensor.offset + begin, std::min(kChunk, tensor.count - begin), tensor.decays});
    }
  }
}

double AdamW::norm(const std::vector<float>& gradients) const {
  std::vector<double> sums(chunks_.size());
  const auto count = static_cast<int64_t>(chunks_.size());
  reference::parallel_for(count, 2.0 * static_cast<double>(gradients.size()), [&](int64_t i) {
    sums[i] = sum_of_squares(gradients.data() + chunks_[i].begin, chunks_[i].count);
  });
  double sum = 0;
  for (const double part : sums) sum += part;
  return std::sqrt(sum);
}

double AdamW::update(int64_t step, double learning_rate, const std::vector<float>& gradients,
                     std::vector<float>& values) {
  const double gradient_norm = norm(gradients);
  if (!std::isfinite(gradient_norm)) return gradient_norm;
  Factors factors;
  factors.gradient_scale = static_cast<float>(std::min(1.0, kMaxNorm / (gradient_norm + 1e-12)));
  factors.first_scale = static_cast<float>(1 / (1 - std::pow(kBeta1, static_cast<double>(step))));
  factors.second_scale = static_cast<float>(1 / (1 - std::pow(kBeta2, static_cast<double>(step))));
  factors.rate = static_cast<float>(learning_rate);
  const auto count = static_cast<int64_t>(chunks_.size());
  reference::parallel_for(count, 30.0 * static_cast<double>(values.size()), [&](int64_t i) {
    const auto [begin, elements, decays] = chunks_[i];
    const float decay = decays ? static_cast<float>(learning_rate * kWeightDecay) : 0.0f;
    update_chunk(
        factors, decay,
        {gradients.data() + begin, first_.data() + begin, second_.data() + begin, values.data() + begin, elements});
  });
  return gradient_norm;
}

double learning_rate_at(int64_t step, double peak) {
  return step >= kWarmupSteps ? peak : peak * static_cast<double>(step) / kWarmupSteps;
}

}  // namespace uniep::train
