// Files of tuned Schedules, and the command that writes them.
#include "tune/tuned.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <new>

#include "cli/chosen_schedule.h"
#include "io/file.h"
#include "support/command.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/random_schedule_case.h"
#include "support/temporary_folder.h"
#include "uniep/error.h"

namespace uniep::test {
namespace {

using Json = nlohmann::json;
using tune::TunedKey;
using tune::TunedSchedule;

TunedSchedule an_entry() {
  const LayerShape shape{64, 32, 8, 2};
  TunedSchedule tuned;
  tuned.key = {"cpu avx2, 2 cores", 2, shape, {}, Direction::kBackward, 64, ""};
  tuned.key.numerics.weight_gradient = WeightGradient::kMainGrad;
  set_activation(tuned.key.numerics, "swiglu:alpha=1.702,limit=7,up_offset=1");
  tuned.key.numerics.router_weight = RouterWeight::kOutput;
  tuned.key.numerics.bias = true;
  tuned.schedule =
      resolve(PartialSchedule::parse("tile.dgrad_fc1.n=128,fusion=pairs"), {.direction = Direction::kBackward,
                                                                            .shape = shape,
                                                                            .numerics = tuned.key.numerics,
                                                                            .machine = {EngineKind::kCpu, 2, 2}});
  tuned.milliseconds = 1.25;
  tuned.default_milliseconds = 1.5;
  return tuned;
}

TEST(TunedFile, IsReadAsItWasWritten) {
  std::vector<TunedSchedule> one = {an_entry()};
  EXPECT_EQ(tune::parse_tuned(tune::to_json(one)), one);
  one[0].key.conditions = "routing zipf:1,order.raster=4";
  EXPECT_EQ(tune::parse_tuned(tune::to_json(one)), one);
  EXPECT_TRUE(tune::parse_tuned(tune::to_json({})).empty());
}

// Ranks in other processes wait for what it says, whatever ended it.
TEST(ChosenSchedule, WhatEndsTheFirstRanksTextIsAnErrorOfAllRanks) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = 2;
  Group group(options);
  expect_error(Status::kInternal, "bad_alloc",
               [&] { cli::text_made_by_first_rank(group, []() -> std::string { throw std::bad_alloc(); }); });
  expect_error(Status::kInternal, "no such file", [&] {
    cli::text_made_by_first_rank(
        group, []() -> std::string { throw std::filesystem::filesystem_error("no such file", std::error_code()); });
  });
  expect_error(Status::kTimeout, "late", [&] {
    cli::text_made_by_first_rank(group, []() -> std::string { throw Error(Status::kTimeout, "late"); });
  });
  EXPECT_EQ(cli::text_made_by_first_rank(group, [] { return std::string("a b"); }), "a b");
}

TEST(TunedFile, WhatIsWrongIsNamed) {
  const auto refusal = [](const std::string& text) {
    try {
      tune::parse_tuned(text);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const auto with = [&](const std::string& pointer, const Json& value) {
    Json json = Json::parse(tune::to_json({an_entry()}));
    json[Json::json_pointer(pointer)] = value;
    return refusal(json.dump());
  };
  EXPECT_EQ(refusal("{"), "no JSON");
  EXPECT_EQ(refusal("[]"), "file: must be an object");
  EXPECT_EQ(with("/format", 3), "file.format: '3'; this version reads 2");
  EXPECT_EQ(with("/schedules", 2), "file.schedules: must be a list");
  EXPECT_EQ(with("/more", 2), "file: 'more' is no key of it; must be one of format, schedules");
  EXPECT_EQ(with("/", 2), "file: '' is no key of it; must be one of format, schedules");
  EXPECT_EQ(with("/schedules/0/conditions", 2), "schedules[0].conditions: must be text");
  EXPECT_EQ(with("/schedules/0/ranks", 65), "schedules[0].ranks: '65'; must be a whole number from 1 to 64");
  EXPECT_EQ(with("/schedules/0/ranks", 1.5), "schedules[0].ranks: '1.5'; must be a whole number from 1 to 64");
  EXPECT_EQ(with("/schedules/0/ms", -1), "schedules[0].ms: '-1'; must be a time above 0");
  EXPECT_EQ(with("/schedules/0/ms", nullptr), "schedules[0].ms: 'null'; must be a time above 0");
  EXPECT_EQ(with("/schedules/0/direction", "up"), "schedules[0].direction: 'up'; must be one of forward, backward");
  EXPECT_EQ(with("/schedules/0/numerics/bias", 1), "schedules[0].numerics.bias: '1'; must be true or false");
  EXPECT_EQ(with("/schedules/0/numerics/router_weight", "all"),
            "schedules[0].numerics.router_weight: 'all'; must be one of activation, output, input");
  EXPECT_EQ(with("/schedules/0/numerics/activation", "relu"),
            "schedules[0].numerics.activation: 'relu'; must be one as `uniep run --activation` takes it");
  EXPECT_EQ(with("/schedules/0/shape", Json::array()), "schedules[0].shape: must be an object");
  EXPECT_EQ(with("/schedules/0/schedule", Json::array()),
            "schedules[0].schedule: must be an object of words and numbers");
  EXPECT_NE(with("/schedules/0/schedule/fusion", "all").find("schedules[0].schedule: fusion"), std::string::npos);
  Json lacking = Json::parse(tune::to_json({an_entry()}));
  lacking["schedules"][0]["schedule"].erase("queue");
  EXPECT_EQ(refusal(lacking.dump()), "schedules[0].schedule: queue is missing");
  const std::string deep(200'000, '[');
  EXPECT_EQ(refusal(deep), "no JSON");
  EXPECT_EQ(refusal(R"({"format": )" + deep + std::string(deep.size(), ']') + R"(, "schedules": []})"),
            "file.format: a array; this version reads 2");
}

TEST(TunedFile, DamageIsNeverMoreThanARefusal) {
  const std::string whole = tune::to_json({an_entry()});
  RandomBits random(3);
  int accepted = 0, refused = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string text = whole.substr(0, round % 2 == 0 ? whole.size() : below(random, whole.size()));
    for (uint64_t i = below(random, 3); i > 0 && !text.empty(); --i) {
      text[below(random, text.size())] = static_cast<char>(below(random, 256));
    }
    try {
      tune::parse_tuned(text);
      ++accepted;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(accepted, 300);
  EXPECT_GT(refused, 1500);
}

TEST(TunedFolder, FindsTheEntryOfItsKeyAlone) {
  const TemporaryFolder temporary;
  const tune::TunedFolder folder(temporary / "made");
  const TunedSchedule tuned = an_entry();
  EXPECT_FALSE(folder.find(tuned.key));
  folder.store(tuned);
  EXPECT_EQ(folder.find(tuned.key), tuned);
  std::vector<TunedKey> others(14, tuned.key);
  others[0].machine = "cpu avx512, 2 cores";
  others[1].ranks = 4;
  others[2].shape.topk = 1;
  others[3].numerics.combine_groups = 2;
  others[4].direction = Direction::kForward;
  others[5].tokens = 128;
  others[6].numerics.bias = false;
  others[7].numerics.router_weight = RouterWeight::kActivation;
  others[8].numerics.alpha = 1.703f;
  others[9].numerics.gate_limit = 8;
  others[10].numerics.up_limit = 8;
  others[11].numerics.up_offset = 0;
  set_activation(others[12].numerics, "relu2");
  others[13].conditions = "routing zipf:1";
  for (const TunedKey& other : others) {
    EXPECT_FALSE(folder.find(other));
    EXPECT_NE(folder.path(other), folder.path(tuned.key));
  }

  // Another's entry under this name, and a file that was cut off: a line, and it stays.
  std::string problem;
  std::filesystem::copy_file(folder.path(tuned.key), folder.path(others[1]));
  EXPECT_FALSE(folder.find(others[1], &problem));
  EXPECT_NE(problem.find("not the entry of its name"), std::string::npos) << problem;
  std::filesystem::resize_file(folder.path(tuned.key), 100);
  EXPECT_FALSE(folder.find(tuned.key, &problem));
  EXPECT_NE(problem.find("no JSON"), std::string::npos) << problem;
  EXPECT_EQ(std::filesystem::file_size(folder.path(tuned.key)), 100u);
  folder.store(tuned);
  EXPECT_EQ(folder.find(tuned.key), tuned);
  const tune::TunedFolder nowhere{std::filesystem::path()};
  nowhere.store(tuned);
  EXPECT_FALSE(nowhere.find(tuned.key));
}

TEST(TunedFolder, BatchesOfAboutASizeShareAnEntry) {
  EXPECT_EQ(tune::token_bucket(0), 1);
  EXPECT_EQ(tune::token_bucket(1), 1);
  EXPECT_EQ(tune::token_bucket(65), 128);
  EXPECT_EQ(tune::token_bucket(4096), 4096);
  EXPECT_EQ(tune::token_bucket(4097), 8192);
  EXPECT_EQ(tune::token_bucket(8192), 8192);
  EXPECT_EQ(tune::token_bucket(12289), 16384);
  EXPECT_EQ(tune::token_bucket(std::numeric_limits<int64_t>::max()), int64_t{1} << 40);
}

const std::vector<std::string> kLayer = {"--engine", "cpu",     "--ranks",   "2",        "--workers",
                                         "2",        "--shape", "64,32,8,2", "--tokens", "60,33"};
const std::vector<std::string> kLayerOfRun = {
    "run", "--engine",  "cpu", "--ranks", "2", "--workers", "2",     "--hidden", "64", "--intermediate",
    "32",  "--experts", "8",   "--topk",  "2", "--tokens",  "60,33", "--json",   "-"};

TEST(TuneCommand, WhatItFindsIsWhatAutoTakesAndTheBitsStay) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const std::string file = (folder / "tuned.json").string();
  const CommandResult before = run_command(join(kLayerOfRun, {"--backward"}));
  ASSERT_EQ(before.status, 0) << before.err;
  const CommandResult tuned = run_command(
      join(join({"tune"}, kLayer), {"--budget", "1", "--candidates", "8", "--export", file, "--json", "-"}));
  ASSERT_EQ(tuned.status, 0) << tuned.err;
  const Json report = Json::parse(tuned.out)["tuned"];
  ASSERT_EQ(report.size(), 2u);
  for (const Json& direction : report) {
    EXPECT_EQ(direction["tried"].size(), 9u);
    for (const Json& one : direction["tried"]) EXPECT_NE(one["verdict"], "untried");
  }
  // Whatever won by the clock of the day, a Schedule of our own in its place shows that the file is heeded.
  std::vector<TunedSchedule> entries = tune::parse_tuned(io::read_text_file(file));
  ASSERT_EQ(entries.size(), 2u);
  const tune::TunedFolder found(folder / "cache");
  for (TunedSchedule& entry : entries) {
    EXPECT_EQ(found.find(entry.key), entry);
    entry.schedule =
        resolve(PartialSchedule::parse("fusion=pairs,order.raster=3"), {.direction = entry.key.direction,
                                                                        .shape = entry.key.shape,
                                                                        .numerics = entry.key.numerics,
                                                                        .machine = {EngineKind::kCpu, 2, 2}});
    found.store(entry);
  }
  const CommandResult after = run_command(join(kLayerOfRun, {"--backward"}));
  EXPECT_EQ(after.json()["schedule"]["order.raster"], 3);
  EXPECT_EQ(after.json()["schedule_backward"]["order.raster"], 3);
  EXPECT_EQ(after.json()["checksum"], before.json()["checksum"]);
  EXPECT_NE(before.json()["schedule"]["order.raster"], 3);
  // Given fields stay, and --tuned goes before the cache.
  const CommandResult given = run_command(join(kLayerOfRun, {"--schedule", "order.raster=5"}));
  EXPECT_EQ(given.json()["schedule"]["order.raster"], 5);
  EXPECT_EQ(given.json()["schedule"]["fusion"], "pairs");
  const CommandResult exported = run_command(join(kLayerOfRun, {"--tuned", file, "--tuned-strict"}));
  EXPECT_EQ(exported.json()["schedule"], tuned.json()["tuned"][0]["schedule"]);
}

// What was found beside given fields, or for another routing, is not what a plain run takes.
TEST(TuneCommand, WhatWasGivenIsPartOfTheKey) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const std::string file = (folder / "tuned.json").string();
  const std::vector<std::string> given = {"--schedule", "order.raster=4", "--routing", "zipf:1"};
  const CommandResult tuned =
      run_command(join(join(join({"tune"}, kLayer), given),
                       {"--budget", "1", "--candidates", "1", "--direction", "forward", "--export", file}));
  ASSERT_EQ(tuned.status, 0) << tuned.err;
  TunedSchedule entry = tune::parse_tuned(io::read_text_file(file)).at(0);
  EXPECT_EQ(entry.key.conditions, "routing zipf:1,order.raster=4");
  entry.schedule =
      resolve(PartialSchedule::parse("fusion=pairs,order.raster=4"), {.direction = entry.key.direction,
                                                                      .shape = entry.key.shape,
                                                                      .numerics = entry.key.numerics,
                                                                      .machine = {EngineKind::kCpu, 2, 2}});
  tune::TunedFolder(folder / "cache").store(entry);
  EXPECT_EQ(run_command(join(kLayerOfRun, given)).json()["schedule"]["fusion"], "pairs");
  EXPECT_EQ(run_command(kLayerOfRun).json()["schedule"]["fusion"], "layer");
  EXPECT_EQ(run_command(join(kLayerOfRun, {"--schedule", "order.raster=4"})).json()["schedule"]["fusion"], "layer");
}

TEST(TuneCommand, ACacheThatCanNotBeWrittenCostsALineAndNothingElse) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", "/proc/uniep");  // where nothing can be made
  const std::string file = (folder / "tuned.json").string(), page = (folder / "page.html").string();
  testing::internal::CaptureStderr();
  const CommandResult tuned =
      run_command(join(join({"tune"}, kLayer), {"--budget", "1", "--candidates", "2", "--direction", "forward",
                                                "--export", file, "--report", page, "--json", "-"}));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(tuned.status, 0) << tuned.err;
  EXPECT_EQ(Json::parse(tuned.out)["tuned"].size(), 1u);
  EXPECT_EQ(tune::parse_tuned(io::read_text_file(file)).size(), 1u);
  EXPECT_TRUE(std::filesystem::exists(page));
  const std::string line = "what is found is not kept in the cache\n";
  EXPECT_NE(said.find(line), std::string::npos) << said;
  EXPECT_EQ(said.find(line), said.rfind(line)) << said;
}

TEST(TuneCommand, WhatAnEarlierRunHasFoundIsAmongTheCandidates) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const std::vector<std::string> tune = {
      "tune",      "--engine",     "cpu", "--ranks",  "2", "--workers", "2", "--tokens",    "32",     "--shape",
      "64,32,8,2", "--candidates", "1",   "--budget", "1", "--json",    "-", "--direction", "forward"};
  ASSERT_EQ(run_command(tune).status, 0);
  const tune::TunedFolder entries(folder / "cache");
  std::vector<TunedSchedule> kept = entries.all();
  ASSERT_EQ(kept.size(), 1U);
  kept[0].schedule.order.raster = 7;
  entries.store(kept[0]);
  const CommandResult again = run_command(tune);
  ASSERT_EQ(again.status, 0) << again.err;
  const Json tried = again.json().at("tuned").at(0).at("tried");
  EXPECT_TRUE(std::any_of(tried.begin(), tried.end(), [](const Json& one) {
    return one.at("schedule").at("order.raster") == 7;
  })) << tried.dump(1);
}

std::vector<std::string> tune_listed(const std::string& file) {
  return join(join({"tune"}, kLayer), {"--direction", "forward", "--budget", "1", "--schedules", file, "--json", "-"});
}

TEST(TuneCommand, SchedulesOfAFileAreTriedInPlaceOfWhatItFinds) {
  // One of two is left behind after the first rounds: by real times, so a disturbed search is done again.
  std::set<int64_t> calls;
  for (int search = 0; search < 5 && !calls.contains(3); ++search) {
    const TemporaryFolder folder;
    const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
    const std::string file = (folder / "schedules.txt").string();
    // The default, and one line twice: each runs once.
    io::write_file(file, "order.raster=3\n\nauto\n{\"fusion\": \"pairs\", \"order.raster\": 2}\r\norder.raster=3\n");
    const CommandResult result = run_command(join(tune_listed(file), {"--rounds", "3"}));
    ASSERT_EQ(result.status, 0) << result.err;
    const Json tried = result.json()["tuned"][0]["tried"];
    ASSERT_EQ(tried.size(), 3u);
    EXPECT_EQ(tried[0]["changes"], "the default");
    EXPECT_EQ(tried[1]["changes"], "order.raster=3");
    EXPECT_EQ(tried[2]["schedule"]["fusion"], "pairs");
    calls = {tried[1]["calls"].get<int64_t>(), tried[2]["calls"].get<int64_t>()};
  }
  EXPECT_TRUE(calls.contains(3)) << testing::PrintToString(calls);
}

TEST(TuneCommand, OfAFileOfSchedulesTheLineThatIsWrongIsNamed) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const std::string file = (folder / "schedules.txt").string();
  const auto refused = [&](const std::string& text, const std::string& said) {
    io::write_file(file, text);
    const CommandResult result = run_command(join(tune_listed(file), {"--schedule", "order.experts_per_wave=4"}));
    EXPECT_EQ(result.status, 2) << result.out;
    EXPECT_NE(result.err.find(said), std::string::npos) << result.err;
  };
  refused("", "must be a file with a Schedule a line");
  refused("order.raster=3\norder.raster=0\n", "line 2: order.raster=0: legal are");
  refused("\nnonsense\n", "line 2: schedule entry 'nonsense'");
  refused("order.experts_per_wave=2\n", "line 1: order.experts_per_wave=2; must be 4, as --schedule says");
  refused("save.z=recompute\n", "line 1: save.z=recompute; must be keep");
  std::string many;
  for (int i = 0; i < 1024; ++i) many += "order.raster=3\n";
  refused(many, "a file with at most 1023 Schedules");
  const CommandResult absent = run_command(tune_listed((folder / "absent.txt").string()));
  EXPECT_EQ(absent.status, 1) << absent.out;
  EXPECT_NE(absent.err.find("--schedules: cannot read"), std::string::npos) << absent.err;
  const CommandResult both = run_command(join(tune_listed(file), {"--candidates", "3"}));
  EXPECT_EQ(both.status, 2) << both.out;
  EXPECT_NE(both.err.find("--candidates"), std::string::npos) << both.err;
}

TEST(TuneCommand, OtherLayersAndDamagedEntriesAreSaidInALine) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const std::string file = (folder / "tuned.json").string();
  io::write_file(file, tune::to_json({an_entry()}));
  testing::internal::CaptureStderr();
  const CommandResult other = run_command(join(kLayerOfRun, {"--tuned", file}));
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(other.status, 0) << other.err;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_NE(said.find("has no entry for this layer"), std::string::npos) << said;
  const CommandResult strict = run_command(join(kLayerOfRun, {"--tuned", file, "--tuned-strict"}));
  EXPECT_EQ(strict.status, 2);
  EXPECT_TRUE(strict.one_line_error()) << strict.err;
  expect_failure(join(kLayerOfRun, {"--tuned-strict"}), 2, {"--tuned-strict: without --tuned"});
  io::write_file(file, "{}");
  const CommandResult damaged = run_command(join(kLayerOfRun, {"--tuned", file}));
  EXPECT_EQ(damaged.status, 2);
  EXPECT_NE(damaged.err.find("file: format is missing"), std::string::npos) << damaged.err;
  const CommandResult none = run_command({"tune", "--engine", "cpu", "--candidates", "1024"});
  EXPECT_EQ(none.status, 2);
  EXPECT_NE(none.err.find("--candidates"), std::string::npos);
}

}  // namespace
}  // namespace uniep::test
