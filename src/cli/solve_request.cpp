#include "cli/solve_request.h"

#include <algorithm>

namespace uniep::cli {

bool is_uniform(const LayerOptions& layer) {
  const std::vector<int64_t> tokens = layer.tokens();
  return layer.routing == "uniform" &&
         std::all_of(tokens.begin(), tokens.end(), [&](int64_t count) { return count == tokens.front(); });
}

bool one_rank_stands_for_all(const LayerOptions& layer) {
  constexpr int64_t kFewRows = 16;
  if (!is_uniform(layer)) return false;
  return layer.tokens().front() * layer.ranks * layer.shape.topk >= kFewRows * layer.shape.experts;
}

tune::SolveRequest solve_request(const SolvedCall& call, const sim::MachineDescription& machine,
                                 const Placement& placement) {
  const LayerOptions& layer = call.layer;
  tune::SolveRequest request;
  request.shape = layer.shape;
  request.numerics = layer.numerics;
  request.ranks = layer.ranks;
  request.machine = &machine;
  request.direction = call.direction;
  request.state = call.state;
  request.fixed = layer.given(call.direction);
  if (is_uniform(layer)) {
    request.loads = {tune::uniform_load(layer.shape, layer.ranks, static_cast<double>(layer.tokens().front()), machine,
                                        layer.numerics.combine_groups)};
    return request;
  }
  for (int rank = 0; rank < layer.ranks; ++rank) {
    request.loads.push_back(tune::load_of(*placement.state(), rank, machine, layer.numerics.combine_groups));
  }
  return request;
}

}  // namespace uniep::cli
