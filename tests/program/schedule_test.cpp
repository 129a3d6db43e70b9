#include "uniep/schedule.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "program/schedule_fields.h"
#include "support/expect_error.h"
#include "support/random_schedule_case.h"
#include "uniep/error.h"

namespace uniep {
namespace {

using test::below;
using test::expect_error;
using test::random_in_range_schedule;
using test::RandomBits;

// ---- The table of fields
// ----------------------------------------------------------------------------------------------

TEST(ScheduleFields, HaveTheNamesOfTheDesignInOrder) {
  const std::vector<std::string> expected = {"fusion",
                                             "dispatch.transport",
                                             "dispatch.dedup",
                                             "comm.where",
                                             "comm.dispatch_sms",
                                             "comm.relay_sms",
                                             "comm.combine_sms",
                                             "comm.reduce_sms",
                                             "comm.chunk_bytes",
                                             "comm.stages",
                                             "comm.reserve_sms",
                                             "comm.lend_sms",
                                             "order.experts_per_wave",
                                             "order.blocks_per_wave",
                                             "order.experts",
                                             "order.interleave",
                                             "order.second_share",
                                             "order.source_rotation",
                                             "order.raster",
                                             "queue",
                                             "tile.m",
                                             "tile.n",
                                             "tile.k",
                                             "tile.stages",
                                             "tile.cluster",
                                             "tile.pipeline",
                                             "combine.transport",
                                             "combine.column_chunks",
                                             "backward.wgrad",
                                             "backward.wgrad_reserve",
                                             "save.xg",
                                             "save.z"};
  std::vector<std::string> names;
  for (const ScheduleField& field : schedule_fields()) names.push_back(field.name);
  ASSERT_EQ(names.size(), kFieldCount);
  EXPECT_EQ(std::vector<std::string>(names.begin(), names.begin() + kCommonFieldCount), expected);
  EXPECT_EQ(name_of(stage_field(GemmStage::kFc1, kTileN)), "tile.fc1.n");
  EXPECT_EQ(name_of(stage_field(GemmStage::kDgradFc1, kTileStages)), "tile.dgrad_fc1.stages");
  EXPECT_EQ(name_of(stage_field(GemmStage::kWgradFc1, kTilePipeline)), "tile.wgrad_fc1.pipeline");
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
}

TEST(ScheduleFields, EachHoldsItsOwnValueAndNoOther) {
  for (int id = 0; id < kFieldCount; ++id) {
    const FieldDescriptor& descriptor = descriptor_of(id);
    EXPECT_EQ(find_field(descriptor.field.name), static_cast<FieldId>(id));
    for (const int value : legal_values(descriptor.field)) {
      const bool is_one_of_many = descriptor.field.maximum >= 1024 && !descriptor.field.power_of_two;
      if (is_one_of_many && value > 20) break;
      Schedule schedule;
      descriptor.set(schedule, value);
      EXPECT_EQ(descriptor.get(schedule), value) << descriptor.field.name;
      for (int other = 0; other < kFieldCount; ++other) {
        if (other == id) continue;
        EXPECT_EQ(descriptor_of(other).get(schedule), descriptor_of(other).get(Schedule{}));
      }
      EXPECT_EQ(parse_value(descriptor.field, value_text(descriptor.field, value)), value);
    }
  }
}

TEST(ScheduleFields, LegalValuesAreThoseOfTheContract) {
  const std::map<std::string, std::string> expected = {{"fusion", "none, pairs or layer"},
                                                       {"dispatch.dedup", "off or on"},
                                                       {"comm.where", "warps or sms"},
                                                       {"comm.reduce_sms", "0 to 1024"},
                                                       {"comm.chunk_bytes", "powers of two from 512 to 65536"},
                                                       {"comm.stages", "1 to 16"},
                                                       {"order.raster", "1 to 16"},
                                                       {"tile.m", "64, 128 or 256"},
                                                       {"tile.n", "64, 128, 192 or 256"},
                                                       {"tile.fc1.n", "128 or 256"},
                                                       {"tile.fc2.n", "64, 128, 192 or 256"},
                                                       {"tile.k", "32, 64 or 128"},
                                                       {"tile.stages", "2 to 8"},
                                                       {"tile.cluster", "1 or 2"},
                                                       {"tile.pipeline", "cooperative or pingpong"},
                                                       {"combine.transport", "epilogue or staged"},
                                                       {"combine.column_chunks", "1 to 8"},
                                                       {"backward.wgrad", "after, fill or mixed"},
                                                       {"backward.wgrad_reserve", "0 to 16"},
                                                       {"save.xg", "keep or redispatch"},
                                                       {"save.z", "keep or recompute"}};
  for (const auto& [name, legal] : expected)
    EXPECT_EQ(legal_text(descriptor_of(*find_field(name)).field), legal) << name;
  EXPECT_EQ(legal_values(descriptor_of(kCommStages).field),
            (std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}));
  EXPECT_EQ(legal_values(descriptor_of(kTileN).field), (std::vector<int>{64, 128, 192, 256}));
}

TEST(ScheduleFields, AStageTakesItsOwnTileBeforeTheCommonOne) {
  Schedule schedule;
  schedule.stage_tile[static_cast<int>(GemmStage::kFc2)].n = 64;
  schedule.stage_tile[static_cast<int>(GemmStage::kFc2)].pipeline = Pipeline::kPingpong;
  TileShape expected = schedule.tile;
  EXPECT_EQ(schedule.tile_of(GemmStage::kFc1), expected);
  expected.n = 64;
  expected.pipeline = Pipeline::kPingpong;
  EXPECT_EQ(schedule.tile_of(GemmStage::kFc2), expected);
}

// ---- Text
// -------------------------------------------------------------------------------------------------------------

TEST(ScheduleText, ReadsListsAndJson) {
  for (const char* nothing : {"", "auto", "  auto \n", "{}", " "}) {
    EXPECT_TRUE(PartialSchedule::parse(nothing).values().empty()) << nothing;
  }
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"fusion", "pairs"}, {"dispatch.dedup", "off"}, {"tile.n", "128"}, {"tile.fc1.n", "256"}};
  EXPECT_EQ(PartialSchedule::parse("tile.fc1.n=256,tile.n=128,dispatch.dedup=off,fusion=pairs").values(), expected);
  EXPECT_EQ(PartialSchedule::parse(" tile.n = 0128 ,\n fusion=pairs, dispatch.dedup=off , tile.fc1.n=256").values(),
            expected);
  EXPECT_EQ(
      PartialSchedule::parse(R"({"tile.n": 128, "tile.fc1.n": "256", "dispatch.dedup": false, "fusion": "pairs"})")
          .values(),
      expected);
  EXPECT_TRUE(PartialSchedule::parse(R"({"dispatch.dedup": "on"})").given("dispatch.dedup"));
  EXPECT_FALSE(PartialSchedule::parse("fusion=none").given("dispatch.dedup"));
}

