// What "auto" makes of entries whose Schedules this engine does not run, on a stand-in for the CUDA driver.
#include "cli/chosen_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "engine/cuda/calls/engine.h"
#include "io/file.h"
#include "sim/machine.h"
#include "support/branch_counts.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "tune/calibrated_machine.h"
#include "uniep/error.h"

namespace uniep::test {
namespace {

Group two_gpus() {
  ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
  ::setenv("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA, 1);
  GroupOptions options;
  options.engine = EngineKind::kCuda;
  options.ranks = 2;
  options.devices = {0, 1};
  return Group(options);
}

TEST(ChosenSchedule, AnEntryThatDoesNotRunHereIsLeftOutWithALine) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const std::string file = (folder / "tuned.json").string();
  cli::LayerOptions options;
  options.engine = EngineKind::kCuda;
  options.shape = {1024, 512, 8, 2};
  options.ranks = 2;
  options.tokens_given = {64};
  Group group = two_gpus();
  BranchCounts branches;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const Schedule built_in = options.resolved(direction, group.machine());
    Schedule legal = built_in, too_many = built_in;
    legal.order.raster = 3;
    too_many.comm.reserve_sms = group.machine().workers;
    const struct {
      const char* what;
      Schedule schedule;
      bool runs;
    } entries[] = {{"one that runs", legal, true}, {"one that is not legal here", too_many, false}};
    for (const auto& [what, schedule, runs] : entries) {
      branches.count(what, true);
      tune::TunedSchedule entry;
      entry.key = cli::tuned_key(options, direction, group);
      entry.schedule = schedule;
      entry.milliseconds = entry.default_milliseconds = 1;
      const tune::TunedFolder cached = cli::tuned_folder();
      cached.store(entry);
      testing::internal::CaptureStderr();
      const Schedule chosen = cli::chosen_schedule(options, direction, group);
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_EQ(chosen, runs ? schedule : built_in) << what;
      EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), runs ? 0 : 1) << what << ": " << said;
      EXPECT_EQ(said.find(cached.path(entry.key).string()) == std::string::npos, runs) << what << ": " << said;
      EXPECT_EQ(cached.find(entry.key), entry) << what;  // it stays
      // The same in a file, whether that has to count or not.
      cached.remove(entry.key);
      io::write_file(file, tune::to_json({entry}));
      options.tuned = file;
      testing::internal::CaptureStderr();
      EXPECT_EQ(cli::chosen_schedule(options, direction, group), runs ? schedule : built_in) << what;
      EXPECT_EQ(testing::internal::GetCapturedStderr().empty(), runs) << what;
      options.tuned_strict = true;
      if (runs) {
        EXPECT_EQ(cli::chosen_schedule(options, direction, group), schedule);
      } else {
        expect_error(Status::kInvalidArgument, file, [&] { cli::chosen_schedule(options, direction, group); });
      }
      options.tuned_strict = false;
      options.tuned.clear();
    }
  }
  branches.expect_all_taken();
}

// Legal by every rule of a Schedule, and yet more than the engine has kernels for.
TEST(ChosenSchedule, AnEntryWithoutAKernelIsLeftOutWithALine) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  cli::LayerOptions options;
  options.engine = EngineKind::kCuda;
  options.shape = {1024, 512, 64, 2};
  options.numerics.combine_groups = 64;
  options.ranks = 2;
  options.tokens_given = {64};
  Group group = two_gpus();
  const Schedule built_in = options.resolved(Direction::kForward, group.machine());
  tune::TunedSchedule entry{.key = cli::tuned_key(options, Direction::kForward, group), .schedule = built_in};
  entry.milliseconds = entry.default_milliseconds = 1;
  entry.schedule.order.raster = 3;
  cli::tuned_folder().store(entry);
  testing::internal::CaptureStderr();
  EXPECT_EQ(cli::chosen_schedule(options, Direction::kForward, group), built_in);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("combine_groups=64: the cuda engine sums up to 32; it is left out\n"), std::string::npos) << said;
}

// On a GPU that the default was not made for, as calibrated: of both directions, where nothing was tuned.
TEST(ChosenSchedule, IsTheSolversWhereThatSurelyBeatsTheDefault) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string()), log("UNIEP_SCHEDULE_LOG", "1");
  cli::LayerOptions options;
  options.engine = EngineKind::kCuda;
  options.shape = {2048, 768, 32, 8};
  options.ranks = 2;
  options.tokens_given = {4096};
  options.schedule = PartialSchedule::parse("fusion=none,comm.where=warps");
  Group group = two_gpus();
  const auto choose = [&](Direction direction) {
    testing::internal::CaptureStderr();
    const Schedule chosen = cli::chosen_schedule(options, direction, group);
    return std::pair(chosen, testing::internal::GetCapturedStderr());
  };
  sim::MachineDescription machine = sim::shipped_machine("h200");
  machine.tiles.at(0).cycles *= 6;  // wide tiles are slow
  for (sim::TileCost& tile : machine.tiles) {
    if (tile.columns == 256) tile.cycles = machine.tiles.at(0).cycles;
  }
  const std::string device = cuda::device_label(0);
  machine.calibrated = sim::CalibratedGpu{device, {}};
  const std::filesystem::path file = tune::calibrated_file(device);
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const Schedule built_in = options.resolved(direction, group.machine());
    std::filesystem::remove(file);
    EXPECT_EQ(choose(direction).first, built_in);
    std::filesystem::create_directories(file.parent_path());
    io::write_file(file, sim::machine_json(machine));
    const auto [chosen, said] = choose(direction);
    EXPECT_NE(chosen, built_in) << said;
    EXPECT_EQ(chosen.fusion, Fusion::kNone);
    EXPECT_NE(said.find("from the solver, 0."), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace uniep::test
