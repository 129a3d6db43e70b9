#include "train/model.h"

#include <algorithm>

#include "model/elementwise.h"
#include "reference/parallel.h"
#include "train/rms_norm.h"

namespace uniep::train {
namespace {

void round_row(const float* in, BFloat16* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bfloat16(in[i]);
}

}  // namespace

Model::Model(const TrainConfig& config, const ParameterLayout& layout)
    : config_(config), layout_(layout), tokens_(config.batch * config.model.sequence), blocks_(config.model.layers) {
  const ModelConfig& model = config_.model;
  const int64_t elements = tokens_ * model.hidden;
  for (Block& block : blocks_) {
    for (auto* buffer : {&block.input, &block.normed, &block.value, &block.gate, &block.convolved, &block.gated,
                         &block.mixed, &block.moe_normed}) {
      buffer->resize(elements);
    }
    block.inverse_rms.resize(tokens_);
    block.moe_inverse_rms.resize(tokens_);
    block.probabilities.resize(tokens_ * model.experts);
    block.probs.resize(tokens_ * model.topk);
    block.ids.resize(tokens_ * model.topk);
    block.moe_in.resize(elements);
    block.moe_out.resize(elements);
    block.balance_gradients.resize(model.experts);
  }
  hidden_.resize(elements);
  head_normed_.resize(elements);
  head_inverse_rms_.resize(tokens_);
  head_probabilities_.resize(tokens_ * kVocabulary);
  gradient_.resize(elements);
  moe_out_gradient_.resize(elements);
  moe_in_gradient_.resize(elements);
  prob_gradients_.resize(tokens_ * model.topk);
  sequence_gradients_.resize(config_.batch * layout_.dense_count());
  scratch_size_ =
      std::max(mixer_scratch(model.sequence, model.hidden), model.sequence * (model.hidden + model.experts));
  scratch_.resize(config_.batch * scratch_size_);
}

template <typename Task>
void Model::for_each_sequence(const Task& task) const {
  const double flops = 4.0 * static_cast<double>(tokens_) * static_cast<double>(layout_.dense_count());
  reference::parallel_for(config_.batch, flops, task);
}

MixerActivations Model::mixer_activations(Block& block, int64_t sequence) const {
  const int64_t first = sequence * config_.model.sequence, at = first * config_.model.hidden;
  return {block.normed.data() + at, block.inverse_rms.data() + first, block.value.data() + at,
          block.gate.data() + at,   block.convolved.data() + at,      block.gated.data() + at};
}

RouterActivations Model::router_activations(Block& block, int64_t sequence) const {
  const int64_t first = sequence * config_.model.sequence;
  return {block.probabilities.data() + first * config_.model.experts, block.ids.data() + first * config_.model.topk,
          block.probs.data() + first * config_.model.topk};
}

MixerWeights Model::mixer_weights(const float* base, const ParameterLayout::Block& at) const {
  return {base + at.mixer_norm, base + at.mixer_in, base + at.mixer_filter, base + at.mixer_out};
}

ExpertLayers::Weights Model::expert_weights(const Parameters& parameters, const ParameterLayout::Block& at) const {
  const bool bias = config_.model.numerics.bias;
  return {parameters.experts(at.w1), parameters.experts(at.w2), bias ? parameters.experts(at.b1) : nullptr,
          bias ? parameters.experts(at.b2) : nullptr};
}

BatchLoss Model::forward(const Parameters& parameters, const std::vector<const uint8_t*>& windows,
                         ExpertLayers& experts) {
  windows_ = windows;
  BatchLoss loss;
  for (int64_t layer = 0; layer < config_.model.layers; ++layer) {
    Block& block = blocks_[layer];
    for_each_sequence([&](int64_t sequence) { block_forward(parameters, layer, sequence); });
    loss.balance += balance_forward(layer);
    const ParameterLayout::Block& at = layout_.block(layer);
    experts.forward(layer, {block.moe_in.data(), block.ids.data(), block.probs.data(), block.moe_out.data()},
                    expert_weights(parameters, at));
  }
  std::vector<double> sums(config_.batch);
  for_each_sequence([&](int64_t sequence) { sums[sequence] = head_forward(parameters, sequence); });
  for (const double sum : sums) loss.cross_entropy += sum;
  loss.cross_entropy /= static_cast<double>(tokens_);
  loss.balance /= static_cast<double>(config_.model.layers);
  return loss;
}

// x of the next block: the mixer's output plus the experts'.
void Model::add_moe_out(const Block& block, int64_t sequence, float* out) const {
  const int64_t elements = config_.model.sequence * config_.model.hidden, at = sequence * elements;
  for (int64_t i = 0; i < elements; ++i) out[i] = block.mixed[at + i] + to_float(block.moe_out[at + i]);
}

void Model::block_forward(const Parameters& parameters, int64_t layer, int64_t sequence) {
  const ModelConfig& model = config_.model;
  const ParameterLayout::Block& at = layout_.block(layer);
  const int64_t first = sequence * model.sequence, offset = first * model.hidden;
  Block& block = blocks_[layer];
  float* input = block.input.data() + offset;
  if (layer == 0) {
    embed(parameters.dense(layout_.embedding()), windows_[sequence], model.sequence, model.hidden, input);
  } else {
    add_moe_out(blocks_[layer - 1], sequence, input);
  }
  mixer_forward({mixer_weights(parameters.dense(0), at), model.sequence, model.hidden, input,
                 mixer_activations(block, sequence), block.mixed.data() + offset, scratch(sequence)});
  rms_norm_forward({block.mixed.data() + offset, parameters.dense(at.moe_norm), model.sequence, model.hidden,
                    block.moe_normed.data() + offset, block.moe_inverse_rms.data() + first});
  router_forward({block.moe_normed.data() + offset, parameters.dense(at.router), model.sequence, model.hidden,
                  model.experts, model.topk, router_activations(block, sequence)});
  round_row(block.moe_normed.data() + offset, block.moe_in.data() + offset, model.sequence * model.hidden);
}

double Model::balance_forward(int64_t layer) {
  const ModelConfig& model = config_.model;
  Block& block = blocks_[layer];
  std::vector<int64_t> slots(model.experts);
  std::vector<double> probabilities(model.experts);
  const RouterLoad load{slots, probabilities};
  add_router_load(router_activations(block, 0), tokens_, model.experts, model.topk, load);
  const double loss = balance_loss(load, tokens_, model.topk, block.balance_gradients);
  for (float& gradient : block.balance_gradients) gradient *= static_cast<float>(config_.balance_weight);
  return loss;
}

double Model::head_forward(const Parameters& parameters, int64_t sequence) {
  const ModelConfig& model = config_.model;
  const int64_t first = sequence * model.sequence, offset = first * model.hidden;
  add_moe_out(blocks_.back(), sequence, hidden_.data() + offset);
  return train::head_forward({{parameters.dense(layout_.final_norm()), parameters.dense(layout_.head())},
                              hidden_.data() + offset,
                              windows_[sequence] + 1,
                              model.sequence,
                              model.hidden,
                              {head_normed_.data() + offset, head_inverse_rms_.data() + first,
                               head_probabilities_.data() + first * kVocabulary}});
}

void Model::backward(const Parameters& parameters, ExpertLayers& experts, std::vector<float>& gradients) {
  for_each_sequence([&](int64_t sequence) { head_backward(parameters, sequence); });
  const bool bias = config_.model.numerics.bias;
  for (int64_t layer = config_.model.layers - 1; layer >= 0; --layer) {
    const ParameterLayout::Block& at = layout_.block(layer);
    experts.backward(
        layer,
        {moe_out_gradient_.data(), blocks_[layer].moe_in.data(), moe_in_gradient_.data(), prob_gradients_.data()},
        expert_weights(parameters, at),
        {gradients.data() + at.w1, gradients.data() + at.w2, bias ? gradients.data() + at.b1 : nullptr,
         bias ? gradients.data() + at.b2 : nullptr});
    for_each_sequence([&](int64_t sequence) { block_backward(parameters, layer, sequence); });
  }
  reduce_sequences(gradients);
}

void Model::head_backward(const Parameters& parameters, int64_t sequence) {
  const ModelConfig& model = config_.model;
  const int64_t first = sequence * model.sequence, offset = first * model.hidden;
  float* gradients = sequence_gradients(sequence);
  train::head_backward({.weights = {parameters.dense(layout_.final_norm()), parameters.dense(layout_.head())},
                        .transposed = parameters.transposed(layout_.head()),
                        .x = hidden_.data() + offset,
                        .targets = windows_[sequence] + 1,
                        .tokens = model.sequence,
                        .hidden = model.hidden,
                        .scale = 1.0f / static_cast<float>(tokens_),
                        .activations = {head_normed_.data() + offset, head_inverse_rms_.data() + first,
                                        head_probabilities_.data() + first * kVocabulary},
                        .x_gradient = gradient_.data() + offset,
                        .gradients = {gradients + layout_.final_norm(), gradients + layout_.head()},
                        .scratch = scratch(sequence)});
  round_row(gradient_.data() + offset, moe_out_gradient_.data() + offset, model.sequence * model.hidden);
}

void Model::block_backward(const Parameters& parameters, int64_t layer, int64_t sequence) {
  const ModelConfig& model = config_.model;
  const ParameterLayout::Block& at = layout_.block(layer);
  const int64_t first = sequence * model.sequence, offset = first * model.hidden;
  const int64_t elements = model.sequence * model.hidden;
  Block& block = blocks_[layer];
  float* gradient = gradient_.data() + offset;
  float* gradients = sequence_gradients(sequence);

  float* normed_gradient = scratch(sequence);
  for (int64_t i = 0; i < elements; ++i) normed_gradient[i] = to_float(moe_in_gradient_[offset + i]);
  router_backward({.x = block.moe_normed.data() + offset,
                   .transposed = parameters.transposed(at.router),
                   .tokens = model.sequence,
                   .hidden = model.hidden,
                   .experts = model.experts,
                   .topk = model.topk,
                   .activations = router_activations(block, sequence),
                   .prob_gradients = prob_gradients_.data() + first * model.topk,
                   .balance_gradients = block.balance_gradients.data(),
                   .x_gradient = normed_gradient,
                   .weight_gradient = gradients + at.router,
                   .scratch = normed_gradient + elements});
  rms_norm_backward({.x = block.mixed.data() + offset,
                     .gain = parameters.dense(at.moe_norm),
                     .inverse_rms = block.moe_inverse_rms.data() + first,
                     .out_gradient = normed_gradient,
                     .rows = model.sequence,
                     .columns = model.hidden,
                     .x_gradient = gradient,
                     .gain_gradient = gradients + at.moe_norm});
  mixer_backward({.weights = mixer_weights(parameters.dense(0), at),
                  .transposed = mixer_weights(parameters.transposed(0), at),
                  .sequence = model.sequence,
                  .hidden = model.hidden,
                  .x = block.input.data() + offset,
                  .activations = mixer_activations(block, sequence),
                  .gradient = gradient,
                  .gradients = {gradients + at.mixer_norm, gradients + at.mixer_in, gradients + at.mixer_filter,
                                gradients + at.mixer_out},
                  .scratch = scratch(sequence)});
  if (layer > 0) {
    round_row(gradient, moe_out_gradient_.data() + offset, elements);
  } else {
    embed_backward(windows_[sequence], gradient, model.sequence, model.hidden, gradients + layout_.embedding());
  }
}

// Sequence after sequence in global order, whichever rank had them.
void Model::reduce_sequences(std::vector<float>& gradients) const {
  constexpr int64_t kElements = 1 << 12;
  const int64_t count = layout_.dense_count();
  const double flops = static_cast<double>(count) * static_cast<double>(config_.batch);
  reference::parallel_for((count + kElements - 1) / kElements, flops, [&](int64_t chunk) {
    const int64_t begin = chunk * kElements, elements = std::min(kElements, count - begin);
    float* sum = gradients.data() + begin;
    std::copy_n(sequence_gradients_.data() + begin, elements, sum);
    for (int64_t sequence = 1; sequence < config_.batch; ++sequence) {
      const float* part = sequence_gradients_.data() + sequence * count + begin;
      for (int64_t i = 0; i < elements; ++i) sum[i] += part[i];
    }
  });
}

}  // namespace uniep::train
