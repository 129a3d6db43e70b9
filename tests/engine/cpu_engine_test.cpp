#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "engine/cpu/engine.h"
#include "model/elementwise.h"
#include "program/gemm_queues.h"
#include "program/schedule_space.h"
#include "support/branch_counts.h"
#include "support/disturb.h"
#include "support/expect_error.h"
#include "support/random_layer.h"

namespace uniep::test {
namespace {

GroupOptions cpu_options(int ranks, int workers) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = ranks;
  options.workers = workers;
  return options;
}

Schedule schedule_for(const Group& group, const LayerConfig& config, Direction direction, const std::string& text) {
  return resolve(
      PartialSchedule::parse(text),
      {.direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = group.machine()});
}

// Tiles large enough to take a while, several waves, all ranks busy.
RandomLayer steady_layer(int ranks) {
  RandomLayer layer = random_layer(4242, {.ranks = {ranks}, .most_local_experts = 4});
  Random random(1);
  cli::LayerData& data = layer.data;
  layer.config = {};
  layer.config.shape = data.shape = {128, 128, 4 * ranks, 3};
  data.tokens.assign(ranks, 150);
  const int64_t tokens = data.all_tokens();
  data.ids.clear();
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t start = random.between(0, data.shape.experts - 1);
    for (int64_t k = 0; k < 3; ++k) data.ids.push_back(static_cast<int32_t>((start + k) % data.shape.experts));
  }
  data.probs.assign(tokens * 3, 0.5f);
  const auto fill = [&](std::vector<BFloat16>& values, int64_t count, float scale) {
    values.resize(count);
    for (BFloat16& value : values) value = to_bfloat16(static_cast<float>(random.unit() - 0.5) * scale);
  };
  fill(data.x, tokens * 128, 4.0f);
  fill(data.dy, tokens * 128, 4.0f);
  fill(data.w1, data.shape.experts * 256 * 128, 0.3f);
  fill(data.w2, data.shape.experts * 128 * 128, 0.3f);
  return layer;
}

struct StageTimes {
  int64_t first_begin = INT64_MAX, last_end = 0;
};

std::map<std::string, StageTimes> stage_times(const std::vector<TileEvent>& events, int rank) {
  std::map<std::string, StageTimes> times;
  for (const TileEvent& event : events) {
    if (event.rank != rank) continue;
    StageTimes& stage = times[event.stage];
    stage.first_begin = std::min(stage.first_begin, event.begin_ns);
    stage.last_end = std::max(stage.last_end, event.end_ns);
  }
  return times;
}

TEST(CpuEngine, OverlapIsReal) {
  const RandomLayer layer = steady_layer(2);
  Group group(cpu_options(2, 2));
  cli::LayerRunner runner(group, layer.config, layer.data);
  std::vector<TileEvent> events;
  for (const char* transport : {"pull", "push"}) {
    const std::string fields = std::string("order.experts_per_wave=1,dispatch.transport=") + transport;
    runner.forward(schedule_for(group, layer.config, Direction::kForward, "fusion=layer," + fields), &events);
    for (int rank = 0; rank < 2; ++rank) {
      auto times = stage_times(events, rank);
      EXPECT_LT(times["fc1"].first_begin, times["dispatch"].last_end) << transport;
      EXPECT_LT(times["fc2"].first_begin, times["fc1"].last_end) << transport;
    }
    runner.forward(schedule_for(group, layer.config, Direction::kForward, "fusion=none," + fields), &events);
    for (int rank = 0; rank < 2; ++rank) {
      auto times = stage_times(events, rank);
      EXPECT_GE(times["fc1"].first_begin, times["dispatch"].last_end) << transport;
      EXPECT_GE(times["fc2"].first_begin, times["fc1"].last_end) << transport;
      EXPECT_GE(times["reduce"].first_begin, times["fc2"].last_end) << transport;
    }
  }
}

