#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/timeline.h"

// Timelines as files, read again.
namespace uniep::cli {

using api::kWaitCategory;
using api::trace_json;
using api::TracedCall;
using api::TracedLayer;

struct TraceLane {
  std::string process;  // "rank 0"
  std::string thread;   // "worker 0 copy"
};
struct TraceSlice {
  std::size_t lane = 0;
  std::string category;
  std::string name;
  double begin_us = 0;
  double duration_us = 0;
};
struct TraceMark {
  std::string name;
  double time_us = 0;
  std::string shape = {}, schedule = {};         // of the call that begins; empty where the timeline does not say
  std::map<std::string, std::string> more = {};  // what else it says of that call (traced_run.h)
};
struct Trace {
  std::string title;
  std::vector<TraceLane> lanes;  // in the order in which they are shown
  std::vector<TraceSlice> slices;
  std::vector<TraceMark> marks;
};

// Reads what trace_json() writes, and other files of the format as far as they hold complete events. `name` stands in
// messages; Error(kInvalidArgument) for anything that is not such a file.
Trace parse_trace(std::string_view text, const std::string& name);

// The lanes of at most so many workers of each process, the first and the rest evenly spread, with their slices. Lanes
// that are no worker's stay.
Trace with_fewer_workers(Trace trace, int workers);

}  // namespace uniep::cli
