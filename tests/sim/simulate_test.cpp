#include "sim/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "cli/layer_options.h"
#include "program/walk.h"
#include "support/branch_counts.h"
#include "support/built_program.h"
#include "support/expect_error.h"

namespace uniep::sim {
namespace {

using test::BuiltProgram;
using TaskKey = std::tuple<int, int, int32_t, int32_t, int32_t>;  // rank, stage, expert, m, n

TaskKey key_of(int rank, const Task& task) {
  return {rank, static_cast<int>(task.stage), task.expert, task.m, task.n};
}

// All tasks of the lists, and how often each is to run: sums once for every two tokens.
std::map<TaskKey, int> listed_tasks(const Program& program) {
  std::map<TaskKey, int> tasks;
  for (int rank = 0; rank < program.ranks(); ++rank) {
    const RankProgram& p = program.rank(rank);
    for (int launch = 0; launch < p.launches; ++launch) {
      for (int kind = 0; kind < kListKinds; ++kind) {
        const ListKind list = static_cast<ListKind>(kind);
        for (int64_t position = 0; position < list_length(p, launch, list); ++position) {
          const Task task = list_task(p, launch, list, position);
          if (!task.has_tile()) continue;
          const int32_t tokens = std::min(kTokenBlock, p.tokens - task.m * kTokenBlock);
          tasks[key_of(rank, task)] += list == ListKind::kReduce ? (tokens + kCudaSumTokens - 1) / kCudaSumTokens : 1;
        }
      }
    }
  }
  return tasks;
}

// When each counter got how much, and each flag was stored, at the earliest, by what the tasks of a timeline signal.
class Signals {
 public:
  Signals(const Program& program, const std::vector<TimedTask>& timeline) {
    std::map<std::tuple<int, int, int64_t>, uint32_t> counted;
    std::vector<const TimedTask*> ordered;
    for (const TimedTask& timed : timeline) ordered.push_back(&timed);
    std::stable_sort(ordered.begin(), ordered.end(), [](const auto* a, const auto* b) { return a->end < b->end; });
    for (const TimedTask* timed : ordered) {
      const RankProgram& p = program.rank(timed->rank);
      bool stores = !is_flag_guarded(p, timed->task);
      for_each_counter_signal(p, timed->task, [&](const CounterSignal& signal) {
        const std::tuple<int, int, int64_t> at{timed->rank, static_cast<int>(signal.space), signal.index};
        counters_[at].emplace_back(timed->end, signal.amount);
        counted[at] += signal.amount;
        if (is_flag_guarded(p, timed->task)) stores = counted[at] == flag_guard(p, timed->task).threshold;
      });
      if (!stores) continue;
      for_each_flag_signal(p, timed->task, [&](const FlagSignal& signal) {
        flags_[{signal.peer, static_cast<int>(signal.space), signal.index}] = timed->end;
      });
    }
  }

  bool held(int rank, const CounterWait& wait, double time) const {
    const auto at = counters_.find({rank, static_cast<int>(wait.space), wait.index});
    uint64_t seen = 0;
    if (at != counters_.end()) {
      for (const auto& [end, amount] : at->second) seen += end <= time ? amount : 0;
    }
    return seen >= wait.threshold;
  }
  bool held(int rank, const FlagWait& wait, double time) const {
    if (wait.space == FlagSpace::kArrive) return true;
    const auto at = flags_.find({rank, static_cast<int>(wait.space), wait.index});
    return at != flags_.end() && at->second <= time;
  }

