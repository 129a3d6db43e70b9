#include "cli/tune_candidates.h"

#include <algorithm>

#include "cli/solve_request.h"
#include "program/buildable.h"
#include "program/schedule_fields.h"
#include "tune/neighbours.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

std::vector<Schedule> solved(const LayerOptions& layer, Direction direction, const Machine& machine,
                             const sim::MachineDescription& description, int count) {
  const Placement placement = is_uniform(layer) ? Placement() : place_ids(layer, make_ids(layer));
  tune::SolveRequest request = solve_request({layer, direction}, description, placement);
  request.best = count;
  std::vector<Schedule> best;
  tune::Solution solution;
  try {
    solution = tune::solve(request);
  } catch (const Error&) {
    return best;  // what was given leaves nothing that the solver knows
  }
  for (const tune::Ranked& ranked : solution.best) {
    // This GPU may have fewer SMs than the description's.
    if (!validate(ranked.schedule,
                  {.direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine})
             .empty())
      continue;
    best.push_back(ranked.schedule);
  }
  return best;
}

// The default with weight gradients beside its dgrads, of which neither the solver nor the neighbours know; empty where
// something given forbids them.
std::vector<Schedule> with_mixed_wgrads(const LayerOptions& layer, const Machine& machine) {
  const ScheduleRequest request = {
      .direction = Direction::kBackward, .shape = layer.shape, .numerics = layer.numerics, .machine = machine};
  PartialSchedule fields = layer.given(Direction::kBackward);
  fields.set(name_of(kBackwardWgrad), "mixed");
  const Schedule schedule = fill(fields, request);
  if (!validate(schedule, request).empty() || !buildable(schedule, request).empty()) return {};
  return {schedule};
}

}  // namespace

std::vector<Schedule> tune_candidates(const LayerOptions& layer, Direction direction, const Machine& machine,
                                      const sim::MachineDescription& description, int others) {
  std::vector<Schedule> all = {layer.resolved(direction, machine)};
  const std::size_t most = 1 + static_cast<std::size_t>(others);
  const auto add = [&](const std::vector<Schedule>& schedules, std::size_t limit) {
    for (const Schedule& schedule : schedules) {
      if (all.size() < limit && std::find(all.begin(), all.end(), schedule) == all.end()) all.push_back(schedule);
    }
  };
  const bool known = machine.engine == EngineKind::kCuda && layer.numerics.combine_groups == 0 &&
                     layer.ranks <= description.most_ranks();
  if (direction == Direction::kBackward && machine.engine == EngineKind::kCuda &&
      !layer.given(direction).given(name_of(kBackwardWgrad))) {
    add(with_mixed_wgrads(layer, machine), most);
  }
  if (known) add(solved(layer, direction, machine, description, others), 1 + static_cast<std::size_t>(others + 1) / 2);
  add(tune::neighbours(all.front(), layer.given(direction),
                       {.direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine},
                       most + all.size()),
      most);
  return all;
}

}  // namespace uniep::cli
