#include "cli/sequential_run.h"

#include <algorithm>

namespace uniep::cli {
namespace {

// Only the last call records its events.
template <typename Call>
std::vector<double> timed(const LayerRunner& runner, int repeat, std::vector<TileEvent>* events, Call&& call) {
  if (repeat > 0) call(nullptr);
  std::vector<double> milliseconds;
  for (int left = std::max(repeat, 1); left > 0; --left) {
    call(left == 1 ? events : nullptr);
    milliseconds.push_back(runner.milliseconds());
  }
  return milliseconds;
}

std::vector<TileEvent>* next_events(std::vector<TracedCall>* traced, const char* name) {
  return traced == nullptr ? nullptr : &traced->emplace_back(TracedCall{name, {}}).events;
}

}  // namespace

CallTimes time_calls(LayerRunner& runner, const LayerSchedules& schedules, int repeat,
                     std::vector<TracedCall>* traced) {
  CallTimes times;
  times.forward_ms = timed(runner, repeat, next_events(traced, "forward"),
                           [&](std::vector<TileEvent>* events) { runner.forward(schedules.forward, events); });
  if (!schedules.backward) return times;
  times.backward_ms = timed(runner, repeat, next_events(traced, "backward"),
                            [&](std::vector<TileEvent>* events) { runner.backward(*schedules.backward, events); });
  return times;
}

LayerSchedules sequential_schedules(const LayerSchedules& schedules, const LayerConfig& config,
                                    const Machine& machine) {
  PartialSchedule fields = PartialSchedule::parse("fusion=none");
  for (const auto& [name, value] : PartialSchedule::from(schedules.forward).values()) {
    if (name == "save.xg" || name == "save.z") fields.set(name, value);
  }
  const auto filled = [&](Direction direction) {
    return resolve(fields,
                   {.direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = machine});
  };
  LayerSchedules sequential{filled(Direction::kForward), {}};
  if (schedules.backward) sequential.backward = filled(Direction::kBackward);
  return sequential;
}

}  // namespace uniep::cli
