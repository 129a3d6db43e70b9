// Searches among Schedules whose times are made up, so that it is known which one has to be found.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <set>

#include "cli/machine_option.h"
#include "cli/simulated_layer.h"
#include "cli/solve_request.h"
#include "cli/tune_candidates.h"
#include "io/file.h"
#include "program/schedule_space.h"
#include "support/random_schedule_case.h"
#include "support/temporary_folder.h"
#include "tune/journal.h"
#include "tune/neighbours.h"
#include "tune/search.h"
#include "tune/tuned.h"
#include "uniep/error.h"

namespace uniep::test {
namespace {

using tune::SearchOptions;
using tune::SearchResult;
using tune::Tried;
using tune::Verdict;

constexpr uint64_t kBits = 7;

Schedule numbered(int i) {
  Schedule schedule;
  schedule.order.raster = 1 + i;
  return schedule;
}

std::vector<Tried> numbered_schedules(int count) {
  std::vector<Tried> all;
  for (int i = 0; i < count; ++i) all.push_back({.schedule = numbered(i)});
  return all;
}

// Schedule i takes base * factor[i]; the clock drifts, and every call has some noise.
class MadeUp : public tune::Trial {
 public:
  explicit MadeUp(std::vector<double> factors, uint64_t seed = 1) : factors_(std::move(factors)), random_(seed) {}

  double milliseconds(const Schedule& schedule) override {
    const int i = begin(schedule);
    if (fails_when_timed.contains(i)) throw Error(Status::kTimeout, "time-out");
    const double noise = 1 + 0.02 * (static_cast<double>(below(random_, 1000)) / 1000 - 0.5);
    const double spike = below(random_, 20) == 0 ? 1.5 : 1;
    return 10 * factors_[static_cast<std::size_t>(i)] * noise * spike * (1 + 0.002 * calls);
  }
  uint64_t checksum(const Schedule& schedule) override {
    const int i = begin(schedule);
    if (fails.contains(i)) throw Error(Status::kTimeout, "rank 1 waits for rank 0");
    return wrong.contains(i) ? kBits + 1 : kBits;
  }
  void warm_up(const Schedule& schedule) override {
    warmed_behind = calls;
    EXPECT_EQ(schedule, numbered(0));
  }
  int64_t spilled_bytes(const Schedule& schedule) override {
    EXPECT_GT(calls_of[schedule.order.raster - 1], 0) << "no kernel of it has run";
    return spilled[schedule.order.raster - 1];
  }
  void recover() override { ++recoveries; }

  std::set<int> fails, fails_when_timed, wrong;
  std::map<int, int64_t> spilled;
  int recoveries = 0, calls = 0, warmed_behind = -1;
  std::map<int, int> calls_of;

 private:
  int begin(const Schedule& schedule) {
    ++calls;
    ++calls_of[schedule.order.raster - 1];
    return schedule.order.raster - 1;
  }

  std::vector<double> factors_;
  RandomBits random_;
};

TEST(TuneSearch, FindsTheFastestThoughClocksDriftAndCallsAreDelayed) {
  int with_spikes = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    RandomBits random(seed);
    std::vector<double> factors = {1.0};
    const int others = 2 + static_cast<int>(below(random, 20));
    for (int i = 0; i < others; ++i) factors.push_back(1.0 + static_cast<double>(below(random, 400)) / 1000);
    const std::size_t fastest = 1 + below(random, static_cast<uint64_t>(others));
    factors[fastest] = 0.95;
    MadeUp trial(factors, seed);
    const SearchResult result = tune::search(numbered_schedules(others + 1), trial);
    EXPECT_EQ(result.best, fastest) << "seed " << seed;
    EXPECT_EQ(result.tried[fastest].verdict, Verdict::kInTheRunning);
    EXPECT_NEAR(result.tried[fastest].ratio, 0.95, 0.02);
    EXPECT_FALSE(result.budget_ended);
    EXPECT_EQ(trial.warmed_behind, others + 1);  // each was called once before, for its bits
    with_spikes += *std::max_element(result.tried[0].milliseconds.begin(), result.tried[0].milliseconds.end()) > 14;
  }
  EXPECT_GT(with_spikes, 20);
}

TEST(TuneSearch, TheDefaultStaysWhereNothingIsSurelyFaster) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    MadeUp trial({1.0, 0.999, 1.001, 0.998, 1.0, 1.002}, seed);
    EXPECT_EQ(tune::search(numbered_schedules(6), trial).best, 0u) << "seed " << seed;
  }
}