TEST(ScheduleText, SetReplaces) {
  PartialSchedule partial = PartialSchedule::parse("tile.n=64");
  partial.set("tile.n", "128");
  partial.set("fusion", "none");
  EXPECT_EQ(partial.values(),
            (std::vector<std::pair<std::string, std::string>>{{"fusion", "none"}, {"tile.n", "128"}}));
  expect_error(Status::kInvalidArgument, "tile.n=127: legal are 64, 128, 192 or 256",
               [&] { partial.set("tile.n", "127"); });
}

TEST(ScheduleText, NamesWhatIsWrongAndWhatIsLegal) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"tile.fc1.nn=128", "'tile.fc1.nn' is unknown; the nearest legal field is tile.fc1.n"},
      {"fusionn=layer", "nearest legal field is fusion"},
      {"fusion=layers", "fusion=layers: legal are none, pairs or layer"},
      {"fusion=", "fusion=: legal are none, pairs or layer"},
      {"fusion=1", "fusion=1: legal are"},
      {"tile.n=100", "tile.n=100: legal are 64, 128, 192 or 256"},
      {"tile.fc1.n=64", "tile.fc1.n=64: legal are 128 or 256"},
      {"tile.n=128x", "tile.n=128x: legal are"},
      {"tile.n=+128", "tile.n=+128: legal are"},
      {"tile.n=99999999999999999999", "tile.n=99999999999999999999: legal are"},
      {"order.raster=-1", "order.raster=-1: legal are 1 to 16"},
      {"comm.chunk_bytes=1000", "comm.chunk_bytes=1000: legal are powers of two from 512 to 65536"},
      {"comm.chunk_bytes=131072", "comm.chunk_bytes=131072: legal are"},
      {"comm.dispatch_sms=1025", "comm.dispatch_sms=1025: legal are 0 to 1024"},
      {"dispatch.dedup=true", "dispatch.dedup=true: legal are off or on"},
      {"fusion=layer,fusion=layer", "fusion=layer: the field is given twice"},
      {"fusion=layer,", "schedule entry '' has no '='"},
      {",fusion=layer", "schedule entry '' has no '='"},
      {"layer", "schedule entry 'layer' has no '='"},
      {"=", "schedule field '' is unknown"},
      {R"({"fusion": "layer", "fusion": "layer"})", "fusion=layer: the field is given twice"},
      {R"({"fusion": true})", "fusion=true: legal are"},
      {R"({"fusion": null})", "fusion=null: legal are"},
      {R"({"tile.n": 128.0})", "tile.n=128.0: legal are"},
      {R"({"tile.n": -9223372036854775808})", "tile.n=-9223372036854775808: legal are"},
      {R"({"tile": {"n": 128}})", "schedule field 'tile' is an object"},
      {R"({"tile.n": [128]})", "schedule field 'tile.n' is an array"},
      {R"({"fusion": "layer")", "not valid JSON"},
      {R"({"fusion": "layer"} x)", "not valid JSON"},
      {std::string("{\"fusion\": \"layer\"}\0x", 21), "not valid JSON at byte 20"},
      {"{", "not valid JSON"},
      {"[]", "schedule entry '[]' has no '='"},
      {"fus\nion\x01=\xff", "'fus\\x0aion\\x01' is unknown"},
  };
  for (const auto& [text, message] : bad) {
    expect_error(Status::kInvalidArgument, message, [&, &given = text] { PartialSchedule::parse(given); });
  }
}

