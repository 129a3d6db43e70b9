#include "program/schedule_space.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "support/expect_error.h"
#include "support/random_schedule_case.h"

namespace uniep {
namespace {

using test::below;
using test::expect_error;
using test::listed;
using test::random_schedule_case;
using test::RandomBits;
using test::ScheduleCase;

Schedule sample(uint64_t seed, const ScheduleCase& c, const PartialSchedule& fixed = {}) {
  return sample_legal(seed, c.request(), fixed);
}

uint64_t count(const ScheduleCase& c, const SpaceLimits& limits = {}) {
  return count_legal(c.request(), limits);
}

std::vector<Schedule> all(const ScheduleCase& c, const SpaceLimits& limits, std::size_t most = SIZE_MAX) {
  std::vector<Schedule> schedules;
  for_each_legal(
      c.request(),
      [&](const Schedule& schedule) {
        schedules.push_back(schedule);
        return schedules.size() < most;
      },
      limits);
  return schedules;
}

bool has_own_tiles(const Schedule& schedule) {
  return std::any_of(schedule.stage_tile.begin(), schedule.stage_tile.end(),
                     [](const TileOverride& own) { return own != TileOverride{}; });
}

TEST(ScheduleSample, IsLegalOnEveryShapeAndMachine) {
  RandomBits random(1);
  test::BranchCounts branches;
  int with_own_tiles = 0;
  constexpr int kRounds = 6000;
  for (int round = 0; round < kRounds; ++round) {
    const ScheduleCase c = random_schedule_case(random);
    count_case(branches, c);
    const Schedule schedule = sample(random(), c);
    const std::vector<std::string> violations = c.violations(schedule);
    ASSERT_TRUE(violations.empty()) << to_text(schedule) << listed(violations);
    // Nearly always drawn: there dgrad FC2 seldom has the columns of the others.
    const bool own_columns = c.machine.engine == EngineKind::kCuda && c.direction == Direction::kBackward;
    with_own_tiles += !own_columns && has_own_tiles(schedule);
  }
  EXPECT_GT(with_own_tiles, kRounds / 20);
  EXPECT_LT(with_own_tiles, kRounds / 3);
  branches.expect_all_taken();
}

TEST(ScheduleSample, IsTheSameForASeedAndDiffersBetweenSeeds) {
  const ScheduleCase c;
  std::set<std::string> texts;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    EXPECT_EQ(sample(seed, c), sample(seed, c));
    texts.insert(to_text(sample(seed, c)));
  }
  EXPECT_GT(texts.size(), 190u);
}

// The values of tile fields that the cuda engine has kernels for.
std::set<int> built_values(int tile_field, std::optional<GemmStage> stage) {
  const bool gradient = stage == GemmStage::kDgradFc2;
  switch (tile_field) {
    case kTileM:
      return {128};
    case kTileN:
      return {128, gradient ? 192 : 256};
    case kTileK:
      return {64};
    case kTileStages:
      return gradient ? std::set<int>{2, 3, 4, 5} : std::set<int>{2, 3, 4, 5, 6};
    case kTileCluster:
      return {1, 2};
    default:
      return {0};
  }
}

int tile_field_of(int id) {
  return id < kCommonFieldCount ? id : kTileM + (id - kCommonFieldCount) % kTileFieldCount;
}

// Whether the cuda engine's rules for a direction read a field of a tile.
bool is_tile_of(int id, Direction direction) {
  if (id < kCommonFieldCount) return id >= kTileM && id <= kTilePipeline;
  const GemmStage stage = *descriptor_of(id).stage;
  if (tile_field_of(id) == kTileM && stage < GemmStage::kWgradFc2) return true;
  const std::vector<GemmStage> stages = stages_of(direction);
  return std::find(stages.begin(), stages.end(), stage) != stages.end();
}

// Every value of every field comes up, on either engine, wherever it can be legal.
TEST(ScheduleSample, ReachesEveryValue) {
  for (const EngineKind engine : {EngineKind::kCpu, EngineKind::kCuda}) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      ScheduleCase c;
      c.direction = direction;
      c.shape = {256, 128, 12, 2};
      c.machine.engine = engine;
      c.machine.workers = 6;
      std::map<int, std::set<int>> seen;
      const bool no_waves = engine == EngineKind::kCuda && direction == Direction::kBackward;
      for (uint64_t seed = 0; seed < 25000; ++seed) {
        // Few schedules leave many workers for relays.
        const bool relays = seed >= 20000 && !no_waves;
        const char* const fixed = relays ? "comm.where=sms,dispatch.transport=push,comm.dispatch_sms=1" : "auto";
        const Schedule schedule = sample(seed, c, PartialSchedule::parse(fixed));
        for (int id = 0; id < kFieldCount; ++id) {
          if (const std::optional<int> value = descriptor_of(id).get(schedule)) seen[id].insert(*value);
        }
      }
      const std::map<int, int64_t> largest = {{kCommDispatchSms, 6},
                                              {kCommRelaySms, no_waves ? 0 : 5},
                                              {kOrderBlocksPerWave, no_waves ? 0 : INT64_MAX},
                                              {kOrderSecondShare, no_waves ? 0 : INT64_MAX},
                                              {kCommCombineSms, 5},
                                              {kCommReduceSms, 5},
                                              {kCommReserveSms, 5},
                                              {kOrderExpertsPerWave, 6}};
      for (int id = 0; id < kFieldCount; ++id) {
        const auto bound = largest.find(id);
        std::vector<int> expected =
            legal_values(descriptor_of(id).field, bound == largest.end() ? INT64_MAX : bound->second);
        if (engine == EngineKind::kCuda && direction == Direction::kBackward) {
          if (id == kDispatchTransport) expected = {static_cast<int>(DispatchTransport::kPull)};
          if (id == kOrderInterleave) expected = {static_cast<int>(Interleave::kPhased)};
        }
        if (engine == EngineKind::kCuda && is_tile_of(id, direction)) {
          std::set<int> missing = built_values(tile_field_of(id), descriptor_of(id).stage);
          for (const int value : seen[id]) {
            // A common value may be another where no stage uses it.
            const bool was_built = missing.erase(value) != 0;
            EXPECT_TRUE(was_built || !descriptor_of(id).stage) << name_of(id) << "=" << value;
          }
          if (tile_field_of(id) == kTileStages) missing.erase(6);  // leaves room for few rings, so it is rare
          EXPECT_TRUE(missing.empty()) << name_of(id) << "=" << *missing.begin();
          continue;
        }
        EXPECT_EQ(std::vector<int>(seen[id].begin(), seen[id].end()), expected) << name_of(id);
      }
    }
  }
}

