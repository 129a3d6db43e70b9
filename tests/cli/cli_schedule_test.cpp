#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "io/file.h"
#include "program/schedule_fields.h"
#include "support/command.h"
#include "support/temporary_folder.h"
#include "uniep/uniep.h"

namespace uniep::test {
namespace {

using Json = nlohmann::json;
using Arguments = std::vector<std::string>;

const Arguments kScheduled = {"schedule", "--engine", "cpu",       "--ranks",  "2",   "--workers",
                              "2",        "--shape",  "64,32,8,2", "--tokens", "9,30"};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

CommandResult succeed(const Arguments& arguments) {
  CommandResult result = run_command(arguments);
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return result;
}

TEST(ScheduleCommand, PrintsTheFilledSchedule) {
  const CommandResult result = succeed(join(kScheduled, {"--schedule", "fusion=pairs,comm.where=sms"}));
  const Schedule schedule =
      resolve(PartialSchedule::parse("fusion=pairs,comm.where=sms"),
              {.direction = Direction::kForward, .shape = {64, 32, 8, 2}, .machine = {EngineKind::kCpu, 2, 2}});
  EXPECT_EQ(result.out, to_json(schedule) + "\n");
}

TEST(ScheduleCommand, WhatItPrintsIsWhatRunTakes) {
  const TemporaryFolder folder;
  const std::string file = (folder / "schedule.json").string();
  const CommandResult printed = succeed(join(kScheduled, {"--schedule", "fusion=none,tile.n=64"}));
  io::write_file(file, printed.out);
  const CommandResult run = succeed({"run",  "--engine",       "cpu", "--ranks",   "2", "--workers", "2", "--hidden",
                                     "64",   "--intermediate", "32",  "--experts", "8", "--topk",    "2", "--tokens",
                                     "9,30", "--schedule",     file,  "--json",    "-"});
  EXPECT_EQ(run.json()["schedule"], printed.json());
}

TEST(ScheduleCommand, BackwardHasItsOwnFields) {
  const Arguments fields = {"--schedule", "fusion=pairs", "--schedule-backward", "fusion=layer"};
  EXPECT_EQ(succeed(join(kScheduled, fields)).json()["fusion"], "pairs");
  EXPECT_EQ(succeed(join(join(kScheduled, fields), {"--direction", "backward"})).json()["fusion"], "layer");
}

TEST(ScheduleCommand, AllViolationsStandInOneLine) {
  const CommandResult result =
      run_command(join(kScheduled, {"--schedule", "order.experts_per_wave=7,comm.where=sms,comm.dispatch_sms=9"}));
  EXPECT_EQ(result.status, 2);
  EXPECT_TRUE(result.one_line_error()) << result.err;
  EXPECT_EQ(result.out, "");
  EXPECT_NE(result.err.find("order.experts_per_wave=7"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("comm.dispatch_sms=9"), std::string::npos) << result.err;
}

TEST(ScheduleCommand, AnExchangeHasItsOwnDefaults) {
  const Arguments hopper = {"schedule",  "--engine", "cuda",    "--ranks",   "2",
                            "--workers", "132",      "--shape", "qwen3-235b"};
  const Json layer = succeed(hopper).json(), back = succeed(join(hopper, {"--op", "combine"})).json();
  EXPECT_EQ(layer["comm.stages"], 3);
  EXPECT_EQ(layer["comm.chunk_bytes"], 4096);
  EXPECT_EQ(back["comm.stages"], 2);
  EXPECT_EQ(back["comm.chunk_bytes"], 8192);
  EXPECT_EQ(back["combine.column_chunks"], 8);
  EXPECT_EQ(succeed(join(hopper, {"--op", "dispatch"})).json()["queue"], "dynamic");
  for (const char* const other : {"--count", "--check"}) {
    const CommandResult result = run_command(join(hopper, {"--op", "dispatch", other}));
    EXPECT_EQ(result.status, 2);
    EXPECT_NE(result.err.find("--op"), std::string::npos) << result.err;
  }
}

TEST(ScheduleCommand, SamplesAreLegalDifferentAndRepeatable) {
  for (const char* direction : {"forward", "backward"}) {
    const Arguments sample = join(kScheduled, {"--sample", "40", "--seed", "3", "--direction", direction});
    const CommandResult result = succeed(sample);
    const std::vector<std::string> lines = lines_of(result.out);
    ASSERT_EQ(lines.size(), 40u);
    EXPECT_GT(std::set<std::string>(lines.begin(), lines.end()).size(), 35u);
    const Direction way = direction == std::string("forward") ? Direction::kForward : Direction::kBackward;
    for (const std::string& line : lines) {
      EXPECT_NO_THROW(resolve(PartialSchedule::parse(line),
                              {.direction = way, .shape = {64, 32, 8, 2}, .machine = {EngineKind::kCpu, 2, 2}}))
          << line;
    }
    EXPECT_EQ(succeed(sample).out, result.out);
  }
}

TEST(ScheduleCommand, SamplesKeepWhatIsGiven) {
  const CommandResult result = succeed(join(kScheduled, {"--sample", "10", "--schedule", "fusion=pairs,tile.n=64"}));
  for (const std::string& line : lines_of(result.out)) {
    EXPECT_EQ(Json::parse(line)["fusion"], "pairs");
    EXPECT_EQ(Json::parse(line)["tile.n"], 64);
  }
}

TEST(ScheduleCommand, CheckProvesEverySample) {
  for (const char* direction : {"forward", "backward"}) {
    const CommandResult result =
        succeed(join(kScheduled, {"--check", "--sample", "10", "--routing", "zipf:1", "--direction", direction}));
    const std::vector<std::string> lines = lines_of(result.out);
    ASSERT_EQ(lines.size(), 10u);
    for (const std::string& line : lines) {
      const Json check = Json::parse(line)["check"];
      EXPECT_EQ(check["ok"], true);
      EXPECT_GT(check["tasks"], 0);
      EXPECT_GT(check["edges"], check["tasks"]);
      EXPECT_TRUE(check["problems"].empty());
    }
  }
}

TEST(ScheduleCommand, CountsTheLegalOnes) {
  const CommandResult two = succeed(join(kScheduled, {"--count", "--vary", "order.source_rotation"}));
  EXPECT_EQ(two.out, "legal     2\nbuildable 2\ndistinct  2\nof these values:\n  order.source_rotation: off, on\n");
  // Where nothing goes by waves, their size changes nothing.
  const Arguments waves = join(kScheduled, {"--count", "--vary", "order.experts_per_wave"});
  const auto third_line = [&](const std::string& schedule) {
    return lines_of(succeed(join(waves, {"--schedule", schedule})).out)[2];
  };
  EXPECT_EQ(third_line("fusion=none"), "distinct  1");
  EXPECT_NE(third_line("fusion=layer"), "distinct  1");
  const CommandResult all = succeed(join(kScheduled, {"--count"}));
  EXPECT_GT(std::stoull(all.out.substr(std::string("legal").size())), 1000u);
}

TEST(ScheduleCommand, ReferenceNamesEveryField) {
  const CommandResult result = succeed({"schedule", "--reference"});
  for (int field = 0; field < kCommonFieldCount; ++field) {
    EXPECT_NE(result.out.find(name_of(field)), std::string::npos) << name_of(field);
  }
}

TEST(ScheduleCommand, CudaSchedulesNeedNoGpu) {
  const CommandResult result = succeed({"schedule", "--engine", "cuda", "--ranks", "8", "--shape", "deepseek-v3"});
  const Json json = result.json();
  EXPECT_EQ(json["tile.m"], 128);
}

TEST(InfoCommand, NamesVersionAndEngines) {
  const CommandResult text = succeed({"info"});
  EXPECT_NE(text.out.find(UNIEP_VERSION_STRING), std::string::npos);
  EXPECT_EQ(text.out.find("GiB"), std::string::npos);
  const Json json = succeed({"info", "--json", "-"}).json();
  EXPECT_EQ(json["version"], UNIEP_VERSION_STRING);
  EXPECT_EQ(json["engines"]["cpu"]["available"], true);
  EXPECT_GE(json["engines"]["cpu"]["cores"], 1);
  const Json& cuda = json["engines"]["cuda"];
  EXPECT_TRUE(cuda["available"] == true || !cuda["reason"].get<std::string>().empty());
  EXPECT_FALSE(json.contains("memory"));
}

TEST(InfoCommand, TellsTheMemoryOfALayer) {
  const Arguments layer = {"info",     "--engine", "cpu",       "--ranks", "2",      "--shape", "64,32,8,2",
                           "--tokens", "9,30",     "--routing", "one",     "--json", "-"};
  const Json json = succeed(layer).json();
  EXPECT_EQ(json["shape"], Json::parse(R"({"hidden": 64, "intermediate": 32, "experts": 8, "topk": 2})"));
  EXPECT_EQ(json["rows_per_rank"], Json::parse("[39, 0]"));
  // z and xg of the 128 rows that 39 are padded to; a rank without rows saves nothing.
  EXPECT_GE(json["memory"]["forward"][0]["saved_bytes"], 128 * (2 * 32 + 64) * 2);
  EXPECT_EQ(json["memory"]["forward"][1]["saved_bytes"], 0);
  EXPECT_EQ(json["memory"]["backward"][0]["saved_bytes"], 0);
  EXPECT_GE(json["memory"]["forward"][1]["symmetric_bytes"], 30 * 2 * 64 * 2);

  // The four ways to save: z and xg, z, xg, nothing.
  const Json& modes = json["modes"];
  ASSERT_EQ(modes.size(), 4u);
  const int64_t z = 128 * 2 * 32 * 2, xg = 128 * 64 * 2;
  const int64_t expected[] = {z + xg, z, xg, 0};
  for (int mode = 0; mode < 4; ++mode) {
    EXPECT_EQ(modes[mode]["saved_bytes"], expected[mode]) << modes[mode];
    EXPECT_NEAR(modes[mode]["saved_bytes_per_token"].get<double>(), expected[mode] / 9.0, 1e-6);
  }
  EXPECT_EQ(modes[3]["save.z"], "recompute");
  EXPECT_EQ(succeed(join(layer, {"--save", "rows"})).json()["memory"]["forward"][0]["saved_bytes"], xg);

  const Json less = succeed(join(layer, {"--schedule", "save.xg=redispatch"})).json();
  EXPECT_LT(less["memory"]["forward"][0]["saved_bytes"], json["memory"]["forward"][0]["saved_bytes"]);

  const CommandResult text = succeed({"info", "--engine", "cpu", "--shape", "qwen3-30b-a3b", "--tokens", "64"});
  EXPECT_NE(text.out.find("H 2048, I 768, E 128, K 8"), std::string::npos) << text.out;
}

TEST(InfoCommand, SaysWhatEachKindOfMemoryIsAndSumsItUp) {
  const Arguments layer = {"info", "--engine", "cpu", "--ranks", "2", "--shape", "2048,1024,8,2", "--tokens", "2000"};
  const Json memory = succeed(join(layer, {"--json", "-"})).json()["memory"];
  const auto most = [&](const char* kind) {
    double bytes = 0;
    for (const Json& ranks : memory) {
      for (const Json& need : ranks) bytes = std::max(bytes, need[kind].get<double>());
    }
    return bytes / (1024.0 * 1024 * 1024);
  };
  const std::string text = succeed(layer).out;
  const std::string line =
      fmt::format("a rank    {:.3f} GiB for each forward whose backward is to come, {:.3f} GiB once",
                  most("saved_bytes"), most("workspace_bytes") + most("symmetric_bytes"));
  EXPECT_NE(text.find(line), std::string::npos) << line << '\n' << text;
  for (const char* kind : {"\nsaved: ", "\nworkspace: ", "\nsymmetric: "}) {
    EXPECT_NE(text.find(kind), std::string::npos) << kind;
  }
}

// A job is sized where there is no GPU: with a process a GPU, each of which has a copy of its x and a table of its
// rows.
TEST(InfoCommand, TellsTheMemoryOfGpusThatAreElsewhere) {
  const Arguments layer = {"info", "--engine", "cuda", "--ranks", "2", "--shape", "256,128,8,2", "--tokens", "300,40"};
  const CommandResult result = run_command(join(layer, {"--json", "-"}));
  if (result.err.find("built without the CUDA headers") != std::string::npos) GTEST_SKIP() << result.err;
  ASSERT_EQ(result.status, 0) << result.err;
  const Json json = result.json();
  if (!json["elsewhere"].get<bool>()) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(json["engine"], "cuda");
  EXPECT_EQ(json["workers"], 132);
  const auto bytes = [&](const char* direction, int rank, const char* kind) {
    return json["memory"][direction][rank][kind].get<int64_t>();
  };
  const int64_t row = 256 * 2, tokens = 300, rows = json["rows_per_rank"][0];
  for (const char* direction : {"forward", "backward"}) {
    const int64_t least = tokens * 2 * row + tokens * row + rows * 8;  // slots of the sums, x or dy, the table
    for (const int rank : {0, 1}) {                                    // the same on all ranks
      EXPECT_GE(bytes(direction, rank, "symmetric_bytes"), least);
      EXPECT_LT(bytes(direction, rank, "symmetric_bytes"), 4 * least);
    }
  }
  EXPECT_GE(bytes("forward", 0, "saved_bytes"), rows * (row + 2 * 128 * 2));
  ASSERT_EQ(json["modes"].size(), 4u);
  EXPECT_EQ(json["modes"][3]["saved_bytes"], 0);
  EXPECT_NE(succeed(layer).out.find("(Hopper GPUs elsewhere, a process each; "), std::string::npos);
  const CommandResult many =
      run_command({"info", "--engine", "cuda", "--ranks", "64", "--tokens", "8", "--shape", "dsv3"});
  EXPECT_EQ(many.status, 2);
  EXPECT_NE(many.err.find("--ranks: 64; GPUs run 1 to 8"), std::string::npos) << many.err;
}

TEST(InfoCommand, ForecastsForNoEngineInParticularOnlyWhatGpusRun) {
  const Arguments ranks = {"info", "--ranks", "64", "--shape", "deepseek-v3", "--tokens", "8"};
  const Arguments shape = {"info", "--ranks", "1", "--shape", "8,8,2,1", "--schedule", "tile.stages=8,tile.n=256"};
  for (const Arguments& refused : {ranks, shape}) {
    const CommandResult result = run_command(refused);
    EXPECT_EQ(result.status, 2) << result.out;
    EXPECT_TRUE(result.one_line_error());
    EXPECT_NE(result.err.find("--engine cpu"), std::string::npos) << result.err;
  }
  EXPECT_NE(run_command(ranks).err.find("--ranks: 64; GPUs run 1 to 8"), std::string::npos);
  succeed(join(ranks, {"--engine", "cpu"}));
}

}  // namespace
}  // namespace uniep::test
