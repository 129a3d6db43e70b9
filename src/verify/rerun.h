#pragma once

#include <span>
#include <string>
#include <vector>

#include "verify/inputs.h"
#include "verify/rank_memory.h"
#include "verify/sums.h"

// The same call again: under another Schedule, with one expert of each rank moved to another rank.
namespace uniep::verify {

// Of each rank the local expert `moved` is computed `shift` ranks further on. Shift 0 moves none.
struct Moved {
  int64_t expert = 0;
  int shift = 0;
};

// One expert's gradients of each rank, as main_grad held them before the call.
struct GradientStart {
  int64_t expert = -1;  // local; -1: there are none
  std::vector<RankArray> dw1, dw2;
};

// What a call left behind, where no expert was moved: of the arguments as they were given.
Sums observe_forward(const Group& group, const Inputs& inputs, std::span<const ForwardArguments> arguments,
                     const Saved& saved);
Sums observe_backward(const Group& group, const Inputs& inputs, std::span<const BackwardArguments> arguments,
                      int64_t gradient_expert);
GradientStart keep_gradients(const Group& group, const LayerConfig& config,
                             std::span<const BackwardArguments> arguments, int64_t expert);

// Runs the call of `inputs` again. `schedule`: fields of both directions. Weight gradients are made of the moved
// experts alone, and only where there is a `start` (which counts with WeightGradient::kMainGrad). Throws Error, of
// which kUnsupported says that the Schedule has no kernel.
Sums run_again(Group& group, const Inputs& inputs, const std::string& schedule, Moved moved,
               const GradientStart* start);

// Texts of Schedules, the given one's own way of running left out.
std::vector<std::string> other_schedules(const Group& group, const LayerConfig& config, const Schedule& given,
                                         Direction direction);

}  // namespace uniep::verify
