#include "program/canonical.h"

#include <gtest/gtest.h>

#include <bit>
#include <set>

#include "program/buildable.h"
#include "program/edges.h"
#include "program/recompute.h"
#include "program/schedule_space.h"
#include "program/task_work.h"
#include "support/branch_counts.h"
#include "support/built_program.h"
#include "support/random_schedule_case.h"
#include "support/walked.h"

namespace uniep::test {
namespace {

class Fingerprint {
 public:
  template <typename... Values>
  void add(Values... values) {
    (mix(static_cast<uint64_t>(values)), ...);
  }
  uint64_t value() const { return value_; }

 private:
  void mix(uint64_t value) { value_ = (std::rotl(value_, 5) ^ value) * 0x9e3779b97f4a7c15u; }
  uint64_t value_ = 1;
};

// What all agents of all ranks do, in order: tasks, their work and moves, waits and signals.
uint64_t fingerprint(const Program& program) {
  Fingerprint print;
  std::vector<Move> moves;
  for (int rank = 0; rank < program.ranks(); ++rank) {
    const RankProgram& p = program.rank(rank);
    std::mt19937_64 random(11);
    const Walked walked = walk_rank(p, random);
    print.add(p.launches, p.workers, p.cluster);
    for (const std::vector<Task>& tasks : walked.of_agent) {
      print.add(tasks.size());
      for (const Task& task : tasks) {
        const TaskWork work = task_work(program, p, task, &moves);
        print.add(task.stage, task.expert, task.m, task.n, work.gemm.m, work.gemm.n, work.gemm.k);
        print.add(work.read_bytes, work.written_bytes, work.rows_taken, work.rows_put, work.row_bytes);
        for (const Move& move : moves) print.add(move.from, move.to, move.bytes);
        struct Waits {
          Fingerprint& print;
          void operator()(const CounterWait& wait) { print.add(wait.space, wait.index, wait.threshold); }
          void operator()(const FlagWait& wait) { print.add(wait.space, wait.index); }
        };
        for_each_wait(p, task, Waits{print});
        std::map<std::pair<int, int64_t>, uint32_t> signals;
        for_each_counter_signal(p, task, [&](const CounterSignal& signal) {
          signals[{static_cast<int>(signal.space), signal.index}] += signal.amount;
        });
        for (const auto& [where, amount] : signals) print.add(where.first, where.second, amount);
        for_each_flag_signal(p, task, [&](const FlagSignal& s) { print.add(s.peer, s.space, s.index); });
      }
    }
  }
  return print.value();
}

// A layer on a machine, without a Schedule yet.
struct LayerCase {
  BuiltProgram built;
  Direction direction = Direction::kForward;
  LayerShape shape;
  Numerics numerics;
  Machine machine;
  int pull_parts = 1;

