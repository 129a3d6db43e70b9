#include <gtest/gtest.h>

#include <set>

#include "program/schedule_fields.h"
#include "support/random_schedule_case.h"
#include "uniep/error.h"
#include "uniep/schedule.h"

// How an open schedule is completed.
namespace uniep {
namespace {

using test::below;
using test::case_of;
using test::listed;
using test::random_in_range_schedule;
using test::random_schedule_case;
using test::RandomBits;
using test::ScheduleCase;

// A schedule has these fields and is legal.
void expect_filled(const ScheduleCase& c, const Schedule& schedule, const char* fields) {
  for (const auto& [name, value] : PartialSchedule::parse(fields).values()) {
    const FieldDescriptor& descriptor = descriptor_of(*find_field(name));
    EXPECT_EQ(descriptor.get(schedule), parse_value(descriptor.field, value)) << name;
  }
  EXPECT_TRUE(c.violations(schedule).empty()) << listed(c.violations(schedule));
}

TEST(ScheduleFill, DefaultsOfBothEngines) {
  ScheduleCase c = case_of(EngineKind::kCuda, Direction::kBackward, 132);
  c.shape = {7168, 2048, 256, 8};
  c.machine.ranks = 8;
  Schedule expected;
  expected.order.experts_per_wave = 32;
  expected.order.interleave = Interleave::kPhased;
  expected.order.raster = 16;
  expected.queue = QueueKind::kDynamic;
  expected.combine.column_chunks = 1;
  expected.comm.stages = 3;  // what the pipeline leaves room for
  expected.stage_tile[static_cast<int>(GemmStage::kDgradFc2)].n = 192;
  EXPECT_EQ(c.filled(), expected);
  EXPECT_EQ(expected.tile, (TileShape{128, 256, 64, 4, 2, Pipeline::kCooperative}));
  c.direction = Direction::kForward;
  expected.order.experts_per_wave = 16;
  expected.combine.column_chunks = 4;
  expected.stage_tile = {};
  EXPECT_EQ(c.filled(), expected);
  c.direction = Direction::kBackward;
  c.machine.engine = EngineKind::kAuto;
  expected = Schedule();
  expected.order.experts_per_wave = 2;
  expected.tile = {64, 128, 64, 4, 1, Pipeline::kCooperative};
  EXPECT_EQ(c.filled(), expected);
  c.shape.experts = 8;
  EXPECT_EQ(c.filled().order.experts_per_wave, 1);
}

TEST(ScheduleFill, OrderOnCudaFollowsTheClassOfTheShape) {
  struct Row {
    LayerShape shape;
    int ranks;
    const char* given;
    Interleave interleave;
    int experts_per_wave, raster, column_chunks;
  };
  const Interleave mixed = Interleave::kMixed, phased = Interleave::kPhased;
  const std::vector<Row> rows = {
      {{2048, 768, 128, 8}, 4, "", mixed, 2, 8, 1},  // NVLink takes as long as the GEMMs
      {{2048, 768, 128, 8}, 8, "", mixed, 1, 8, 1},
      {{2048, 768, 128, 8}, 64, "", mixed, 1, 8, 1},    // fewer experts than waves
      {{2048, 768, 128, 8}, 1, "", phased, 16, 16, 2},  // no links
      {{4096, 1536, 128, 8}, 8, "", mixed, 1, 8, 1},
      {{4096, 1536, 128, 8}, 4, "", phased, 16, 16, 4},
      {{7168, 2048, 256, 8}, 8, "", phased, 16, 16, 4},
      {{2880, 2880, 128, 4}, 8, "", phased, 16, 16, 1},  // its bands would not be whole tiles
      {{4096, 14336, 8, 2}, 8, "", phased, 1, 16, 4},    // one expert a rank
      {{2048, 768, 128, 8}, 4, "fusion=pairs", phased, 16, 8, 1},
      {{4096, 1536, 128, 8}, 2, "order.interleave=mixed", mixed, 4, 16, 4},
      {{7168, 2048, 256, 8}, 8, "fusion=none", phased, 16, 16, 1},
      {{7168, 2048, 256, 8}, 8, "combine.transport=staged", phased, 16, 16, 1},
      {{7168, 2048, 256, 8}, 8, "order.raster=3,combine.column_chunks=8", phased, 16, 3, 8},
  };
  for (const Row& row : rows) {
    ScheduleCase c = case_of(EngineKind::kCuda, Direction::kForward, 132);
    c.shape = row.shape;
    c.machine.ranks = row.ranks;
    const Schedule filled = c.filled(PartialSchedule::parse(row.given));
    SCOPED_TRACE(std::to_string(row.shape.hidden) + " " + row.given);
    EXPECT_EQ(filled.order.interleave, row.interleave);
    EXPECT_EQ(filled.order.experts_per_wave, row.experts_per_wave);
    EXPECT_EQ(filled.order.raster, row.raster);
    EXPECT_EQ(filled.combine.column_chunks, row.column_chunks);
  }
}

TEST(ScheduleFill, CompletesWhatARequestNeeds) {
  struct Row {
    EngineKind engine;
    Direction direction;
    const char* given;
    const char* expected;  // fields of the filled schedule
  };
  const EngineKind cpu = EngineKind::kCpu, cuda = EngineKind::kCuda;
  const Direction forward = Direction::kForward, backward = Direction::kBackward;
  const std::vector<Row> rows = {
      {cpu, forward, "comm.where=sms", "comm.dispatch_sms=1,comm.combine_sms=0,comm.reduce_sms=0"},
      {cpu, forward, "comm.where=sms,combine.transport=staged", "comm.dispatch_sms=1,comm.combine_sms=1"},
      {cpu, forward, "comm.where=sms,combine.transport=staged,comm.reserve_sms=7",
       "comm.dispatch_sms=1,comm.combine_sms=0"},
      {cpu, forward, "comm.where=sms,combine.transport=staged,comm.dispatch_sms=8", "comm.combine_sms=0"},
      {cpu, forward, "comm.dispatch_sms=3", "comm.where=sms,combine.transport=epilogue"},
      {cpu, forward, "comm.combine_sms=7", "comm.where=sms,combine.transport=staged,comm.dispatch_sms=1"},
      {cpu, forward, "comm.reduce_sms=2", "comm.where=sms,comm.dispatch_sms=1"},
      {cpu, forward, "comm.dispatch_sms=0", "comm.where=warps"},
      {cpu, forward, "order.interleave=mixed", "fusion=layer"},
      {cpu, backward, "backward.wgrad=fill", "fusion=layer"},
      {cpu, backward, "fusion=none", "order.interleave=phased,backward.wgrad=after"},
      {cpu, backward, "fusion=pairs", "order.interleave=phased,backward.wgrad=fill"},
      {cpu, forward, "tile.n=64", "tile.fc1.n=128"},
      {cpu, forward, "tile.fc2.m=256", "tile.m=256"},
      {cuda, forward, "", "tile.m=128,tile.n=256,tile.stages=4,comm.chunk_bytes=4096,comm.stages=3"},
      {cuda, forward, "tile.n=128", "tile.stages=4,comm.chunk_bytes=4096,comm.stages=4"},
      {cuda, forward, "tile.fc1.n=128", "tile.n=128,tile.stages=4"},
      {cuda, forward, "tile.fc2.stages=3", "tile.n=256,tile.stages=3,comm.stages=4"},
      {cuda, forward, "tile.fc1.stages=6", "tile.n=128,tile.stages=6,comm.stages=3"},
      {cuda, forward, "tile.fc2.cluster=1", "tile.cluster=1"},
      {cuda, forward, "tile.fc1.n=128,tile.fc2.n=256", "fusion=pairs,order.interleave=phased"},
      {cuda, forward, "tile.cluster=1,tile.fc1.cluster=2,tile.fc2.k=64", "tile.fc2.cluster=2"},
      {cuda, forward, "tile.n=128,tile.fc1.n=256", "fusion=layer,tile.fc2.n=256"},
      {cuda, backward, "tile.cluster=2,tile.wgrad_fc1.cluster=1", "tile.dgrad_fc2.cluster=1,tile.dgrad_fc1.cluster=1"},
      {cuda, forward, "comm.chunk_bytes=16384", "tile.n=256,tile.stages=3,comm.stages=3"},
      {cuda, backward, "", "fusion=layer,dispatch.transport=pull,backward.wgrad=fill,tile.dgrad_fc2.n=192"},
      {cuda, backward, "order.experts_per_wave=1", "fusion=pairs,order.experts_per_wave=1,order.interleave=phased"},
      {cuda, backward, "backward.wgrad=fill,comm.reserve_sms=2", "fusion=layer"},
      {cuda, backward, "tile.n=128", "tile.n=128,tile.stages=4,comm.stages=4"},
      {cuda, backward, "tile.n=192", "tile.stages=4,tile.dgrad_fc1.n=128,tile.wgrad_fc2.n=128,tile.wgrad_fc1.n=128"},
      {cuda, backward, "tile.dgrad_fc2.n=128", "tile.n=256,tile.stages=4,backward.wgrad=fill"},
      {cuda, backward, "tile.dgrad_fc1.n=128", "tile.n=128,backward.wgrad=fill"},
      {cuda, backward, "tile.n=256,tile.wgrad_fc1.n=128", "tile.dgrad_fc1.n=128,tile.wgrad_fc2.n=128"},
      {cuda, backward, "tile.wgrad_fc2.n=128,tile.wgrad_fc1.n=256", "fusion=pairs,backward.wgrad=after"},
      {cuda, backward, "backward.wgrad=after,tile.wgrad_fc1.n=128", "tile.n=256,tile.dgrad_fc2.n=192"},
      {cuda, backward, "tile.stages=2", "tile.n=256,tile.dgrad_fc2.n=128"},
      {cuda, backward, "tile.stages=6", "tile.n=128,tile.dgrad_fc2.stages=4"},
      {cuda, backward, "fusion=none", "backward.wgrad=after,tile.n=256,tile.dgrad_fc2.n=192"},
      {cuda, backward, "fusion=layer",
       "order.experts_per_wave=4,order.interleave=phased,backward.wgrad=fill,tile.stages=4,tile.dgrad_fc2.n=192"},
      {cuda, backward, "fusion=layer,tile.dgrad_fc2.stages=3", "tile.stages=3,backward.wgrad=fill"},
      {cuda, backward, "comm.chunk_bytes=65536", "comm.stages=1,comm.where=warps,tile.n=256,tile.stages=2"},
      {cuda, backward, "tile.n=256,tile.stages=4,comm.stages=16", "comm.chunk_bytes=512"},
      {cuda, forward, "comm.where=sms,combine.transport=staged",
       "comm.dispatch_sms=2,comm.combine_sms=2,tile.cluster=2"},
      {cuda, forward, "comm.dispatch_sms=3", "comm.where=sms,tile.cluster=1"},
      {cuda, forward, "comm.reserve_sms=1", "tile.cluster=1"},
      {cuda, forward, "comm.reserve_sms=7", "tile.cluster=1"},
      {cpu, forward, "comm.lend_sms=on", "queue=dynamic,comm.where=warps,dispatch.transport=pull"},
      {cuda, backward, "comm.lend_sms=on,comm.reserve_sms=2", "queue=dynamic,tile.cluster=2"},
  };
  for (const Row& row : rows) {
    ScheduleCase c = case_of(row.engine, row.direction, 8);
    c.shape.intermediate = 2048;  // not bound by links
    SCOPED_TRACE(row.given);
    expect_filled(c, c.filled(PartialSchedule::parse(row.given)), row.expected);
  }
}

// With groups of sums the workers that compute also send: few that only send are slower by far.
TEST(ScheduleFill, NoWorkerOnlySendsWithGroups) {
  for (const EngineKind engine : {EngineKind::kCpu, EngineKind::kCuda}) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      ScheduleCase c = case_of(engine, direction, 8);
      c.numerics.combine_groups = 2;
      for (const char* const given : {"comm.where=sms", "comm.where=sms,combine.transport=staged"}) {
        expect_filled(c, c.filled(PartialSchedule::parse(given)), "combine.transport=staged,comm.combine_sms=0");
      }
      expect_filled(c, c.filled(PartialSchedule::parse("comm.combine_sms=2")), "comm.where=sms,comm.combine_sms=2");
    }
  }
}