TEST(CpuEngine, WgradFillsTheTimeOfTheCombine) {
  const RandomLayer layer = steady_layer(2);
  Group group(cpu_options(2, 2));
  cli::LayerRunner runner(group, layer.config, layer.data);
  std::vector<TileEvent> events;
  runner.forward(schedule_for(group, layer.config, Direction::kForward, "auto"));
  runner.backward(schedule_for(group, layer.config, Direction::kBackward, "fusion=layer,backward.wgrad=after"),
                  &events);
  auto after = stage_times(events, 0);
  EXPECT_GE(after["wgrad_fc2"].first_begin, after["reduce"].last_end);
  runner.backward(schedule_for(group, layer.config, Direction::kBackward, "fusion=layer,backward.wgrad=fill"), &events);
  auto fill = stage_times(events, 0);
  EXPECT_LT(fill["wgrad_fc2"].first_begin, fill["reduce"].last_end);
}

TEST(CpuEngine, DedicatedWorkersDoWhatTheScheduleSays) {
  const RandomLayer layer = steady_layer(2);
  Group group(cpu_options(2, 5));
  cli::LayerRunner runner(group, layer.config, layer.data);
  std::vector<TileEvent> events;
  runner.forward(schedule_for(group, layer.config, Direction::kForward,
                              "fusion=layer,comm.where=sms,comm.dispatch_sms=1,comm.combine_sms=1,comm.reduce_sms=1,"
                              "combine.transport=staged,comm.reserve_sms=1"),
                 &events);
  std::map<std::string, std::set<int>> workers;
  for (const TileEvent& event : events) {
    EXPECT_FALSE(event.copy_agent);
    workers[event.stage].insert(event.worker);
  }
  EXPECT_EQ(workers["dispatch"], (std::set<int>{0}));
  EXPECT_EQ(workers["combine"], (std::set<int>{2}));
  EXPECT_EQ(workers["reduce"], (std::set<int>{3}));
  EXPECT_TRUE(workers["fc1"].count(0) + workers["fc1"].count(1) == workers["fc1"].size()) << "worker 4 is reserved";
}

// An even shuffle seed makes clusters of two. Their workers take a ticket for two positions, from one queue or from the
// two of mixed GEMMs; on one worker there is no pair.
TEST(CpuEngine, ClustersOfTwoTakeTheirTicketsTogether) {
  const RandomLayer layer = steady_layer(2);
  const cli::LayerResult expected = run_sequential(layer);
  BranchCounts branches;
  for (const int workers : {1, 2, 4, 6}) {
    for (const char* text :
         {"fusion=layer,order.interleave=mixed,queue=dynamic", "fusion=layer,order.interleave=phased,queue=dynamic",
          "fusion=layer,order.interleave=mixed,queue=static,tile.n=128", "fusion=none,queue=dynamic",
          "fusion=layer,order.interleave=mixed,queue=dynamic,comm.where=sms,comm.dispatch_sms=2"}) {
      if (std::string(text).find("sms=2") != std::string::npos && workers < 2) continue;
      for (const uint64_t seed : {1, 2, 14}) {
        GroupOptions options = cpu_options(2, workers);
        options.timeout_seconds = 20;
        Group group(options);
        disturb(group, {.shuffle_seed = seed});
        cli::LayerRunner runner(group, layer.config, layer.data);
        const Schedule schedule = schedule_for(group, layer.config, Direction::kForward, text);
        runner.forward(schedule);
        runner.backward(schedule_for(group, layer.config, Direction::kBackward, text));
        ASSERT_EQ(difference(runner.result(), expected), "") << text << " workers " << workers << " seed " << seed;
        const Program program(dynamic_cast<const cpu::CpuEngine&>(group.implementation())
                                  .request(layer.config, schedule, Direction::kForward, false),
                              runner.placement().state());
        const RankProgram& p = program.rank(0);
        const bool queues = has_gemm_queues(p, 0);
        branches.count("clusters of one", p.cluster == 1);
        branches.count("one pair", p.cluster == 2 && workers == 2);
        branches.count("several pairs", p.cluster == 2 && workers > 2);
        branches.count("pairs, static queues", p.cluster == 2 && !p.dynamic);
        branches.count("pairs, one dynamic queue", p.cluster == 2 && p.dynamic && !queues);
        branches.count("one pair, two dynamic queues", p.cluster == 2 && queues && workers == 2);
        branches.count("several pairs, two dynamic queues", p.cluster == 2 && queues && workers > 2);
        branches.count("pairs that copy first", p.cluster == 2 && p.on_sms);
      }
    }
  }
  branches.expect_all_taken();
}