TEST(TuneSearch, WhatSpillsMoreRegistersThanTheDefaultIsOut) {
  MadeUp trial({1.0, 0.5, 0.9});
  trial.spilled[1] = 16;
  SearchResult result = tune::search(numbered_schedules(3), trial);
  EXPECT_EQ(result.best, 2u);
  EXPECT_EQ(result.tried[1].verdict, Verdict::kFailed);
  EXPECT_EQ(result.tried[1].reason, "its kernels spill 16 bytes of registers a thread; the default's 0");
  EXPECT_TRUE(result.tried[1].milliseconds.empty());
  trial.spilled = {{0, 16}, {1, 16}, {2, 24}};
  result = tune::search(numbered_schedules(3), trial);
  EXPECT_EQ(result.best, 1u);
  EXPECT_EQ(result.tried[2].verdict, Verdict::kFailed);
}

TEST(TuneSearch, WhatFailsOrGivesOtherBitsIsOutAndTheRestGoesOn) {
  MadeUp trial({1.0, 0.5, 0.5, 0.5, 0.9});
  trial.fails = {1};
  trial.wrong = {2};
  trial.fails_when_timed = {3};
  std::vector<std::string> told;
  SearchOptions options;
  options.progress = [&](const Tried& tried) { told.emplace_back(tune::verdict_name(tried.verdict)); };
  const SearchResult result = tune::search(numbered_schedules(5), trial, options);
  EXPECT_EQ(result.best, 4u);
  EXPECT_EQ(result.tried[1].verdict, Verdict::kFailed);
  EXPECT_EQ(result.tried[1].reason, "rank 1 waits for rank 0");
  EXPECT_EQ(result.tried[2].verdict, Verdict::kWrong);
  EXPECT_EQ(result.tried[3].verdict, Verdict::kFailed);
  EXPECT_EQ(result.tried[0].verdict, Verdict::kSlower);
  EXPECT_EQ(trial.recoveries, 2);
  EXPECT_EQ(told.front(), "untried");
  EXPECT_EQ(std::count(told.begin(), told.end(), "failed"), 2);
}

// Of a round all calls follow each other; after one that failed each is timed by itself, and no time is counted twice.
// Where none fails by itself, none is queued again.
TEST(TuneSearch, ARoundIsTimedAtOnce) {
  class Rounds : public MadeUp {
   public:
    using MadeUp::MadeUp;
    bool queues_calls() const override { return true; }
    std::vector<double> milliseconds_in_turn(std::span<const Schedule> schedules) override {
      sizes.push_back(schedules.size());
      if (only_alone && schedules.size() > 1) throw Error(Status::kTimeout, "together they hang");
      return MadeUp::milliseconds_in_turn(schedules);
    }
    std::vector<std::size_t> sizes;
    bool only_alone = false;
  };
  Rounds trial({1.0, 1.1, 0.9, 1.2});
  SearchOptions options;
  options.rounds = 2;
  SearchResult result = tune::search(numbered_schedules(4), trial, options);
  EXPECT_EQ(result.best, 2u);
  std::vector<std::size_t> sizes = {4, 4, 3, 3, 3, 3};
  sizes.insert(sizes.end(), static_cast<std::size_t>(options.final_rounds), 2);
  EXPECT_EQ(trial.sizes, sizes);
  Rounds failing({1.0, 1.1, 0.9, 1.2});
  failing.fails_when_timed = {3};
  result = tune::search(numbered_schedules(4), failing, options);
  EXPECT_EQ(result.best, 2u);
  EXPECT_EQ(result.tried[3].verdict, Verdict::kFailed);
  sizes = {4, 1, 1, 1, 1, 3};
  sizes.insert(sizes.end(), static_cast<std::size_t>(options.final_rounds), 2);
  EXPECT_EQ(failing.sizes, sizes);
  EXPECT_EQ(result.tried[1].milliseconds.size(), 2u);
  Rounds alone({1.0, 1.1, 0.9, 1.2});
  alone.only_alone = true;
  EXPECT_EQ(tune::search(numbered_schedules(4), alone, options).best, 2u);
  EXPECT_EQ(alone.sizes.front(), 4u);
  EXPECT_EQ(std::count(alone.sizes.begin(), alone.sizes.end(), 1), std::ssize(alone.sizes) - 1);
  EXPECT_EQ(alone.recoveries, 1);
}

