#pragma once

#include <optional>
#include <vector>

#include "cli/layer_runner.h"
#include "cli/trace_file.h"

// Timed calls of a layer, and the same ones without any overlap.
namespace uniep::cli {

// What is called: forward, and backward if it has a Schedule.
struct LayerSchedules {
  Schedule forward;
  std::optional<Schedule> backward;
};

struct CallTimes {
  std::vector<double> forward_ms, backward_ms;
};

// One call of each direction, or a warm-up and `repeat` calls. With `traced` the last call of each direction is
// recorded there.
CallTimes time_calls(LayerRunner& runner, const LayerSchedules& schedules, int repeat,
                     std::vector<TracedCall>* traced = nullptr);

// Every stage a launch of its own, all else as "auto" fills it, but saved state as in `schedules`.
LayerSchedules sequential_schedules(const LayerSchedules& schedules, const LayerConfig& config, const Machine& machine);

}  // namespace uniep::cli
