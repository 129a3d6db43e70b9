#include "train/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "io/hash64.h"
#include "model/elementwise.h"

namespace uniep::train {
namespace {

constexpr double kSmallDeviation = 0.02;  // of the head, the routers and biases: they start nearly uniform

// Uniform on the 2^24 multiples of 2^-23 in [-1, 1). Exact.
float uniform(uint64_t hash) {
  return static_cast<float>(static_cast<int32_t>(hash >> 40) - (1 << 23)) * 0x1p-23f;
}

}  // namespace

ParameterLayout::ParameterLayout(const ModelConfig& model) {
  const int64_t hidden = model.hidden, intermediate = model.intermediate, experts = model.experts;
  const double hidden_deviation = 1 / std::sqrt(static_cast<double>(hidden));
  // What is added to the residual stream starts smaller the more layers there are.
  const double residual = 1 / std::sqrt(2.0 * static_cast<double>(model.layers));
  embedding_ = add("embedding", {kVocabulary, hidden}, 0.5);
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = fmt::format("blocks.{}.", layer);
    Block& block = blocks_.emplace_back();
    block.mixer_norm = add_norm(prefix + "mixer.norm", hidden);
    block.mixer_in = add(prefix + "mixer.in", {hidden, 2 * hidden}, hidden_deviation);
    block.mixer_filter = add(prefix + "mixer.filter", {kMixerTaps, hidden}, 1 / std::sqrt(double{kMixerTaps}));
    block.mixer_out = add(prefix + "mixer.out", {hidden, hidden}, hidden_deviation * residual);
    block.moe_norm = add_norm(prefix + "moe.norm", hidden);
    block.router = add(prefix + "moe.router", {hidden, experts}, kSmallDeviation);
  }
  final_norm_ = add_norm("norm", hidden);
  head_ = add("head", {hidden, kVocabulary}, kSmallDeviation);
  dense_count_ = count_;
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = fmt::format("blocks.{}.moe.", layer);
    const double deviation = residual / std::sqrt(static_cast<double>(intermediate));
    blocks_[layer].w1 = add(prefix + "w1", {experts, model.w1_rows(), hidden}, hidden_deviation);
    blocks_[layer].w2 = add(prefix + "w2", {experts, hidden, intermediate}, deviation);
    if (!model.numerics.bias) continue;
    blocks_[layer].b1 = add(prefix + "b1", {experts, model.w1_rows()}, kSmallDeviation, false);
    blocks_[layer].b2 = add(prefix + "b2", {experts, hidden}, kSmallDeviation, false);
  }
}

int64_t ParameterLayout::add(std::string name, std::vector<int64_t> shape, double deviation, bool decays) {
  ParameterTensor& tensor = tensors_.emplace_back();
  tensor.name = std::move(name);
  tensor.shape = std::move(shape);
  tensor.offset = count_;
  tensor.count = std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>());
  tensor.bound = static_cast<float>(deviation * std::sqrt(3.0));  // of a uniform distribution
  tensor.decays = decays;
  count_ += tensor.count;
  return tensor.offset;
}

int64_t ParameterLayout::add_norm(std::string name, int64_t columns) {
  return add(std::move(name), {columns}, 0.0, false);
}

Parameters::Parameters(const ParameterLayout& layout)
    : layout_(layout),
      values_(layout.count()),
      transposed_(layout.dense_count()),
      rounded_(layout.count() - layout.dense_count()) {}

void Parameters::initialise(uint64_t seed) {
  uint64_t number = 0;
  for (const ParameterTensor& tensor : layout_.tensors()) {
    const uint64_t stream = io::avalanche64(io::avalanche64(seed + io::kGolden64) ^ ++number);
    float* values = values_.data() + tensor.offset;
    for (int64_t i = 0; i < tensor.count; ++i) {
      const uint64_t hash = io::avalanche64(stream + static_cast<uint64_t>(i + 1) * io::kGolden64);
      values[i] = tensor.bound == 0 ? 1.0f : uniform(hash) * tensor.bound;
    }
  }
  refresh();
}

void Parameters::refresh() {
  for (const ParameterTensor& tensor : layout_.tensors()) {
    if (tensor.offset >= layout_.dense_count() || tensor.shape.size() != 2) continue;
    const int64_t rows = tensor.shape[0], columns = tensor.shape[1];
    const float* in = values_.data() + tensor.offset;
    float* out = transposed_.data() + tensor.offset;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) out[column * rows + row] = in[row * columns + column];
    }
  }
  const int64_t dense = layout_.dense_count();
  for (std::size_t i = 0; i < rounded_.size(); ++i) rounded_[i] = to_bfloat16(values_[dense + i]);
}

}  // namespace uniep::train