  ScheduleRequest request() const {
    return {.direction = direction, .shape = shape, .numerics = numerics, .machine = machine};
  }
  Schedule canonical_of(const Schedule& schedule) const { return canonical(schedule, request()); }
  std::vector<std::string> violations(const Schedule& schedule) const { return validate(schedule, request()); }
  uint64_t fingerprint_of(const Schedule& schedule) const {
    ProgramRequest request{shape, numerics, schedule, direction, dispatches_x_again(schedule, true), machine.workers};
    request.redispatch = request.redispatch && direction == Direction::kBackward;
    const bool forward = direction == Direction::kForward;
    const GemmStage first = forward ? GemmStage::kFc1 : GemmStage::kDgradFc2;
    if (machine.engine == EngineKind::kCuda) request.cluster = schedule.tile_of(first).cluster;
    request.pull_parts = pull_parts;
    return fingerprint(Program(request, built.placement));
  }
};

LayerCase layer_case(uint64_t seed, const RandomLayerLimits& limits = {.ranks = {1, 2, 4}, .most_local_experts = 6}) {
  LayerCase c;
  RandomBits random(seed);
  c.direction = below(random, 2) == 0 ? Direction::kForward : Direction::kBackward;
  c.built = build(seed, c.direction, limits);
  c.shape = c.built.layer.data.shape;
  c.numerics = c.built.layer.config.numerics;
  c.machine.ranks = c.built.layer.ranks;
  c.machine.engine = below(random, 2) == 0 ? EngineKind::kCpu : EngineKind::kCuda;
  c.machine.workers = pick(random, std::vector<int>{1, 2, 4, 6});
  c.pull_parts = 1 + below(random, 4);
  return c;
}

TEST(Canonical, RunsAsTheScheduleDoesAndIsItsOwn) {
  BranchCounts branches;
  std::set<std::string> merged;
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    const LayerCase c = layer_case(seed);
    const char* const fixed = seed % 4 == 0   ? "fusion=none"
                              : seed % 4 == 1 ? "fusion=layer,order.interleave=mixed"
                                              : "auto";
    PartialSchedule given = PartialSchedule::parse(fixed);
    if (c.machine.engine == EngineKind::kCuda && c.direction == Direction::kBackward) given = {};
    const Schedule schedule = sample_legal(seed, c.request(), given);
    const Schedule name = c.canonical_of(schedule);
    const std::string text = c.built.layer.description + "\n" + to_text(schedule) + "\nis\n" + to_text(name);
    ASSERT_TRUE(c.violations(name).empty()) << text << listed(c.violations(name));
    ASSERT_EQ(to_text(c.canonical_of(name)), to_text(name)) << text;
    ASSERT_EQ(c.fingerprint_of(schedule), c.fingerprint_of(name)) << text;
    // What is compiled into kernels.
    const bool forward = c.direction == Direction::kForward;
    for (const GemmStage stage : stages_of(c.direction)) {
      TileShape tile = schedule.tile_of(stage), of_name = name.tile_of(stage);
      if (c.machine.engine == EngineKind::kCpu) {
        tile.cluster = of_name.cluster = 1;
        tile.pipeline = of_name.pipeline = Pipeline::kCooperative;
      }
      ASSERT_EQ(tile, of_name) << text;
    }
    ASSERT_EQ(schedule.comm.stages, name.comm.stages);
    if (schedule.comm.chunk_bytes != name.comm.chunk_bytes) {
      ASSERT_GE(std::min(schedule.comm.chunk_bytes, name.comm.chunk_bytes), c.shape.hidden * 2) << text;
    }
    const std::vector<std::string> reasons = canonical_reasons(schedule, c.request());
    EXPECT_EQ(reasons.empty(), schedule == name) << text;
    for (const std::string& reason : reasons) merged.insert(reason.substr(0, reason.find('=')));
    EXPECT_TRUE(canonical_differences(schedule, name, c.request()).empty());
    branches.count("forward", forward);
    branches.count("backward", !forward);
    branches.count("cpu", c.machine.engine == EngineKind::kCpu);
    branches.count("cuda", c.machine.engine == EngineKind::kCuda);
    branches.count("already canonical", schedule == name);
  }
  branches.expect_all_taken();
  for (const char* const field :
       {"dispatch.dedup", "comm.chunk_bytes", "order.experts_per_wave", "order.blocks_per_wave", "order.experts",
        "order.interleave", "order.second_share", "order.source_rotation", "order.raster", "queue", "tile.n",
        "tile.cluster", "tile.pipeline", "combine.column_chunks", "backward.wgrad", "backward.wgrad_reserve", "save.xg",
        "save.z"}) {
    EXPECT_TRUE(merged.count(field) == 1) << field << " was never merged";
  }
}

// The other way round it need not hold, but fields of the Program must not be merged where they count.
TEST(Canonical, KeepsApartWhatRunsOtherwise) {
  std::map<std::string, std::pair<int, int>> by_field;  // pairs with other names, of them with other Programs
  const std::vector<int> of_program{kFusion,
                                    kDispatchTransport,
                                    kDispatchDedup,
                                    kCommWhere,
                                    kOrderExpertsPerWave,
                                    kOrderInterleave,
                                    kOrderSourceRotation,
                                    kOrderRaster,
                                    kQueue,
                                    kTileM,
                                    kTileN,
                                    kCombineTransport,
                                    kCombineColumnChunks,
                                    kBackwardWgrad,
                                    kBackwardWgradReserve,
                                    kOrderBlocksPerWave,
                                    kOrderExperts,
                                    kOrderSecondShare,
                                    kCommRelaySms};
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    LayerCase c =
        layer_case(seed, {.ranks = {2, 4}, .most_local_experts = 6, .most_tokens = 600, .fewest_tokens = 300});
    c.machine.engine = EngineKind::kCpu;
    c.machine.workers = 4;
    RandomBits random(seed);
    const Schedule schedule = sample_legal(seed, c.request());
    const int field = of_program[below(random, of_program.size())];
    Schedule other = schedule;
    descriptor_of(field).set(other, pick(random, legal_values(descriptor_of(field).field, 8192)));
    if (!c.violations(other).empty()) continue;
    const bool apart = !canonical_differences(schedule, other, c.request()).empty();
    const bool differ = c.fingerprint_of(schedule) != c.fingerprint_of(other);
    ASSERT_TRUE(apart || !differ) << c.built.layer.description << "\n" << to_text(schedule) << "\n" << to_text(other);
    by_field[name_of(field)].first += apart ? 1 : 0;
    by_field[name_of(field)].second += differ ? 1 : 0;
  }
  int apart = 0, differ = 0;
  for (const auto& [field, counts] : by_field) {
    apart += counts.first;
    differ += counts.second;
    std::printf("%-26s %4d apart, %4d of them differ\n", field.c_str(), counts.first, counts.second);
  }
  EXPECT_GT(differ, apart * 7 / 10);
}

