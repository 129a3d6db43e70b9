#include "uniep/call_timer.h"

#include <gtest/gtest.h>

#include <memory>

#include "engine/call_timer_state.h"
#include "support/c_layer.h"
#include "support/disturb.h"
#include "support/expect_error.h"

namespace uniep::test {
namespace {

struct Tile {
  const char* stage;
  int64_t wait, begin, end;
  int worker = 0, rank = 0;
};

std::vector<TileEvent> events_of(const std::vector<Tile>& tiles) {
  std::vector<TileEvent> events;
  for (const Tile& tile : tiles) {
    TileEvent event;
    event.rank = tile.rank;
    event.worker = tile.worker;
    event.stage = tile.stage;
    event.copy_agent = std::string(tile.stage) == "dispatch" || std::string(tile.stage) == "reduce";
    event.wait_begin_ns = tile.wait;
    event.begin_ns = tile.begin;
    event.end_ns = tile.end;
    events.push_back(event);
  }
  return events;
}

TEST(RankTimes, WaitsOfTheFirstGemmAreTheDispatchThatNothingHides) {
  const internal::RankTimes times = internal::rank_times(events_of({{"dispatch", 0, 100, 9000},
                                                                    {"fc1", 0, 9100, 9500},
                                                                    {"fc1", 9500, 9700, 9800},
                                                                    {"fc2", 9800, 20000, 21000},  // no dispatch
                                                                    {"fc1", 50, 9150, 9500, 1},
                                                                    {"fc1", 0, 77777, 88888, 0, 1}}),  // another rank's
                                                         0);
  EXPECT_EQ(times.first_waits_ns, 9100u + 200 + 9100 + 50);
  EXPECT_EQ(times.workers, 2u);
  EXPECT_EQ(times.sum_ns, 0u);
}

TEST(RankTimes, ADispatchInAnEarlierLaunchIsWaitedForToo) {
  const internal::RankTimes times =
      internal::rank_times(events_of({{"dispatch", 1000, 1100, 5000}, {"dgrad_fc2", 6000, 6010, 7000}}), 0);
  EXPECT_EQ(times.first_waits_ns, 5000u + 10);
  const internal::RankTimes behind_others = internal::rank_times(
      events_of({{"dispatch", 1000, 1100, 5000}, {"wgrad_fc2", 1000, 1000, 6000}, {"dgrad_fc2", 6000, 6010, 7000}}), 0);
  EXPECT_EQ(behind_others.first_waits_ns, 10u);
}

TEST(RankTimes, SumsCountFromTheLastGemm) {
  const internal::RankTimes times = internal::rank_times(events_of({{"fc2", 0, 10, 10'000},
                                                                    {"reduce", 5000, 9000, 9900},
                                                                    {"reduce", 9900, 14'000, 15'000},
                                                                    {"reduce", 15'000, 15'900, 17'000}}),
                                                         0);
  EXPECT_EQ(times.sum_ns, 7000u);
  EXPECT_EQ(times.arrival_ns, 4000u);  // the last sum has only asked
  EXPECT_EQ(times.call_ns, 17'000u);
}

TEST(RankTimes, ARankWithoutRowsSumsFromItsBegin) {
  const internal::RankTimes times = internal::rank_times(events_of({{"reduce", 2000, 6000, 9000}}), 0);
  EXPECT_EQ(times.sum_ns, 7000u);
  EXPECT_EQ(times.arrival_ns, 4000u);
  EXPECT_EQ(times.workers, 0u);
  EXPECT_EQ(times.call_ns, 7000u);
  EXPECT_EQ(internal::rank_times({}, 0).sum_ns, 0u);
  EXPECT_EQ(internal::rank_times({}, 0).call_ns, 0u);
}

// As a replay writes them: the number away, the times, the number.
TEST(CallTimerState, GivesNothingWhileAReplayWrites) {
  internal::CallTimerState state;
  state.count = 1;
  state.ranks = std::make_shared<internal::RankTimes>();
  EXPECT_FALSE(state.read(0).has_value());
  state.begin();
  EXPECT_FALSE(state.read(0).has_value());
  internal::RankTimes times{};
  times.call_ns = 5;
  state.write(0, times);
  ASSERT_TRUE(state.read(0).has_value());
  EXPECT_EQ(state.read(0)->call_ns, 5u);
  EXPECT_EQ(state.read(0)->runs, 1u);
  state.ranks->call = 0;
  EXPECT_FALSE(state.is_over());
  EXPECT_FALSE(state.read(0).has_value());
  state.ranks->runs = 2;
  state.ranks->call = state.call;
  EXPECT_EQ(state.read(0)->runs, 2u);
}

class Timed : public ::testing::Test {
 protected:
  Timed() : random(random_layer(20, {.ranks = {2}, .fewest_tokens = 24})) {
    GroupOptions options;
    options.engine = EngineKind::kCpu;
    options.ranks = 2;
    group = std::make_unique<Group>(options);
    runner = std::make_unique<cli::LayerRunner>(*group, random.config, random.data);
  }
  Schedule schedule(Direction direction, const std::string& text) const {
    return resolve(PartialSchedule::parse(text), {.direction = direction,
                                                  .shape = random.config.shape,
                                                  .numerics = random.config.numerics,
                                                  .machine = group->machine()});
  }

  RandomLayer random;
  std::unique_ptr<Group> group;
  std::unique_ptr<cli::LayerRunner> runner;
};

TEST_F(Timed, EveryFusionAndDirectionSaysWhatItsEventsSay) {
  CallTimer timer(*group);
  EXPECT_FALSE(timer.is_over());
  EXPECT_FALSE(timer.times(0).has_value());
  for (const char* text : {"fusion=layer", "fusion=pairs", "fusion=none"}) {
    std::vector<TileEvent> events;
    const auto compare = [&](bool sums_show) {
      ASSERT_TRUE(timer.is_over());
      for (int rank = 0; rank < 2; ++rank) {
        const internal::RankTimes expected = internal::rank_times(events, rank);
        const std::optional<CallTimes> got = timer.times(rank);
        ASSERT_TRUE(got.has_value());
        EXPECT_DOUBLE_EQ(got->exposed_dispatch_ms,
                         1e-6 * static_cast<double>(expected.first_waits_ns) / expected.workers);
        EXPECT_DOUBLE_EQ(got->sum_ms, 1e-6 * static_cast<double>(expected.sum_ns));
        EXPECT_DOUBLE_EQ(got->call_ms, 1e-6 * static_cast<double>(expected.call_ns));
        EXPECT_EQ(got->runs, 1u);
        EXPECT_GT(got->exposed_dispatch_ms, 0);
        EXPECT_GE(got->call_ms, got->sum_ms);
        EXPECT_GE(got->wait_ms, got->exposed_dispatch_ms);
        if (sums_show) {
          EXPECT_GT(got->sum_ms, 0);
        }
      }
    };
    runner->forward(schedule(Direction::kForward, text), &events, &timer);
    compare(true);
    events.clear();
    runner->backward(schedule(Direction::kBackward, text), &events, &timer);
    compare(false);  // weight gradients may hide them
  }
}

TEST_F(Timed, ARankThatIsLateIsWaitedFor) {
  CallTimer timer(*group);
  constexpr int kLateMicroseconds = 4000;
  group->implementation().disturb({.delayed_rank = 0, .delay_microseconds = kLateMicroseconds});
  runner->forward(schedule(Direction::kForward, "fusion=layer"), nullptr, &timer);
  EXPECT_GT(timer.times(1)->wait_ms, 1e-3 * kLateMicroseconds);
}

TEST_F(Timed, SaysWhatIsWrong) {
  CallTimer timer(*group);
  expect_error(Status::kInvalidArgument, "rank: 2; legal are 0 to 1", [&] { timer.times(2); });
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = 2;
  Group other(options);
  CallTimer others(other);
  expect_error(Status::kInvalidArgument, "timer: of another group",
               [&] { runner->forward(schedule(Direction::kForward, ""), nullptr, &others); });
}

TEST(CTimer, TimesTheNextCall) {
  const RandomLayer random = random_layer(20, {.ranks = {2}, .fewest_tokens = 24});
  const CLayer layer(random);
  GroupHandle group = make_group(group_options(2));
  PlacementHandle placement = layer.place(group.get());
  uniep_timer* timer = nullptr;
  expect_ok(uniep_timer_create(group.get(), &timer));
  uniep_call_times times{sizeof(times), -1, -1, -1, -1, -1, 7};
  expect_ok(uniep_timer_read(timer, 0, &times));
  EXPECT_EQ(times.state, UNIEP_TIMES_NOT_YET);
  EXPECT_EQ(times.wait_ms, 0);
  EXPECT_EQ(times.runs, 0u);
  expect_ok(uniep_timer_start(timer));
  SavedHandle saved = layer.forward(group.get(), placement.get(), "auto");
  expect_ok(uniep_timer_read(timer, 1, &times));
  EXPECT_EQ(times.state, UNIEP_TIMES_KNOWN);
  EXPECT_GT(times.exposed_dispatch_ms, 0);
  EXPECT_GT(times.call_ms, times.sum_ms);
  EXPECT_EQ(times.runs, 1u);
  uniep_call_times old{offsetof(uniep_call_times, call_ms), -1, -1, -1, -1, -1, 7};  // of version 0.1
  expect_ok(uniep_timer_read(timer, 1, &old));
  EXPECT_EQ(old.wait_ms, times.wait_ms);
  EXPECT_EQ(old.call_ms, -1);
  EXPECT_EQ(old.runs, 7u);
  const uniep_call_times first = times;
  layer.forward(group.get(), placement.get(), "auto");  // not timed
  expect_ok(uniep_timer_read(timer, 1, &times));
  EXPECT_EQ(times.exposed_dispatch_ms, first.exposed_dispatch_ms);
  expect_ok(uniep_timer_start(timer));
  expect_ok(layer.backward(group.get(), saved.get(), "auto"));
  expect_ok(uniep_timer_read(timer, 1, &times));
  EXPECT_NE(times.exposed_dispatch_ms, first.exposed_dispatch_ms);

  expect_failure(UNIEP_INVALID_ARGUMENT, "rank: 2; legal are 0 to 1", uniep_timer_read(timer, 2, &times));
  expect_failure(UNIEP_INVALID_ARGUMENT, "times: null pointer", uniep_timer_read(timer, 0, nullptr));
  expect_failure(UNIEP_INVALID_ARGUMENT, "timer: null pointer", uniep_timer_read(nullptr, 0, &times));
  expect_failure(UNIEP_INVALID_ARGUMENT, "timer: null pointer", uniep_timer_start(nullptr));
  expect_failure(UNIEP_INVALID_ARGUMENT, "timer: null pointer", uniep_timer_create(group.get(), nullptr));
  saved.reset();
  group.reset();
  placement.reset();
  expect_ok(uniep_timer_read(timer, 1, &times));  // it outlives its group
  expect_failure(UNIEP_INVALID_ARGUMENT, "timer: its group has been destroyed", uniep_timer_start(timer));
  uniep_timer_destroy(timer);
  uniep_timer_destroy(nullptr);
}

}  // namespace
}  // namespace uniep::test
