#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "io/file.h"
#include "support/command.h"
#include "support/temporary_folder.h"

namespace uniep::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The smallest list: of a combine alone.
std::vector<std::string> combine(const fs::path& folder) {
  return {"compile", "--op", "combine", "--shape", "4096,1536,128,8", "--ranks", "8", "--out", folder.string()};
}

// Without cuda.h at build time or NVRTC at run time it is refused in one line that says so.
bool can_compile(const CommandResult& result) {
  if (result.status == 0) return true;
  EXPECT_EQ(result.status, 2) << result.err;
  EXPECT_TRUE(result.one_line_error()) << result.err;
  EXPECT_TRUE(result.err.find("NVRTC") != std::string::npos || result.err.find("cuda.h") != std::string::npos)
      << result.err;
  return false;
}

TEST(CompileCommand, CompilesOnceWhatAJobNeeds) {
  const TemporaryFolder temporary;
  const fs::path folder = temporary / "made" / "kernels";
  const CommandResult first = run_command(join(combine(folder), {"--json", "-"}));
  if (!can_compile(first)) return;
  const Json kernels = first.json()["kernels"];
  EXPECT_EQ(first.json()["compiled"], kernels.size());
  bool exchange = false;
  for (const Json& kernel : kernels) {
    EXPECT_FALSE(kernel["was_there"].get<bool>());
    EXPECT_GT(fs::file_size(kernel["file"].get<std::string>()), 10'000u);
    exchange |= kernel["name"].get<std::string>().find("exchange.cu") != std::string::npos;
  }
  EXPECT_TRUE(exchange);

  // Again, for readers alone, with one file lost: only root may still write.
  fs::remove(kernels.back()["file"].get<std::string>());
  fs::permissions(folder, fs::perms::owner_read | fs::perms::owner_exec);
  const CommandResult again = run_command(join(combine(folder), {"--json", "-"}));
  fs::permissions(folder, fs::perms::owner_all);
  if (::geteuid() == 0) {
    EXPECT_EQ(again.json()["compiled"], 1);
  } else {
    EXPECT_EQ(again.status, 1);
  }
  const CommandResult complete = run_command(combine(folder));
  EXPECT_NE(complete.out.find("UNIEP_CACHE_DIR=" + folder.string()), std::string::npos) << complete.out;
}

TEST(CompileCommand, SaysWhatItCanNotDo) {
  const TemporaryFolder folder;
  const auto expect_refusal = [](const std::vector<std::string>& arguments, int status, const std::string& words) {
    const CommandResult result = run_command(arguments);
    EXPECT_TRUE(result.one_line_error()) << result.err;
    if (result.err.find("NVRTC") != std::string::npos || result.err.find("cuda.h") != std::string::npos) return;
    EXPECT_EQ(result.status, status) << result.err;
    EXPECT_NE(result.err.find(words), std::string::npos) << result.err;
  };
  const auto with = [&](const std::vector<std::string>& more) { return join(combine(folder / "kernels"), more); };
  expect_refusal({"compile", "--shape", "4096,1536,128,8"}, 2, "--out");
  expect_refusal(with({"--engine", "cpu"}), 2, "--engine: 'cpu'; must be cuda");
  const std::vector<std::string> wrong = {"compile", "--op", "wgrad", "--out", (folder / "kernels").string()};
  const std::vector<std::string> uneven = {"compile", "--ranks", "7", "--out", (folder / "kernels").string()};
  expect_refusal(wrong, 2, "--op: 'wgrad'; must be layer|dispatch|combine");
  expect_refusal(with({"--schedule", "comm.chunk_bytes=5"}), 2, "comm.chunk_bytes");
  expect_refusal(uneven, 2, "experts: 16 can not be divided evenly over 7 ranks");
  expect_refusal({"compile", "--ranks", "16", "--out", (folder / "kernels").string()}, 2,
                 "ranks: 16; the cuda engine runs 1 to 8");
  expect_refusal(combine("/proc/kernels"), 1, "folder: '/proc/kernels' can not be written");
  io::write_file(folder / "file", "");
  expect_refusal(combine(folder / "file"), 1, "file' can not be written");
  EXPECT_FALSE(fs::exists(folder / "kernels"));
}

}  // namespace
}  // namespace uniep::test