 private:
  std::map<std::tuple<int, int, int64_t>, std::vector<std::pair<double, uint32_t>>> counters_;
  std::map<std::tuple<int, int, int64_t>, double> flags_;
};

// Waits of the two tokens of a sum alone, as the GPU's warps have them.
template <typename Wait>
void for_each_wait_of(const RankProgram& p, const TimedTask& timed, Wait&& wait) {
  if (timed.task.stage != Stage::kReduce) {
    for_each_wait(p, timed.task, wait);
    return;
  }
  for (int32_t position = timed.token_begin; position < timed.token_end; ++position) {
    const int64_t first = static_cast<int64_t>(summed_token(p, position)) * p.topk;
    for (int64_t entry = first; entry < first + p.topk; ++entry) {
      const int32_t expert = p.expert_of_slot[entry];
      if (expert < 0) continue;
      const int32_t unit = p.combine_groups > 0 ? timed.task.m : block_of_row(p, expert, p.row_of_slot[entry]);
      wait(FlagWait{FlagSpace::kCombined, combined_flag(p, p.rank_of_expert[expert], unit, timed.task.n)});
    }
  }
}

void expect_right(const BuiltProgram& built, const Simulated& simulated) {
  const Program& program = *built.program;
  std::map<TaskKey, int> left = listed_tasks(program);
  const Signals signals(program, simulated.timeline);
  for (const TimedTask& timed : simulated.timeline) {
    ASSERT_GE(--left[key_of(timed.rank, timed.task)], 0) << built.text;
    ASSERT_LE(timed.wait_begin, timed.begin) << built.text;
    ASSERT_LE(timed.begin, timed.end) << built.text;
    bool held = true;
    for_each_wait_of(program.rank(timed.rank), timed,
                     [&](const auto& wait) { held &= signals.held(timed.rank, wait, timed.begin); });
    ASSERT_TRUE(held) << built.text << ": " << stage_name(timed.task.stage, program.rank(timed.rank).direction);
  }
  for (const auto& [key, count] : left) ASSERT_EQ(count, 0) << built.text;
  EXPECT_EQ(simulated.tasks, static_cast<int64_t>(simulated.timeline.size()));
  double last = 0, busy = 0;
  for (const TimedTask& timed : simulated.timeline) {
    last = std::max(last, timed.end);
    busy += timed.end - timed.begin;
  }
  EXPECT_GE(simulated.ms * 1e3, last);
  double told = 0;
  for (const auto& [name, stage] : simulated.stages) told += stage.busy_ms;
  const double workers = static_cast<double>(program.rank(0).workers) * program.ranks();
  EXPECT_NEAR(told * 1e3 * workers, busy, 1e-6 * busy + 1e-6);
  EXPECT_EQ(simulated.ms_per_rank.size(), static_cast<std::size_t>(program.ranks()));
}

// One worker runs one tile at a time, in each of its two agents; math warps that sum run beside the copy agent.
void expect_one_at_a_time(const BuiltProgram& built, const Simulated& simulated) {
  std::map<std::tuple<int, int, bool>, std::vector<std::pair<double, double>>> agents;
  for (const TimedTask& timed : simulated.timeline) {
    agents[{timed.rank, timed.worker, timed.copy_agent}].emplace_back(timed.begin, timed.end);
  }
  for (auto& [agent, spans] : agents) {
    std::sort(spans.begin(), spans.end());
    for (std::size_t i = 1; i < spans.size(); ++i) ASSERT_LE(spans[i - 1].second, spans[i].first + 1e-9) << built.text;
  }
}

TEST(Simulate, RunsEveryTaskOnceAfterItsWaits) {
  test::BranchCounts branches;
  const MachineDescription& machine = shipped_machine("h200");
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (uint64_t seed = 1; seed <= 600; ++seed) {
      const bool parts = seed % 5 == 0;  // which a random schedule of few tokens seldom does
      const BuiltProgram built =
          parts ? test::build(seed, direction, {.most_local_experts = 6, .most_tokens = 400},
                              PartialSchedule::parse("fusion=layer,order.experts_per_wave=1,order.blocks_per_wave=1,"
                                                     "tile.m=64"))
                : test::build(seed, direction);
      const Simulated simulated = simulate(*built.program, machine, {.record = true});
      expect_right(built, simulated);
      expect_one_at_a_time(built, simulated);
      if (::testing::Test::HasFatalFailure()) return;
      EXPECT_GE(simulated.ms * 1.0000001, simulated.limits.gemm_ms) << built.text;
      test::count_layer(branches, built.layer);
      test::count_schedule(branches, *built.program);
    }
  }
  branches.expect_all_taken();
}

TEST(Simulate, OneRankForAllEndsWhereTokensAreAsMany) {
  test::BranchCounts branches;
  const PartialSchedule relays =
      PartialSchedule::parse("comm.where=sms,dispatch.transport=push,comm.dispatch_sms=2,comm.relay_sms=2");
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (uint64_t seed = 1; seed <= 400; ++seed) {
      const BuiltProgram built =
          seed % 8 == 0 ? test::build(seed, direction, {}, relays, 6) : test::build(seed, direction);
      const auto& ranks = built.placement->rank;
      const bool even = std::all_of(ranks.begin(), ranks.end(),
                                    [&](const auto& rank) { return rank.tokens == ranks.front().tokens; });
      branches.count("as many tokens on several ranks", even && ranks.size() > 1);
      branches.count("others", !even);
      branches.count("push", even && ranks.size() > 1 && built.program->rank(0).push);
      branches.count("push, heavy experts first",
                     even && ranks.size() > 1 && built.program->rank(0).push && built.program->rank(0).heavy_first);
      branches.count("push, relays", even && ranks.size() > 1 && built.program->rank(0).relay_workers > 0);
      branches.count("combine groups", even && ranks.size() > 1 && built.program->rank(0).combine_groups > 0);
      const auto run = [&] { return simulate(*built.program, shipped_machine("h200"), {.one_rank = true}); };
      if (even) {
        EXPECT_EQ(run().ms_per_rank.size(), 1u) << built.text;
      } else {
        test::expect_error(Status::kInvalidArgument, "one rank for all: rank ", run);
      }
    }
  }
  branches.expect_all_taken();
}

