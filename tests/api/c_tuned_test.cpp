// What `uniep tune` has found, as programs in C are given it.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "api/machine_name.h"
#include "io/file.h"
#include "support/environment.h"
#include "support/temporary_folder.h"
#include "tune/tuned.h"
#include "uniep/c_api.h"
#include "uniep/group.h"

namespace uniep::test {
namespace {

using tune::TunedSchedule;

class TunedInC : public testing::Test {
 protected:
  TunedInC() {
    uniep_group_options options = {};
    options.size = sizeof(options);
    options.engine = UNIEP_ENGINE_CPU;
    options.ranks = 2;
    options.workers = 2;
    uniep_group* made = nullptr;
    EXPECT_EQ(uniep_group_create(&options, &made), UNIEP_OK) << uniep_last_error();
    group_.reset(made);
    GroupOptions same;
    same.engine = EngineKind::kCpu;
    same.ranks = 2;
    same.workers = 2;
    own_.key = {api::machine_name(Group(same)), 2, {64, 32, 8, 2}, {}, Direction::kForward, 64, ""};
    own_.schedule = resolve({}, {.direction = Direction::kForward,
                                 .shape = own_.key.shape,
                                 .numerics = {},
                                 .machine = {EngineKind::kCpu, 2, 2}});
    own_.milliseconds = own_.default_milliseconds = 1;
  }

  std::vector<TunedSchedule> found(const char* file) {
    std::size_t needed = 0;
    EXPECT_EQ(uniep_tuned_schedules(group_.get(), file, nullptr, 0, &needed), UNIEP_OK) << uniep_last_error();
    std::string text(needed, ' ');
    EXPECT_EQ(uniep_tuned_schedules(group_.get(), file, text.data(), needed - 1, &needed), UNIEP_OVERFLOW);
    EXPECT_EQ(uniep_tuned_schedules(group_.get(), file, text.data(), needed, &needed), UNIEP_OK) << uniep_last_error();
    text.resize(needed - 1);
    return tune::parse_tuned(text);
  }

  std::unique_ptr<uniep_group, void (*)(uniep_group*)> group_{nullptr, uniep_group_destroy};
  TunedSchedule own_;
};

TEST_F(TunedInC, AreTheEntriesOfTheGroupsMachineAndRanks) {
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  TunedSchedule machine = own_, ranks = own_, fields = own_, longer = own_;
  machine.key.machine += ", another";
  ranks.key.ranks = 4;
  fields.key.conditions = "order.raster=4";
  longer.key.tokens = 8192;
  const tune::TunedFolder entries(folder / "cache");
  for (const TunedSchedule& one : {own_, machine, ranks, fields}) entries.store(one);
  io::write_file(folder / "cache" / "0000000000000000.tuned.json", "{");  // no entry, and no error
  EXPECT_EQ(found(nullptr), std::vector<TunedSchedule>{own_});
  const std::string file = (folder / "export.json").string();
  io::write_file(file, tune::to_json({machine, own_, ranks, longer}));
  EXPECT_EQ(found(file.c_str()), (std::vector<TunedSchedule>{own_, longer}));
}

TEST_F(TunedInC, AFileThatIsNoneIsNamed) {
  const TemporaryFolder folder;
  std::size_t needed = 0;
  const std::string missing = (folder / "missing.json").string(), damaged = (folder / "damaged.json").string();
  EXPECT_EQ(uniep_tuned_schedules(group_.get(), missing.c_str(), nullptr, 0, &needed), UNIEP_IO);
  EXPECT_NE(std::string(uniep_last_error()).find("missing.json"), std::string::npos);
  io::write_file(damaged, "{");
  EXPECT_EQ(uniep_tuned_schedules(group_.get(), damaged.c_str(), nullptr, 0, &needed), UNIEP_INVALID_ARGUMENT);
  EXPECT_NE(std::string(uniep_last_error()).find("damaged.json"), std::string::npos);
}

}  // namespace
}  // namespace uniep::test
