#include "cli/gathered.h"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "engine/event_clocks.h"
#include "program/stage.h"

namespace uniep::cli {
namespace {

// An event without addresses of its process.
struct PackedEvent {
  TileEvent event;
  Stage stage;
  Direction direction;
};

PackedEvent packed(const TileEvent& event) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (int i = 0; i < kStageCount; ++i) {
      const auto stage = static_cast<Stage>(i);
      if (std::string_view(event.stage) == stage_name(stage, direction)) return {event, stage, direction};
    }
  }
  throw Error(Status::kInternal, std::string("no stage has the name ") + event.stage);
}

}  // namespace

std::vector<double> slowest_times(Group& group, std::vector<double> own) {
  if (group.local_ranks() == group.ranks()) return own;
  const std::vector<double> all = gathered(group, own);
  for (std::size_t i = 0; i < all.size(); ++i) own[i % own.size()] = std::max(own[i % own.size()], all[i]);
  return own;
}

std::vector<TileEvent> gathered_events(Group& group, const std::vector<TileEvent>& own) {
  std::vector<PackedEvent> packed_own;
  packed_own.reserve(own.size());
  for (const TileEvent& event : own) packed_own.push_back(packed(event));
  std::vector<TileEvent> events;
  for (const PackedEvent& from : gathered(group, packed_own)) {
    events.push_back(from.event);
    events.back().stage = stage_name(from.stage, from.direction);
  }
  std::vector<int> clock_of_rank(static_cast<std::size_t>(group.ranks()));
  std::iota(clock_of_rank.begin(), clock_of_rank.end(), 0);
  internal::bring_clocks_together(events, clock_of_rank);
  return events;
}

}  // namespace uniep::cli
