#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "train/config.h"
#include "train/rank_memory.h"
#include "uniep/uniep.h"

namespace uniep::train {

// The model's MoE layers on a group of ranks. Arrays hold the global batch in order, and all experts; the sequences are
// dealt to the ranks in contiguous runs (not all of one length, some perhaps empty), the experts likewise by the
// library. They lie on the host, whatever the engine.
class ExpertLayers {
 public:
  ExpertLayers(const TrainConfig& config, const ParallelConfig& parallel);

  struct Weights {
    const BFloat16* w1;  // [E, 2 I, H]
    const BFloat16* w2;  // [E, H, I]
  };

  // y [T, H] from x [T, H], with ids and probs [T, K]. What backward needs is kept until the layer's next forward.
  void forward(int64_t layer, const BFloat16* x, const int32_t* ids, const float* probs, const Weights& weights,
               BFloat16* y);
  // dx [T, H] and dprobs [T, K] from dy [T, H]; dw1 and dw2 in fp32, shaped as the weights.
  void backward(int64_t layer, const BFloat16* dy, const BFloat16* x, const Weights& weights, BFloat16* dx,
                float* dprobs, float* dw1, float* dw2);

  // The end of a step, before the weights change: what a verifier found, in words; nothing without one.
  std::vector<std::string> end_step();
  int64_t checks() const;  // of layers, so far

  const Group& group() const { return group_; }
  const Schedule& schedule() const { return forward_schedule_; }
  const Schedule& schedule_backward() const { return backward_schedule_; }

 private:
  int64_t first_token(int rank) const;
  int64_t rank_weight_elements() const {  // of w2; w1: twice
    return layer_.shape.experts / group_.ranks() * layer_.shape.hidden * layer_.shape.intermediate;
  }
  uniep::Weights rank_weights(int rank, const Weights& weights, RankMemory& memory) const;
  std::vector<RankMemory> rank_memory() const;
  void finish(std::vector<RankMemory>& memory);
  bool is_verified(int64_t layer, Direction direction) const;
  std::vector<Routing> routings(const int32_t* ids, const float* probs, std::vector<RankMemory>& memory) const;

  int64_t batch_;
  int64_t sequence_;
  LayerConfig layer_;
  Group group_;
  Schedule forward_schedule_;
  Schedule backward_schedule_;
  std::vector<Saved> saved_;  // of each layer

  struct RoutingArrays {
    const int32_t* ids;
    const float* probs;
  };
  std::vector<RoutingArrays> routing_of_layer_;
  std::unique_ptr<Verifier> verifier_;
  // Of the call that is checked at the end of the step.
  std::vector<BFloat16> kept_x_, kept_dy_;
  std::vector<int32_t> kept_ids_;
  std::vector<float> kept_probs_;
  std::vector<RankMemory> kept_;
};

}  // namespace uniep::train
