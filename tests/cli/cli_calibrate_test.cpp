#include <gtest/gtest.h>

#include <fstream>

#include "cli/calibration_model.h"
#include "cli/output_file.h"
#include "cli/timeline_model.h"
#include "io/file.h"
#include "support/command.h"
#include "support/environment.h"
#include "support/temporary_folder.h"
#include "tune/calibrated_machine.h"

namespace uniep::cli {
namespace {

using test::CommandResult;
using test::run_command;
using test::TemporaryFolder;

void expect_refused(const std::vector<std::string>& arguments, const std::string& text, int status = 2) {
  const CommandResult result = run_command(arguments);
  EXPECT_EQ(result.status, status) << result.err;
  EXPECT_TRUE(result.one_line_error()) << result.err;
  EXPECT_NE(result.err.find(text), std::string::npos) << result.err;
  EXPECT_EQ(result.out, "");
}

// What a machine that is as h200 says would measure in a few small layers.
tune::Calibration small_calibration() {
  tune::Calibration calibration{"NVIDIA H200", 132, {}, {"a layer: why"}};
  for (const char* schedule : {"auto", "queue=static", "tile.cluster=1", "fusion=none"}) {
    tune::CalibrationLayer layer;
    layer.shape = {512, 256, 16, 2};
    layer.tokens = 256;
    layer.schedule = schedule;
    layer.held_out = calibration.layers.size() == 1;
    calibration.layers.push_back(layer);
  }
  const CalibrationModel model(calibration.layers, sim::shipped_machine("h200"));
  const std::vector<double> all = model.milliseconds_in_turn(sim::shipped_machine("h200"));
  for (std::size_t i = 0; i < calibration.layers.size(); ++i) calibration.layers[i].milliseconds.assign(3, all[i]);
  return calibration;
}

class CliCalibrate : public ::testing::Test {
 protected:
  std::string path(const char* name) const { return (folder_.path() / name).string(); }
  std::string written(const char* name, const std::string& text) const {
    std::ofstream(path(name), std::ios::trunc) << text;
    return path(name);
  }
  const TemporaryFolder folder_;
};

TEST_F(CliCalibrate, FitsWhatRawHolds) {
  const std::string raw = written("raw.json", tune::to_json(small_calibration()));
  EXPECT_EQ(tune::parse_calibration(tune::to_json(small_calibration()), "raw"), small_calibration());
  const std::string out = path("m.json");
  const CommandResult result = run_command({"calibrate", "--from-raw", raw, "--out", out, "--json", "-"});
  ASSERT_EQ(result.status, 0) << result.err;
  const nlohmann::json json = result.json();
  EXPECT_EQ(json.at("device"), "NVIDIA H200");
  EXPECT_EQ(json.at("base"), "h200");
  EXPECT_EQ(json.at("layers").size(), 4u);
  EXPECT_EQ(json.at("dropped").size(), 1u);
  EXPECT_EQ(json.at("error").at("held_out").at("layers"), 1);
  EXPECT_LT(json.at("error").at("fitted").at("calibrated"), 0.01);
  EXPECT_EQ(run_command({"simulate", "--shape", "512,256,16,2", "--ranks", "2", "--machine", out}).status, 0);
  const CommandResult table = run_command({"calibrate", "--from-raw", raw});
  ASSERT_EQ(table.status, 0) << table.err;
  EXPECT_NE(table.out.find("3 layers fitted"), std::string::npos) << table.out;
}

TEST_F(CliCalibrate, DropsLayersThatAreNotLegal) {
  tune::Calibration calibration = small_calibration();
  calibration.layers[0].schedule = "tile.n=17";
  const std::string raw = written("raw.json", tune::to_json(calibration));
  const CommandResult result = run_command({"calibrate", "--from-raw", raw, "--json", "-"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.json().at("dropped").size(), 2u);
  EXPECT_EQ(result.json().at("layers").size(), 3u);
}

TEST_F(CliCalibrate, RefusesBadRawFiles) {
  const std::string good = tune::to_json(small_calibration());
  expect_refused({"calibrate", "--from-raw", path("none.json")}, "none.json", 1);
  const auto refused = [&](const std::string& text, const std::string& why) {
    expect_refused({"calibrate", "--from-raw", written("bad.json", text)}, why);
  };
  refused(good.substr(0, good.size() / 2), "bad.json: is not valid JSON");
  refused("[]", "is not a JSON object");
  refused("{}", "format: is missing; must be \"uniep calibration\"");
  const auto changed = [&](auto&& change, const std::string& why) {
    nlohmann::ordered_json json = nlohmann::ordered_json::parse(good);
    change(json);
    refused(json.dump(), why);
  };
  changed([](auto& json) { json["version"] = 2; }, "version: '2'; must be a whole number from 1 to 1");
  changed([](auto& json) { json["more"] = 2; }, "more: is not known");
  changed([](auto& json) { json.erase("device"); }, "device: is missing");
  changed([](auto& json) { json["layers"][1]["ms"][0] = -1; }, "layers[1].ms: '-1'; must be times above 0");
  changed([](auto& json) { json["layers"][1]["ms"] = nlohmann::json::array(); }, "layers[1].ms: is empty");
  changed([](auto& json) { json["layers"][1]["tokens"] = 1 << 30; }, "layers[1].tokens: '1073741824'; must be");
  changed([](auto& json) { json["layers"][1]["state"] = "cold"; }, "layers[1].state: '\"cold\"'; must be sustained or");
  changed([](auto& json) { json["layers"] = nlohmann::json::array(); }, "calibration: no layers");
}

TEST_F(CliCalibrate, RefusesBadOptions) {
  expect_refused({"calibrate", "--ranks", "3"}, "--ranks: '3'; must be");
  expect_refused({"calibrate", "--ranks", "2", "--devices", "0,0"}, "--devices: '0,0'; must be 2 GPUs that differ");
  expect_refused({"calibrate", "--ranks", "1", "--devices", "0,1"}, "--devices: '0,1'; must be 1 GPU");
  expect_refused({"calibrate", "--devices", "0,1,2"}, "--devices: '0,1,2'; must be one or two GPUs");
  expect_refused({"calibrate", "--seconds", "0"}, "--seconds: '0'; must be 1 to 600");
  expect_refused({"calibrate", "--out", path("none/m.json")}, "--out: ", 1);
  expect_refused({"calibrate", "--base", "h300"}, "--base: 'h300' is neither a file nor one of");
  expect_refused({"calibrate", "--base", written("m.json", "{}")}, "format: is missing");
}

// Timelines that the simulator makes of a machine that is not quite an H200.
class CliCalibrateTraces : public CliCalibrate {
 protected:
  CliCalibrateTraces() {
    sim::MachineDescription machine = sim::shipped_machine("h200");
    machine.clock.limit *= 0.9;
    machine.copy.task *= 1.3;
    written("other.json", sim::machine_json(machine));
  }
  std::string recorded(const char* name, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"simulate", "--machine", path("other.json"), "--shape", "2048,768,16,8",
                                          "--ranks",  "2",         "--tokens",         "512",     "--trace",
                                          path(name)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandResult result = run_command(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    return path(name);
  }
};

TEST_F(CliCalibrateTraces, FitsTimelines) {
  const std::string a = recorded("a.trace"), b = recorded("b.trace", {"--schedule", "fusion=none"}),
                    c = recorded("c.trace", {"--schedule", "queue=static"}), out = path("m.json");
  const CommandResult result =
      run_command({"calibrate", "--traces", a, b, c, "--base", "h200", "--out", out, "--json", "-"});
  ASSERT_EQ(result.status, 0) << result.err;
  const nlohmann::json json = result.json();
  EXPECT_EQ(json.at("device"), "simulated h200");
  EXPECT_EQ(json.at("compute_units"), 132);
  EXPECT_TRUE(json.at("constants")[0].at("spread").is_null());
  EXPECT_EQ(json.at("layers").size(), 0u);
  ASSERT_EQ(json.at("timelines").size(), 3u);
  EXPECT_EQ(json.at("timelines")[1].at("timeline"), "forward of " + b + ": 2048,768,16,8 x 2");
  EXPECT_EQ(json.at("timelines")[1].at("state"), "sustained");
  EXPECT_EQ(json.at("timelines")[1].at("held_out"), false);
  EXPECT_EQ(json.at("timelines")[2].at("held_out"), true);
  EXPECT_GT(json.at("timelines")[1].at("numbers").at("fc1: a tile").at("us"), 1);
  EXPECT_TRUE(json.at("timelines")[1].at("numbers").contains("between launches"));
  EXPECT_FALSE(json.at("timelines")[0].at("numbers").contains("between launches"));
  EXPECT_EQ(json.at("timeline_error").at("fitted").at("calls"), 2);
  EXPECT_EQ(json.at("timeline_error").at("held_out").at("calls"), 1);
  const nlohmann::json end = json.at("timeline_error").at("held_out").at("end");
  EXPECT_GT(end.at("base"), 0.03);
  EXPECT_LT(end.at("calibrated"), end.at("base").get<double>() / 3);
  EXPECT_EQ(run_command({"simulate", "--shape", "512,256,16,2", "--ranks", "2", "--machine", out}).status, 0);
  const CommandResult table = run_command({"calibrate", "--traces", a, b});
  ASSERT_EQ(table.status, 0) << table.err;
  EXPECT_NE(table.out.find(" 2 timelines fitted: h200 is"), std::string::npos) << table.out;
  EXPECT_EQ(table.out.find("held out"), std::string::npos) << table.out;
  EXPECT_EQ(table.out.find("layer of"), std::string::npos) << table.out;
}

TEST_F(CliCalibrateTraces, FitsTimelinesBesideLayers) {
  tune::Calibration calibration = small_calibration();
  calibration.device = "simulated h200";
  const std::string raw = written("raw.json", tune::to_json(calibration)), a = recorded("a.trace");
  const CommandResult result = run_command({"calibrate", "--from-raw", raw, "--traces", a, "--json", "-"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.json().at("layers").size(), 4u);
  EXPECT_EQ(result.json().at("timelines").size(), 1u);
  EXPECT_EQ(result.json().at("error").at("fitted").at("layers"), 3);
  expect_refused({"calibrate", "--from-raw", written("raw.json", tune::to_json(small_calibration())), "--traces", a},
                 "--traces: '" + a +
                     "' is of 'simulated h200' with 132 compute units, and --from-raw of 'NVIDIA "
                     "H200' with 132; must be of one kind of GPU\n");
}

// Whatever a call was given, what its timeline says is enough to simulate the very same.
TEST_F(CliCalibrateTraces, ATimelineSaysAllThatItsCallWasGiven) {
  const std::vector<std::string> layer = {"simulate", "--shape", "1024,512,16,4", "--ranks", "2"};
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {"--tokens", "700,300", "--routing", "zipf:0.7", "--seed", "9", "--direction", "backward", "--wgrad",
            "fp32"},
           {"--tokens", "900", "--combine-groups", "4", "--schedule", "combine.transport=staged,fusion=pairs"},
           {"--tokens", "900,300", "--routing", "one", "--activation", "relu2", "--workers", "64", "--state", "paused"},
           {"--tokens", "512", "--activation", "swiglu:alpha=1.702,limit=7", "--router-weight", "output", "--bias",
            "--direction", "backward", "--save", "recompute", "--seed", "18446744073709551615"}}) {
    const std::string file = path("t.trace");
    const CommandResult made = run_command(test::join(test::join(layer, more), {"--trace", file}));
    ASSERT_EQ(made.status, 0) << made.err;
    const TimelineModel timelines(read_timelines({file}), sim::shipped_machine("h200"));
    const std::vector<TimelineNumber>& measured = timelines.measured(0).numbers;
    const std::vector<double> predicted = timelines.predicted(0, sim::shipped_machine("h200"));
    ASSERT_EQ(predicted.size(), measured.size());
    for (std::size_t i = 0; i < measured.size(); ++i) {
      EXPECT_NEAR(predicted[i], measured[i].us, 0.01 + 1e-4 * measured[i].us) << measured[i].name << more.at(1);
    }
  }
  const TracedRun run = read_timelines({path("t.trace")}).front().run;
  EXPECT_EQ(run.layer.seed, 18446744073709551615u);
  EXPECT_EQ(run.layer.numerics.alpha, 1.702f);
  EXPECT_EQ(run.layer.numerics.router_weight, RouterWeight::kOutput);
  EXPECT_TRUE(run.layer.numerics.bias);
  EXPECT_EQ(run.machine.device, "simulated h200");
}

TEST_F(CliCalibrateTraces, RefusesWhatTimelinesDoNotSay) {
  const std::string a = recorded("a.trace");
  const nlohmann::json good = nlohmann::json::parse(io::read_text_file(a));
  const auto refused = [&](const std::string& why, auto&& change) {
    nlohmann::json json = good;
    for (nlohmann::json& event : json["traceEvents"]) {
      if (event["ph"] == "i") change(event);
    }
    const std::string bad = written("bad.trace", json.dump());
    expect_refused({"calibrate", "--traces", a, bad}, "--traces: '" + bad + "': " + why);
  };
  const auto says = [&](const char* key, const std::string& value, const std::string& why) {
    refused(why, [&](nlohmann::json& mark) { mark["args"][key] = value; });
  };
  refused(
      "does not say shape, schedule, engine, device, gpus, compute_units, workers, tokens, routing, seed, "
      "activation, router_weight, bias, combine_groups, wgrad; must be a timeline of",
      [](nlohmann::json& mark) { mark.erase("args"); });
  refused("does not say tokens; must be", [](nlohmann::json& mark) { mark["args"].erase("tokens"); });
  refused("call: 'dispatch'; must be forward, backward", [](nlohmann::json& mark) { mark["name"] = "dispatch"; });
  says("engine", "cpu", "engine: 'cpu'; must be cuda or simulator");
  says("engine", "tpu", "engine: 'tpu'; must be cpu, cuda, simulator");
  says("device", "NVIDIA H100", "is of 'NVIDIA H100' with 132 compute units, and '" + a + "' of 'simulated h200' with");
  says("compute_units", "0", "compute_units: '0'; must be a whole number from 1 to 4096");
  says("compute_units", "144", "is of 'simulated h200' with 144 compute units, and");
  says("workers", "133", "workers: '133'; must be a whole number from 1 to 132");
  says("gpus", "1", "gpus: '1'; must be 2, one for each rank");
  says("gpus", "x", "gpus: 'x'; must be a whole number");
  says("tokens", "512,", "tokens: '512,'; must be");
  says("tokens", "65537,1", "tokens: '65537,1'; must be");
  says("tokens", "512", "gpus: '2'; must be 1, one for each rank");
  says("shape", "2048,768,16", "shape: '2048,768,16'; must be H,I,E,K");
  says("shape", "262144,768,16,8", "shape: '262144,768,16,8'; must be at most 131072");
  says("shape", "2048,768,16,999", "");
  says("shape", "2048,768,17,8", "");
  says("schedule", "tile.n=17", "");
  says("schedule", "nothing=1", "schedule: ");
  says("routing", "file", "routing: from a file, which a timeline does not hold; must be uniform, zipf:S or one");
  says("routing", "hot", "routing: ");
  says("seed", "-1", "seed: '-1'; must be a whole number from 0 to");
  says("activation", "sine", "activation: ");
  says("router_weight", "both", "router_weight: ");
  says("bias", "maybe", "bias: 'maybe'; must be no, yes");
  says("combine_groups", "-2", "combine_groups: '-2'; must be a whole number");
  says("wgrad", "fp8", "wgrad: 'fp8'; must be bf16, fp32, main_grad");
  says("state", "warm", "state: 'warm'; must be sustained, paused");
}

TEST_F(CliCalibrateTraces, RefusesTimelinesOfSomethingElse) {
  const std::string a = recorded("a.trace");
  const nlohmann::json good = nlohmann::json::parse(io::read_text_file(a));
  const auto refused = [&](const std::string& why, auto&& change) {
    nlohmann::json json = good;
    change(json);
    const std::string bad = written("bad.trace", json.dump());
    expect_refused({"calibrate", "--traces", bad}, why);
  };
  const auto mark_says = [&](const char* key, const std::string& value, const std::string& why) {
    refused(why, [&](nlohmann::json& json) {
      for (nlohmann::json& event : json["traceEvents"]) {
        if (event["ph"] == "i") event["args"][key] = value;
      }
    });
  };
  mark_says("tokens", "65536,65536", "tiles of GEMMs, and the layer that it names up to");
  mark_says("tokens", "512,500", "tiles of ");
  mark_says("shape", "2048,1024,16,8", "tiles of fc1, and the layer that it names ");
  mark_says("schedule", "combine.transport=staged", "it has no tile of combine");
  refused("holds no complete event", [](nlohmann::json& json) {
    json["traceEvents"] = nlohmann::json::array({json["traceEvents"].back()});  // braces alone: clang copies
    json["traceEvents"][0]["ph"] = "M";
  });
  refused("has no mark that says what ran", [](nlohmann::json& json) {
    for (nlohmann::json& event : json["traceEvents"]) {
      if (event["ph"] == "i") event["ph"] = "b";
    }
  });
  refused("its lane 'stream 7' is no worker's; must be 'worker N copy' or 'worker N compute'",
          [](nlohmann::json& json) {
            for (nlohmann::json& event : json["traceEvents"]) {
              if (event["name"] == "thread_name") event["args"]["name"] = "stream 7";
            }
          });
  refused("its stage 'lunch' is not in its schedule", [](nlohmann::json& json) {
    for (nlohmann::json& event : json["traceEvents"]) {
      if (event.value("cat", "") == "fc1") event["cat"] = "lunch";
    }
  });
  refused("tiles of ", [](nlohmann::json& json) {
    for (std::size_t i = json["traceEvents"].size(); i-- > 0;) {
      if (json["traceEvents"][i].value("cat", "") == "fc1") return json["traceEvents"].erase(i);
    }
  });
  refused("bad.trace': it has 1 ranks, not 2", [](nlohmann::json& json) {
    for (nlohmann::json& event : json["traceEvents"]) {
      if (event["name"] == "process_name") event["args"]["name"] = "rank 0";
    }
  });
  // Calls that began together would all have the same tiles.
  for (const double later : {0.0, -1.0}) {
    refused("bad.trace': its mark 2 is at ", [&](nlohmann::json& json) {
      const nlohmann::json events = json["traceEvents"];
      for (const nlohmann::json& event : events) {
        if (event["ph"] != "i") continue;
        nlohmann::json second = event, third = event;
        second["ts"] = event["ts"].get<double>() + 2;
        third["ts"] = second["ts"].get<double>() + later;
        json["traceEvents"].insert(json["traceEvents"].end(), {second, third});
      }
    });
  }
  expect_refused({"calibrate", "--traces", written("bad.trace", "{")}, "bad.trace': is not valid JSON");
}

TEST_F(CliCalibrateTraces, RefusesOptionsThatDoNotGoWithIt) {
  const std::string a = recorded("a.trace");
  expect_refused({"calibrate", "--traces", path("none.trace")}, "none.trace", 1);
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {"--seconds", "5"}, {"--ranks", "1"}, {"--devices", "0"}, {"--raw", path("r.json")}, {"--compile-only"}}) {
    expect_refused(test::join({"calibrate", "--traces", a}, more),
                   more.front() + ": nothing is measured with --traces; must be left out");
  }
  const std::string raw = written("times.json", tune::to_json(small_calibration()));
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {"--seconds", "5"}, {"--ranks", "1"}, {"--raw", path("r.json")}, {"--compile-only"}}) {
    expect_refused(test::join({"calibrate", "--from-raw", raw}, more),
                   more.front() + ": nothing is measured with --from-raw; must be left out");
  }
  EXPECT_FALSE(std::filesystem::exists(path("r.json")));
  expect_refused({"calibrate", "--traces", a, "--base", "gb300"}, "--base: 'gb300' is neither a file nor one of");
  expect_refused({"calibrate", "--traces", a, "--out", path("none/m.json")}, "--out: ", 1);
  const std::string cpu = path("cpu.trace");
  ASSERT_EQ(run_command({"run", "--engine", "cpu", "--ranks", "2", "--tokens", "64", "--trace", cpu}).status, 0);
  expect_refused({"calibrate", "--traces", cpu}, "--traces: '" + cpu + "': engine: 'cpu'; must be cuda or simulator");
  expect_refused({"calibrate", "--traces", recorded("one.trace", {"--one-rank"})}, "gpus: '1'; must be 2");
}