// A layer of full size on a machine.
struct SizedLayer {
  explicit SizedLayer(const LayerShape& shape, int ranks, int64_t tokens, const std::string& routing = "uniform") {
    options.shape = shape;
    options.ranks = ranks;
    options.tokens_given = {tokens};
    options.routing = routing;
    placement = cli::place_ids(options, cli::make_ids(options));
  }
  Simulated run(const MachineDescription& machine, const std::string& schedule = "auto", SimulateOptions how = {},
                Direction direction = Direction::kForward) const {
    const Machine target = schedule_machine(machine, options.ranks);
    const Schedule resolved =
        resolve(PartialSchedule::parse(schedule),
                {.direction = direction, .shape = options.shape, .numerics = options.numerics, .machine = target});
    const Program program(simulated_request(options.shape, options.numerics, resolved, direction, machine),
                          placement.state());
    return simulate(program, machine, how);
  }
  cli::LayerOptions options;
  Placement placement;
};

const LayerShape kQwen{2048, 768, 128, 8};

TEST(Simulate, OneRankStandsForAllWhereRoutingIsUniform) {
  const SizedLayer layer(kQwen, 8, 4096);
  const MachineDescription& machine = shipped_machine("h200");
  for (const char* schedule : {"auto", "dispatch.transport=push", "comm.where=sms,comm.dispatch_sms=16",
                               "combine.transport=staged", "fusion=none", "order.interleave=phased"}) {
    const double all = layer.run(machine, schedule).ms, one = layer.run(machine, schedule, {.one_rank = true}).ms;
    EXPECT_NEAR(one / all, 1, 0.07) << schedule;
  }
}

TEST(Simulate, IsTheSameEachTime) {
  const SizedLayer layer(kQwen, 4, 512);
  const Simulated first = layer.run(shipped_machine("h200")), second = layer.run(shipped_machine("h200"));
  EXPECT_EQ(first.ms_per_rank, second.ms_per_rank);
  EXPECT_EQ(first.clock_ghz, second.clock_ghz);
}