TEST(TuneSearch, TimesTheDefaultWhereNothingElseIsLeft) {
  MadeUp trial({1.0, 0.5});
  EXPECT_FALSE(tune::search(numbered_schedules(1), trial).tried[0].milliseconds.empty());
  trial.fails = {1};
  const SearchResult result = tune::search(numbered_schedules(2), trial);
  EXPECT_EQ(result.best, 0u);
  EXPECT_FALSE(result.tried[0].milliseconds.empty());
}

TEST(TuneSearch, AFailingDefaultIsTheCallersError) {
  MadeUp trial({1.0, 0.5});
  trial.fails = {0};
  EXPECT_THROW(tune::search(numbered_schedules(2), trial), Error);
  EXPECT_THROW(tune::search({}, trial), Error);
}

TEST(TuneSearch, WhatIsKnownToFailIsNotCalled) {
  MadeUp trial({1.0, 0.5, 0.9});
  std::vector<Tried> schedules = numbered_schedules(3);
  schedules[1].verdict = Verdict::kFailed;
  EXPECT_EQ(tune::search(schedules, trial).best, 2u);
  EXPECT_EQ(trial.calls_of[1], 0);
}

TEST(TuneSearch, EndsWithItsBudget) {
  MadeUp trial(std::vector<double>(20, 1.0));
  SearchOptions options;
  options.budget_milliseconds = 500;  // two rounds and a half of 20 calls of 10 ms
  const SearchResult result = tune::search(numbered_schedules(20), trial, options);
  EXPECT_TRUE(result.budget_ended);
  EXPECT_EQ(result.tried[7].milliseconds.size(), 3u);
  EXPECT_EQ(result.best, 0u);
}

TEST(TuneSearch, SlowSchedulesAreLeftBehindEarly) {
  MadeUp trial({1.0, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3, 0.9});
  tune::search(numbered_schedules(9), trial);
  EXPECT_LT(trial.calls_of[3], 20);
  EXPECT_GT(trial.calls_of[8], 30);
}

TEST(TuneSearch, WhatIsFarBehindIsCalledTwice) {
  MadeUp trial({1.0, 100, 1.3, 0.9});
  const SearchResult result = tune::search(numbered_schedules(4), trial);
  EXPECT_EQ(result.tried[1].verdict, Verdict::kSlower);
  EXPECT_EQ(result.tried[1].milliseconds.size(), 2u);
  EXPECT_GT(result.tried[1].ratio, 90);
  EXPECT_EQ(result.tried[2].milliseconds.size(), 4u);
  EXPECT_EQ(result.best, 3u);
}

// A layer of a tenth of a millisecond whose first timed call the system held up for as long again and more.
TEST(TuneSearch, OneCallThatWasHeldUpPutsNothingOut) {
  class HeldUp : public MadeUp {
   public:
    using MadeUp::MadeUp;
    double milliseconds(const Schedule& schedule) override {
      const bool first = seen_.insert(schedule.order.raster).second;
      return MadeUp::milliseconds(schedule) * (schedule == numbered(3) && first ? 4 : 1);
    }

   private:
    std::set<int> seen_;
  };
  HeldUp trial({1.0, 100, 1.3, 0.9});
  const SearchResult result = tune::search(numbered_schedules(4), trial);
  EXPECT_EQ(result.best, 3u);
  EXPECT_NEAR(result.tried[3].ratio, 0.9, 0.02);
  EXPECT_EQ(result.tried[1].milliseconds.size(), 2u);
  // One that fails when it is called again has failed.
  class FailsAgain : public MadeUp {
   public:
    using MadeUp::MadeUp;
    double milliseconds(const Schedule& schedule) override {
      if (calls_of[1] == 2) fails_when_timed = {1};
      return MadeUp::milliseconds(schedule);
    }
  };
  FailsAgain failing({1.0, 100, 0.9});
  EXPECT_EQ(tune::search(numbered_schedules(3), failing).tried[1].verdict, Verdict::kFailed);
  EXPECT_EQ(failing.recoveries, 1);
}

