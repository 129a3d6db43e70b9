#pragma once

#include "cli/layer_options.h"
#include "tune/solve.h"

namespace uniep::cli {

// Whether all ranks have as many tokens, and routing is uniform, so that one rank stands for all.
bool is_uniform(const LayerOptions& layer);
// And whether that may be any rank: with a few rows an expert one rank has more of them than another.
bool one_rank_stands_for_all(const LayerOptions& layer);

struct SolvedCall {
  const LayerOptions& layer;
  Direction direction = Direction::kForward;
  tune::State state = tune::State::kSustained;
};

// What the solver is asked for a layer on a machine, which has to outlive it. With uneven routing the loads are those
// of `placement`, which is then needed.
tune::SolveRequest solve_request(const SolvedCall& call, const sim::MachineDescription& machine,
                                 const Placement& placement);

}  // namespace uniep::cli
