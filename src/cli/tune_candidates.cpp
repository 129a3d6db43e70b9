#include "cli/tune_candidates.h"

#include <algorithm>
#include <utility>

#include "cli/simulated_layer.h"
#include "cli/solve_request.h"
#include "program/buildable.h"
#include "program/canonical.h"
#include "program/schedule_fields.h"
#include "tune/neighbours.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

// The closed form's best that discrete events put in order: under two seconds where one rank stands for all.
constexpr int kSimulatedEven = 64, kSimulatedUneven = 8;

// In the order of their times as simulated.
void order_by_simulation(const LayerOptions& layer, const tune::SolveRequest& request, const Placement& placement,
                         std::vector<Schedule>& best) {
  const std::vector<int64_t> tokens = layer.tokens();
  if (best.empty() || *std::max_element(tokens.begin(), tokens.end()) > kSimulatedTokens) return;
  const bool uniform = is_uniform(layer);
  const SimulatedLayer simulated(request, uniform ? place_ids(layer, make_ids(layer)) : placement,
                                 one_rank_stands_for_all(layer));
  const auto count = std::min<std::size_t>(best.size(), uniform ? kSimulatedEven : kSimulatedUneven);
  std::vector<std::pair<double, std::size_t>> times;
  for (std::size_t i = 0; i < count; ++i) times.emplace_back(simulated.milliseconds(best[i]), i);
  std::sort(times.begin(), times.end());
  std::vector<Schedule> ordered;
  for (const auto& [milliseconds, i] : times) ordered.push_back(best[i]);
  std::copy(ordered.begin(), ordered.end(), best.begin());
}

std::vector<Schedule> solved(const LayerOptions& layer, Direction direction, const Machine& machine,
                             const sim::MachineDescription& description, int count) {
  const Placement placement = is_uniform(layer) ? Placement() : place_ids(layer, make_ids(layer));
  tune::SolveRequest request = solve_request({layer, direction}, description, placement);
  request.best = std::max(count, kSimulatedEven);
  request.fixed = with_only_buildable(std::move(request.fixed), machine);
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
  order_by_simulation(layer, request, placement, best);
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
  const ScheduleRequest request = {
      .direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine};
  std::vector<Schedule> all = {layer.resolved(direction, machine)}, names = {canonical(all.front(), request)};
  const std::size_t most = 1 + static_cast<std::size_t>(others);
  const auto add = [&](const std::vector<Schedule>& schedules, std::size_t limit) {
    for (const Schedule& schedule : schedules) {
      if (all.size() >= limit) return;
      const Schedule name = canonical(schedule, request);
      if (!buildable(schedule, request).empty()) continue;
      if (std::find(names.begin(), names.end(), name) != names.end()) continue;
      names.push_back(name);
      all.push_back(schedule);
    }
  };
  const bool known = machine.engine == EngineKind::kCuda && layer.ranks <= description.most_ranks();
  if (direction == Direction::kBackward && machine.engine == EngineKind::kCuda &&
      !layer.given(direction).given(name_of(kBackwardWgrad))) {
    add(with_mixed_wgrads(layer, machine), most);
  }
  if (known) add(solved(layer, direction, machine, description, others), 1 + static_cast<std::size_t>(others + 1) / 2);
  constexpr std::size_t kAlike = 4;  // more than so many of a neighbour run as it does
  add(tune::neighbours(all.front(), layer.given(direction), request, kAlike * most), most);
  return all;
}

}  // namespace uniep::cli
