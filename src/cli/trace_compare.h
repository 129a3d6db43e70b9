#pragma once

#include <map>
#include <string>
#include <vector>

#include "cli/trace_file.h"
#include "uniep/schedule.h"

// Two timelines of one call, side by side.
namespace uniep::cli {

struct TracedStage {
  int64_t tiles = 0;
  double begin_ms = 0, end_ms = 0;  // of its first and last tile
  double mean_us = 0;               // of a tile
};
struct TraceSummary {
  std::string shape, schedule;              // empty: the timeline does not say
  std::map<std::string, std::string> more;  // of its mark: what else was called, and how (traced_run.h)
  int processes = 0;                        // ranks
  double begin_ms = 0;                      // of the first GEMM tile, from the first event on
  double waits_ms = 0;                      // that compute agents waited for, in the mean of them
  double end_ms = 0;                        // of the last event
  std::map<std::string, TracedStage> stages = {};
};

// Of the call that is marked with this name; of all events where a timeline has one mark, or none. Throws
// Error(kInvalidArgument) where it has several and none of this name.
TraceSummary summarize(const Trace& trace, const std::string& call, const std::string& name);

// What makes two timelines not of the same call: the shape and all that was called, where both say it, ranks, and tiles
// by stage but for reduce, whose tiles engines cut as they like. Empty where nothing does. Of which machines they are
// may differ.
std::string differing_call(const TraceSummary& measured, const TraceSummary& simulated);

// What in the Schedule that the timeline says makes it run in another way than `schedule`. Empty where nothing does, or
// where it says none.
std::string differing_schedule(const TraceSummary& measured, const ScheduleRequest& request, const Schedule& schedule);

}  // namespace uniep::cli
