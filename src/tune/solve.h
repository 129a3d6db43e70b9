#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tune/closed_form.h"

// The best Schedule of one direction of a layer without measuring: the closed form over all combinations of the values
// below, the GEMMs', the dispatch's and the combine's fields worked out once each.
namespace uniep::tune {

struct SolveRequest {
  LayerShape shape;
  Numerics numerics;
  Direction direction = Direction::kForward;
  int ranks = 1;
  std::vector<RankLoad> loads;  // of all ranks, or one that stands for all
  const sim::MachineDescription* machine = nullptr;
  State state = State::kSustained;
  PartialSchedule fixed;  // what every Schedule has
  int best = 8;           // so many of the best: first the best of each way to run that is near the best of all
};

struct Ranked {
  Schedule schedule;
  double us = 0;
};

// What a field's choice is worth: the best other value of it, all else equal.
struct FieldGain {
  std::string field, value, other;
  double us = 0;  // that `other` takes more; negative where only the whole of another Schedule is better
};

struct Solution {
  uint64_t points = 0;       // Schedules that were evaluated, each legal, buildable and canonical()
  double solve_ms = 0;       // that this thread ran
  std::vector<Ranked> best;  // ascending
  Estimate estimate;         // of best.front()
  double default_us = 0;     // of the Schedule that fill() makes
  Schedule default_schedule;
  Bound bound;                   // each the greatest of all ranks
  std::vector<FieldGain> gains;  // the largest first
};

Problem problem_of(const SolveRequest& request, const RankLoad& load);

// The load whose rank takes longest under a Schedule.
const RankLoad& busiest(const SolveRequest& request, const Schedule& schedule);

// Throws Error(kInvalidArgument) where nothing that has the fixed values is legal or has a kernel.
Solution solve(const SolveRequest& request);

// All Schedules that solve() evaluates, in its order; false ends it.
void for_each_point(const SolveRequest& request, const std::function<bool(const Schedule&)>& visit);

// Which values the fields take there, "field: value, value", a line each.
std::vector<std::string> solved_values(const SolveRequest& request);

}  // namespace uniep::tune