// Where the links take as long as the dgrads, weight gradients run beside them, if that goes with what was given.
TEST(ScheduleFill, MixesWeightGradientsWhereLinksBindOnCuda) {
  struct Row {
    LayerShape shape;
    int ranks;
    const char *given, *expected;
  };
  const LayerShape small{2048, 768, 128, 8}, middle{4096, 1536, 128, 8}, large{7168, 2048, 256, 8};
  const char* const mixed =
      "fusion=layer,backward.wgrad=mixed,queue=dynamic,order.interleave=phased,order.raster=16,combine.column_chunks=1";
  const char* const filled = "fusion=layer,backward.wgrad=fill,order.raster=16";
  const std::vector<Row> rows = {
      {small, 8, "", mixed},
      {small, 4, "", mixed},
      {small, 2, "", filled},
      {small, 1, "", filled},
      {middle, 8, "", filled},  // its forward is bound by links
      {middle, 4, "", filled},
      {large, 8, "", filled},
      {large, 8, "backward.wgrad_reserve=3", mixed},
      {small, 8, "backward.wgrad=fill", filled},
      {small, 8, "backward.wgrad=after", "fusion=pairs"},
      {small, 8, "fusion=pairs", "fusion=pairs,backward.wgrad=fill,order.raster=16"},
      {small, 8, "fusion=layer", mixed},
      {small, 8, "fusion=none", "backward.wgrad=after"},
      {small, 8, "queue=static", "fusion=layer,backward.wgrad=fill,queue=static"},
      {small, 8, "order.experts_per_wave=4", "fusion=pairs,backward.wgrad=fill,order.experts_per_wave=4"},
      {small, 8, "save.xg=redispatch", mixed},
      {small, 8, "combine.transport=staged", mixed},
      {small, 8, "tile.wgrad_fc2.n=128,tile.wgrad_fc1.n=256", "fusion=pairs,backward.wgrad=after"},
  };
  for (const Row& row : rows) {
    ScheduleCase c = case_of(EngineKind::kCuda, Direction::kBackward, 132);
    c.shape = row.shape;
    c.machine.ranks = row.ranks;
    SCOPED_TRACE(std::to_string(row.shape.hidden) + " on " + std::to_string(row.ranks) + ", " + row.given);
    expect_filled(c, c.filled(PartialSchedule::parse(row.given)), row.expected);
  }
  // Biases that the router's weight multiplies have no one kernel in backward.
  ScheduleCase c = case_of(EngineKind::kCuda, Direction::kBackward, 132);
  c.shape = small;
  c.machine.ranks = 8;
  c.numerics.bias = true;
  c.numerics.router_weight = RouterWeight::kOutput;
  EXPECT_EQ(c.filled().fusion, Fusion::kPairs);
}