TEST(ScheduleSample, KeepsFixedFields) {
  const ScheduleCase c;
  const PartialSchedule fixed = PartialSchedule::parse("fusion=pairs,comm.where=sms,tile.fc1.n=128");
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Schedule schedule = sample(seed, c, fixed);
    EXPECT_TRUE(c.violations(schedule).empty());
    EXPECT_EQ(schedule.fusion, Fusion::kPairs);
    EXPECT_EQ(schedule.comm.where, CommWhere::kSms);
    EXPECT_EQ(schedule.stage_tile[0].n, 128);
  }
  expect_error(Status::kInvalidArgument, "order.interleave=mixed",
               [&] { sample(0, c, PartialSchedule::parse("fusion=pairs,order.interleave=mixed")); });
  ScheduleCase illegal = c;
  illegal.shape.hidden = 12;
  expect_error(Status::kInvalidArgument, "hidden=12", [&] { sample(0, illegal); });
}

// fill() finds a legal whole wherever there is one. (Stages' own values are given whole: fill() adds none to a stage
// without any, even if that alone would help.)
TEST(ScheduleSample, FillCompletesAnyPartOfALegalSchedule) {
  RandomBits random(29);
  test::BranchCounts branches;
  for (int round = 0; round < 6000; ++round) {
    const ScheduleCase c = random_schedule_case(random);
    count_case(branches, c);
    const Schedule legal = sample(random(), c);
    const PartialSchedule whole = PartialSchedule::from(legal);
    PartialSchedule given;
    const int share = 1 + below(random, 8);
    for (const auto& [name, value] : whole.values()) {
      const bool is_own_tile = descriptor_of(*find_field(name)).stage.has_value();
      if (is_own_tile || below(random, share) == 0) given.set(name, value);
    }
    const std::vector<std::string> violations = c.violations(c.filled(given));
    ASSERT_TRUE(violations.empty()) << to_text(c.filled(given)) << listed(violations);
  }
  branches.expect_all_taken();
}

