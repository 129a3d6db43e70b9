#include "tune/online_candidates.h"

#include <algorithm>
#include <utility>

#include "program/buildable.h"
#include "program/canonical.h"
#include "program/checker.h"
#include "program/recompute.h"
#include "tune/neighbours.h"
#include "tune/small_placement.h"
#include "tune/solve.h"
#include "uniep/error.h"

namespace uniep::tune {
namespace {

constexpr std::size_t kNeighbours = 64;
constexpr int kSolved = 8;
constexpr double kPredicted = 1.05;  // of the incumbent's time
constexpr int64_t kCheckedTokens = 24;

// Given fields, and those that are not the tuner's to change: what forward saves, and what the job keeps for itself.
PartialSchedule fixed_fields(const TunerLayer& layer, Direction direction, const Schedule& incumbent) {
  PartialSchedule fixed = direction == Direction::kForward ? layer.fixed_forward : layer.fixed_backward;
  for (const auto& [name, value] : PartialSchedule::from(incumbent).values()) {
    if (name == "save.xg" || name == "save.z" || name == "comm.reserve_sms" || name == "comm.lend_sms")
      fixed.set(name, value);
  }
  return fixed;
}

ScheduleRequest schedule_request(const TunerLayer& layer, Direction direction, const Machine& machine) {
  return {.direction = direction, .shape = layer.config.shape, .numerics = layer.config.numerics, .machine = machine};
}

// The solver's and the closed form's view of a layer; of what they do not know they say nothing.
class Model {
 public:
  Model(const TunerLayer& layer, Direction direction, const Machine& machine,
        const sim::MachineDescription& description) {
    if (machine.engine != EngineKind::kCuda || machine.ranks > std::min(description.most_ranks(), kMaxBuiltRanks)) {
      return;
    }
    request_.shape = layer.config.shape;
    request_.numerics = layer.config.numerics;
    request_.direction = direction;
    request_.ranks = machine.ranks;
    request_.machine = &description;
    request_.loads = {uniform_load(request_.shape, machine.ranks,
                                   static_cast<double>(std::max<int64_t>(layer.tokens, 1)), description,
                                   request_.numerics.combine_groups)};
    request_.best = kSolved;
    problem_ =
        make_problem({layer.config, machine.ranks, direction, request_.state}, request_.loads.front(), description);
  }

  bool knows() const { return request_.machine != nullptr; }

  std::vector<Schedule> solved(PartialSchedule fixed, const Machine& machine) {
    request_.fixed = with_only_buildable(std::move(fixed), machine);
    std::vector<Schedule> all;
    try {
      for (const Ranked& ranked : solve(request_).best) all.push_back(ranked.schedule);
    } catch (const Error&) {
      // The fixed fields leave nothing that the closed form knows.
    }
    return all;
  }

  bool is_near(const Schedule& schedule, const Schedule& incumbent) const {
    return !knows() || estimate(problem_, schedule).us <= kPredicted * estimate(problem_, incumbent).us;
  }

 private:
  SolveRequest request_;
  Problem problem_;
};

}  // namespace

bool is_runnable(const Schedule& schedule, const ScheduleRequest& request) {
  return validate(schedule, request).empty() && buildable(schedule, request).empty();
}

std::vector<Schedule> online_candidates(const TunerLayer& layer, Direction direction, const Machine& machine,
                                        const Schedule& incumbent, const sim::MachineDescription& description) {
  const ScheduleRequest request = schedule_request(layer, direction, machine);
  Model model(layer, direction, machine, description);
  const PartialSchedule fixed = fixed_fields(layer, direction, incumbent);
  std::vector<Schedule> all;
  if (model.knows()) all = model.solved(fixed, machine);
  for (const Schedule& schedule : neighbours(incumbent, fixed, request, kNeighbours)) {
    all.push_back(schedule);
  }
  const auto name_of_run = [&](const Schedule& schedule) { return canonical(schedule, request); };
  std::vector<Schedule> kept, names = {name_of_run(incumbent)};
  for (const Schedule& schedule : all) {
    if (!is_runnable(schedule, request) || !model.is_near(schedule, incumbent)) continue;
    const Schedule name = name_of_run(schedule);
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    names.push_back(name);
    kept.push_back(schedule);
  }
  return kept;
}

bool is_proven(const TunerLayer& layer, Direction direction, const Machine& machine, const Schedule& schedule) {
  if (!is_runnable(schedule, schedule_request(layer, direction, machine))) return false;
  ProgramRequest request;
  request.shape = layer.config.shape;
  request.numerics = layer.config.numerics;
  request.schedule = schedule;
  request.direction = direction;
  request.redispatch = direction == Direction::kBackward && dispatches_x_again(schedule, true);
  request.workers = machine.workers;
  if (machine.engine == EngineKind::kCuda) {
    const GemmStage stage = direction == Direction::kForward ? GemmStage::kFc1 : GemmStage::kDgradFc2;
    request.cluster = schedule.tile_of(stage).cluster;
    request.pull_parts = pull_parts(request.shape);
  }
  return check_program(Program(request, small_placement(request.shape, machine.ranks, kCheckedTokens))).ok;
}

}  // namespace uniep::tune
