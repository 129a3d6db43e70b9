#pragma once

#include <string>

#include "cli/layer_options.h"
#include "cli/trace_file.h"
#include "sim/machine.h"
#include "sim/simulate.h"

namespace uniep::cli {

// What `uniep simulate` has found.
struct SimulatedCall {
  const LayerOptions& layer;
  Direction direction;
  const sim::MachineDescription& description;
  const Schedule& schedule;
  const sim::Simulated& result;
  TracedCall timeline;
  // The built-in default with the layer's own way to save, and its time.
  Schedule default_schedule;
  double default_ms = 0;
};

// All of it as one HTML page with nothing outside of it, and what the layer would take elsewhere.
std::string simulate_report(const SimulatedCall& call);

}  // namespace uniep::cli