TEST(ScheduleFill, NothingGivenIsAlwaysLegal) {
  RandomBits random(13);
  test::BranchCounts branches;
  for (int round = 0; round < 3000; ++round) {
    const ScheduleCase c = random_schedule_case(random);
    count_case(branches, c);
    const std::vector<std::string> violations = c.violations(c.filled());
    ASSERT_TRUE(violations.empty()) << to_text(c.filled()) << listed(violations);
  }
  branches.expect_all_taken();
}

// Whatever one field says, the rest adapts to it, or the field itself is at fault and named.
TEST(ScheduleFill, AnySingleFieldIsLegalOrNamed) {
  RandomBits random(17);
  test::BranchCounts branches;
  for (int round = 0; round < 60; ++round) {
    const ScheduleCase c = random_schedule_case(random);
    count_case(branches, c);
    for (const FieldDescriptor& descriptor : field_descriptors()) {
      std::vector<int> values = legal_values(descriptor.field);
      if (values.size() > 40) values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 131, 132, 133, 1024};
      for (const int value : values) {
        if (!is_legal_value(descriptor.field, value)) continue;
        PartialSchedule given;
        given.set(descriptor.field.name, value_text(descriptor.field, value));
        const Schedule schedule = c.filled(given);
        ASSERT_EQ(descriptor.get(schedule), value);
        for (const std::string& violation : c.violations(schedule)) {
          EXPECT_NE(violation.find(descriptor.field.name + "="), std::string::npos)
              << descriptor.field.name << "=" << value << listed(c.violations(schedule));
        }
      }
    }
  }
  branches.expect_all_taken();
}