// In shuffled calls lent workers leave at random, before their first task or later. They neither send nor sum.
TEST(CpuEngine, LentWorkersComeAndGo) {
  const RandomLayer layer = steady_layer(2);
  const cli::LayerResult expected = run_sequential(layer);
  BranchCounts branches;
  for (const char* const backward_text : {"fusion=layer", "fusion=pairs", "backward.wgrad=mixed"}) {
    for (const uint64_t seed : {0, 1, 2, 3, 4, 5, 6}) {
      GroupOptions options = cpu_options(2, 6);
      options.timeout_seconds = 20;
      Group group(options);
      disturb(group, {.shuffle_seed = seed});
      cli::LayerRunner runner(group, layer.config, layer.data);
      const std::string lent = "queue=dynamic,comm.reserve_sms=4,comm.lend_sms=on,combine.transport=staged,";
      std::vector<TileEvent> events;
      runner.forward(schedule_for(group, layer.config, Direction::kForward, lent + "fusion=layer"), &events);
      std::vector<TileEvent> backward_events;
      runner.backward(schedule_for(group, layer.config, Direction::kBackward, lent + backward_text), &backward_events);
      ASSERT_EQ(difference(runner.result(), expected), "") << backward_text << " seed " << seed;
      for (const auto& call : {events, backward_events}) {
        std::set<std::pair<int, int>> seen;
        for (const TileEvent& event : call) {
          if (event.worker < 2) continue;
          seen.insert({event.rank, event.worker});
          const std::string stage = event.stage;
          EXPECT_TRUE(stage != "combine" && stage != "reduce") << stage << " on a lent worker";
          branches.count("a lent worker dispatches", stage == "dispatch");
          branches.count("a lent worker multiplies", stage == "fc2");
          branches.count("a lent worker makes weight gradients", stage == "wgrad_fc1");
        }
        branches.count("a lent worker runs nothing", seed > 0 && seen.size() < 8);
        branches.count("all lent workers run something", seed > 0 && seen.size() == 8);
      }
      branches.count("clusters of two", seed > 0 && seed % 2 == 0);
    }
  }
  branches.expect_all_taken();
}

TEST(CpuEngine, ThousandsOfCallsAndTheEndOfTheEpochs) {
  const RandomLayer layer =
      random_layer(31, {.ranks = {2}, .most_local_experts = 3, .most_tokens = 8, .most_columns = 24});
  const cli::LayerResult expected = run_sequential(layer);
  Group group(cpu_options(2, 2));
  dynamic_cast<cpu::CpuEngine&>(group.implementation()).set_next_epoch(0xffffffffu - 1500);
  cli::LayerRunner runner(group, layer.config, layer.data);
  for (int call = 0; call < 1500; ++call) {
    runner.forward(sample_legal(call,
                                {.direction = Direction::kForward,
                                 .shape = layer.config.shape,
                                 .numerics = layer.config.numerics,
                                 .machine = group.machine()},
                                PartialSchedule::parse("save.xg=keep,save.z=keep")));
    runner.backward(sample_legal(call,
                                 {.direction = Direction::kBackward,
                                  .shape = layer.config.shape,
                                  .numerics = layer.config.numerics,
                                  .machine = group.machine()},
                                 PartialSchedule::parse("save.xg=keep")));
    if (call % 50 == 0 || call > 1480 || (call > 740 && call < 760)) {
      ASSERT_EQ(difference(runner.result(), expected), "") << "call " << call;
    }
  }
}

TEST(CpuEngine, WeightsAndGradientsByAddress) {
  for (const uint64_t seed : {61, 62, 63, 64}) {
    const RandomLayer layer = random_layer(seed);
    Group group(cpu_options(layer.ranks, 2));
    cli::LayerRunner runner(group, layer.config, layer.data, {.by_address = true});
    runner.forward(schedule_for(group, layer.config, Direction::kForward, "auto"));
    runner.backward(schedule_for(group, layer.config, Direction::kBackward, "auto"));
    EXPECT_EQ(difference(runner.result(), run_sequential(layer)), "") << layer.description;
  }
}

TEST(CpuEngine, SeveralForwardsMayBeOutstanding) {
  const RandomLayer a = random_layer(51, {.ranks = {2}, .fewest_tokens = 8});
  const RandomLayer b = random_layer(52, {.ranks = {2}, .fewest_tokens = 8});
  Group group(cpu_options(2, 2));
  cli::LayerRunner first(group, a.config, a.data), second(group, b.config, b.data);
  const auto schedule = [&](const RandomLayer& layer, Direction direction) {
    return schedule_for(group, layer.config, direction, "auto");
  };
  first.forward(schedule(a, Direction::kForward));
  second.forward(schedule(b, Direction::kForward));
  first.backward(schedule(a, Direction::kBackward));
  second.backward(schedule(b, Direction::kBackward));
  first.backward(schedule(a, Direction::kBackward));  // a saved state may be used again
  EXPECT_EQ(difference(first.result(), run_sequential(a)), "");
  EXPECT_EQ(difference(second.result(), run_sequential(b)), "");
}

TEST(CpuEngine, SixtyFourRanksMakeProgress) {
  RandomLayer layer = random_layer(64, {.ranks = {64}, .most_local_experts = 2, .most_tokens = 12, .most_columns = 32});
  Group group(cpu_options(64, 2));
  for (const char* text : {"auto", "dispatch.transport=push,queue=dynamic", "fusion=none"}) {
    const cli::LayerResult got =
        run_layer(group, layer.config, layer.data, schedule_for(group, layer.config, Direction::kForward, text),
                  schedule_for(group, layer.config, Direction::kBackward, text));
    ASSERT_EQ(difference(got, run_sequential(layer)), "") << text;
  }
}

TEST(CpuEngine, AllInstructionSetsGiveTheSameBits) {
  const RandomLayer layer =
      random_layer(71, {.ranks = {2}, .most_local_experts = 3, .most_tokens = 20, .fewest_tokens = 8});
  Group group(cpu_options(2, 1));
  std::vector<cli::LayerResult> results;
  for (const cpu::InstructionSet set :
       {cpu::InstructionSet::kPortable, cpu::InstructionSet::kAvx2, cpu::InstructionSet::kAvx512}) {
    if (!cpu::is_supported(set)) continue;
    dynamic_cast<cpu::CpuEngine&>(group.implementation()).set_instruction_set(set);
    results.push_back(run_layer(group, layer.config, layer.data,
                                schedule_for(group, layer.config, Direction::kForward, "auto"),
                                schedule_for(group, layer.config, Direction::kBackward, "auto")));
  }
  ASSERT_FALSE(results.front().y.empty());
  for (const cli::LayerResult& result : results) EXPECT_EQ(difference(result, results.front()), "");
  if (results.size() == 1) GTEST_SKIP() << "this machine has the portable set alone";
}

TEST(CpuEngine, ASlowRankDelaysButDoesNotChange) {
  const RandomLayer layer = random_layer(81, {.ranks = {4}, .most_local_experts = 4, .fewest_tokens = 8});
  Group group(cpu_options(4, 2));
  disturb(group, {.delayed_rank = 2, .delay_microseconds = 500});
  EXPECT_EQ(difference(run_layer(group, layer.config, layer.data,
                                 schedule_for(group, layer.config, Direction::kForward, "auto"),
                                 schedule_for(group, layer.config, Direction::kBackward, "auto")),
                       run_sequential(layer)),
            "");
}

