#include "train/expert_layers.h"

namespace uniep::train {
namespace {

GroupOptions group_options(const TrainConfig& config, const ParallelConfig& parallel) {
  check(config, parallel);
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = parallel.ranks;
  options.workers = parallel.workers;
  return options;
}

LayerConfig layer_config(const TrainConfig& config) {
  LayerConfig layer;
  layer.shape = config.model.shape();
  layer.numerics.weight_gradient = WeightGradient::kFloat32;
  return layer;
}

}  // namespace

ExpertLayers::ExpertLayers(const TrainConfig& config, const ParallelConfig& parallel)
    : batch_(config.batch),
      sequence_(config.model.sequence),
      layer_(layer_config(config)),
      group_(group_options(config, parallel)),
      forward_schedule_(
          resolve(parallel.schedule, Direction::kForward, layer_.shape, layer_.numerics, group_.machine())),
      backward_schedule_(
          resolve(parallel.schedule_backward, Direction::kBackward, layer_.shape, layer_.numerics, group_.machine())),
      saved_(config.model.layers) {}

int64_t ExpertLayers::first_token(int rank) const {
  return batch_ * rank / group_.ranks() * sequence_;
}

uniep::Weights ExpertLayers::rank_weights(int rank, const Weights& weights) const {
  const int64_t first_expert = layer_.shape.experts / group_.ranks() * rank;
  const int64_t w2_elements = layer_.shape.hidden * layer_.shape.intermediate;
  uniep::Weights own;
  own.w1 = weights.w1 + first_expert * 2 * w2_elements;
  own.w2 = weights.w2 + first_expert * w2_elements;
  return own;
}

void ExpertLayers::forward(int64_t layer, const BFloat16* x, const int32_t* ids, const float* probs,
                           const Weights& weights, BFloat16* y) {
  const int64_t hidden = layer_.shape.hidden, topk = layer_.shape.topk;
  std::vector<Routing> routings(group_.ranks());
  std::vector<ForwardArguments> arguments(group_.ranks());
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t first = first_token(rank);
    routings[rank].tokens = first_token(rank + 1) - first;
    routings[rank].topk_ids = ids + first * topk;
    routings[rank].probs = probs + first * topk;
    arguments[rank].x = x + first * hidden;
    arguments[rank].weights = rank_weights(rank, weights);
    arguments[rank].y = y + first * hidden;
  }
  saved_[layer] = Saved();  // gives its memory back first
  const Placement placement = place(group_, layer_.shape, routings);
  saved_[layer] = uniep::forward(group_, layer_, forward_schedule_, placement, arguments);
}

void ExpertLayers::backward(int64_t layer, const BFloat16* dy, const BFloat16* x, const Weights& weights, BFloat16* dx,
                            float* dprobs, float* dw1, float* dw2) {
  const int64_t hidden = layer_.shape.hidden, topk = layer_.shape.topk;
  std::vector<BackwardArguments> arguments(group_.ranks());
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t first = first_token(rank);
    const int64_t first_expert = layer_.shape.experts / group_.ranks() * rank;
    const int64_t w2_elements = hidden * layer_.shape.intermediate;
    arguments[rank].dy = dy + first * hidden;
    arguments[rank].x = x + first * hidden;
    arguments[rank].weights = rank_weights(rank, weights);
    arguments[rank].dx = dx + first * hidden;
    arguments[rank].dprobs = dprobs + first * topk;
    arguments[rank].gradients.dw1 = dw1 + first_expert * 2 * w2_elements;
    arguments[rank].gradients.dw2 = dw2 + first_expert * w2_elements;
  }
  uniep::backward(group_, layer_, backward_schedule_, saved_[layer], arguments);
}

}  // namespace uniep::train
