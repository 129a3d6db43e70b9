#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cli/trace_file.h"
#include "sim/simulate.h"

// What a timeline of one call says in numbers that a simulated one can be held beside.
namespace uniep::cli {

// A task of one agent; microseconds.
struct TimelineTask {
  int rank = 0;
  int worker = 0;
  bool copies = false;    // the worker's copy agent
  std::size_t stage = 0;  // among Timeline::stages
  double wait_begin = 0, begin = 0, end = 0;
};
struct Timeline {
  std::vector<std::string> stages;  // names
  std::vector<TimelineTask> tasks;
  int ranks = 0;
  // Place of a stage's name, which is added where it is new.
  std::size_t stage(const std::string& name);
};
// Of the trace's mark at that place. Throws Error(kInvalidArgument) where it has no tile, or lanes that are no
// worker's.
Timeline timeline_of(const Trace& trace, std::size_t mark);
Timeline timeline_of(const program::Program& program, const std::vector<sim::TimedTask>& tasks);

// A time, and by what share of it two timelines of one call may differ for reasons that are no constant of a machine.
struct TimelineNumber {
  std::string name;  // "fc1: a tile"
  double us = 0;
  double error = 0;
};
struct TimelineNumbers {
  std::map<std::string, int64_t> tiles;  // by stage
  int ranks = 0;
  std::vector<TimelineNumber> numbers;  // the first is how long it all took

  double of(const std::string& name) const;  // 0 where there is none
};
struct TimelineStyle {
  bool copies_on_sms = false;  // warps of one worker copy side by side, of which one records: its tasks say nothing
  int launches = 1;
};
TimelineNumbers timeline_numbers(Timeline timeline, const TimelineStyle& style);

bool is_copy_stage(const std::string& stage);

}  // namespace uniep::cli
