#pragma once

#include "cli/layer_options.h"
#include "sim/machine.h"
#include "sim/simulate.h"
#include "tune/solve.h"

namespace uniep::cli {

inline constexpr int64_t kSimulatedTokens = 8192;  // at most, of a rank; more take as long in proportion
inline constexpr int kSimulatedRanks = 8;          // each by itself, at most

// Times of a layer's calls on a machine by discrete events. Made once, for as many Schedules as wanted; `machine` has
// to outlive it.
class SimulatedLayer {
 public:
  // `placement`: of the layer's routing.
  SimulatedLayer(const tune::SolveRequest& request, const Placement& placement, bool one_rank);

  // Begins at the clock of the default: within 0.6 % of what simulate() says by itself, in half the time.
  double milliseconds(const Schedule& schedule) const;

 private:
  sim::Simulated simulated(const Schedule& schedule) const;

  tune::SolveRequest request_;
  Placement placement_;
  bool one_rank_;
  double near_ghz_ = 0;  // the default's clock
};

}  // namespace uniep::cli
