#include "cli/solve_request.h"

#include <algorithm>

namespace uniep::cli {

bool is_uniform(const LayerOptions& layer) {
  const std::vector<int64_t> tokens = layer.tokens();
  return layer.routing == "uniform" &&
         std::all_of(tokens.begin(), tokens.end(), [&](int64_t count) { return count == tokens.front(); });
}

tune::SolveRequest solve_request(const LayerOptions& layer, const sim::MachineDescription& machine, tune::State state,
                                 const Placement& placement) {
  tune::SolveRequest request;
  request.shape = layer.shape;
  request.numerics = layer.numerics;
  request.ranks = layer.ranks;
  request.machine = &machine;
  request.state = state;
  request.fixed = layer.given(Direction::kForward);
  if (is_uniform(layer)) {
    request.loads = {
        tune::uniform_load(layer.shape, layer.ranks, static_cast<double>(layer.tokens().front()), machine)};
    return request;
  }
  for (int rank = 0; rank < layer.ranks; ++rank) {
    request.loads.push_back(tune::load_of(*placement.state(), rank, machine));
  }
  return request;
}

}  // namespace uniep::cli
