#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "train/expert_layers.h"
#include "train/head.h"
#include "train/mixer.h"
#include "train/parameters.h"
#include "train/router.h"

namespace uniep::train {

struct BatchLoss {
  double cross_entropy = 0;  // mean over the batch's bytes, nats
  double balance = 0;        // mean over the layers, before its weight
};

// The byte-level language model: embedding, then blocks of x += mixer(x), x += moe(rms_norm(x)), then the head.
// The dense parts are computed sequence by sequence and their gradients summed over the sequences in global order, so
// no result depends on how sequences are dealt to ranks or threads.
class Model {
 public:
  Model(const TrainConfig& config, const ParameterLayout& layout);

  // `windows`: for each sequence of the batch sequence + 1 bytes.
  BatchLoss forward(const Parameters& parameters, const std::vector<const uint8_t*>& windows, ExpertLayers& experts);
  // Writes the gradient of cross_entropy + balance_weight * (sum over the layers of the balancing losses) for the batch
  // of the last forward(), laid out as the parameters.
  void backward(const Parameters& parameters, ExpertLayers& experts, std::vector<float>& gradients);

 private:
  struct Block {
    std::vector<float> input;                                               // [T, H]
    std::vector<float> normed, inverse_rms, value, gate, convolved, gated;  // of the mixer
    std::vector<float> mixed;                                               // [T, H] after the mixer
    std::vector<float> moe_normed, moe_inverse_rms;
    std::vector<float> probabilities, probs;  // of the router: [T, E], [T, K]
    std::vector<int32_t> ids;                 // [T, K]
    std::vector<BFloat16> moe_in, moe_out;    // [T, H]
    std::vector<float> balance_gradients;     // [E]
  };

  MixerActivations mixer_activations(Block& block, int64_t sequence) const;
  RouterActivations router_activations(Block& block, int64_t sequence) const;
  ExpertLayers::Weights expert_weights(const Parameters& parameters, const ParameterLayout::Block& at) const;
  MixerWeights mixer_weights(const float* base, const ParameterLayout::Block& at) const;
  float* sequence_gradients(int64_t sequence) { return sequence_gradients_.data() + sequence * layout_.dense_count(); }
  float* scratch(int64_t sequence) { return scratch_.data() + sequence * scratch_size_; }

  void block_forward(const Parameters& parameters, int64_t layer, int64_t sequence);
  void add_moe_out(const Block& block, int64_t sequence, float* out) const;
  double balance_forward(int64_t layer);
  double head_forward(const Parameters& parameters, int64_t sequence);
  void head_backward(const Parameters& parameters, int64_t sequence);
  void block_backward(const Parameters& parameters, int64_t layer, int64_t sequence);
  void reduce_sequences(std::vector<float>& gradients) const;
  template <typename Task>
  void for_each_sequence(const Task& task) const;

  const TrainConfig config_;
  const ParameterLayout& layout_;
  int64_t tokens_;
  std::vector<const uint8_t*> windows_;
  std::vector<Block> blocks_;
  std::vector<float> hidden_, head_normed_, head_inverse_rms_, head_probabilities_;
  std::vector<float> gradient_;             // [T, H] of the residual stream
  std::vector<BFloat16> moe_out_gradient_;  // [T, H]
  std::vector<BFloat16> moe_in_gradient_;   // [T, H]
  std::vector<float> prob_gradients_;       // [T, K]
  std::vector<float> sequence_gradients_;   // [batch, dense parameters]
  std::vector<float> scratch_;              // [batch, scratch_size_]
  int64_t scratch_size_ = 0;
};

}  // namespace uniep::train
