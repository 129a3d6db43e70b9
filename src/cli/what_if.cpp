#include "cli/what_if.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/simulated_layer.h"
#include "cli/solve_request.h"
#include "program/buildable.h"
#include "tune/solve.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

constexpr int kSimulatedSchedules = 4;  // of the solver's best
constexpr int kEngineRanks = 8;         // of tables that vary something else
constexpr int kRanks[] = {4, 8, 16, 32, 64};
constexpr int64_t kTokens[] = {1024, 2048, 4096, 8192, 16384};
constexpr const char* kSkews[] = {"uniform", "zipf:0.5", "zipf:1", "zipf:1.5"};
// Those whose links reach more ranks than a node's.
constexpr const char* kWideMachines[] = {"h100_ib8", "gb200_nvl72"};

LayerOptions uniform(const LayerOptions& layer) {
  LayerOptions made = layer;
  const std::vector<int64_t> tokens = layer.tokens();
  made.routing = "uniform";
  made.tokens_given = {std::max<int64_t>(1, *std::max_element(tokens.begin(), tokens.end()))};
  made.engine = EngineKind::kAuto;
  made.workers = 0;
  return made;
}

void set_bound(WhatIf& row, double bound_us, const std::string& limits) {
  row.bound_ms = bound_us * 1e-3;
  row.limits = limits;
}

class Prediction {
 public:
  Prediction(const LayerOptions& layer, Direction direction, const sim::MachineDescription& description)
      : layer_(layer),
        direction_(direction),
        description_(description),
        machine_(sim::schedule_machine(description, layer.ranks)) {}

  WhatIf run(const std::string& found, WhatIf row) {
    const Schedule base = layer_.resolved(direction_, machine_);
    const std::optional<Schedule> other = changed(found);
    const bool simulated = layer_.ranks <= kSimulatedRanks;
    if (simulated) placement_ = place_ids(layer_, make_ids(layer_));
    row.predicted_by = simulated ? "simulator" : "closed form";
    tune::SolveRequest request = solve_request({layer_, direction_}, description_, placement_);
    request.best = kSimulatedSchedules;
    if (!simulated) {
      closed_form(row, request, other);
      return row;
    }
    row.default_ms = simulate(base, &row);
    if (other) row.found_ms = simulate(*other);
    const tune::Solution solution = tune::solve(request);
    row.solved_ms = row.default_ms;
    for (const tune::Ranked& one : solution.best) row.solved_ms = std::min(*row.solved_ms, simulate(one.schedule));
    set_bound(row, solution.bound.us(), solution.bound.limits());
    return row;
  }