// Damaged and random text is read or refused with one printable line.
TEST(ScheduleText, SurvivesHostileText) {
  RandomBits random(7);
  const std::string pieces[] = {"{",
                                "}",
                                "\"",
                                ",",
                                "=",
                                ":",
                                "[",
                                "tile.n",
                                "fusion",
                                "layer",
                                "\\u0000",
                                "1e999",
                                std::string(1, '\0'),
                                "\xff\xfe",
                                "\n",
                                "auto",
                                "128",
                                "true",
                                std::string(300, '{')};
  int refused = 0;
  for (int round = 0; round < 6000; ++round) {
    std::string text;
    if (below(random, 2) == 0) {
      text =
          below(random, 2) == 0 ? to_json(random_in_range_schedule(random)) : to_text(random_in_range_schedule(random));
    }
    for (int edits = 1 + below(random, 4); edits > 0; --edits) {
      const std::size_t at = random() % (text.size() + 1);
      switch (below(random, 3)) {
        case 0:
          text.insert(at, pieces[random() % std::size(pieces)]);
          break;
        case 1:
          text.erase(at, random() % 8);
          break;
        default:
          text.insert(at, 1, static_cast<char>(random()));
          break;
      }
    }
    try {
      PartialSchedule::parse(text);
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      for (const char c : std::string(error.what())) ASSERT_TRUE(c >= 0x20 && c < 0x7f) << error.what();
      ASSERT_LT(std::string(error.what()).size(), 1000u);
    }
  }
  EXPECT_GT(refused, 3000);
}

TEST(ScheduleText, ParseOfPrintGivesTheSame) {
  RandomBits random(11);
  for (int round = 0; round < 1000; ++round) {
    const Schedule schedule = random_in_range_schedule(random);
    const PartialSchedule from = PartialSchedule::from(schedule);
    EXPECT_EQ(PartialSchedule::parse(to_text(schedule)).values(), from.values());
    EXPECT_EQ(PartialSchedule::parse(to_json(schedule)).values(), from.values());
    Schedule rebuilt;
    for (const auto& [name, value] : from.values()) {
      const FieldDescriptor& descriptor = descriptor_of(*find_field(name));
      descriptor.set(rebuilt, parse_value(descriptor.field, value));
    }
    EXPECT_EQ(rebuilt, schedule);
  }
  EXPECT_EQ(to_json(Schedule{}).rfind(R"({"fusion": "layer", "dispatch.transport": "pull", "dispatch.dedup": "on")", 0),
            0u);
  EXPECT_EQ(to_json(Schedule{}).find("fc1"), std::string::npos);
  EXPECT_EQ(to_json(Schedule{}).find('\n'), std::string::npos);
}

// ---- The reference
// ----------------------------------------------------------------------------------------------------

TEST(ScheduleReference, TheFileIsUpToDate) {
  const auto project = std::filesystem::path(UNIEP_TEST_DATA).parent_path().parent_path();
  std::ifstream file(project / "docs" / "schedule.md", std::ios::binary);
  ASSERT_TRUE(file.good()) << "docs/schedule.md is missing; make it: uniep schedule --reference > docs/schedule.md";
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), schedule_reference_markdown()) << "make it anew: uniep schedule --reference > docs/schedule.md";
}

TEST(ScheduleReference, HasEveryFieldWithItsMeaning) {
  const std::string text = schedule_reference_markdown();
  for (int id = 0; id < kCommonFieldCount; ++id) {
    const ScheduleField& field = descriptor_of(id).field;
    EXPECT_NE(text.find("| `" + field.name + "` |"), std::string::npos) << field.name;
    EXPECT_NE(text.find(field.meaning), std::string::npos) << field.name;
    EXPECT_FALSE(field.meaning.empty() || field.strategy.empty()) << field.name;
  }
}

}  // namespace
}  // namespace uniep