// One run at a clock that is nearly the call's says what one at the call's own does, but for tiles that wait for
// memory, which follows no clock.
TEST(Simulate, AClockThatIsNearIsPutRight) {
  const MachineDescription& machine = shipped_machine("h200");
  const SizedLayer layer({4096, 1536, 32, 8}, 2, 4096);
  const std::pair<const char*, double> schedules[] = {
      {"auto", 0.0015}, {"fusion=none", 0.0015}, {"comm.where=sms,comm.dispatch_sms=8", 0.0015}, {"tile.n=128", 0.006}};
  for (const State state : {State::kSustained, State::kPaused}) {
    for (const auto& [schedule, most] : schedules) {
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        SimulateOptions how{.state = state, .one_rank = true};
        how.near_ghz = layer.run(machine, schedule, how, direction).clock_ghz;
        const Simulated at_it = layer.run(machine, schedule, how, direction);
        for (const double off : {0.95, 0.992, 1.008}) {
          SimulateOptions beside = how;
          beside.near_ghz *= off;
          const Simulated near = layer.run(machine, schedule, beside, direction);
          EXPECT_NEAR(near.ms / at_it.ms, 1, most) << schedule << ", " << off;
          EXPECT_NEAR(near.clock_ghz / at_it.clock_ghz, 1, most) << schedule << ", " << off;
          EXPECT_NEAR(near.load / at_it.load, 1, most) << schedule << ", " << off;
          EXPECT_NEAR(near.limits.gemm_ms / at_it.limits.gemm_ms, 1, most) << schedule << ", " << off;
        }
      }
    }
  }
}

TEST(Simulate, WaitsForTheBusiestRank) {
  const SizedLayer even(kQwen, 4, 2048), uneven(kQwen, 4, 2048, "zipf:1");
  const Simulated first = even.run(shipped_machine("h200")), second = uneven.run(shipped_machine("h200"));
  EXPECT_GT(second.ms, 1.2 * first.ms);
  EXPECT_GT(second.limits.gemm_ms, 1.2 * first.limits.gemm_ms);
}

TEST(Simulate, FollowsTheMachine) {
  const SizedLayer layer(kQwen, 8, 4096);
  MachineDescription machine = shipped_machine("h200");
  const double as_is = layer.run(machine).ms;
  for (LinkRate& rate : machine.links[0].rates) rate.read /= 4, rate.write /= 4, rate.both /= 4;
  const Simulated slow_links = layer.run(machine);
  EXPECT_GT(slow_links.ms, 2 * as_is);
  EXPECT_STREQ(slow_links.limits.name(), "links");
  machine = shipped_machine("h200");
  for (TileCost& tile : machine.tiles) tile.cycles_per_k *= 4, tile.cycles *= 4;
  EXPECT_STREQ(layer.run(machine).limits.name(), "gemm");
  EXPECT_GT(layer.run(machine).ms, 2 * as_is);
  EXPECT_LT(layer.run(shipped_machine("gb200_nvl72")).ms, as_is);
  EXPECT_GT(layer.run(shipped_machine("h800")).ms, as_is);
}

TEST(Simulate, AllShippedMachinesRunBothDirections) {
  const SizedLayer layer({1024, 512, 64, 4}, 4, 512);
  for (const std::string& name : shipped_machine_names()) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      EXPECT_GT(layer.run(shipped_machine(name), "auto", {}, direction).ms, 0) << name;
    }
  }
}

TEST(Simulate, RefusesMoreRanksThanTheMachineLinks) {
  const SizedLayer layer(kQwen, 16, 64);
  test::expect_error(Status::kInvalidArgument, "ranks: 16; machine h200 links at most 8",
                     [&] { layer.run(shipped_machine("h200")); });
}

// Copy warps sum beside tiles, also where SMs dispatch.
TEST(Simulate, CopyWarpsSumBesideTiles) {
  const SizedLayer layer(kQwen, 4, 4096);
  for (const char* schedule : {"comm.where=warps", "comm.where=sms,comm.dispatch_sms=16"}) {
    MachineDescription machine = shipped_machine("h200");
    double took[2] = {};  // the first sum of a copy warp, as described and where sums beside tiles are slow
    for (double& first_took : took) {
      const Simulated call = layer.run(machine, schedule, {.record = true});
      double last_tile = 0, first_sum = call.ms * 1e3;
      for (const TimedTask& timed : call.timeline) {
        if (timed.task.stage == Stage::kSecondGemm) last_tile = std::max(last_tile, timed.begin);
        if (timed.task.stage != Stage::kReduce || !timed.copy_agent || timed.begin >= first_sum) continue;
        first_sum = timed.begin;
        first_took = timed.end - timed.begin;
      }
      EXPECT_LT(first_sum, 0.9 * last_tile) << schedule;
      machine.sums.beside /= 8;
    }
    EXPECT_GT(took[1], 4 * took[0]) << schedule;
  }
}

