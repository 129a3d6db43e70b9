#include <gtest/gtest.h>

#include <fstream>

#include "cli/calibration_model.h"
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
  for (std::size_t i = 0; i < calibration.layers.size(); ++i) {
    calibration.layers[i].milliseconds.assign(3, model.milliseconds(i, sim::shipped_machine("h200")));
  }
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

TEST_F(CliCalibrate, NeedsAGpu) {
  if (std::filesystem::exists("/dev/nvidiactl")) GTEST_SKIP() << "this machine may have one";
  expect_refused({"calibrate", "--out", path("m.json")}, "no Hopper GPU to measure", 1);
  EXPECT_FALSE(std::filesystem::exists(path("m.json")));
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
