#pragma once

#include <optional>
#include <string>

#include "cli/layer_options.h"
#include "sim/machine.h"

namespace uniep::cli {

struct SolverChoice {
  Schedule schedule;
  double ratio = 1;  // its predicted time over the built-in default's
};

// What the solver finds for a direction of a layer, where the simulator says that it beats the built-in default by more
// than what nine of ten of the simulator's errors stay below; none else. A pure function of sizes, the largest T of any
// rank, the given fields and the machine: the routing is taken to be uniform. Nothing is timed. `unasked`, where not
// null, says why the solver was not asked, or stays empty.
std::optional<SolverChoice> solver_choice(const LayerOptions& layer, Direction direction, const Machine& machine,
                                          const sim::MachineDescription& description, std::string* unasked = nullptr);

}  // namespace uniep::cli