// As many tasks as it has warps are under way on an SM that dispatches, so that it does not wait for each.
TEST(Simulate, SmsThatDispatchHideTheLatencyOfLinks) {
  const SizedLayer layer(kQwen, 2, 4096);
  constexpr const char* kFewSms = "comm.where=sms,comm.dispatch_sms=8";
  MachineDescription machine = shipped_machine("h200");
  const double as_is = layer.run(machine, kFewSms).ms;
  machine.links[0].latency += 20;
  EXPECT_LT(layer.run(machine, kFewSms).ms, 1.2 * as_is);
}

// A pipeline of two stages asks for operands too late; what workers do not share comes through the port of each.
TEST(Simulate, TilesWaitForTheirOperands) {
  const SizedLayer layer(kQwen, 1, 4096);
  MachineDescription machine = shipped_machine("h200");
  const auto over = [&](const char* schedule, const char* other) {
    return layer.run(machine, schedule).ms / layer.run(machine, other).ms;
  };
  EXPECT_GT(over("tile.stages=2", "tile.stages=4"), 1.15);
  EXPECT_LT(over("tile.stages=2", "tile.stages=4"), 1.6);
  EXPECT_LT(over("tile.stages=3", "tile.stages=4"), 1.1);
  machine.pipeline.port = 40;  // narrow ones
  EXPECT_GT(over("tile.n=128,tile.cluster=1", "tile.n=128,tile.cluster=2"), 1.06);
  const double clock = layer.run(machine, "tile.stages=2").clock_ghz;
  machine.clock.waiting = 1;
  EXPECT_LT(layer.run(machine, "tile.stages=2").clock_ghz, 0.98 * clock);
  // Memory does not follow the workers' clock: at twice the clock a tile that it keeps waiting gains little.
  const auto faster = [&](const char* schedule) {
    const auto ms = [&](double ghz) { return layer.run(machine, schedule, {.limit_ghz = ghz}).ms; };
    return ms(0.8) / ms(1.6);
  };
  machine.clock.highest = machine.clock.pause = 3;
  machine.pipeline.port *= shipped_machine("h200").clock.highest / 3;
  EXPECT_LT(faster("tile.n=128,tile.cluster=1"), 0.95 * faster("tile.stages=4"));
  machine.pipeline = {};
  EXPECT_DOUBLE_EQ(over("tile.stages=2", "tile.stages=4"), 1.0);
  EXPECT_LT(over("tile.n=128,tile.cluster=1", "tile.n=128,tile.cluster=2"), 1.04);
}

// Several ranks lose clock where power limits it, begin later, and pull chunks more slowly than one alone.
TEST(Simulate, SeveralRanksLoseToOne) {
  MachineDescription machine = shipped_machine("h200");
  machine.clock.linked = machine.time.peers = machine.copy.chunk_remote = 0;
  const SizedLayer one(kQwen, 1, 2048), two(kQwen, 2, 2048);
  const Simulated alone = one.run(machine), before = two.run(machine);
  const double pushed = two.run(machine, "dispatch.transport=push").ms;
  const SimulateOptions paused{.state = State::kPaused};
  const double rested = two.run(machine, "auto", paused).ms;

  MachineDescription linked = machine;
  linked.clock.linked = 0.1;
  EXPECT_NEAR(clock_of(linked.clock, {}, 0.95, 5000, true) / clock_of(linked.clock, {}, 0.95, 5000, false), 0.9, 1e-9);
  EXPECT_LT(two.run(linked).clock_ghz, 0.97 * before.clock_ghz);
  EXPECT_EQ(two.run(linked, "auto", paused).ms, rested);
  EXPECT_EQ(one.run(linked).ms, alone.ms);

  MachineDescription later = machine;
  later.time.peers = 100;
  EXPECT_NEAR(two.run(later, "auto", paused).ms - rested, 0.1, 0.01);
  EXPECT_EQ(one.run(later).ms, alone.ms);

  MachineDescription remote = machine;
  remote.copy.chunk_remote = 10;
  const auto busy = [](const Simulated& call) { return call.stages.at("dispatch").busy_ms; };
  EXPECT_GT(busy(two.run(remote)), 1.2 * busy(before));
  EXPECT_EQ(two.run(remote, "dispatch.transport=push").ms, pushed);
  EXPECT_EQ(one.run(remote).ms, alone.ms);
}

