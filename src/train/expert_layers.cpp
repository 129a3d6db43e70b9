#include "train/expert_layers.h"

namespace uniep::train {
namespace {

GroupOptions group_options(const TrainConfig& config, const ParallelConfig& parallel) {
  check(config, parallel);
  GroupOptions options;
  options.engine = parallel.engine;
  options.devices = parallel.devices;
  options.ranks = parallel.ranks;
  options.workers = parallel.workers;
  return options;
}

LayerConfig layer_config(const TrainConfig& config) {
  LayerConfig layer;
  layer.shape = config.model.shape();
  layer.numerics = config.model.numerics;
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

std::vector<RankMemory> ExpertLayers::rank_memory() const {
  std::vector<RankMemory> memory;
  for (int rank = 0; rank < group_.ranks(); ++rank) memory.emplace_back(group_.device(rank));
  return memory;
}

void ExpertLayers::finish(std::vector<RankMemory>& memory) {
  group_.synchronize();
  for (RankMemory& of_rank : memory) of_rank.read_results();
}

uniep::Weights ExpertLayers::rank_weights(int rank, const Weights& weights, RankMemory& memory) const {
  const int64_t elements = rank_weight_elements();
  uniep::Weights own;
  own.w1 = memory.input(weights.w1 + rank * rank_w1_elements(), rank_w1_elements());
  own.w2 = memory.input(weights.w2 + rank * elements, elements);
  return own;
}

void ExpertLayers::forward(int64_t layer, const BFloat16* x, const int32_t* ids, const float* probs,
                           const Weights& weights, BFloat16* y) {
  const int64_t hidden = layer_.shape.hidden, topk = layer_.shape.topk;
  std::vector<RankMemory> memory = rank_memory();
  std::vector<Routing> routings(group_.ranks());
  std::vector<ForwardArguments> arguments(group_.ranks());
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t first = first_token(rank), tokens = first_token(rank + 1) - first;
    RankMemory& own = memory[rank];
    routings[rank].tokens = tokens;
    routings[rank].topk_ids = own.input(ids + first * topk, tokens * topk);
    routings[rank].probs = own.input(probs + first * topk, tokens * topk);
    arguments[rank].x = own.input(x + first * hidden, tokens * hidden);
    arguments[rank].weights = rank_weights(rank, weights, own);
    arguments[rank].y = own.result(y + first * hidden, tokens * hidden);
  }
  saved_[layer] = Saved();  // gives its memory back first
  const Placement placement = place(group_, layer_.shape, routings);
  saved_[layer] = uniep::forward(group_, layer_, forward_schedule_, placement, arguments);
  finish(memory);
}

void ExpertLayers::backward(int64_t layer, const BFloat16* dy, const BFloat16* x, const Weights& weights, BFloat16* dx,
                            float* dprobs, float* dw1, float* dw2) {
  const int64_t hidden = layer_.shape.hidden, topk = layer_.shape.topk, elements = rank_weight_elements();
  std::vector<RankMemory> memory = rank_memory();
  std::vector<BackwardArguments> arguments(group_.ranks());
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t first = first_token(rank), tokens = first_token(rank + 1) - first;
    RankMemory& own = memory[rank];
    arguments[rank].dy = own.input(dy + first * hidden, tokens * hidden);
    arguments[rank].x = own.input(x + first * hidden, tokens * hidden);
    arguments[rank].weights = rank_weights(rank, weights, own);
    arguments[rank].dx = own.result(dx + first * hidden, tokens * hidden);
    arguments[rank].dprobs = own.result(dprobs + first * topk, tokens * topk);
    arguments[rank].gradients.dw1 = own.result(dw1 + rank * rank_w1_elements(), rank_w1_elements());
    arguments[rank].gradients.dw2 = own.result(dw2 + rank * elements, elements);
  }
  uniep::backward(group_, layer_, backward_schedule_, saved_[layer], arguments);
  finish(memory);
}

}  // namespace uniep::train
