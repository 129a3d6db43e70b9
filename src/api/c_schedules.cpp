#include "api/c_schedules.h"

#include <algorithm>

namespace uniep {

const Schedule& ResolvedSchedules::find(const char* text, Direction direction, Operation operation,
                                        const LayerConfig& layer, const Machine& machine) {
  const auto found = std::find_if(known_.rbegin(), known_.rend(), [&](const Known& known) {
    return known.direction == direction && known.operation == operation && known.layer.shape == layer.shape &&
           known.layer.numerics == layer.numerics && known.text == text;
  });
  if (found != known_.rend()) {
    // Most layers take turns between a few texts, which may keep their places.
    constexpr std::ptrdiff_t kNear = 8;
    if (found - known_.rbegin() < kNear) return found->schedule;
    std::rotate(found.base() - 1, found.base(), known_.end());
    return known_.back().schedule;
  }
  const Schedule schedule = resolve(PartialSchedule::parse(text), {.direction = direction,
                                                                   .shape = layer.shape,
                                                                   .numerics = layer.numerics,
                                                                   .machine = machine,
                                                                   .operation = operation});
  if (known_.size() == kMax) known_.erase(known_.begin());
  known_.push_back({text, direction, operation, layer, schedule});
  return known_.back().schedule;
}

}  // namespace uniep
