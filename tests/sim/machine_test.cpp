#include "sim/machine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "sim/embedded_machines.h"
#include "sim/machine_fields.h"
#include "support/branch_counts.h"
#include "support/expect_error.h"

namespace uniep::sim {
namespace {

using Json = nlohmann::ordered_json;
using test::expect_error;

std::string default_text() {
  for (const EmbeddedMachine& machine : embedded_machines()) {
    if (std::string(machine.name) == kDefaultMachine) return machine.text;
  }
  return {};
}

void expect_refused(const std::string& text, const std::string& what) {
  expect_error(Status::kInvalidArgument, "file.json: " + what, [&] { parse_machine(text, "file.json"); });
}

void expect_refused(const std::function<void(Json&)>& change, const std::string& what) {
  Json json = Json::parse(default_text());
  change(json);
  expect_refused(json.dump(), what);
}

TEST(Machine, ShippedOnesAreReadAndNamed) {
  const std::vector<std::string> names = shipped_machine_names();
  for (const char* name : {"h200", "dgx_h100", "h800", "h100_ib2", "h100_ib8", "gb200_nvl72", "ascend_a3"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
  for (const std::string& name : names) {
    const MachineDescription& machine = shipped_machine(name);
    EXPECT_EQ(machine.name, name);
    EXPECT_EQ(parse_machine(machine_json(machine), "again"), machine);
    for (const auto& [key, origin] : machine.origin) EXPECT_FALSE(origin.from.empty()) << name << " " << key;
  }
  expect_error(Status::kInvalidArgument, "machine: 'h300'; must be one of ", [] { shipped_machine("h300"); });
}

TEST(Machine, NumbersOfTheDefaultSayThatTheyWereMeasured) {
  const MachineDescription& machine = shipped_machine(kDefaultMachine);
  EXPECT_EQ(machine.origin.at("clock.limit").source, Source::kMeasured);
  EXPECT_EQ(machine.origin.at("memory.l2").source, Source::kPublished);
  EXPECT_EQ(machine.origin.at("links[0].rates[2].read").source, Source::kMeasured);
  EXPECT_EQ(machine.origin.at("workers[0].count").source, Source::kMeasured);
}

TEST(Machine, TilesAndLinksBetweenWhatIsGiven) {
  const MachineDescription& machine = shipped_machine("h200");
  const TileCost& tile = machine.tiles[0];
  ASSERT_TRUE(tile.work.has(Work::kFc1) && tile.rows == 128 && tile.columns == 256);
  const double whole = machine.tile_cycles(Work::kFc1, 128, 256, 1000);
  EXPECT_DOUBLE_EQ(whole, tile.cycles_per_k * 1000 + tile.cycles);
  EXPECT_DOUBLE_EQ(machine.tile_cycles(Work::kFc1, 256, 256, 1000), 2 * whole);
  EXPECT_DOUBLE_EQ(machine.tile_cycles(Work::kDgradFc2, 128, 192, 0), machine.tiles[2].cycles);
  const LinkRate four = machine.link_rate(0, 4), six = machine.link_rate(0, 6), eight = machine.link_rate(0, 8);
  EXPECT_LT(six.read, four.read);
  EXPECT_GT(six.read, eight.read);
  EXPECT_EQ(machine.link_rate(0, 8), machine.link_rate(0, 64));
  const MachineDescription& nodes = shipped_machine("h100_ib8");
  EXPECT_EQ(nodes.most_ranks(), 64);
  EXPECT_EQ(nodes.level_between(0, 7), 0);
  EXPECT_EQ(nodes.level_between(7, 8), 1);
  EXPECT_TRUE(shipped_machine("ascend_a3").has_activation_stage());
  EXPECT_EQ(shipped_machine("ascend_a3").class_of(Work::kReduce).name, "vector");
  EXPECT_FALSE(machine.has_activation_stage());
}

TEST(Machine, FillsSchedules) {
  const Machine machine = schedule_machine(shipped_machine("h200"), 8);
  EXPECT_EQ(machine.workers, 132);
  EXPECT_EQ(machine.ranks, 8);
  const LayerShape shape{7168, 2048, 256, 8};
  EXPECT_TRUE(validate(fill({}, {.direction = Direction::kForward, .shape = shape, .machine = machine}),
                       {.direction = Direction::kForward, .shape = shape, .machine = machine})
                  .empty());
}

TEST(Machine, RefusesWhatIsNoDescription) {
  expect_refused("", "is not valid JSON");
  expect_refused("{\"format\": \"uniep machine\",", "is not valid JSON");
  expect_refused("[1, 2]", "is not a JSON object");
  expect_refused("{}", "format: is missing; must be \"uniep machine\"");
  expect_refused("{\"format\": \"a trace\"}", "format: \"a trace\"; must be \"uniep machine\"");
  expect_refused(std::string(kMaxMachineText + 1, ' '), "holds 1048577 bytes");
  const std::string text = default_text();
  expect_refused("{\"name\": \"twice\", " + text.substr(text.find('{') + 1), "name: comes twice in an object");
}

// However deep a value is, it is refused where it stands.
TEST(Machine, RefusesDeepValues) {
  const auto refused = [](const std::string& begin, const std::string& end, const std::string& what) {
    constexpr std::size_t kDepth = 500'000;
    const std::string deep = begin + std::string(kDepth, '[') + std::string(kDepth, ']') + end;
    ASSERT_LE(deep.size(), kMaxMachineText);
    expect_refused(deep, what);
    std::string objects = begin;
    for (std::size_t i = 0; i < 100'000; ++i) objects += "{\"a\":";
    expect_refused(objects + "1" + std::string(100'000, '}') + end, what);
  };
  refused("", "", "");
  refused(R"({"format":)", R"(,"version":2})", "format: a");
  refused(R"({"format":"uniep machine","version":)", "}", "version: a");
  const std::string known = R"({"format":"uniep machine","version":2,)";
  refused(known + R"("x":)", R"(,"y":1,"z":2,"name":3})", "x: is not known");
  std::string text = default_text();
  for (const char* key : {"name", "title", "workers", "links", "clock"}) {
    Json json = Json::parse(text);
    json[key] = "HERE";
    const std::string changed = json.dump();
    const std::size_t at = changed.find("\"HERE\"");
    refused(changed.substr(0, at), changed.substr(at + 6), key);
  }
}

TEST(Machine, RefusesOtherVersions) {
  expect_refused([](Json& json) { json["version"] = 4; },
                 "version: 4; must be 1 to 3: this file is of a later version");
  expect_refused([](Json& json) { json["version"] = 0; }, "version: 0; must be 1 to 3");
  expect_refused([](Json& json) { json["version"] = "1"; }, "version: \"1\"; must be 1 to 3");
  expect_refused([](Json& json) { json.erase("version"); }, "version: is missing; must be 1 to 3");
}

TEST(Machine, FilesOfVersion1MeanWhatTheyMeant) {
  Json json = Json::parse(default_text());
  json["version"] = 1;
  json.erase("pipeline");
  for (const char* key : {"waiting", "linked"}) json["clock"].erase(key);
  json["time"].erase("peers");
  for (const char* key : {"send_fixed", "ring", "clocked", "chunk_remote"}) json["copy"].erase(key);
  MachineDescription read = parse_machine(json.dump(), "old.json");
  for (const NumberField& field : number_fields()) {
    if (field.since == 1) continue;
    EXPECT_EQ(field.of(read), field.before) << field.key;
    EXPECT_NE(read.origin[std::string(field.section) + "." + field.key].from.find("version 1"), std::string::npos);
  }
  EXPECT_EQ(read.clock.limit, shipped_machine(kDefaultMachine).clock.limit);
  EXPECT_EQ(parse_machine(machine_json(read), "again.json"), read);
  json["clock"]["waiting"] = 1;
  expect_error(Status::kInvalidArgument, "clock.waiting: is not known",
               [&] { parse_machine(json.dump(), "old.json"); });
}

TEST(Machine, FilesOfVersion2MeanWhatTheyMeant) {
  Json json = Json::parse(default_text());
  json["version"] = 2;
  json["clock"].erase("linked");
  json["copy"].erase("chunk_remote");
  json["time"].erase("peers");
  MachineDescription read = parse_machine(json.dump(), "old.json");
  const MachineDescription& now = shipped_machine(kDefaultMachine);
  EXPECT_GT(now.clock.linked * now.copy.chunk_remote * now.time.peers, 0);
  EXPECT_EQ(read.clock.linked + read.copy.chunk_remote + read.time.peers, 0);
  EXPECT_EQ(read.clock.waiting, now.clock.waiting);
  EXPECT_NE(read.origin["time.peers"].from.find("version 2"), std::string::npos);
}

TEST(Machine, EveryNumberIsCheckedForPresenceUnitSourceAndRange) {
  for (const NumberField& field : number_fields()) {
    const std::string key = std::string(field.section) + "." + field.key;
    const auto at = [&](Json& json) -> Json& { return json[field.section][field.key]; };
    expect_refused([&](Json& json) { json[field.section].erase(field.key); }, key + ": is missing");
    expect_refused([&](Json& json) { at(json)["unit"] = "furlong"; }, key + ".unit: \"furlong\"; must be \"");
    expect_refused([&](Json& json) { at(json)["source"] = "rumour"; },
                   key + ".source: \"rumour\"; must be measured, published or assumed");
    expect_refused([&](Json& json) { at(json)["from"] = ""; }, key + ".from: \"\"; must be a text");
    expect_refused([&](Json& json) { at(json)["value"] = -1; }, key + ".value: -1; must be a");
    expect_refused([&](Json& json) { at(json)["value"] = field.most * 1.5 + 1; }, key + ".value: ");
    expect_refused([&](Json& json) { at(json)["value"] = std::nan(""); }, key + ".value: null; must be a");
    expect_refused([&](Json& json) { at(json)["value"] = "12"; }, key + ".value: \"12\"; must be a");
    expect_refused([&](Json& json) { at(json)["spread"] = 0.1; }, key + ".spread: is not known");
    expect_refused([&](Json& json) { at(json) = 12; }, key + ": 12; must be an object with value, unit, source, from");
    if (field.whole) {
      expect_refused([&](Json& json) { at(json)["value"] = field.least + 0.5; }, key + ".value: ");
    }
  }
}

TEST(Machine, RefusesUnknownAndMissingKeysAndStages) {
  expect_refused([](Json& json) { json["colour"] = 1; }, "colour: is not known; must be one of format, version, name");
  expect_refused([](Json& json) { json["clock"]["turbo"] = 1; }, "clock.turbo: is not known; must be one of limit");
  expect_refused([](Json& json) { json.erase("links"); }, "links: is missing");
  expect_refused([](Json& json) { json["links"] = 3; }, "links: 3; must be a list of 0 to 4");
  expect_refused([](Json& json) { json["name"] = ""; }, "name: \"\"; must be a text that is not empty");
  expect_refused([](Json& json) { json["title"] = std::string(1000, 'x'); }, "title: ");
  expect_refused([](Json& json) { json["workers"] = Json::array(); }, "workers: 0 entries; must be a list of 1 to 8");
  expect_refused(
      [](Json& json) {
        json["workers"][0]["stages"] = {"fc1", "lunch"};
      },
      "workers[0].stages: \"lunch\"; must be a list of dispatch, fc1");
  expect_refused([](Json& json) { json["workers"][0]["count"]["value"] = 0; }, "workers[0].count.value: 0; must be a");
  expect_refused([](Json& json) { json["workers"][0]["stages"].erase(8); },
                 "workers: no class runs reduce; must be a class for each stage");
  expect_refused([](Json& json) { json["workers"].push_back(json["workers"][0]); },
                 "workers: two classes run the same stage");
  expect_refused(
      [](Json& json) {
        json["workers"].push_back(json["workers"][0]);
        json["workers"][0]["stages"] = {"fc1", "dispatch", "combine", "reduce"};
        json["workers"][1]["stages"] = {"fc2", "dgrad_fc2", "dgrad_fc1", "wgrad_fc2", "wgrad_fc1"};
      },
      "workers: fc2 and fc1 are run by different classes");
  expect_refused([](Json& json) { json["tiles"][0]["stages"] = {"dispatch"}; },
                 "tiles[0].stages: \"dispatch\"; must be");
  expect_refused([](Json& json) { json["tiles"].erase(4), json["tiles"].erase(3); }, "tiles: none is for wgrad_fc2");
  expect_refused([](Json& json) { json["tiles"][1]["rows"] = 0; }, "tiles[1].rows: 0; must be a whole number");
  expect_refused([](Json& json) { json["tiles"][1]["cycles"]["unit"] = "us"; },
                 "tiles[1].cycles.unit: \"us\"; must be \"cycles\"");
  expect_refused([](Json& json) { json["links"][0]["relay"] = 1; }, "links[0].relay: 1; must be true or false");
  expect_refused([](Json& json) { json["links"][0]["ranks"] = 1; }, "links[0].ranks: 1; must be a whole number");
  expect_refused([](Json& json) { json["links"].push_back(json["links"][0]); },
                 "links[1].ranks: 8; must be more than those of the level before");
  expect_refused([](Json& json) { json["links"][0]["rates"][1]["ranks"] = 2; },
                 "links[0].rates[1].ranks: 2; must be more than those of the entry before");
  expect_refused([](Json& json) { json["links"][0]["rates"][1]["read"]["value"] = 0; },
                 "links[0].rates[1].read.value: 0; must be a number from");
  expect_refused([](Json& json) { json["links"][0]["rates"] = Json::array(); }, "links[0].rates: 0 entries");
  expect_refused([](Json& json) { json["clock"]["pause_lowest"]["value"] = 1.9; },
                 "clock.pause_lowest.value: 1.9; must be at most clock.pause");
}

TEST(Machine, SaysWhichGpuItWasCalibratedOn) {
  MachineDescription machine = shipped_machine(kDefaultMachine);
  EXPECT_FALSE(machine.calibrated);
  machine.calibrated = CalibratedGpu{"NVIDIA H200", {"copy.push", "tiles[0].cycles"}};
  EXPECT_EQ(parse_machine(machine_json(machine), "m.json"), machine);
  expect_refused([](Json& json) { json["calibrated"] = 1; }, "calibrated: 1; must be an object with device, doubtful");
  expect_refused([](Json& json) { json["calibrated"]["device"] = "GPU"; }, "calibrated.doubtful: is missing");
  expect_refused(
      [](Json& json) {
        json["calibrated"] = {{"device", ""}, {"doubtful", Json::array()}};
      },
      "calibrated.device: \"\"; must be a text");
  expect_refused(
      [](Json& json) {
        json["calibrated"] = {{"device", "GPU"}, {"doubtful", {1}}};
      },
      "calibrated.doubtful[0]: 1; must be a key");
  expect_refused(
      [](Json& json) {
        json["calibrated"] = {{"device", "GPU"}, {"doubtful", {"clock.limit", Json::array()}}};
      },
      "calibrated.doubtful[1]: a list of 0; must be a key");
  expect_refused(
      [](Json& json) {
        json["calibrated"] = {{"device", "GPU"}, {"doubtful", "clock.limit"}};
      },
      "calibrated.doubtful: \"clock.limit\"; must be a list of at most 200 keys");
  expect_refused(
      [](Json& json) {
        json["calibrated"] = {{"device", "GPU"}, {"doubtful", std::vector<int>(201)}};
      },
      "calibrated.doubtful: a list of 201; must be a list of at most 200 keys");
}

// Whatever is in a file, it is read or refused by one line.
TEST(Machine, TruncatedAndMutatedFilesAreReadOrRefused) {
  test::BranchCounts branches;
  const std::string text = default_text();
  const auto read = [&](const std::string& changed) {
    bool accepted = true;
    try {
      const MachineDescription machine = parse_machine(changed, "fuzzed");
      EXPECT_EQ(parse_machine(machine_json(machine), "again"), machine);
    } catch (const Error& error) {
      accepted = false;
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      for (const char c : std::string(error.what())) ASSERT_TRUE(c >= ' ' && c <= '~') << error.what();
    }
    branches.count("read", accepted);
    branches.count("refused", !accepted);
  };
  for (std::size_t length = 0; length < text.size(); length += 7) read(text.substr(0, length));
  std::mt19937_64 random(1);
  const std::vector<std::string> pieces = {"-",    "1e999", "9",   "\"", "{",    "}",  "[",    "]",    "null",
                                           "\x01", "\xff",  "NaN", ",",  "true", "\n", "\\u0", "1e-9", "."};
  for (int round = 0; round < 3000; ++round) {
    std::string changed = text;
    for (uint64_t i = random() % 3 + 1; i > 0; --i) {
      const std::size_t at = random() % changed.size();
      switch (random() % 3) {
        case 0:
          changed[at] = static_cast<char>(random());
          break;
        case 1:
          changed.erase(at, random() % 40);
          break;
        default:
          changed.insert(at, pieces[random() % pieces.size()]);
      }
    }
    read(changed);
  }
  read(std::string(200000, '['));
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep::sim
