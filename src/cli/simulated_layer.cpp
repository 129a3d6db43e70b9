#include "cli/simulated_layer.h"

#include "sim/simulate.h"

namespace uniep::cli {

SimulatedLayer::SimulatedLayer(const tune::SolveRequest& request, const Placement& placement, bool one_rank)
    : request_(request), placement_(placement), one_rank_(one_rank) {}

double SimulatedLayer::milliseconds(const Schedule& schedule) const {
  const sim::MachineDescription& machine = *request_.machine;
  const Program program(
      sim::simulated_request(request_.shape, request_.numerics, schedule, request_.direction, machine),
      placement_.state());
  sim::SimulateOptions how;
  how.state = request_.state;
  how.one_rank = one_rank_;
  return sim::simulate(program, machine, how).ms;
}

}  // namespace uniep::cli
