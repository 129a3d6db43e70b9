#include "engine/event_clocks.h"

#include <algorithm>
#include <limits>
#include <map>

namespace uniep::internal {
namespace {

void shift(TileEvent& event, int64_t by) {
  event.wait_begin_ns += by;
  event.begin_ns += by;
  event.end_ns += by;
}

}  // namespace

void bring_clocks_together(std::vector<TileEvent>& events, std::span<const int> clock_of_rank) {
  const auto clock_of = [&](const TileEvent& event) { return clock_of_rank[static_cast<std::size_t>(event.rank)]; };
  std::map<int, int64_t> last;  // by clock
  for (const TileEvent& event : events) {
    const auto [place, is_first] = last.emplace(clock_of(event), event.end_ns);
    if (!is_first) place->second = std::max(place->second, event.end_ns);
  }
  int64_t begin = std::numeric_limits<int64_t>::max();
  for (TileEvent& event : events) {
    shift(event, -last[clock_of(event)]);
    begin = std::min(begin, event.wait_begin_ns);
  }
  for (TileEvent& event : events) shift(event, -begin);
}

}  // namespace uniep::internal