TEST(TuneSearch, EachSecondRoundIsTheOneBeforeInReverse) {
  class Listed : public MadeUp {
   public:
    using MadeUp::MadeUp;
    double milliseconds(const Schedule& schedule) override {
      order.push_back(schedule.order.raster - 1);
      return MadeUp::milliseconds(schedule);
    }
    std::vector<int> order;
  };
  for (const int rounds : {2, 3, 4, 5}) {
    Listed trial(std::vector<double>(13, 1.0));
    SearchOptions options;
    options.rounds = rounds;
    tune::search(numbered_schedules(13), trial, options);
    auto next = trial.order.begin();
    std::set<std::vector<int>> drawn;
    const auto round_of = [&](std::ptrdiff_t schedules) {
      std::vector<int> round(next, next + schedules);
      next += schedules;
      return round;
    };
    // The default and the others' faster half stay, for twice as many rounds.
    for (int schedules = 13, own = rounds; schedules > 3; schedules = 1 + (schedules - 1) / 2, own *= 2) {
      for (int round = 0; round < own; ++round) {
        const std::vector<int> one = round_of(schedules);
        drawn.insert(one);
        if (++round == own) break;
        std::vector<int> other = round_of(schedules);
        std::reverse(other.begin(), other.end());
        EXPECT_EQ(one, other) << schedules << " Schedules, " << rounds << " rounds first, round " << round;
      }
    }
    EXPECT_GT(drawn.size(), 3u);
  }
}

// A GPU that has rested in a slow call is faster in the next one.
TEST(TuneSearch, WhatRunsBesideASlowOneIsNotFavoured) {
  class Rested : public MadeUp {
   public:
    using MadeUp::MadeUp;
    double milliseconds(const Schedule& schedule) override {
      const double own = MadeUp::milliseconds(schedule) * (is_rested_ ? 0.9 : 1);
      is_rested_ = schedule == numbered(2);
      return own;
    }

   private:
    bool is_rested_ = false;
  };
  std::vector<double> factors(8, 1.0);
  factors[2] = 1.4;
  Rested trial(factors);
  SearchOptions options;
  options.rounds = 40;
  options.budget_milliseconds = 40 * 84;
  const SearchResult result = tune::search(numbered_schedules(8), trial, options);
  EXPECT_EQ(result.best, 0u) << result.best << ": " << result.tried[result.best].ratio;
  for (const std::size_t beside : {1, 3}) EXPECT_GT(result.tried[beside].ratio, 0.98);
}

