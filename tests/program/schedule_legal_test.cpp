#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include "program/schedule_fields.h"
#include "support/expect_error.h"
#include "support/random_schedule_case.h"
#include "uniep/error.h"
#include "uniep/schedule.h"

// Which schedules are legal.
namespace uniep {
namespace {

using test::below;
using test::case_of;
using test::expect_error;
using test::listed;
using test::pick;
using test::random_schedule_case;
using test::RandomBits;
using test::ScheduleCase;

bool begins_with(const std::string& text, const std::string& prefix) {
  return text.rfind(prefix, 0) == 0;
}

// Whether a violation begins with the prefix.
bool reports(const std::vector<std::string>& violations, const std::string& prefix) {
  return std::any_of(violations.begin(), violations.end(),
                     [&](const std::string& violation) { return begins_with(violation, prefix); });
}

// ---- Validation
// -------------------------------------------------------------------------------------------------------

struct Planted {
  const char* prefix;  // of the violation
  std::function<void(ScheduleCase&, Schedule&)> plant;
};

// Violations that do not touch each other, on a backward schedule of a cpu with 4 workers and El = 4.
const std::vector<Planted>& planted_violations() {
  static const std::vector<Planted> planted = {
      {"hidden=12:", [](ScheduleCase& c, Schedule&) { c.shape.hidden = 12; }},
      {"intermediate=0:", [](ScheduleCase& c, Schedule&) { c.shape.intermediate = 0; }},
      {"topk=9:", [](ScheduleCase& c, Schedule&) { c.shape.topk = 9; }},
      {"combine_groups=-1:", [](ScheduleCase& c, Schedule&) { c.numerics.combine_groups = -1; }},
      {"router_weight=3: legal are activation (0)",
       [](ScheduleCase& c, Schedule&) { c.numerics.router_weight = static_cast<RouterWeight>(3); }},
      {"weight_gradient=3:",
       [](ScheduleCase& c, Schedule&) { c.numerics.weight_gradient = static_cast<WeightGradient>(3); }},
      {"queue=2: legal are static or dynamic", [](ScheduleCase&, Schedule& s) { s.queue = static_cast<QueueKind>(2); }},
      {"save.xg=-1:", [](ScheduleCase&, Schedule& s) { s.save_xg = static_cast<SaveXg>(-1); }},
      {"save.z=2:", [](ScheduleCase&, Schedule& s) { s.save_z = static_cast<SaveZ>(2); }},
      {"comm.dispatch_sms=1:", [](ScheduleCase&, Schedule& s) { s.comm.dispatch_sms = 1; }},
      {"comm.combine_sms=2: comm.where", [](ScheduleCase&, Schedule& s) { s.comm.combine_sms = 2; }},
      {"comm.combine_sms=2: combine.transport", [](ScheduleCase&, Schedule& s) { s.comm.combine_sms = 2; }},
      {"comm.reduce_sms=3:", [](ScheduleCase&, Schedule& s) { s.comm.reduce_sms = 3; }},
      {"comm.chunk_bytes=1000:", [](ScheduleCase&, Schedule& s) { s.comm.chunk_bytes = 1000; }},
      {"comm.stages=17:", [](ScheduleCase&, Schedule& s) { s.comm.stages = 17; }},
      {"comm.reserve_sms=4: legal are 0 to 3", [](ScheduleCase&, Schedule& s) { s.comm.reserve_sms = 4; }},
      {"order.experts_per_wave=5: legal are 1 to 4", [](ScheduleCase&, Schedule& s) { s.order.experts_per_wave = 5; }},
      {"order.raster=17:", [](ScheduleCase&, Schedule& s) { s.order.raster = 17; }},
      {"order.interleave=mixed: needs fusion=layer", [](ScheduleCase&, Schedule& s) { s.fusion = Fusion::kNone; }},
      {"backward.wgrad=fill: needs fusion", [](ScheduleCase&, Schedule& s) { s.fusion = Fusion::kNone; }},
      {"tile.n=100:", [](ScheduleCase&, Schedule& s) { s.tile.n = 100; }},
      {"tile.stages=2147483647:", [](ScheduleCase&, Schedule& s) { s.tile.stages = 2147483647; }},
      {"tile.wgrad_fc1.k=48:", [](ScheduleCase&, Schedule& s) { s.stage_tile[5].k = 48; }},
      {"tile.fc2.m=256: must equal tile.m", [](ScheduleCase&, Schedule& s) { s.stage_tile[1].m = 256; }},
      {"tile.dgrad_fc1.m=128: must equal tile.m", [](ScheduleCase&, Schedule& s) { s.stage_tile[3].m = 128; }},
      {"combine.column_chunks=0:", [](ScheduleCase&, Schedule& s) { s.combine.column_chunks = 0; }},
  };
  return planted;
}

TEST(ScheduleValidate, ReportsEveryPlantedViolationAtOnce) {
  RandomBits random(3);
  const std::vector<Planted>& all = planted_violations();
  for (int round = 0; round < 500; ++round) {
    ScheduleCase c = case_of(EngineKind::kCpu, Direction::kBackward, 4);
    Schedule schedule = c.filled();
    ASSERT_TRUE(c.violations(schedule).empty());
    std::vector<std::string> expected;
    const int share = 1 + below(random, 8);
    for (const Planted& planted : all) {
      if (below(random, share) != 0) continue;
      planted.plant(c, schedule);
      expected.emplace_back(planted.prefix);
    }
    const std::vector<std::string> violations = c.violations(schedule);
    for (const std::string& prefix : expected) {
      EXPECT_TRUE(reports(violations, prefix)) << prefix << " is not among" << listed(violations);
    }
    EXPECT_EQ(violations.empty(), expected.empty());
    for (const std::string& violation : violations) {
      EXPECT_TRUE(std::any_of(
          all.begin(), all.end(),
          [&](const Planted& planted) {
            return begins_with(violation, std::string(planted.prefix).substr(0, std::string(planted.prefix).find(':')));
          }))
          << "not planted: " << violation;
    }
  }
}

TEST(ScheduleValidate, NamesEachRuleByItsField) {
  struct Row {
    EngineKind engine;
    Direction direction;
    const char* given;
    const char* prefix;  // of the one violation; empty: legal
  };
  const EngineKind cpu = EngineKind::kCpu, cuda = EngineKind::kCuda, automatic = EngineKind::kAuto;
  const Direction forward = Direction::kForward, backward = Direction::kBackward;
  const std::vector<Row> rows = {
      {cpu, forward, "comm.where=sms,comm.dispatch_sms=0", "comm.dispatch_sms=0: comm.where=sms needs at least 1"},
      {cpu, forward, "comm.where=sms,comm.dispatch_sms=8", ""},
      {cpu, forward, "comm.where=sms,comm.dispatch_sms=9", "comm.dispatch_sms=9: "},
      {cpu, forward, "comm.where=sms,comm.dispatch_sms=6,comm.reduce_sms=2", ""},
      {cpu, forward, "comm.where=sms,comm.dispatch_sms=7,comm.reduce_sms=2", "comm.dispatch_sms=7: "},
      {cpu, forward, "comm.where=sms,comm.dispatch_sms=6,comm.reserve_sms=3", "comm.dispatch_sms=6: "},
      {cpu, forward, "comm.where=sms,combine.transport=epilogue,comm.combine_sms=1",
       "comm.combine_sms=1: combine.transp"},
      {cpu, forward, "comm.reserve_sms=7", ""},
      {cpu, forward, "comm.reserve_sms=7,comm.lend_sms=on", ""},
      {cpu, forward, "comm.lend_sms=on,queue=static", "comm.lend_sms=on: needs queue=dynamic"},
      {cpu, forward, "comm.lend_sms=on,comm.where=sms", "comm.lend_sms=on: needs"},
      {cpu, forward, "comm.lend_sms=on,dispatch.transport=push", "comm.lend_sms=on: needs"},
      {cpu, forward, "comm.reserve_sms=8", "comm.reserve_sms=8: legal are 0 to 7"},
      {cpu, forward, "fusion=pairs,order.interleave=mixed", "order.interleave=mixed: "},
      {cpu, backward, "fusion=none,backward.wgrad=fill", "backward.wgrad=fill: "},
      {cpu, forward, "fusion=none,backward.wgrad=fill", ""},
      {cpu, backward, "fusion=pairs,backward.wgrad=fill", ""},
      {cpu, backward, "tile.m=64,tile.wgrad_fc2.m=256", ""},
      {cpu, backward, "tile.m=64,tile.dgrad_fc2.m=256", "tile.dgrad_fc2.m=256: must equal tile.m"},
      {cpu, forward, "tile.n=64,tile.fc1.n=256", ""},
      {cpu, forward, "tile.m=256,tile.n=256,tile.k=128,tile.stages=8,tile.pipeline=pingpong", ""},
      {automatic, forward, "tile.m=256,tile.n=256,comm.chunk_bytes=65536,comm.stages=16", ""},
      {cuda, forward, "tile.m=256", "tile.m=256: not built on cuda; legal is 128"},
      {cuda, backward, "tile.m=64", "tile.m=64: not built on cuda; legal is 128"},
      {cuda, forward, "tile.n=192", "tile.n=192: not built on cuda; legal is 128 or 256"},
      {cuda, forward, "tile.k=32", "tile.k=32: not built on cuda; legal is 64"},
      {cuda, forward, "tile.pipeline=pingpong", "tile.pipeline=pingpong: not built on cuda; legal is cooperative"},
      {cuda, forward, "tile.fc2.pipeline=pingpong", "tile.fc2.pipeline=pingpong: not built on cuda"},
      {cuda, backward, "tile.n=256,tile.stages=5", "tile.stages=5 with tile.n=256, comm.chunk_bytes"},
      {cuda, forward, "tile.n=256,tile.stages=4,comm.chunk_bytes=16384,comm.stages=1",
       "tile.stages=4 with tile.n=256, comm.chunk_bytes=16384 and comm.stages=1: the kernel takes 236544 bytes"},
      {cuda, forward, "tile.n=256,tile.stages=4,comm.chunk_bytes=4096,comm.stages=4", "tile.stages=4 with tile.n=256"},
      {cuda, forward, "tile.n=256,tile.stages=4,comm.chunk_bytes=4096,comm.stages=3", ""},
      {cuda, forward, "tile.n=256,tile.stages=4,comm.where=sms,comm.stages=4,comm.chunk_bytes=4096",
       "tile.stages=4 with tile.n=256"},
      {cuda, forward, "fusion=layer,tile.fc1.n=128,tile.fc2.n=256",
       "tile.fc1.n=128 with tile.fc2.n=256: fusion=layer runs"},
      {cuda, forward, "tile.fc1.n=128,tile.fc2.n=256,fusion=pairs", ""},
      {cuda, forward, "fusion=layer,tile.fc1.stages=3,tile.fc2.stages=2",
       "tile.fc1.stages=3 with tile.fc2.stages=2: fusion=layer runs"},
      {cuda, forward, "tile.stages=2,tile.fc1.stages=3,fusion=none", ""},
      {cuda, forward, "tile.fc1.cluster=1,tile.fc2.cluster=2", "tile.fc1.cluster=1 with tile.fc2.cluster=2: a call"},
      {cuda, forward, "tile.cluster=2,comm.reserve_sms=7", "tile.cluster=2: "},
      {cuda, forward, "tile.cluster=2,comm.reserve_sms=6", ""},
      {cuda, forward, "tile.cluster=2,comm.reserve_sms=1", "tile.cluster=2: must divide the 7 available workers"},
      {cuda, forward, "tile.cluster=2,comm.where=sms,comm.dispatch_sms=3", "tile.cluster=2: must divide"},
      {cuda, forward, "tile.wgrad_fc1.m=256,tile.wgrad_fc1.n=256", ""},
      {cuda, forward, "fusion=layer,dispatch.transport=push", ""},
      {cuda, backward, "fusion=layer", ""},
      {cuda, backward, "fusion=layer,order.experts_per_wave=1",
       "order.experts_per_wave=1: in backward fusion=layer has one wave on cuda; legal is 4, the local experts of a"},
      {cuda, backward, "fusion=layer,order.interleave=mixed,order.experts_per_wave=4",
       "order.interleave=mixed: in backward not built on cuda yet; legal is phased"},
      {cuda, backward, "fusion=layer,tile.dgrad_fc2.stages=3,tile.dgrad_fc1.stages=2",
       "tile.dgrad_fc1.stages=2 with tile.dgrad_fc2.stages=3: fusion=layer runs dgrad_fc2 and dgrad_fc1 in one"},
      {cpu, backward, "fusion=layer", ""},
      {cuda, backward, "fusion=none", ""},
      {cuda, backward, "dispatch.transport=push", "dispatch.transport=push: in backward not built on cuda yet"},
      {cpu, backward, "dispatch.transport=push", ""},
      {cuda, backward, "tile.dgrad_fc2.n=256", "tile.dgrad_fc2.n=256: not built on cuda; legal is 128 or 192"},
      {cuda, backward, "tile.dgrad_fc1.n=192", "tile.dgrad_fc1.n=192: not built on cuda; legal is 128 or 256"},
      {cuda, backward, "tile.dgrad_fc2.n=192,tile.dgrad_fc2.stages=2",
       "tile.dgrad_fc2.stages=2 with tile.dgrad_fc2.n=192: dgrad_fc2 needs a stage for every 64 columns, 3 at least"},
      {cuda, backward, "tile.dgrad_fc2.n=192,tile.dgrad_fc2.stages=3", ""},
      {cuda, backward, "tile.dgrad_fc2.n=192,tile.dgrad_fc2.stages=4,comm.chunk_bytes=4096,comm.stages=3", ""},
      {cuda, backward, "tile.dgrad_fc2.n=192,tile.dgrad_fc2.stages=4,comm.chunk_bytes=4096,comm.stages=4",
       "tile.dgrad_fc2.stages=4 with tile.dgrad_fc2.n=192, comm.chunk_bytes=4096 and comm.stages=4: the kernel takes "
       "236544 bytes"},
      {cuda, backward, "backward.wgrad=fill,tile.dgrad_fc1.n=256,tile.wgrad_fc1.n=128",
       "tile.wgrad_fc1.n=128 with tile.dgrad_fc1.n=256: backward.wgrad=fill runs dgrad_fc1 and wgrad_fc1 in one"},
      {cuda, backward, "backward.wgrad=fill,tile.dgrad_fc1.stages=3,tile.wgrad_fc2.stages=2",
       "tile.wgrad_fc2.stages=2 with tile.dgrad_fc1.stages=3: backward.wgrad=fill"},
      {cuda, backward, "backward.wgrad=after,tile.dgrad_fc1.n=256,tile.wgrad_fc1.n=128", ""},
      {cuda, backward, "backward.wgrad=after,tile.wgrad_fc1.n=256,tile.wgrad_fc1.stages=5",
       "tile.wgrad_fc1.stages=5 with tile.wgrad_fc1.n=256: the kernel takes 276480 bytes"},
      {cuda, backward, "tile.dgrad_fc2.cluster=1,tile.dgrad_fc1.cluster=2", "tile.dgrad_fc2.cluster=1 with"},
      {cuda, backward, "tile.wgrad_fc1.m=256", "tile.wgrad_fc1.m=256: not built on cuda"},
  };
  for (const Row& row : rows) {
    const ScheduleCase c = case_of(row.engine, row.direction, 8);
    const std::vector<std::string> violations = c.violations(c.filled(PartialSchedule::parse(row.given)));
    const std::string prefix = row.prefix;
    if (prefix.empty()) {
      EXPECT_TRUE(violations.empty()) << row.given << listed(violations);
    } else {
      EXPECT_TRUE(reports(violations, prefix)) << row.given << listed(violations);
    }
  }
}

TEST(ScheduleValidate, ChecksGroupsShapeAndMachine) {
  const auto violations_with = [](const std::function<void(ScheduleCase&)>& change) {
    ScheduleCase c;
    change(c);
    return c.violations(c.filled());
  };
  EXPECT_TRUE(violations_with([](ScheduleCase& c) { c.numerics.combine_groups = 4; }).empty());
  EXPECT_TRUE(reports(violations_with([](ScheduleCase& c) { c.numerics.combine_groups = 3; }),
                      "combine_groups=3: must divide the number of experts, 8"));
  EXPECT_TRUE(reports(violations_with([](ScheduleCase& c) { c.numerics.combine_groups = 1; }),
                      "combine_groups=1: must be a multiple of the number of ranks, 2"));
  EXPECT_TRUE(reports(violations_with([](ScheduleCase& c) { c.shape.experts = 7; }),
                      "experts=7: must be a multiple of the number of ranks, 2"));
  EXPECT_TRUE(reports(violations_with([](ScheduleCase& c) { c.shape.experts = 0; }), "experts=0:"));
  EXPECT_TRUE(reports(violations_with([](ScheduleCase& c) { c.machine.ranks = 0; }), "ranks=0:"));
  EXPECT_TRUE(reports(violations_with([](ScheduleCase& c) { c.machine.ranks = 65; }), "ranks=65:"));
  EXPECT_TRUE(reports(violations_with([](ScheduleCase& c) { c.machine.workers = 0; }), "workers=0:"));
  EXPECT_TRUE(reports(violations_with([](ScheduleCase& c) { c.shape.topk = 0; }), "topk=0:"));
  EXPECT_TRUE(reports(violations_with([](ScheduleCase& c) { c.numerics.activation = static_cast<Activation>(5); }),
                      "activation=5:"));

  ScheduleCase grouped;
  grouped.numerics.combine_groups = 2;
  Schedule schedule = grouped.filled();
  EXPECT_EQ(schedule.combine.transport, CombineTransport::kStaged);
  schedule.combine.transport = CombineTransport::kEpilogue;
  EXPECT_TRUE(reports(grouped.violations(schedule), "combine.transport=epilogue: combine_groups=2 needs staged"));
}

TEST(ScheduleValidate, ResolveThrowsAllOfThemInOneLine) {
  const ScheduleCase c;
  const PartialSchedule given =
      PartialSchedule::parse("fusion=none,order.interleave=mixed,comm.where=warps,comm.reduce_sms=1");
  for (const char* part : {"order.interleave=mixed", "comm.reduce_sms=1", "; "}) {
    expect_error(Status::kInvalidArgument, part, [&] { resolve(given, c.request()); });
  }
  EXPECT_EQ(resolve({}, c.request()), c.filled());
}

// The rules once more, by hand, for schedules whose fields are all in range.
bool is_legal_by_hand(const Schedule& s, const ScheduleCase& c) {
  const int64_t available = c.machine.workers - s.comm.reserve_sms;
  if (available < 1 || s.order.experts_per_wave > c.shape.experts / c.machine.ranks) return false;
  if (s.comm.where == CommWhere::kWarps) {
    if (s.comm.dispatch_sms + s.comm.relay_sms + s.comm.combine_sms + s.comm.reduce_sms != 0) return false;
  } else if (s.comm.dispatch_sms < 1 || s.comm.combine_sms + s.comm.reduce_sms >= available ||
             s.comm.dispatch_sms + s.comm.relay_sms + s.comm.combine_sms + s.comm.reduce_sms > available) {
    return false;
  }
  if (s.comm.relay_sms > 0 && s.dispatch.transport == DispatchTransport::kPull) return false;
  const bool mixes_by_tickets = s.order.interleave == Interleave::kMixed && s.queue == QueueKind::kDynamic;
  if (s.order.second_share > 0 && !mixes_by_tickets) return false;
  const bool may_part = s.fusion == Fusion::kLayer && s.order.experts_per_wave == 1;
  if (s.order.blocks_per_wave > 0 && !may_part) return false;
  const bool may_lend = s.queue == QueueKind::kDynamic && s.comm.where == CommWhere::kWarps &&
                        s.dispatch.transport == DispatchTransport::kPull;
  if (s.comm.lend_sms && !may_lend) return false;
  const bool epilogue = s.combine.transport == CombineTransport::kEpilogue;
  if (epilogue && (s.comm.combine_sms > 0 || c.numerics.combine_groups > 0)) return false;
  if (s.fusion != Fusion::kLayer && s.order.interleave == Interleave::kMixed) return false;
  const bool backward = c.direction == Direction::kBackward;
  if (backward && !test::may_have_wgrad(s)) return false;
  for (int stage = 0; stage < 4; ++stage) {
    if (s.stage_tile[stage].m.value_or(s.tile.m) != s.tile.m) return false;
  }
  if (!backward && s.stage_tile[0].n.value_or(s.tile.n) % 128 != 0) return false;
  if (c.machine.engine != EngineKind::kCuda) return true;
  if (backward && s.dispatch.transport == DispatchTransport::kPush) return false;
  if (backward && s.order.blocks_per_wave > 0) return false;
  if (backward && s.fusion == Fusion::kLayer) {
    const bool one_wave = s.order.experts_per_wave == c.shape.experts / c.machine.ranks;
    if (!one_wave || s.order.interleave == Interleave::kMixed) return false;
    if (c.numerics.bias && c.numerics.router_weight == RouterWeight::kOutput) return false;
    if (s.tile_of(GemmStage::kDgradFc2).stages != s.tile_of(GemmStage::kDgradFc1).stages) return false;
  }
  const int64_t ring = (s.comm.chunk_bytes + 16) * s.comm.stages;
  const TileShape first = s.tile_of(backward ? GemmStage::kDgradFc2 : GemmStage::kFc1);
  for (int stage = backward ? 2 : 0; stage < (backward ? 6 : 2); ++stage) {
    const TileShape t = s.tile_of(static_cast<GemmStage>(stage));
    for (const int64_t kind : {available, int64_t{s.comm.dispatch_sms}, int64_t{s.comm.relay_sms},
                               int64_t{s.comm.combine_sms}, int64_t{s.comm.reduce_sms}}) {
      if (kind % t.cluster != 0) return false;
    }
    const bool gradient = stage == static_cast<int>(GemmStage::kDgradFc2), wgrad = stage > 3;
    if (t.m != 128 || t.k != 64 || t.pipeline != Pipeline::kCooperative) return false;
    if (gradient ? t.n != 128 && t.n != 192 : t.n % 128 != 0) return false;
    if (gradient && t.stages * 64 < t.n) return false;
    if (t.cluster != first.cluster) return false;
    if (!backward && s.fusion == Fusion::kLayer && (t.n != first.n || t.stages != first.stages)) return false;
    const TileShape dgrad_fc1 = s.tile_of(GemmStage::kDgradFc1);
    const bool alone = wgrad && s.wgrad == WgradOrder::kAfter;
    if (wgrad && !alone && (t.n != dgrad_fc1.n || t.stages != dgrad_fc1.stages)) return false;
    const int64_t beside = alone ? 3 * (4096 + 16) : ring + 5120;
    const int64_t bytes = 2 * t.stages * t.k * (t.m + t.n) + (gradient ? 49152 : 16384) + beside + 1024;
    if ((bytes + 1023) / 1024 * 1024 > c.machine.shared_memory_bytes) return false;
  }
  return true;
}

TEST(ScheduleValidate, AgreesWithTheRulesWrittenByHand) {
  RandomBits random(5);
  test::BranchCounts branches;
  std::map<std::string, int> alone;
  int legal = 0;
  const int rounds = 60000;
  for (int round = 0; round < rounds; ++round) {
    ScheduleCase c = random_schedule_case(random);
    count_case(branches, c);
    c.numerics.bias = below(random, 4) == 0;
    if (c.numerics.bias) c.numerics.router_weight = RouterWeight::kOutput;
    // On sms a ring may be too large without the tiles being so too.
    Schedule schedule = c.filled(PartialSchedule::parse(below(random, 2) == 0 ? "comm.where=sms" : "auto"));
    for (int changes = below(random, 6); changes > 0; --changes) {
      const FieldDescriptor& descriptor = descriptor_of(below(random, kFieldCount));
      std::vector<int> values = legal_values(descriptor.field);
      if (values.size() > 16) values.resize(16);
      descriptor.set(schedule, pick(random, values));
    }
    const bool expected = is_legal_by_hand(schedule, c);
    legal += expected;
    const std::vector<std::string> violations = c.violations(schedule);
    ASSERT_EQ(violations.empty(), expected) << to_text(schedule) << listed(violations);
    if (violations.size() == 1) ++alone[violations.front().substr(0, violations.front().find('='))];
  }
  for (const auto& [field, count] : alone) std::printf("%8d  %s alone is at fault\n", count, field.c_str());
  // Whatever the rules blame, but for fields of the ring and the tile, which stand for each other.
  for (const char* field : {"comm.dispatch_sms",
                            "comm.relay_sms",
                            "order.blocks_per_wave",
                            "order.second_share",
                            "comm.combine_sms",
                            "comm.reduce_sms",
                            "comm.reserve_sms",
                            "comm.lend_sms",
                            "combine.transport",
                            "order.interleave",
                            "order.experts_per_wave",
                            "backward.wgrad",
                            "tile.m",
                            "tile.n",
                            "tile.stages",
                            "tile.cluster",
                            "tile.fc2.m",
                            "tile.dgrad_fc2.m",
                            "tile.dgrad_fc1.m",
                            "fusion",
                            "dispatch.transport",
                            "tile.dgrad_fc2.n",
                            "tile.dgrad_fc2.stages",
                            "tile.wgrad_fc2.n",
                            "tile.wgrad_fc1.stages"}) {
    EXPECT_GT(alone[field], 0) << field << " alone was never at fault";
  }
  EXPECT_GT(legal, rounds / 5);
  EXPECT_LT(legal, rounds * 4 / 5);
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep
