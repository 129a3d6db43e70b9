#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/html_page.h"
#include "cli/layer_options.h"
#include "cli/trace_file.h"
#include "sim/machine.h"
#include "sim/simulate.h"

// What the pages of `uniep tune --report` and `uniep simulate --report` have in common.
namespace uniep::cli {

std::string ms_text(double milliseconds);

// A call as a timeline, and its picture with so many workers of each rank as a reader can tell apart.
Trace recorded(const std::string& title, const TracedCall& call);
std::string timeline_picture(const std::string& title, const TracedCall& call, int ranks);

// The layer, with further rows of (name, value) behind its own.
void add_layer_table(HtmlPage& page, const LayerOptions& layer,
                     const std::vector<std::pair<std::string, std::string>>& further);

// What no order of tiles beats.
void add_limits(HtmlPage& page, const sim::MachineDescription& description, const sim::Limits& limits);

// The layer elsewhere, predicted. `found` is a Schedule's changed fields, "key=value,..."; `column` heads its times.
struct WhatIfRequest {
  const LayerOptions& layer;
  Direction direction;
  std::string found;
  const sim::MachineDescription& description;
};
void add_what_ifs(HtmlPage& page, const WhatIfRequest& request, const std::string& column);

}  // namespace uniep::cli