TEST(Neighbours, AreLegalDifferentAndKeepWhatIsGiven) {
  RandomBits random(5);
  std::size_t most = 0;
  for (int round = 0; round < 40; ++round) {
    const LayerShape shape{8 * (4 + int64_t{below(random, 90)}), 8 * (4 + int64_t{below(random, 90)}), 16, 2};
    const Machine machine{below(random, 2) == 0 ? EngineKind::kCpu : EngineKind::kCuda, 4, 66};
    const Direction direction = below(random, 2) == 0 ? Direction::kForward : Direction::kBackward;
    const PartialSchedule given = PartialSchedule::parse("comm.where=warps,order.raster=4,comm.reserve_sms=8");
    const Schedule start = resolve(given, {.direction = direction, .shape = shape, .machine = machine});
    const std::vector<Schedule> found =
        tune::neighbours(start, given, {.direction = direction, .shape = shape, .machine = machine}, 500);
    std::set<std::string> texts = {to_text(start)};
    for (const Schedule& schedule : found) {
      EXPECT_TRUE(validate(schedule, {.direction = direction, .shape = shape, .machine = machine}).empty())
          << to_text(schedule);
      EXPECT_TRUE(texts.insert(to_text(schedule)).second) << to_text(schedule);
      EXPECT_EQ(schedule.comm.where, CommWhere::kWarps);
      EXPECT_EQ(schedule.order.raster, 4);
      EXPECT_EQ(schedule.save_xg, start.save_xg);
      EXPECT_EQ(schedule.save_z, start.save_z);
      EXPECT_FALSE(schedule.comm.lend_sms) << "whose streams have high priority the caller knows alone";
    }
    EXPECT_GT(found.size(), 5u);
    most = std::max(most, found.size());
    const std::vector<Schedule> few =
        tune::neighbours(start, given, {.direction = direction, .shape = shape, .machine = machine}, 3);
    EXPECT_EQ(few, std::vector<Schedule>(found.begin(), found.begin() + 3));
  }
  EXPECT_GT(most, 15u);
}

TEST(Candidates, OfALayerOnGpusAreTheSolversAndNeighbours) {
  cli::LayerOptions layer;
  layer.engine = EngineKind::kCuda;
  layer.shape = {2048, 768, 128, 8};
  layer.ranks = 8;
  layer.tokens_given = {8192};
  const Machine machine{EngineKind::kCuda, 8, 132};
  const sim::MachineDescription h200 = cli::load_machine(sim::kDefaultMachine);
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const std::vector<Schedule> all = cli::tune_candidates(layer, direction, machine, h200, 16);
    ASSERT_EQ(all.size(), 17u);
    EXPECT_EQ(all.front(), layer.resolved(direction, machine));
    int far = 0, mixed = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(
          validate(all[i],
                   {.direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine})
              .empty());
      EXPECT_EQ(std::count(all.begin(), all.end(), all[i]), 1);
      mixed += all[i].wgrad == WgradOrder::kMixed;
      const auto near = tune::neighbours(
          all.front(), {},
          {.direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine}, 500);
      far += i > 0 && std::find(near.begin(), near.end(), all[i]) == near.end();
    }
    EXPECT_GT(far, 2);
    EXPECT_EQ(cli::tune_candidates(layer, direction, machine, h200, 16), all);
    // The solver's come in the order of their times as simulated, which is another than the closed form's.
    const Placement placement = cli::place_ids(layer, cli::make_ids(layer));
    tune::SolveRequest request = cli::solve_request({layer, direction}, h200, placement);
    request.best = 64;
    const std::vector<tune::Ranked> by_form = tune::solve(request).best;
    const cli::SimulatedLayer simulated(request, placement, cli::one_rank_stands_for_all(layer));
    std::vector<double> times;
    std::vector<std::size_t> places;
    for (const Schedule& schedule : all) {
      const auto found = std::find_if(by_form.begin(), by_form.end(),
                                      [&](const tune::Ranked& ranked) { return ranked.schedule == schedule; });
      if (schedule == all.front() || found == by_form.end() || times.size() == 8) continue;
      times.push_back(simulated.milliseconds(schedule));
      places.push_back(static_cast<std::size_t>(found - by_form.begin()));
    }
    EXPECT_GT(times.size(), 5u);
    EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
    EXPECT_FALSE(std::is_sorted(places.begin(), places.end()));
    // Weight gradients beside dgrads are the default's here. Elsewhere they are one of those that are tried, unless
    // something given forbids it.
    EXPECT_EQ(mixed > 0, direction == Direction::kBackward);
    EXPECT_LT(mixed, 17);
    const auto mixed_of = [&](const cli::LayerOptions& of) {
      const std::vector<Schedule> found = cli::tune_candidates(of, direction, machine, h200, 16);
      return std::count_if(found.begin(), found.end(),
                           [](const Schedule& schedule) { return schedule.wgrad == WgradOrder::kMixed; });
    };
    cli::LayerOptions longer = layer;
    longer.shape.intermediate = 2048;
    EXPECT_EQ(mixed_of(longer), direction == Direction::kBackward);
    longer.schedule = PartialSchedule::parse("fusion=pairs");
    EXPECT_EQ(mixed_of(longer), 0);
  }
}

