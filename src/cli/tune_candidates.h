#pragma once

#include <vector>

#include "cli/layer_options.h"
#include "sim/machine.h"

namespace uniep::cli {

// Schedules that are worth measuring for a layer, of those that run alike one: the built-in choice first; on cuda the
// solver's best for half of the rest, in the order of their times as simulated; then what differs from the built-in
// choice in one field. Nothing but the arguments decides.
std::vector<Schedule> tune_candidates(const LayerOptions& layer, Direction direction, const Machine& machine,
                                      const sim::MachineDescription& description, int others);

}  // namespace uniep::cli
