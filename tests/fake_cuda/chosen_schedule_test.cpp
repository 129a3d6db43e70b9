// What "auto" makes of entries whose Schedules this engine does not run, on a stand-in for the CUDA driver.
#include "cli/chosen_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "io/file.h"
#include "support/branch_counts.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "uniep/error.h"

namespace uniep::test {
namespace {

TEST(ChosenSchedule, AnEntryThatDoesNotRunHereIsLeftOutWithALine) {
  ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
  ::setenv("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA, 1);
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const std::string file = (folder / "tuned.json").string();
  cli::LayerOptions options;
  options.engine = EngineKind::kCuda;
  options.shape = {1024, 512, 8, 2};
  options.ranks = 2;
  options.tokens_given = {64};
  GroupOptions group_options;
  group_options.engine = EngineKind::kCuda;
  group_options.ranks = 2;
  group_options.devices = {0, 1};
  Group group(group_options);
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

}  // namespace
}  // namespace uniep::test