// Neighbours change one field; the solver's change many.
TEST(Candidates, OfALayerWithGroupsAreTheSolversToo) {
  cli::LayerOptions layer;
  layer.engine = EngineKind::kCuda;
  layer.shape = {2048, 768, 128, 8};
  layer.ranks = 8;
  layer.tokens_given = {1024};
  layer.numerics.combine_groups = 8;
  const Machine machine{EngineKind::kCuda, 8, 132};
  const sim::MachineDescription h200 = cli::load_machine(sim::kDefaultMachine);
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const ScheduleRequest request = {
        .direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine};
    const std::vector<Schedule> all = cli::tune_candidates(layer, direction, machine, h200, 16);
    ASSERT_EQ(all.size(), 17u);
    const std::vector<Schedule> near = tune::neighbours(all.front(), {}, request, 500);
    int far = 0;
    for (const Schedule& schedule : all) {
      EXPECT_TRUE(validate(schedule, request).empty()) << to_text(schedule);
      far += schedule != all.front() && schedule.wgrad != WgradOrder::kMixed &&
             std::find(near.begin(), near.end(), schedule) == near.end();
    }
    EXPECT_GT(far, 4);
    // The first of them is simulated to be faster than the default.
    const tune::SolveRequest solved = cli::solve_request({layer, direction}, h200, Placement());
    const cli::SimulatedLayer simulated(solved, cli::place_ids(layer, cli::make_ids(layer)), true);
    double best = 1e9;
    for (int i = 1; i < 4; ++i) best = std::min(best, simulated.milliseconds(all[i]));
    EXPECT_LT(best, 0.98 * simulated.milliseconds(all.front()));
  }
}

// No kernel of a process pushes into another one's expert rows.
TEST(Candidates, HaveKernelsWithAProcessARank) {
  const sim::MachineDescription& h200 = sim::shipped_machine("h200");
  cli::LayerOptions layer;
  layer.engine = EngineKind::kCuda;
  layer.ranks = 2;
  layer.shape = {2048, 768, 128, 8};
  layer.tokens_given = {256};
  Machine machine = sim::schedule_machine(h200, 2);
  const auto pushes = [&] {
    int count = 0;
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      for (const Schedule& schedule : cli::tune_candidates(layer, direction, machine, h200, 32)) {
        count += schedule.dispatch.transport == DispatchTransport::kPush;
      }
    }
    return count;
  };
  EXPECT_GT(pushes(), 0);
  machine.processes = true;
  EXPECT_EQ(pushes(), 0);
}

TEST(Journal, ASearchThatWasKilledGoesOnWithoutWhatKilledIt) {
  const TemporaryFolder folder;
  const auto file = folder / "made" / "a.tried";
  std::vector<Tried> schedules = numbered_schedules(5);
  {
    tune::Journal journal(file);
    schedules[1].verdict = Verdict::kSlower;
    schedules[2].verdict = Verdict::kWrong;
    schedules[3].verdict = Verdict::kInTheRunning;
    for (const std::size_t i : {1, 2, 3, 4}) journal.note(schedules[i]);  // 4 was about to be tried
  }
  std::vector<Tried> again = numbered_schedules(5);
  tune::Journal journal(file);
  journal.mark(again);
  EXPECT_EQ(again[0].verdict, Verdict::kUntried);
  EXPECT_EQ(again[1].verdict, Verdict::kSlower);
  EXPECT_EQ(again[2].verdict, Verdict::kWrong);
  EXPECT_EQ(again[3].verdict, Verdict::kUntried);
  EXPECT_EQ(again[4].verdict, Verdict::kFailed);
  EXPECT_EQ(again[4].reason, "the program ended while this was tried");

  // Over: slower ones may be tried anew, the others stay out.
  journal.finish();
  std::vector<Tried> next = numbered_schedules(5);
  tune::Journal(file).mark(next);
  EXPECT_EQ(next[1].verdict, Verdict::kUntried);
  EXPECT_EQ(next[2].verdict, Verdict::kWrong);
  EXPECT_EQ(next[4].verdict, Verdict::kFailed);
}

