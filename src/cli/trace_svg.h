#pragma once

#include <string>

#include "cli/trace_file.h"

namespace uniep::cli {

// The timeline as a picture: a lane an agent, grouped by rank, stages in colours that colour-blind readers can tell
// apart, waits hatched, with a legend and a time axis in milliseconds.
std::string trace_svg(const Trace& trace);

}  // namespace uniep::cli
