#pragma once

#include <memory>
#include <string>

#include "engine/cpu/engine.h"
#include "support/layer_arrays.h"
#include "uniep/verifier.h"

namespace uniep::test {

// A job of one layer on the cpu engine, with a verifier that checks each step.
class VerifiedJob {
 public:
  // `first` is where its turns begin: an even one with a forward.
  VerifiedJob(const RandomLayer& of_layer, const std::string& schedule,
              const VerifierOptions& options = {.every = 1, .budget = 1}, const Allocator& allocator = {})
      : layer(of_layer), arrays(layer) {
    GroupOptions group_options;
    group_options.engine = EngineKind::kCpu;
    group_options.ranks = layer.ranks;
    group_options.workers = 2;
    group_options.allocator = allocator;
    group = std::make_unique<Group>(group_options);
    verifier = std::make_unique<Verifier>(*group, options);
    const auto resolved = [&](Direction direction) {
      return resolve(PartialSchedule::parse(schedule), {.direction = direction,
                                                        .shape = layer.config.shape,
                                                        .numerics = layer.config.numerics,
                                                        .machine = group->machine()});
    };
    forward_schedule = resolved(Direction::kForward);
    backward_schedule = resolved(Direction::kBackward);
  }

  cpu::CpuEngine& engine() { return dynamic_cast<cpu::CpuEngine&>(group->implementation()); }

  // One step, but for its end. The fault is in the calls of that direction alone, before the verifier's own.
  void run(cpu::BitFault* fault = nullptr, Direction with_fault = Direction::kForward) {
    const Placement placement = place(*group, layer.config.shape, arrays.routings);
    const std::vector<ForwardArguments> forwards = arrays.forward_arguments();
    engine().plant(with_fault == Direction::kForward ? fault : nullptr);
    const Saved saved = forward(*group, layer.config, forward_schedule, placement, forwards);
    engine().plant(static_cast<cpu::BitFault*>(nullptr));
    verifier->after_forward({"layer 1", layer.config, forward_schedule, arrays.routings}, forwards, saved);
    const std::vector<BackwardArguments> backwards = arrays.backward_arguments(WeightGradientTime::kNow, false);
    verifier->before_backward("layer 1", layer.config, backwards);
    engine().plant(with_fault == Direction::kBackward ? fault : nullptr);
    backward(*group, layer.config, backward_schedule, saved, backwards);
    engine().plant(static_cast<cpu::BitFault*>(nullptr));
    verifier->after_backward({"layer 1", layer.config, backward_schedule, arrays.routings}, backwards);
  }

  RandomLayer layer;
  LayerArrays arrays;
  std::unique_ptr<Group> group;
  std::unique_ptr<Verifier> verifier;
  Schedule forward_schedule, backward_schedule;
};

}  // namespace uniep::test
