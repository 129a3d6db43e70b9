#include "cli/simulated_layer.h"

namespace uniep::cli {

SimulatedLayer::SimulatedLayer(const tune::SolveRequest& request, const Placement& placement, bool one_rank)
    : request_(request), placement_(placement), one_rank_(one_rank) {
  near_ghz_ = simulated(resolve(request.fixed, {.direction = request.direction,
                                                .shape = request.shape,
                                                .numerics = request.numerics,
                                                .machine = sim::schedule_machine(*request.machine, request.ranks)}))
                  .clock_ghz;
}

double SimulatedLayer::milliseconds(const Schedule& schedule) const {
  return simulated(schedule).ms;
}

sim::Simulated SimulatedLayer::simulated(const Schedule& schedule) const {
  const sim::MachineDescription& machine = *request_.machine;
  const Program program(
      sim::simulated_request(request_.shape, request_.numerics, schedule, request_.direction, machine),
      placement_.state());
  sim::SimulateOptions how;
  how.state = request_.state;
  how.near_ghz = near_ghz_;
  how.one_rank = one_rank_;
  return sim::simulate(program, machine, how);
}

}  // namespace uniep::cli