TEST(Journal, KnowsWhatFailedForOthers) {
  const TemporaryFolder folder;
  const auto file = folder / "a.online";
  std::vector<Tried> schedules = numbered_schedules(4);
  {
    tune::Journal other(file, 1);
    schedules[0].verdict = Verdict::kFailed;
    schedules[1].verdict = Verdict::kSlower;
    for (const std::size_t i : {0, 1, 2}) other.note(schedules[i]);  // 2 was about to be tried
  }
  tune::Journal journal(file);
  schedules[3].verdict = Verdict::kWrong;
  journal.note(schedules[3]);
  EXPECT_TRUE(journal.is_out(schedules[0].schedule));
  EXPECT_FALSE(journal.is_out(schedules[1].schedule));
  EXPECT_TRUE(journal.is_out(schedules[2].schedule));
  const tune::Journal later(file, 2);
  for (const std::size_t i : {0, 2, 3}) EXPECT_TRUE(later.is_out(schedules[i].schedule)) << i;
}

TEST(Journal, SearchesThatLiveHaveFilesOfTheirOwn) {
  const TemporaryFolder folder;
  const auto file = folder / "a.online";
  std::vector<Tried> schedules = numbered_schedules(3);
  {
    tune::Journal first(file);
    first.note(schedules[0]);  // under way
    tune::Journal second(file);
    EXPECT_FALSE(second.is_out(schedules[0].schedule));
    EXPECT_FALSE(tune::Journal::look(file).is_out(schedules[0].schedule));
    schedules[1].verdict = Verdict::kWrong;
    second.note(schedules[1]);
    schedules[0].verdict = Verdict::kInTheRunning;
    first.note(schedules[0]);
    schedules[2].verdict = Verdict::kUntried;
    second.note(schedules[2]);
    tune::Journal::forget(file);  // of no living one
    EXPECT_TRUE(std::filesystem::exists(file) && std::filesystem::exists(folder / "a.online1"));
  }
  const tune::Journal next(file);
  EXPECT_FALSE(next.is_out(schedules[0].schedule));
  EXPECT_TRUE(next.is_out(schedules[1].schedule));
  EXPECT_TRUE(next.is_out(schedules[2].schedule));  // its program has ended
  EXPECT_FALSE(std::filesystem::exists(folder / "a.online1.lock"));
  tune::Journal::forget(file);
  EXPECT_FALSE(std::filesystem::exists(folder / "a.online1"));
}

// Kernels are not taken from a folder that others may write.
TEST(Journal, MakesItsFolderForItsUserAlone) {
  const TemporaryFolder folder;
  const mode_t before = ::umask(0002);
  tune::Journal(folder / "made" / "deeper" / "a.online").note(numbered_schedules(1)[0]);
  tune::TunedFolder(folder / "tuned").store({});
  ::umask(before);
  for (const auto& made : {folder / "made", folder / "made" / "deeper", folder / "tuned"}) {
    struct stat found {};
    ASSERT_EQ(::stat(made.c_str(), &found), 0) << made;
    EXPECT_EQ(found.st_mode & 0777u, 0755u) << made;
  }
}

TEST(Journal, WhatMakesNoSenseCountsAsAbsent) {
  const TemporaryFolder folder;
  const auto file = folder / "a.tried";
  io::write_file(file, "failed\nwonderful\tfusion=layer\t\n\t\t\nfailed\t" + to_text(numbered(1)) + "\twhy\n");
  std::vector<Tried> schedules = numbered_schedules(2);
  tune::Journal(file).mark(schedules);
  EXPECT_EQ(schedules[0].verdict, Verdict::kUntried);
  EXPECT_EQ(schedules[1].reason, "why");
  tune::Journal nowhere{std::filesystem::path()};
  nowhere.note(schedules[1]);
  nowhere.finish();
}

}  // namespace
}  // namespace uniep::test
