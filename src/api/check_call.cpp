#include "api/check_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/engine.h"
#include "model/place.h"
#include "model/refuse.h"

namespace uniep::api {

void check_schedule(const Group& group, const LayerConfig& config, const Schedule& schedule, Direction direction,
                    Operation operation) {
  internal::LegalSchedules& legal = group.implementation().legal_schedules();
  const internal::LegalSchedules::Question question{schedule, config.shape, config.numerics, direction, operation};
  if (legal.has(question)) return;
  const std::vector<std::string> violations = validate(schedule, {.direction = direction,
                                                                  .shape = config.shape,
                                                                  .numerics = config.numerics,
                                                                  .machine = group.machine(),
                                                                  .operation = operation});
  if (!violations.empty()) refuse(fmt::format("schedule: {}", fmt::join(violations, "; ")));
  legal.add(question);
}

void check_call(const Group& group, const GivenCall& call, std::size_t arguments) {
  const auto& [config, schedule, direction, placement, operation] = call;
  check_shape(config.shape, group.ranks());
  if (placement.empty()) refuse("placement: empty; call place() first");
  const internal::PlacementState& placed = *placement.state();
  if (group.engine() == EngineKind::kCpu && placed.engine_tables != nullptr) {
    refuse("placement: made by a group of the cuda engine; the group's engine is cpu");
  }
  if (placed.ranks != group.ranks()) {
    refuse(fmt::format("placement: made for {} ranks; the group has {}", placed.ranks, group.ranks()));
  }
  if (placed.placed_by.first != group.first_local_rank() || placed.placed_by.count != group.local_ranks()) {
    refuse(fmt::format("placement: made where the first local rank is {} of {}; the group's is {} of {}",
                       placed.placed_by.first, placed.placed_by.count, group.first_local_rank(), group.local_ranks()));
  }
  if (placed.shape.experts != config.shape.experts || placed.shape.topk != config.shape.topk ||
      placed.shape.hidden != config.shape.hidden || placed.shape.intermediate != config.shape.intermediate) {
    refuse("placement: made for another shape than the layer's");
  }
  if (arguments != static_cast<std::size_t>(group.local_ranks())) {
    refuse(fmt::format("arguments: {} given; one for each of the {} local ranks is needed", arguments,
                       group.local_ranks()));
  }
  check_schedule(group, config, schedule, direction, operation);
}

void check_array(const void* array, const char* name, int rank, bool needed) {
  if (array == nullptr && needed) refuse(fmt::format("{}: null on rank {}", name, rank));
}

}  // namespace uniep::api
