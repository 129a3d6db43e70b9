#pragma once

#include <memory>
#include <vector>

#include "tests/cuda/gpu_support.h"
#include "tests/cuda/small_layer.h"
#include "uniep/verifier.h"

// Steps of a small layer on four virtual ranks of one GPU, with a verifier.
namespace uniep::cuda::test {

constexpr int kRanks = 4, kExperts = 16;
constexpr int64_t kTokens = 200;
constexpr const char* kSchedules[] = {"fusion=none", "fusion=pairs,queue=dynamic",
                                      "fusion=pairs,combine.transport=staged", "tile.cluster=1,order.raster=4"};

// Experts of four ranks, and a verifier that checks each step's forward or backward in turn.
class VerifiedJob {
 public:
  VerifiedJob(int experts, const char* schedule, uint64_t seed)
      : config_{{.hidden = 512, .intermediate = 256, .experts = experts, .topk = 3}, {}} {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = kRanks;
    options.devices = std::vector<int>(kRanks, 0);
    group_ = std::make_unique<Group>(options);
    verifier_ = std::make_unique<Verifier>(*group_, VerifierOptions{.every = 1, .budget = 1, .seed = seed});
    const PartialSchedule given = PartialSchedule::parse(schedule);
    forward_schedule_ = resolve(given, {.direction = Direction::kForward,
                                        .shape = config_.shape,
                                        .numerics = config_.numerics,
                                        .machine = group_->machine()});
    backward_schedule_ = resolve(given, {.direction = Direction::kBackward,
                                         .shape = config_.shape,
                                         .numerics = config_.numerics,
                                         .machine = group_->machine()});
    for (int rank = 0; rank < kRanks; ++rank) {
      layers_.push_back(std::make_unique<SmallLayer>(config_.shape, kRanks, rank, 0, kTokens));
    }
  }

  // One step but for its end. `after_forward` and `after_backward` run behind the calls, before the verifier sees them.
  template <typename AfterForward, typename AfterBackward>
  void step(AfterForward&& after_forward, AfterBackward&& after_backward) {
    std::vector<Routing> routings;
    std::vector<ForwardArguments> forwards;
    std::vector<BackwardArguments> backwards;
    for (const auto& layer : layers_) {
      routings.push_back(layer->routing(kTokens));
      forwards.push_back(layer->arguments());
      backwards.push_back(layer->backward_arguments());
    }
    const Placement placement = place(*group_, config_.shape, routings);
    const Saved saved = forward(*group_, config_, forward_schedule_, placement, forwards);
    group_->synchronize();
    after_forward(forwards);
    verifier_->after_forward({"layer 1", config_, forward_schedule_, routings}, forwards, saved);
    backward(*group_, config_, backward_schedule_, saved, backwards);
    group_->synchronize();
    after_backward(backwards);
    verifier_->after_backward({"layer 1", config_, backward_schedule_, routings}, backwards);
  }
  void step() {
    const auto nothing = [](const auto&) {};
    step(nothing, nothing);
  }

  Verifier& verifier() { return *verifier_; }
  const SmallLayer& layer(int rank) const { return *layers_[static_cast<std::size_t>(rank)]; }
  std::vector<Finding> end() { return verifier_->end_step(); }

 private:
  LayerConfig config_;
  std::vector<std::unique_ptr<SmallLayer>> layers_;
  std::unique_ptr<Group> group_;
  std::unique_ptr<Verifier> verifier_;
  Schedule forward_schedule_, backward_schedule_;
};

}  // namespace uniep::cuda::test
