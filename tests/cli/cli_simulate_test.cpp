#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/trace_file.h"
#include "io/file.h"
#include "io/npy.h"
#include "sim/machine.h"
#include "support/command.h"
#include "support/html_page.h"
#include "support/temporary_folder.h"

namespace uniep::cli {
namespace {

using test::CommandResult;
using test::join;
using test::run_command;
using test::TemporaryFolder;

const std::vector<std::string> kSmall = {"simulate", "--shape", "512,256,16,2", "--ranks", "2", "--tokens", "256"};

void expect_bad_usage(const std::vector<std::string>& arguments, const std::string& text) {
  const CommandResult result = run_command(arguments);
  EXPECT_EQ(result.status, 2) << result.err;
  EXPECT_TRUE(result.one_line_error()) << result.err;
  EXPECT_NE(result.err.find(text), std::string::npos) << result.err;
  EXPECT_EQ(result.out, "");
}

// Which JSON is.
TEST(CliSimulate, NamesOfFilesNeedNotBeUtf8) {
  const TemporaryFolder folder;
  const std::string file = (folder / "\xff\xfe.json").string();
  io::write_file(file, sim::machine_json(sim::shipped_machine("h200")));
  for (const char* command : {"simulate", "solve"}) {
    std::vector<std::string> arguments = join(kSmall, {"--machine", file, "--json", "-"});
    arguments.front() = command;
    const CommandResult result = run_command(arguments);
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_NE(result.json().dump().find("\xef\xbf\xbd\xef\xbf\xbd.json"), std::string::npos) << result.out;
  }
}

TEST(CliSimulate, ReportsAsJson) {
  const CommandResult result = run_command(join(kSmall, {"--json", "-"}));
  ASSERT_EQ(result.status, 0) << result.err;
  const nlohmann::json json = result.json();
  EXPECT_GT(json.at("ms").get<double>(), json.at("bound_ms").get<double>());
  ASSERT_EQ(json.at("ms_per_rank").size(), 2u);
  EXPECT_EQ(json.at("ms"), std::max(json["ms_per_rank"][0], json["ms_per_rank"][1]));
  EXPECT_TRUE(json.at("limits_ms").contains(json.at("limits").get<std::string>()));
  EXPECT_EQ(json.at("machine"), "h200");
  EXPECT_EQ(json.at("schedule").at("fusion"), "layer");
  for (const char* stage : {"dispatch", "fc1", "fc2", "reduce"}) {
    const nlohmann::json& times = json.at("stages").at(stage);
    EXPECT_LT(times.at("begin_ms"), times.at("end_ms")) << stage;
    EXPECT_GT(times.at("busy_ms"), 0) << stage;
    EXPECT_LE(times.at("end_ms"), json.at("ms")) << stage;
  }
}

TEST(CliSimulate, WritesAPage) {
  const TemporaryFolder folder;
  const std::string file = (folder / "r.html").string();
  const CommandResult result = run_command(
      join(kSmall, {"--direction", "backward", "--schedule", "fusion=none", "--report", file, "--json", "-"}));
  ASSERT_EQ(result.status, 0) << result.err;
  const std::string page = io::read_text_file(file);
  test::expect_whole(page);
  EXPECT_EQ(test::count(page, "<svg"), 1);
  const CommandResult plain = run_command(join(kSmall, {"--direction", "backward", "--json", "-"}));
  const double ms = result.json()["ms"], default_ms = plain.json()["ms"], bound_ms = result.json()["bound_ms"];
  const std::string beside = fmt::format("{:.3f} ms beside the default's {:.3f} ms, {:.1f} % above the bound, {:.3f}",
                                         ms, default_ms, 100 * (ms / bound_ms - 1), bound_ms);
  for (const std::string& part : {beside, std::string("Not as in the default: fusion=none"),
                                  std::string("<td>wgrad_fc1</td>"), std::string("<td>EP 64</td>")}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  // Its tables begin with the default, without the fields that were given here.
  const CommandResult one = run_command(join(kSmall, {"--direction", "backward", "--one-rank", "--json", "-"}));
  const std::string row = fmt::format("<td>T 256</td><td class=\"number\">{:.3f}</td>", one.json()["ms"].get<double>());
  EXPECT_NE(page.find(row), std::string::npos) << row;

  const CommandResult refused = run_command(join(kSmall, {"--report", (folder / "no" / "r.html").string()}));
  EXPECT_EQ(refused.status, 1);
  EXPECT_NE(refused.err.find("--report"), std::string::npos) << refused.err;
}

TEST(CliSimulate, CountsTheBytesOfWhatIsStored) {
  const auto memory_ms = [](const std::vector<std::string>& layer) {
    const CommandResult result = run_command(join({"simulate", "--one-rank", "--json", "-"}, layer));
    EXPECT_EQ(result.status, 0) << result.err;
    return result.json()["limits_ms"]["memory"].get<double>();
  };
  // Weight gradients in bf16, in fp32, and in fp32 with what they are added to; nearly all else are weights.
  const std::vector<std::string> backward = {"--shape",  "dsv3", "--ranks",     "8",
                                             "--tokens", "64",   "--direction", "backward"};
  const double bf16 = memory_ms(backward);
  EXPECT_NEAR(memory_ms(join(backward, {"--wgrad", "fp32"})) / bf16, 1.5, 0.05);
  EXPECT_NEAR(memory_ms(join(backward, {"--wgrad", "main_grad"})) / bf16, 2.5, 0.1);
  // z and the activation: three columns with a gate, two without.
  const std::vector<std::string> wide = {"--shape",  "64,8192,1,1", "--ranks",    "1",
                                         "--tokens", "12800",       "--schedule", "fusion=none"};
  const double gated = memory_ms(wide), plain = memory_ms(join(wide, {"--activation", "relu2"}));
  EXPECT_NEAR(plain / gated, 3.0 / 4.0, 0.03);
}

TEST(CliSimulate, ReportsInWords) {
  const CommandResult result =
      run_command(join(kSmall, {"--direction", "backward", "--one-rank", "--state", "paused"}));
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out.rfind("backward on h200: ", 0), 0u) << result.out;
  EXPECT_NE(result.out.find("wgrad_fc1"), std::string::npos) << result.out;
}

TEST(CliSimulate, FollowsScheduleMachineStateAndWorkers) {
  const auto ms = [](const std::vector<std::string>& more) {
    const std::vector<std::string> layer = {"simulate", "--shape", "4096,1536,16,8", "--ranks", "2",
                                            "--tokens", "4096"};
    const CommandResult result = run_command(join(join(layer, more), {"--json", "-"}));
    EXPECT_EQ(result.status, 0) << result.err;
    return result.json().at("ms").get<double>();
  };
  const double usual = ms({});
  EXPECT_GT(ms({"--schedule", "fusion=none"}), usual);
  EXPECT_LT(ms({"--machine", "gb200_nvl72"}), usual);
  EXPECT_GT(ms({"--workers", "16"}), usual);
  EXPECT_NE(ms({"--state", "paused"}), usual);
  EXPECT_GT(ms({"--limit-clock", "0.8"}), usual);
}

TEST(CliSimulate, WritesATimelineThatItsOwnReaderTakes) {
  const TemporaryFolder folder;
  const std::string trace = (folder.path() / "t.json").string();
  const CommandResult result = run_command(join(kSmall, {"--trace", trace, "--json", "-"}));
  ASSERT_EQ(result.status, 0) << result.err;
  const Trace read = parse_trace(io::read_text_file(trace), trace);
  ASSERT_EQ(read.marks.size(), 1u);
  EXPECT_EQ(read.marks[0].name, "forward");
  EXPECT_EQ(read.lanes.front().process, "rank 0");
  EXPECT_EQ(read.lanes.back().process, "rank 1");
}

TEST(CliSimulate, LaysATimelineBesideItsOwn) {
  const TemporaryFolder folder;
  const std::string trace = (folder.path() / "t.json").string();
  ASSERT_EQ(run_command(join(kSmall, {"--trace", trace, "--schedule", "queue=static"})).status, 0);
  const CommandResult same =
      run_command(join(kSmall, {"--against", trace, "--json", "-", "--schedule", "queue=static"}));
  ASSERT_EQ(same.status, 0) << same.err;
  const nlohmann::json against = same.json().at("against");
  EXPECT_EQ(against.at("timeline"), against.at("simulated"));
  EXPECT_GT(against["timeline"].at("stages").at("fc1").at("tiles"), 0);
  const CommandResult words = run_command(join(kSmall, {"--against", trace, "--schedule", "queue=static"}));
  ASSERT_EQ(words.status, 0) << words.err;
  EXPECT_NE(words.out.find("first GEMM tile, ms"), std::string::npos);
  EXPECT_NE(words.out.find("fc2: a tile, us"), std::string::npos);
}

// The engines' own timelines are of the same tiles.
TEST(CliSimulate, TakesTheTimelineOfAnEngine) {
  const TemporaryFolder folder;
  const std::string trace = (folder.path() / "t.json").string();
  const std::vector<std::string> layer = {"--shape", "64,64,8,2", "--ranks", "2", "--tokens", "64"};
  const std::string tiles =
      "tile.m=128,tile.n=256,tile.k=64,tile.cluster=2,fusion=layer,order.interleave=phased,"
      "comm.chunk_bytes=4096,comm.stages=3";
  const CommandResult ran = run_command(join({"run",
                                              "--engine",
                                              "cpu",
                                              "--workers",
                                              "4",
                                              "--backward",
                                              "--json",
                                              "-",
                                              "--trace",
                                              trace,
                                              "--hidden",
                                              "64",
                                              "--intermediate",
                                              "64",
                                              "--experts",
                                              "8",
                                              "--topk",
                                              "2",
                                              "--ranks",
                                              "2",
                                              "--tokens",
                                              "64",
                                              "--schedule",
                                              tiles},
                                             {}));
  ASSERT_EQ(ran.status, 0) << ran.err;
  const std::string schedule = ran.json().at("schedule").dump();
  const CommandResult result = run_command(
      join(join({"simulate"}, layer), {"--against", trace, "--workers", "4", "--schedule", schedule, "--json", "-"}));
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.json().at("against").at("timeline").at("stages").at("fc1").at("tiles"),
            result.json().at("against").at("simulated").at("stages").at("fc1").at("tiles"));
}

TEST(CliSimulate, RefusesTimelinesOfSomethingElse) {
  const TemporaryFolder folder;
  const std::string trace = (folder.path() / "t.json").string(), other = (folder.path() / "o.json").string();
  ASSERT_EQ(run_command(join(kSmall, {"--trace", trace})).status, 0);
  expect_bad_usage({"simulate", "--shape", "512,256,16,2", "--ranks", "4", "--tokens", "256", "--against", trace},
                   "is of something else: it has 2 ranks, not 4");
  expect_bad_usage({"simulate", "--shape", "512,512,16,2", "--ranks", "2", "--tokens", "256", "--against", trace},
                   "is of something else: its shape is '512,256,16,2', not 512,512,16,2");
  // As many tiles, of another call.
  const std::vector<std::pair<std::vector<std::string>, std::string>> changes = {
      {{"--seed", "7"}, "its seed is '1', not 7"},
      {{"--routing", "zipf:0.1"}, "its routing is 'uniform', not zipf:0.1"},
      {{"--router-weight", "output"}, "its router_weight is 'activation', not output"},
      {{"--bias"}, "its bias is 'no', not yes"},
      {{"--state", "paused"}, "its state is 'sustained', not paused"},
      {{"--workers", "100"}, "its workers is '132', not 100"},
  };
  for (const auto& [change, message] : changes) {
    expect_bad_usage(join(join(kSmall, change), {"--against", trace}), "is of something else: " + message);
  }
  expect_bad_usage({"simulate", "--shape", "512,256,16,2", "--ranks", "2", "--tokens", "255", "--against", trace},
                   "is of something else: its tokens is '256,256', not 255,255");
  for (const std::vector<std::string>& change :  // machines are compared; weight gradients are backward's
       {std::vector<std::string>{"--machine", "dgx_h100"}, {"--wgrad", "main_grad"}}) {
    EXPECT_EQ(run_command(join(join(kSmall, change), {"--against", trace})).status, 0);
  }
  // As many tiles as the simulated ones, in another order.
  ASSERT_EQ(run_command(join(kSmall, {"--trace", other, "--schedule", "order.raster=4"})).status, 0);
  expect_bad_usage(join(kSmall, {"--against", other, "--schedule", "order.raster=2"}),
                   "--against: '" + other + "' is of something else: its schedule has order.raster=4\n");
  // One that does not say what it is of, as earlier ones do not.
  std::string plain = io::read_text_file(other);
  for (std::size_t at = plain.find(", \"args\": {\"shape\""); at != std::string::npos; at = std::string::npos) {
    plain.erase(at, plain.find('}', at) + 1 - at);
  }
  std::ofstream(other, std::ios::trunc) << plain;
  EXPECT_EQ(run_command(join(kSmall, {"--against", other, "--schedule", "order.raster=2"})).status, 0);
  expect_bad_usage(join(kSmall, {"--against", trace, "--direction", "backward"}), "is of something else: ");
  std::ofstream(other) << "{\"traceEvents\": 3}";
  expect_bad_usage(join(kSmall, {"--against", other}), "--against: ");
  std::ofstream(other, std::ios::trunc) << "not a trace";
  expect_bad_usage(join(kSmall, {"--against", other}), "is not valid JSON");
}

TEST(CliSimulate, RefusesBadMachines) {
  const TemporaryFolder folder;
  const std::string file = (folder.path() / "m.json").string();
  expect_bad_usage(join(kSmall, {"--machine", "h300"}), "--machine: 'h300' is neither a file nor one of ascend_a3, ");
  const std::string good = sim::machine_json(sim::shipped_machine("h200"));
  const auto write = [&](const std::string& text) { std::ofstream(file, std::ios::trunc) << text; };
  write(good);
  EXPECT_EQ(run_command(join(kSmall, {"--machine", file})).status, 0);
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(good);
  json["clock"]["limit"]["unit"] = "MHz";
  write(json.dump());
  expect_bad_usage(join(kSmall, {"--machine", file}), file + ": clock.limit.unit: \"MHz\"; must be \"GHz\"");
  write(good.substr(0, good.size() / 2));
  expect_bad_usage(join(kSmall, {"--machine", file}), "is not valid JSON");
}

TEST(CliSimulate, RefusesWhatTheMachineCanNot) {
  expect_bad_usage({"simulate", "--ranks", "16"}, "--ranks: '16'; must be at most 8, which h200 links");
  expect_bad_usage(join(kSmall, {"--workers", "500"}), "--workers: '500'; must be at most 132");
  expect_bad_usage(join(kSmall, {"--engine", "cpu"}), "--engine: 'cpu'; must be cuda or auto");
  expect_bad_usage(join(kSmall, {"--schedule", "tile.m=64"}), "tile.m");
  expect_bad_usage({"simulate", "--ranks", "2", "--tokens", "3,4", "--one-rank"},
                   "one rank for all: rank 1 has 4 tokens and rank 0 3");
  const TemporaryFolder folder;
  const std::string to_last = (folder / "last.npy").string(), to_first = (folder / "first.npy").string();
  const auto all_to = [](int32_t expert) {
    std::vector<int32_t> ids;
    for (int slot = 0; slot < 512 * 2; ++slot) ids.push_back(expert + slot % 2);
    return ids;
  };
  io::write_npy(to_last, {{512, 2}, all_to(14)});
  io::write_npy(to_first, {{512, 2}, all_to(0)});
  expect_bad_usage(join(kSmall, {"--one-rank", "--routing", to_last}),
                   "--one-rank: rank 0 has 0 rows and rank 1 1024; must be about as many as on the busiest");
  EXPECT_EQ(run_command(join(kSmall, {"--one-rank", "--routing", to_first})).status, 0);
  expect_bad_usage(join(kSmall, {"--state", "cold"}), "--state: 'cold'; must be sustained|paused");
  expect_bad_usage(join(kSmall, {"--state", "paused", "--limit-clock", "1.2"}),
                   "--limit-clock: '1.2'; must be left out with --state paused");
  for (const char* clock : {"0", "-1", "nan", "1e3", "1.2GHz", ""}) {
    expect_bad_usage(join(kSmall, {"--limit-clock", clock}),
                     std::string("--limit-clock: '") + clock + "'; must be 0.01 to 100 (GHz)");
  }
}

}  // namespace
}  // namespace uniep::cli