// At the power limit a call follows its own load at once and that of the calls beside it over seconds.
TEST(Simulate, CallsThatTakeTurnsShareAPowerLimit) {
  const Clock& clock = shipped_machine("h200").clock;
  const auto alone = [&](double load) { return clock_of(clock, {}, load, 2000); };
  const auto beside = [&](double load, double limit) { return clock_of(clock, {.limit_ghz = limit}, load, 2000); };
  const auto limit_of = [&](double load, double other, int others) {
    Turns turns;
    turns.add(2000, load);
    turns.add(2000, other, others);
    EXPECT_EQ(turns.calls, 1 + others);
    return turns.limit_ghz(clock);
  };
  EXPECT_NEAR(beside(0.9, limit_of(0.9, 0.9, 3)), alone(0.9), 1e-9);
  const double mixed = limit_of(0.95, 0.6, 1), mostly_light = limit_of(0.95, 0.6, 9);
  EXPECT_GT(beside(0.95, mixed), 1.01 * alone(0.95));
  EXPECT_GT(mostly_light, 1.01 * mixed);
  EXPECT_LT(beside(0.6, mixed), 0.99 * alone(0.6));
  EXPECT_GT(beside(0.6, mixed), 1.02 * beside(0.95, mixed));
  // No call runs faster than after a pause.
  EXPECT_EQ(beside(1, 3), clock.pause);
  EXPECT_EQ(beside(0.1, 3), clock.highest);
  EXPECT_EQ(clock_of(clock, {.state = State::kPaused, .limit_ghz = 1}, 0.9, 2000),
            clock_of(clock, {.state = State::kPaused}, 0.9, 2000));

  const SizedLayer layer(kQwen, 1, 4096);
  const MachineDescription& machine = shipped_machine("h200");
  const Simulated as_is = layer.run(machine), slower = layer.run(machine, "auto", {.limit_ghz = 0.9});
  EXPECT_LT(slower.clock_ghz, 0.95 * as_is.clock_ghz);
  EXPECT_GT(slower.ms, 1.05 * as_is.ms);
  EXPECT_GT(as_is.load, 0.5);
  EXPECT_LE(as_is.load, 1);
}

TEST(Simulate, CopiesWaitForTheirRingAndFollowTheClock) {
  const SizedLayer layer(kQwen, 1, 4096);
  const auto follows = [&](const std::string& schedule, double WarpCopies::*constant, double value) {
    MachineDescription machine = shipped_machine("dgx_h100");
    machine.copy.clocked = 0.4;
    const double as_is = layer.run(machine, schedule).ms;
    machine.copy.*constant = value;
    return layer.run(machine, schedule).ms / as_is;
  };
  EXPECT_LT(follows("fusion=none,comm.stages=1", &WarpCopies::ring, 0), 0.985);
  EXPECT_DOUBLE_EQ(follows("fusion=none,comm.stages=3", &WarpCopies::ring, 0), 1.0);
  const std::string staged = "fusion=none,combine.transport=staged";
  EXPECT_LT(follows(staged + ",comm.stages=1", &WarpCopies::ring, 0), 0.985);
  EXPECT_LT(follows(staged + ",comm.chunk_bytes=512", &WarpCopies::send_fixed, 0.2), 0.95);
  EXPECT_LT(follows("comm.where=sms,comm.dispatch_sms=1", &WarpCopies::clocked, 1), 0.95);  // the GPU has little to do
  EXPECT_GT(follows("comm.where=sms,comm.dispatch_sms=1", &WarpCopies::clocked, 0), 1.05);
  const std::string by_warps = "dispatch.dedup=off,comm.chunk_bytes=512,comm.reserve_sms=120";
  EXPECT_GT(follows(by_warps, &WarpCopies::clocked, 0), 1.03);
}