struct CountingAllocator {
  std::size_t live = 0, most = 0, requested = 0;
  int64_t fail_after = -1;
  static void* allocate(void* context, std::size_t bytes, std::size_t alignment, int, Stream) {
    auto* self = static_cast<CountingAllocator*>(context);
    if (self->fail_after == 0) return nullptr;
    if (self->fail_after > 0) --self->fail_after;
    self->live += bytes;
    self->requested += bytes;
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  static void release(void* context, void* memory, std::size_t bytes, int, Stream) {
    static_cast<CountingAllocator*>(context)->live -= bytes;
    ::operator delete(memory, std::align_val_t(256));
  }
};

TEST(CpuEngine, TakesWhatItSaysFromTheCallersAllocatorAndGivesItBack) {
  const RandomLayer layer = random_layer(91, {.ranks = {2}, .fewest_tokens = 8});
  CountingAllocator counter;
  GroupOptions options = cpu_options(2, 2);
  options.allocator = {CountingAllocator::allocate, CountingAllocator::release, &counter};
  {
    Group group(options);
    cli::LayerRunner runner(group, layer.config, layer.data);
    const Schedule schedule = schedule_for(group, layer.config, Direction::kForward, "auto");
    std::size_t saved = 0, workspace = 0;
    for (const MemoryNeed& need : memory_need(group, layer.config, schedule, runner.placement())) {
      saved += need.saved_bytes;
      workspace += need.workspace_bytes;
    }
    runner.forward(schedule);
    EXPECT_EQ(counter.live, saved);
    EXPECT_EQ(counter.requested, saved + workspace);
    counter.fail_after = 1;
    try {
      runner.forward(schedule);
      FAIL() << "the allocator had no room";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kOutOfMemory);
    }
    counter.fail_after = -1;
    runner.forward(schedule);  // nothing was broken by it
  }
  EXPECT_EQ(counter.live, 0u);
}

TEST(CpuEngine, CapacityFixesTheMemoryWhateverTheRouting) {
  const RandomLayer layer = random_layer(93, {.ranks = {2}, .most_local_experts = 4, .fewest_tokens = 8});
  RandomLayer other = layer;
  other.data.ids.assign(other.data.ids.size(), -1);
  Group group(cpu_options(2, 2));
  const Capacity capacity{4096};
  cli::LayerRunner runner(group, layer.config, layer.data, {.capacity = capacity}),
      idle(group, other.config, other.data, {.capacity = capacity});
  const Schedule schedule = schedule_for(group, layer.config, Direction::kForward, "auto");
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const auto need = memory_need(group, layer.config, schedule, runner.placement(), {.direction = direction});
    const auto idle_need = memory_need(group, layer.config, schedule, idle.placement(), {.direction = direction});
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(need[rank].saved_bytes, idle_need[rank].saved_bytes);
      EXPECT_EQ(need[rank].workspace_bytes, idle_need[rank].workspace_bytes);
    }
  }
  runner.forward(schedule);
  runner.backward(schedule_for(group, layer.config, Direction::kBackward, "auto"));
  EXPECT_EQ(difference(runner.result(), run_sequential(layer)), "");
}

// What another engine keeps with a placement.
class ForeignTables final : public internal::EngineTables {
 public:
  internal::PlacementState with_counts(const internal::PlacementState& placed) const override { return placed; }
};

TEST(CpuEngine, BadCallsAreNamedBeforeAnythingRuns) {
  const RandomLayer layer = random_layer(95, {.ranks = {2}, .fewest_tokens = 8});
  Group group(cpu_options(2, 2));
  cli::LayerRunner runner(group, layer.config, layer.data);
  const Schedule good = schedule_for(group, layer.config, Direction::kForward, "auto");
  Schedule bad = good;
  bad.order.raster = 99;
  bad.comm.reserve_sms = 7;
  try {
    runner.forward(bad);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("order.raster"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("comm.reserve_sms"), std::string::npos) << error.what();
  }
  Schedule redispatch = schedule_for(group, layer.config, Direction::kForward, "save.xg=redispatch");
  runner.forward(redispatch);
  try {
    runner.backward(schedule_for(group, layer.config, Direction::kBackward, "save.xg=keep"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("save.xg"), std::string::npos) << error.what();
  }
  const std::vector<ForwardArguments> missing(2);
  auto foreign = std::make_shared<internal::PlacementState>(*runner.placement().state());
  foreign->engine_tables = std::make_shared<ForeignTables>();
  expect_error(Status::kInvalidArgument, "placement: made by a group of the cuda engine; the group's engine is cpu",
               [&] { forward(group, layer.config, good, Placement(foreign), missing); });
  EXPECT_THROW(forward(group, layer.config, good, runner.placement(), missing), Error);
  EXPECT_THROW(Group(cpu_options(0, 1)), Error);
  EXPECT_THROW(Group(cpu_options(65, 1)), Error);
  GroupOptions cuda = cpu_options(1, 1);
  cuda.launch = Launch::kProcesses;
  EXPECT_THROW(Group{cuda}, Error);
}

}  // namespace
}  // namespace uniep::test