// What the enumeration tries, for up to 5 workers and 12 local experts.
std::vector<int> values_in_space(const std::string& name, const ScheduleCase& c) {
  std::vector<int> values = legal_values(descriptor_of(*find_field(name)).field);
  if (name == "order.raster") values = {1, 2, 4, 8, 16};
  if (name == "comm.stages") values = {1, 2, 3, 4, 8, 16};
  if (name.find("_sms") != std::string::npos && name != "comm.lend_sms") values = {0, 1, 2, 4};
  if (name == "order.experts_per_wave") {
    values = {1, 2, 3, 4, 5, 6, 7, 8};
    const int local_experts = static_cast<int>(c.shape.experts / c.machine.ranks);
    if (local_experts > 8) values.push_back(local_experts);
  }
  return values;
}

// The enumeration beside every combination of the same values that validate() accepts.
TEST(ScheduleSpace, HoldsExactlyTheLegalCombinations) {
  RandomBits random(31);
  const std::vector<std::vector<std::string>> varied = {
      {"fusion", "order.interleave", "backward.wgrad", "queue"},
      {"fusion", "backward.wgrad", "backward.wgrad_reserve", "queue"},
      {"comm.where", "comm.dispatch_sms", "comm.combine_sms", "comm.reduce_sms", "comm.reserve_sms",
       "combine.transport"},
      {"dispatch.transport", "comm.where", "comm.dispatch_sms", "comm.relay_sms", "comm.reduce_sms", "tile.cluster"},
      {"fusion", "order.experts_per_wave", "order.blocks_per_wave", "order.interleave", "queue", "order.second_share",
       "order.experts", "backward.wgrad"},
      {"tile.m", "tile.n", "tile.pipeline", "tile.stages", "tile.k", "comm.where", "comm.dispatch_sms"},
      {"tile.m", "tile.n", "tile.fc1.n", "tile.fc2.m", "tile.wgrad_fc1.pipeline", "tile.cluster"},
      {"comm.chunk_bytes", "comm.stages", "tile.stages", "tile.fc1.stages"},
      {"fusion", "queue", "comm.where", "comm.reserve_sms", "comm.lend_sms", "dispatch.transport", "tile.cluster"},
      {"order.experts_per_wave", "order.raster", "save.xg", "dispatch.dedup", "order.source_rotation"},
  };
  for (int round = 0; round < 60; ++round) {
    ScheduleCase c = random_schedule_case(random);
    c.machine.workers = 1 + below(random, 5);
    SpaceLimits limits;
    limits.vary = varied[round % varied.size()];
    const bool fixes = below(random, 2) == 0;
    if (fixes && limits.vary.front() != "fusion") limits.fixed = PartialSchedule::parse("fusion=none,queue=dynamic");

    std::vector<Schedule> expected = {c.filled(limits.fixed)};
    std::vector<std::string> in_order = limits.vary;
    std::sort(in_order.begin(), in_order.end(),
              [](const std::string& a, const std::string& b) { return *find_field(a) < *find_field(b); });
    for (const std::string& name : in_order) {
      const FieldDescriptor& descriptor = descriptor_of(*find_field(name));
      std::vector<Schedule> next;
      for (const Schedule& schedule : expected) {
        if (descriptor.stage) {
          next.push_back(schedule);
          descriptor.set(next.back(), std::nullopt);
        }
        for (const int value : values_in_space(name, c)) {
          next.push_back(schedule);
          descriptor.set(next.back(), value);
        }
      }
      expected = std::move(next);
    }
    expected.erase(std::remove_if(expected.begin(), expected.end(),
                                  [&](const Schedule& schedule) { return !c.violations(schedule).empty(); }),
                   expected.end());
    EXPECT_TRUE(all(c, limits) == expected) << "varied: " << listed(limits.vary);
    EXPECT_EQ(count(c, limits), expected.size()) << "varied: " << listed(limits.vary);
  }
}