TEST_F(CliCalibrate, NeedsAGpu) {
  if (std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "this machine may have one";
  expect_refused({"calibrate", "--out", path("m.json")}, "no Hopper GPU to measure", 1);
  EXPECT_FALSE(std::filesystem::exists(path("m.json")));
}

TEST_F(CliCalibrate, SaysHowLongItMeasures) {
  EXPECT_NE(run_command({"calibrate", "--help"}).out.find("(default 40 a rank)"), std::string::npos);
}

// What is kept while work goes on is given up at the first failure.
TEST_F(CliCalibrate, KeptFilesFailOnce) {
  std::vector<std::string> lines;
  const auto say = [&](const std::string& line) { lines.push_back(line); };
  KeptFile good(path("kept"), say);
  for (const char* text : {"one", "two"}) {
    good.keep(text);
    EXPECT_EQ(io::read_text_file(path("kept")), text);
  }
  EXPECT_TRUE(lines.empty());
  KeptFile bad(path("none/kept"), say);
  bad.keep("one");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_TRUE(lines[0].starts_with("warning: cannot write file ")) << lines[0];
  EXPECT_TRUE(lines[0].ends_with("; it is not written again until the end")) << lines[0];
  std::filesystem::create_directory(path("none"));
  bad.keep("two");
  EXPECT_EQ(lines.size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(path("none/kept")));
}

TEST_F(CliCalibrate, AutoFindsOnlyWhatItMayUse) {
  const test::ScopedVariable cache("UNIEP_CACHE_DIR", folder_.path().string());
  const std::string device = "NVIDIA H200";
  const std::filesystem::path file = tune::calibrated_file(device);
  EXPECT_EQ(file.filename(), "nvidia_h200.json");
  std::string problem;
  EXPECT_FALSE(tune::find_calibrated(device, problem));
  EXPECT_EQ(problem, "");
  sim::MachineDescription machine = sim::shipped_machine("h200");
  const auto expect = [&](const std::string& why) {
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::trunc) << sim::machine_json(machine);
    problem.clear();
    EXPECT_EQ(tune::find_calibrated(device, problem).has_value(), why.empty());
    EXPECT_NE(problem.find(why), std::string::npos) << problem;
    EXPECT_EQ(problem.empty(), why.empty()) << problem;
  };
  expect("is not what uniep calibrate wrote");
  machine.calibrated = sim::CalibratedGpu{device, {}};
  expect("");
  machine.calibrated->doubtful = {"copy.push"};
  expect("disagrees with itself on copy.push");
  machine.calibrated = sim::CalibratedGpu{"NVIDIA H100", {}};
  expect("is of 'NVIDIA H100', not of 'NVIDIA H200'");
  std::ofstream(file, std::ios::trunc) << "no";
  EXPECT_FALSE(tune::find_calibrated(device, problem));
  EXPECT_NE(problem.find("is not valid JSON"), std::string::npos) << problem;
}

}  // namespace
}  // namespace uniep::cli
