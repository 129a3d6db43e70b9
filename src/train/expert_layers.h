#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "train/candidate_check.h"
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
    const BFloat16* b1;  // [E, 2 I]; this and b2: null without biases
    const BFloat16* b2;  // [E, H]
  };
  struct Gradients {
    float* dw1;
    float* dw2;
    float* db1;  // as the biases
    float* db2;
  };

  struct ForwardArrays {
    const BFloat16* x;   // [T, H]
    const int32_t* ids;  // [T, K]
    const float* probs;
    BFloat16* y;  // [T, H]
  };
  struct BackwardArrays {
    const BFloat16* dy;  // [T, H]
    const BFloat16* x;
    BFloat16* dx;
    float* dprobs;  // [T, K]
  };

  // y from x, with ids and probs. What backward needs is kept until the layer's next forward.
  void forward(int64_t layer, const ForwardArrays& arrays, const Weights& weights);
  // dx and dprobs from dy; weight gradients in fp32, shaped as the weights.
  void backward(int64_t layer, const BackwardArrays& arrays, const Weights& weights, const Gradients& gradients);

  // Around each step of the training, before the weights change: what a verifier found, in words; nothing without one.
  void begin_step();
  std::vector<std::string> end_step();
  int64_t checks() const;  // of layers, so far

  const Group& group() const { return group_; }
  // What runs now; without tuning what was asked for, all the time.
  const Schedule& schedule() const { return tuner_ ? tuner_->incumbent(0, Direction::kForward) : forward_schedule_; }
  const Schedule& schedule_backward() const {
    return tuner_ ? tuner_->incumbent(0, Direction::kBackward) : backward_schedule_;
  }
  double layer_milliseconds() const { return layer_milliseconds_; }  // of all calls since begin_step()
  const Tuner* tuner() const { return tuner_.get(); }                // null: nothing is tuned

 private:
  int64_t first_token(int rank) const;
  int64_t rank_weight_elements() const {  // of w2
    return layer_.shape.experts / group_.ranks() * layer_.shape.hidden * layer_.shape.intermediate;
  }
  int64_t rank_w1_elements() const { return (is_gated(layer_.numerics.activation) ? 2 : 1) * rank_weight_elements(); }
  int64_t rank_b1_elements() const { return rank_w1_elements() / layer_.shape.hidden; }
  int64_t rank_b2_elements() const { return rank_weight_elements() / layer_.shape.intermediate; }
  uniep::Weights rank_weights(int rank, const Weights& weights, RankMemory& memory) const;
  std::vector<RankMemory> rank_memory() const;
  void finish(std::vector<RankMemory>& memory);
  void start_tuner(const ParallelConfig& parallel);
  void start_verifier(int64_t every);
  // Runs call(schedule) and takes its time. What a candidate fails at runs again under the incumbent.
  template <typename Call>
  void timed(Direction direction, const Placement& placement, const Call& call);
  bool is_verified(int64_t layer, Direction direction) const;
  std::vector<Routing> routings(const int32_t* ids, const float* probs, std::vector<RankMemory>& memory) const;

  int64_t batch_;
  int64_t sequence_;
  LayerConfig layer_;
  Group group_;
  const DeviceArrays* device_arrays_;  // null on the cpu engine alone
  Schedule forward_schedule_;
  Schedule backward_schedule_;
  std::vector<Saved> saved_;  // of each layer
  std::unique_ptr<CandidateCheck> check_;
  std::unique_ptr<Tuner> tuner_;
  double layer_milliseconds_ = 0;

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
