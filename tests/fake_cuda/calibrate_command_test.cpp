// `uniep calibrate` on a stand-in for the CUDA driver, on which each call takes a tenth of a millisecond: what becomes
// of the measurement, not what is measured.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "engine/cuda/calls/engine.h"
#include "io/file.h"
#include "sim/machine.h"
#include "support/command.h"
#include "support/environment.h"
#include "support/loaded_fake_cuda.h"
#include "support/temporary_folder.h"
#include "tune/calibrated_machine.h"

namespace uniep::test {
namespace {

unsigned mode_of(const std::filesystem::path& path) {
  struct stat found {};
  return ::stat(path.c_str(), &found) == 0 ? static_cast<unsigned>(found.st_mode) & 0777u : 0u;
}

// Times that can not be kept are one warning, and an error once everything else is written.
TEST(CalibrateCommand, AFullDiskUnderRawLosesNothingElse) {
  fake();
  const TemporaryFolder folder;
  const ScopedVariable cache("UNIEP_CACHE_DIR", (folder / "cache").string());
  const mode_t before = ::umask(0);
  testing::internal::CaptureStderr();
  const CommandResult result = run_command({"calibrate", "--seconds", "1", "--raw", "/dev/full"});
  const std::string said = testing::internal::GetCapturedStderr();
  ::umask(before);
  const std::filesystem::path file = tune::calibrated_file(cuda::device_label(0));
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(sim::parse_machine(io::read_text_file(file), file.string()).calibrated);
  EXPECT_NE(result.out.find("machine description: " + file.string()), std::string::npos) << result.out;
  const std::string reason = "cannot write file '/dev/full': No space left on device";
  const std::string warning = "uniep calibrate: warning: " + reason + "; it is not written again until the end\n";
  const std::size_t warned = said.find(warning);
  ASSERT_NE(warned, std::string::npos) << said;
  EXPECT_NE(said.find(" layers of ", warned), std::string::npos) << said;
  EXPECT_EQ(said.find(warning, warned + 1), std::string::npos) << said;
  EXPECT_EQ(result.err, "uniep calibrate: --raw: " + reason + "\n");
  EXPECT_EQ(mode_of(file.parent_path()), 0755u);  // kernels are not taken from a folder that others may write
}

}  // namespace
}  // namespace uniep::test