TEST(ScheduleSpace, BeginsWithLegalSchedulesOnALargeMachine) {
  ScheduleCase c;
  c.machine.engine = EngineKind::kCuda;
  c.machine.workers = 132;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    c.direction = direction;
    const std::vector<Schedule> first = all(c, {}, 5000);
    ASSERT_EQ(first.size(), 5000u);
    for (const Schedule& schedule : first) ASSERT_TRUE(c.violations(schedule).empty()) << to_text(schedule);
    EXPECT_TRUE(all(c, {}, 5000) == first);
  }
}

TEST(ScheduleSpace, CountsWithoutVisiting) {
  ScheduleCase c;
  c.machine.workers = 1;
  c.machine.ranks = 1;
  c.shape = {8, 8, 1, 1};
  // Free fields: dispatch 4, ring 48, wave 1, experts 2, rotation 2, raster 5, chunks 8, save 2 x 2; warps or sms,
  // epilogue or staged 4; a tile of 3 m, 2 n (fc1), 3 k, 7 stages, 2 clusters, 2 pipelines.
  const uint64_t free = uint64_t{4} * 48 * 2 * 2 * 5 * 8 * 2 * 2 * 4 * (3 * 2 * 3 * 7 * 2 * 2);
  // Without fusion=layer 2; with it 8 sizes of waves, phased or mixed; mixed under dynamic queues with 16 shares.
  const uint64_t by_list = 2 + 8 + 8, by_tickets = 2 + 8 + 8 * 16;
  // A fourth of the dynamic ones may lend: copy warps, pull.
  EXPECT_EQ(count(c), free * by_list + free / 4 * by_tickets * 5);
  c.direction = Direction::kBackward;
  // Weight gradients after, or but for fusion=none filling; mixed 17 reserves, without any of these. 4 n.
  const uint64_t listed = 2 * by_list - 1, dealt = 2 * by_tickets - 1 + 17;
  EXPECT_EQ(count(c), (free * listed + free / 4 * dealt * 5) * 2);
  c.shape.hidden = 12;
  EXPECT_EQ(count(c), 0u);
  EXPECT_TRUE(all(c, {}).empty());
}

TEST(ScheduleSpace, EveryFieldOfEveryStageCanBeCounted) {
  ScheduleCase c;
  SpaceLimits limits;
  for (const ScheduleField& field : schedule_fields()) limits.vary.push_back(field.name);
  EXPECT_EQ(count(c, limits), UINT64_MAX) << "more than 64 bits hold";
}

TEST(ScheduleSpace, RefusesUnknownAndFixedFields) {
  const ScheduleCase c;
  SpaceLimits limits;
  limits.vary = {"tile.nn"};
  expect_error(Status::kInvalidArgument, "vary=tile.nn: no such field; the nearest legal one is tile.n",
               [&] { count(c, limits); });
  limits.vary = {"fusion"};
  limits.fixed.set("fusion", "none");
  expect_error(Status::kInvalidArgument, "vary=fusion: the field is fixed", [&] { all(c, limits); });
  limits.vary = {"queue"};
  limits.fixed.set("order.interleave", "mixed");
  EXPECT_TRUE(all(c, limits).empty()) << "fixed fields that contradict each other admit nothing";
  EXPECT_EQ(count(c, limits), 0u);
}

}  // namespace
}  // namespace uniep
