#pragma once

#include <string>
#include <vector>

#include "cli/layer_options.h"
#include "cli/trace_file.h"
#include "sim/machine.h"
#include "tune/search.h"
#include "tune/tuned.h"

namespace uniep::cli {

// What `uniep tune` has found for one direction.
struct TunedDirection {
  tune::TunedSchedule entry;
  tune::SearchResult search;
  bool knows = true;                     // whether the entry says more than none
  TracedCall default_call, chosen_call;  // recorded for a report
};

// All that is known of it as one HTML page with nothing outside of it. `measured_on` says what was measured,
// `description` is what is simulated.
std::string tune_report(const LayerOptions& layer, const sim::MachineDescription& description,
                        const std::string& measured_on, const std::vector<TunedDirection>& directions);

}  // namespace uniep::cli