 private:
  // What was found somewhere else, as far as it is legal and has a kernel here.
  std::optional<Schedule> changed(const std::string& found) const {
    try {
      PartialSchedule fields = layer_.given(direction_);
      const PartialSchedule others = PartialSchedule::parse(found.empty() ? "auto" : found);
      for (const auto& [name, value] : others.values()) fields.set(name, value);
      const Schedule schedule = resolve(
          fields, {.direction = direction_, .shape = layer_.shape, .numerics = layer_.numerics, .machine = machine_});
      Machine built = machine_;
      built.ranks = std::min(built.ranks, kMaxBuiltRanks);  // of more as it would be
      if (!buildable(schedule,
                     {.direction = direction_, .shape = layer_.shape, .numerics = layer_.numerics, .machine = built})
               .empty())
        return std::nullopt;
      return schedule;
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  void closed_form(WhatIf& row, const tune::SolveRequest& request, const std::optional<Schedule>& other) const {
    const tune::Solution solution = tune::solve(request);
    row.default_ms = solution.default_us * 1e-3;
    row.solved_ms = std::min(solution.best.front().us * 1e-3, *row.default_ms);
    if (other) {
      const tune::Problem problem = tune::make_problem({{layer_.shape, layer_.numerics}, layer_.ranks, direction_},
                                                       tune::busiest(request, *other), description_);
      row.found_ms = tune::estimate(problem, *other).us * 1e-3;
    }
    set_bound(row, solution.bound.us(), solution.bound.limits());
  }

  double simulate(const Schedule& schedule, WhatIf* bounded = nullptr) const {
    sim::SimulateOptions how;
    how.one_rank = one_rank_stands_for_all(layer_);
    const Program program(sim::simulated_request(layer_.shape, layer_.numerics, schedule, direction_, description_),
                          placement_.state());
    const sim::Simulated result = sim::simulate(program, description_, how);
    if (bounded != nullptr) set_bound(*bounded, result.limits.bound_ms() * 1e3, result.limits.name());
    return result.ms;
  }

  const LayerOptions& layer_;
  Direction direction_;
  const sim::MachineDescription& description_;
  Machine machine_;
  Placement placement_;  // none: only the closed form is asked
};

}  // namespace

WhatIf what_if(const LayerOptions& layer, Direction direction, const std::string& found,
               const sim::MachineDescription& description, const std::string& what) {
  WhatIf row;
  row.what = what;
  row.machine = description.name;
  if (layer.ranks > description.most_ranks()) {
    row.refused = fmt::format("it links at most {} ranks", description.most_ranks());
    return row;
  }
  try {
    return Prediction(layer, direction, description).run(found, row);
  } catch (const Error& error) {
    row.refused = error.what();
    return row;
  }
}

std::vector<WhatIf> what_if_machines(const LayerOptions& layer, Direction direction, const std::string& found,
                                     const sim::MachineDescription& own) {
  LayerOptions made = uniform(layer);
  made.ranks = std::min(made.ranks, kEngineRanks);
  std::vector<WhatIf> rows;
  const std::vector<std::string> shipped = sim::shipped_machine_names();
  if (std::find(shipped.begin(), shipped.end(), own.name) == shipped.end()) {
    rows.push_back(what_if(made, direction, found, own, own.title));
  }
  for (const std::string& name : shipped) {
    const sim::MachineDescription& machine = sim::shipped_machine(name);
    rows.push_back(what_if(made, direction, found, machine, machine.title));
  }
  return rows;
}

std::vector<WhatIf> what_if_ranks(const LayerOptions& layer, Direction direction, const std::string& found,
                                  const sim::MachineDescription& own) {
  LayerOptions made = uniform(layer);
  std::vector<WhatIf> rows;
  for (const int ranks : kRanks) {
    made.ranks = ranks;
    const std::string what = fmt::format("EP {}", ranks);
    bool is_there = false;
    const auto add = [&](const sim::MachineDescription& machine) {
      if (ranks <= machine.most_ranks()) rows.push_back(what_if(made, direction, found, machine, what));
      is_there |= ranks <= machine.most_ranks();
    };
    add(own);
    for (const char* name : kWideMachines) {
      if (ranks > kEngineRanks && own.name != name) add(sim::shipped_machine(name));
    }
    if (!is_there) rows.push_back(what_if(made, direction, found, own, what));
  }
  return rows;
}

std::vector<WhatIf> what_if_tokens(const LayerOptions& layer, Direction direction, const std::string& found,
                                   const sim::MachineDescription& own) {
  LayerOptions made = uniform(layer);
  made.ranks = std::min(made.ranks, kEngineRanks);
  const int64_t given = made.tokens_given.front();
  std::vector<int64_t> counts(std::begin(kTokens), std::end(kTokens));
  if (std::find(counts.begin(), counts.end(), given) == counts.end()) counts.push_back(given);
  std::sort(counts.begin(), counts.end());
  std::vector<WhatIf> rows;
  for (const int64_t tokens : counts) {
    made.tokens_given = {tokens};
    rows.push_back(what_if(made, direction, found, own, fmt::format("T {}", tokens)));
  }
  return rows;
}

std::vector<WhatIf> what_if_skew(const LayerOptions& layer, Direction direction, const std::string& found,
                                 const sim::MachineDescription& own) {
  LayerOptions made = uniform(layer);
  made.ranks = std::min(made.ranks, kEngineRanks);
  std::vector<WhatIf> rows;
  for (const char* skew : kSkews) {
    made.routing = skew;
    rows.push_back(what_if(made, direction, found, own, skew));
  }
  return rows;
}

}  // namespace uniep::cli
