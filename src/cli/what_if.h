#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/layer_options.h"
#include "sim/simulate.h"

// The layer elsewhere: predicted times of the default, of a Schedule that was found, and of the solver's best.
namespace uniep::cli {

struct WhatIf {
  std::string what;                                       // "EP 16", "zipf:1"
  std::string machine;                                    // a description's name
  std::optional<double> default_ms, found_ms, solved_ms;  // none: not legal there, or not known
  std::optional<double> bound_ms;                         // what no Schedule can beat
  std::string limits;                                     // what the bound is
  std::string predicted_by;                               // "simulator", "closed form"
  std::string refused;                                    // why there is nothing
};

// Of one layer, `found` being a Schedule's changed fields, "key=value,...", and `description` of the machine. Above
// eight ranks forward is predicted by closed form, and backward with one rank for all.
WhatIf what_if(const LayerOptions& layer, Direction direction, const std::string& found,
               const sim::MachineDescription& description, const std::string& what);

// The tables of a report. The first two and the third take uniform routing, and the largest T of any rank.
std::vector<WhatIf> what_if_machines(const LayerOptions& layer, Direction direction, const std::string& found,
                                     const sim::MachineDescription& own);
std::vector<WhatIf> what_if_ranks(const LayerOptions& layer, Direction direction, const std::string& found,
                                  const sim::MachineDescription& own);
std::vector<WhatIf> what_if_tokens(const LayerOptions& layer, Direction direction, const std::string& found,
                                   const sim::MachineDescription& own);
std::vector<WhatIf> what_if_skew(const LayerOptions& layer, Direction direction, const std::string& found,
                                 const sim::MachineDescription& own);

}  // namespace uniep::cli
