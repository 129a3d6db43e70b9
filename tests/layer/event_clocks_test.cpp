#include "engine/event_clocks.h"

#include <gtest/gtest.h>

namespace uniep {
namespace {

TileEvent event(int rank, int64_t wait, int64_t begin, int64_t end) {
  TileEvent event;
  event.rank = rank;
  event.wait_begin_ns = wait;
  event.begin_ns = begin;
  event.end_ns = end;
  return event;
}

TEST(EventClocks, RanksOfOneClockKeepTheirDistances) {
  std::vector<TileEvent> events = {event(0, 100, 110, 150), event(1, 120, 125, 190)};
  internal::bring_clocks_together(events, std::vector<int>{3, 3});
  EXPECT_EQ(events[0].wait_begin_ns, 0);
  EXPECT_EQ(events[0].end_ns, 50);
  EXPECT_EQ(events[1].wait_begin_ns, 20);
  EXPECT_EQ(events[1].begin_ns, 25);
  EXPECT_EQ(events[1].end_ns, 90);
}

TEST(EventClocks, DifferentClocksMeetAtTheEnd) {
  std::vector<TileEvent> events = {event(0, 1000, 1010, 1500), event(1, 90'000, 90'001, 90'400),
                                   event(1, 90'450, 90'460, 90'600), event(2, -700, -690, -200)};
  internal::bring_clocks_together(events, std::vector<int>{0, 1, 2});
  EXPECT_EQ(events[0].end_ns, 600);
  EXPECT_EQ(events[2].end_ns, 600);
  EXPECT_EQ(events[3].end_ns, 600);
  EXPECT_EQ(events[1].wait_begin_ns, 0);
  EXPECT_EQ(events[0].wait_begin_ns, 100);
  EXPECT_EQ(events[3].begin_ns, 110);
}

TEST(EventClocks, NoEvents) {
  std::vector<TileEvent> events;
  internal::bring_clocks_together(events, std::vector<int>{0});
  EXPECT_TRUE(events.empty());
}

}  // namespace
}  // namespace uniep
