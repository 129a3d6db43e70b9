#include "engine/call_times.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace uniep::internal {
using program::CallSpan;
using program::FirstWaits;
using program::Stage;
using program::TileSpan;

namespace {

Stage stage_of(const char* name) {
  for (int i = 0; i < program::kStageCount; ++i) {
    const auto stage = static_cast<Stage>(i);
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      if (std::strcmp(program::stage_name(stage, direction), name) == 0) return stage;
    }
  }
  return Stage::kPull;
}

TileSpan span_of(const TileEvent& event) {
  return {stage_of(event.stage), static_cast<uint64_t>(event.wait_begin_ns), static_cast<uint64_t>(event.begin_ns),
          static_cast<uint64_t>(event.end_ns)};
}

}  // namespace

RankTimes rank_times(std::span<const TileEvent> events, int rank) {
  CallSpan call;
  std::map<int, FirstWaits> workers;
  for (const TileEvent& event : events) {
    if (event.rank != rank) continue;
    const TileSpan tile = span_of(event);
    call.add(tile);
    if (!event.copy_agent) workers[event.worker].add(tile);
  }
  RankTimes times{};
  times.sum_ns = call.sum_ns();
  times.call_ns = call.call_ns();
  for (const auto& [worker, waits] : workers) {
    times.first_waits_ns += waits.total_ns(call);
    times.workers += waits.has_tiles() ? 1 : 0;
  }
  for (const TileEvent& event : events) {
    if (event.rank == rank) times.arrival_ns = std::max(times.arrival_ns, call.arrival_ns(span_of(event)));
  }
  return times;
}

}  // namespace uniep::internal