// What copies take from tiles goes by rows and chunks, not by how long the copies last or who makes them.
TEST(Simulate, CopiesTakeFromTilesByWhatTheyPut) {
  const SizedLayer layer({4096, 1536, 16, 8}, 1, 4096);
  const auto taken = [&](const std::string& schedule, double chunk_in) {
    MachineDescription machine = shipped_machine("h200");
    machine.copy.chunk_in *= chunk_in;
    machine.slowdown.copies = 0.2;
    const double with = layer.run(machine, schedule, {.limit_ghz = 1.3}).ms;
    machine.slowdown.copies = 0;
    return with - layer.run(machine, schedule, {.limit_ghz = 1.3}).ms;
  };
  const double by_warps = taken("auto", 1);
  EXPECT_GT(by_warps, 0.02);
  EXPECT_NEAR(taken("auto", 2), by_warps, 0.15 * by_warps);
  EXPECT_NEAR(taken("dispatch.dedup=off", 1), by_warps, 0.15 * by_warps);
  EXPECT_GT(taken("comm.where=sms,comm.dispatch_sms=16", 1), 0.5 * by_warps);
  EXPECT_GT(taken("comm.chunk_bytes=1024", 1), 1.2 * by_warps);
}

// More column chunks are narrower pieces of a row, each of which costs its own time where the sums are what is left.
TEST(Simulate, NarrowSumsTakeLonger) {
  const SizedLayer layer({2048, 768, 16, 8}, 1, 4096);
  const auto with = [&](const char* chunks) {
    return layer.run(shipped_machine("h200"), std::string("combine.column_chunks=") + chunks, {.limit_ghz = 1.3}).ms;
  };
  EXPECT_GT(with("8"), 1.01 * with("4"));
  EXPECT_GT(with("4"), 1.003 * with("2"));
}

// With groups a row a group is sent and summed, in whatever order a token names its experts. Of four groups, eight
// experts of 32 are in 3.72 in the mean.
TEST(Simulate, GroupsSendAndSumARowEach) {
  SizedLayer layer({1024, 256, 32, 8}, 2, 1024);
  const auto ratio = [&](auto&& slow) {
    MachineDescription machine = shipped_machine("h200");
    slow(machine);
    double ms[2];
    for (int i = 0; i < 2; ++i) {
      layer.options.numerics.combine_groups = 4 * i;
      ms[i] = layer.run(machine, "fusion=none,combine.transport=staged").ms;
    }
    return ms[1] / ms[0];
  };
  const double sums = ratio([](MachineDescription& machine) { machine.sums.alone = machine.sums.beside = 1; });
  EXPECT_NEAR(sums, (3.72 + 1) / (8 + 1), 0.05);
  const double links = ratio([](MachineDescription& machine) { machine.links[0].rates[0].write = 0.2; });
  EXPECT_NEAR(links, 3.72 / 8, 0.02);
}

// Nodes that are linked by less than what is inside them: rows cross once a node.
TEST(Simulate, LinksBetweenNodesCost) {
  const SizedLayer layer(kQwen, 16, 512);
  EXPECT_GT(layer.run(shipped_machine("h100_ib2")).ms, 1.5 * layer.run(shipped_machine("gb200_nvl72")).ms);
  MachineDescription without = shipped_machine("h100_ib2");
  without.links[1].relay = false;
  EXPECT_GT(layer.run(without).limits.links_ms, layer.run(shipped_machine("h100_ib2")).limits.links_ms);
}

}  // namespace
}  // namespace uniep::sim
