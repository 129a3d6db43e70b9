#include "cli/trace_compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>

#include "cli/timeline_numbers.h"
#include "io/quote.h"
#include "program/canonical.h"
#include "tune/changed_fields.h"
#include "uniep/error.h"

namespace uniep::cli {
TraceSummary summarize(const Trace& trace, const std::string& call, const std::string& name) {
  double from = -std::numeric_limits<double>::infinity(), until = std::numeric_limits<double>::infinity();
  TraceSummary summary;
  const auto tell = [&](const TraceMark& mark) {
    summary = {.shape = mark.shape, .schedule = mark.schedule, .more = mark.more};
  };
  if (trace.marks.size() == 1) tell(trace.marks[0]);
  if (trace.marks.size() > 1) {
    const auto at =
        std::find_if(trace.marks.begin(), trace.marks.end(), [&](const TraceMark& mark) { return mark.name == call; });
    if (at == trace.marks.end()) {
      throw Error(Status::kInvalidArgument, fmt::format("{}: holds {} calls and none that is called {}",
                                                        io::quote_path(name), trace.marks.size(), call));
    }
    from = at->time_us;
    tell(*at);
    for (const TraceMark& mark : trace.marks) {
      if (mark.time_us > from) until = std::min(until, mark.time_us);
    }
  }
  std::set<std::string> processes;
  std::set<std::size_t> computing;
  double first = std::numeric_limits<double>::infinity(), first_gemm = first, last = -first, waits = 0;
  std::vector<std::pair<std::size_t, double>> waited;
  for (const TraceSlice& slice : trace.slices) {
    if (slice.begin_us < from || slice.begin_us >= until) continue;
    processes.insert(trace.lanes[slice.lane].process);
    first = std::min(first, slice.begin_us);
    last = std::max(last, slice.begin_us + slice.duration_us);
    if (slice.category == kWaitCategory) {
      waited.emplace_back(slice.lane, slice.duration_us);
      continue;
    }
    if (!is_copy_stage(slice.category)) {
      computing.insert(slice.lane);
      first_gemm = std::min(first_gemm, slice.begin_us);
    }
    TracedStage& stage = summary.stages[slice.category];
    const double begin = slice.begin_us * 1e-3, end = (slice.begin_us + slice.duration_us) * 1e-3;
    stage.begin_ms = stage.tiles == 0 ? begin : std::min(stage.begin_ms, begin);
    stage.end_ms = stage.tiles == 0 ? end : std::max(stage.end_ms, end);
    stage.mean_us += slice.duration_us;
    ++stage.tiles;
  }
  if (summary.stages.empty()) {
    throw Error(Status::kInvalidArgument, fmt::format("{}: holds no tile of {}", io::quote_path(name), call));
  }
  for (auto& [stage_name, stage] : summary.stages) {
    stage.begin_ms -= first * 1e-3;
    stage.end_ms -= first * 1e-3;
    stage.mean_us /= static_cast<double>(stage.tiles);
  }
  for (const auto& [lane, us] : waited) waits += computing.count(lane) ? us : 0;
  summary.processes = static_cast<int>(processes.size());
  summary.begin_ms = computing.empty() ? 0 : (first_gemm - first) * 1e-3;
  summary.waits_ms = computing.empty() ? 0 : waits * 1e-3 / static_cast<double>(computing.size());
  summary.end_ms = (last - first) * 1e-3;
  return summary;
}

std::string differing_call(const TraceSummary& measured, const TraceSummary& simulated) {
  if (!measured.shape.empty() && measured.shape != simulated.shape) {
    return fmt::format("its shape is {}, not {}", io::quote_text(measured.shape), simulated.shape);
  }
  if (measured.processes != simulated.processes) {
    return fmt::format("it has {} ranks, not {}", measured.processes, simulated.processes);
  }
  constexpr const char* kOfTheCall[] = {"tokens", "routing",        "seed",  "activation", "router_weight",
                                        "bias",   "combine_groups", "wgrad", "workers",    "state"};
  const bool backward = simulated.stages.count("dgrad_fc2") != 0;
  for (const std::string key : kOfTheCall) {
    if (key == "wgrad" && !backward) continue;
    const auto said = measured.more.find(key), other = simulated.more.find(key);
    if (said == measured.more.end() || other == simulated.more.end() || said->second == other->second) continue;
    return fmt::format("its {} is {}, not {}", key, io::quote_text(said->second), other->second);
  }
  for (const auto& [name, stage] : measured.stages) {
    const auto other = simulated.stages.find(name);
    if (other == simulated.stages.end())
      return fmt::format("its stage {} is not in the schedule", io::quote_text(name));
    if (name != "reduce" && other->second.tiles != stage.tiles) {
      return fmt::format("it has {} tiles of {}, not {}", stage.tiles, name, other->second.tiles);
    }
  }
  for (const auto& [name, stage] : simulated.stages) {
    if (!measured.stages.count(name)) return fmt::format("it has no tile of {}", name);
  }
  return {};
}

std::string differing_schedule(const TraceSummary& measured, const ScheduleRequest& request, const Schedule& schedule) {
  if (measured.schedule.empty()) return {};
  const Schedule other = fill(PartialSchedule::parse(measured.schedule), request);
  if (canonical_differences(other, schedule, request).empty()) return {};
  return fmt::format("its schedule has {}", tune::changed_fields(other, schedule));
}

}  // namespace uniep::cli