TEST(CountSpace, DistinctIsTheNumberOfCanonicalSchedules) {
  BranchCounts branches;
  for (uint64_t seed = 1; !branches.never_taken().empty() || seed <= 300; ++seed) {
    ASSERT_LT(seed, 2000U);
    RandomBits random(seed);
    const ScheduleCase c = random_schedule_case(random);
    SpaceLimits limits;
    std::set<std::string> vary;
    const int fields = 2 + below(random, 5);
    for (int i = 0; i < fields; ++i) {
      const int field = below(random, 8) == 0 ? below(random, kFieldCount) : below(random, kCommonFieldCount);
      if (field != kCommDispatchSms && field != kCommRelaySms && field != kCommCombineSms) vary.insert(name_of(field));
    }
    limits.vary.assign(vary.begin(), vary.end());
    // Fixed values that are not canonical must not hide Schedules.
    const Schedule any = sample_legal(seed, c.request());
    for (const int field :
         {kFusion, kOrderInterleave, kOrderExpertsPerWave, kOrderRaster, kQueue, kDispatchTransport}) {
      if (below(random, 3) != 0 || vary.count(name_of(field)) > 0) continue;
      limits.fixed.set(name_of(field), value_text(descriptor_of(field).field, *descriptor_of(field).get(any)));
    }
    const uint64_t visits = count_legal(c.request(), limits);
    if (visits > 3000) continue;
    const bool over_limits = !engine_limits(c.request()).empty();
    std::set<std::string> names;
    uint64_t built = 0;
    for_each_legal(
        c.request(),
        [&](const Schedule& schedule) {
          ++built;
          EXPECT_TRUE(over_limits != buildable(schedule, c.request()).empty());
          names.insert(to_text(canonical(schedule, c.request())));
          return true;
        },
        limits);
    const SpaceCounts counts = count_space(c.request(), limits);
    std::string text = std::to_string(seed) + " vary";
    for (const std::string& field : limits.vary) text += " " + field;
    ASSERT_GE(counts.legal, counts.buildable) << text;
    ASSERT_EQ(counts.buildable, over_limits ? 0 : built) << text;
    ASSERT_TRUE(counts.distinct.has_value()) << text;
    ASSERT_EQ(*counts.distinct, over_limits ? 0 : names.size()) << text;
    branches.count("something runs alike", names.size() < built);
    branches.count("nothing does", names.size() == built && built > 1);
    branches.count("own tiles vary", !vary.empty() && std::any_of(vary.begin(), vary.end(), [](const auto& field) {
                     return find_field(field).value() >= kCommonFieldCount;
                   }));
    branches.count("cuda", c.machine.engine == EngineKind::kCuda && built > 1);
    branches.count("backward on cuda",
                   c.machine.engine == EngineKind::kCuda && c.direction == Direction::kBackward && built > 1);
    branches.count("more than the engine runs", over_limits);
    branches.count("legal elsewhere, not built", counts.legal > counts.buildable && !over_limits);
  }
  branches.expect_all_taken();
}

TEST(Buildable, SaysInWordsWhatHasNoKernel) {
  const LayerShape shape{4096, 1536, 128, 8};
  const Machine machine{EngineKind::kCuda, 8, 132};
  const auto reasons = [&](const std::string& text, Direction direction = Direction::kForward, bool processes = false,
                           const LayerShape& of = {4096, 1536, 128, 8}, int ranks = 8) {
    Machine with = machine;
    with.ranks = ranks;
    with.processes = processes;
    const Schedule schedule =
        fill(PartialSchedule::parse(text), {.direction = direction, .shape = of, .machine = with});
    return buildable(schedule, {.direction = direction, .shape = of, .machine = with});
  };
  EXPECT_TRUE(reasons("auto").empty());
  EXPECT_TRUE(reasons("dispatch.transport=push").empty());
  const auto expect_one = [](const std::vector<std::string>& lines, const std::string& begin) {
    ASSERT_EQ(lines.size(), 1U) << listed(lines);
    EXPECT_EQ(lines[0].rfind(begin, 0), 0U) << lines[0];
  };
  expect_one(reasons("dispatch.transport=push", Direction::kForward, true), "dispatch.transport=push");
  expect_one(reasons("tile.m=64"), "tile.m=64");
  expect_one(reasons("tile.pipeline=pingpong"), "tile.pipeline=pingpong");
  EXPECT_TRUE(reasons("fusion=layer,backward.wgrad=after", Direction::kBackward).empty());
  expect_one(reasons("fusion=layer,order.experts_per_wave=1", Direction::kBackward), "order.experts_per_wave=1");
  expect_one(reasons("fusion=layer,order.interleave=mixed,order.experts_per_wave=16", Direction::kBackward),
             "order.interleave=mixed");
  expect_one(reasons("auto", Direction::kForward, false, shape, 16), "ranks=16");
  expect_one(reasons("auto", Direction::kForward, false, {4096, 1536, 128, 40}), "topk=40");
  expect_one(reasons("auto", Direction::kForward, false, {4096, 1536, 4096, 8}), "experts=4096");
  const Machine cpu{EngineKind::kCpu, 64, 4};
  EXPECT_TRUE(buildable(fill({}, {.direction = Direction::kForward, .shape = shape, .machine = cpu}),
                        {.direction = Direction::kForward, .shape = shape, .machine = cpu})
                  .empty());
}

}  // namespace
}  // namespace uniep::test