TEST(ScheduleFill, SingleFieldsThatNoMachineForbidsAreLegal) {
  RandomBits random(19);
  const std::set<int> bounded_by_machine = {kCommDispatchSms, kCommRelaySms,        kCommCombineSms, kCommReduceSms,
                                            kCommReserveSms,  kOrderExpertsPerWave, kTileCluster,    kCombineTransport};
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (const EngineKind engine : {EngineKind::kCpu, EngineKind::kCuda}) {
      const ScheduleCase c = case_of(engine, direction, 132);
      for (int id = 0; id < kFieldCount; ++id) {
        if (bounded_by_machine.count(id) != 0) continue;
        for (const int value : legal_values(descriptor_of(id).field)) {
          const std::set<std::string> not_built = {
              "m=64", "m=256", "n=64", "n=192", "k=32", "k=128", "stages=7", "stages=8", "pipeline=pingpong"};
          const std::set<std::string> not_built_in_backward = {"dispatch.transport=push", "order.interleave=mixed",
                                                               "tile.dgrad_fc2.n=256", "tile.dgrad_fc2.stages=6"};
          const bool parts_waves = (id == kOrderBlocksPerWave || id == kOrderSecondShare) && value > 0;
          if (engine == EngineKind::kCuda && direction == Direction::kBackward && parts_waves) continue;
          const std::string text = name_of(id) + "=" + value_text(descriptor_of(id).field, value);
          const bool is_tile = text.rfind("tile.", 0) == 0;
          if (engine == EngineKind::kCuda && is_tile && not_built.count(text.substr(text.rfind('.') + 1)) != 0)
            continue;
          if (engine == EngineKind::kCuda && direction == Direction::kBackward &&
              not_built_in_backward.count(text) != 0)
            continue;
          PartialSchedule given;
          given.set(name_of(id), value_text(descriptor_of(id).field, value));
          const std::vector<std::string> violations = c.violations(c.filled(given));
          EXPECT_TRUE(violations.empty()) << to_text(c.filled(given)) << listed(violations);
        }
      }
    }
  }
}

// Part of a legal schedule, in which nothing contradicts: given fields stay, and what is filled around them adds
// nothing that a field alone does not answer for.
TEST(ScheduleFill, GivenFieldsStay) {
  RandomBits random(23);
  test::BranchCounts branches;
  int legal = 0;
  for (int round = 0; round < 1000; ++round) {
    const ScheduleCase c = random_schedule_case(random);
    count_case(branches, c);
    const PartialSchedule source = PartialSchedule::from(random_in_range_schedule(random));
    PartialSchedule given;
    const int share = 1 + below(random, 12);
    for (const auto& [name, value] : source.values()) {
      if (below(random, share) == 0) given.set(name, value);
    }
    const Schedule schedule = c.filled(given);
    for (const auto& [name, value] : given.values()) {
      const FieldDescriptor& descriptor = descriptor_of(*find_field(name));
      ASSERT_EQ(descriptor.get(schedule), parse_value(descriptor.field, value)) << name;
    }
    if (c.violations(schedule).empty()) {
      ++legal;
      EXPECT_EQ(c.filled(PartialSchedule::from(schedule)), schedule) << "a filled schedule needs no more";
    }
  }
  EXPECT_GT(legal, 50);
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep
