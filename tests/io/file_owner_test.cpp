// Which process a file belongs to: one that lives, not a child that it has forked, nor one that only asks.
#include "io/file_owner.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include "io/descriptor.h"
#include "io/file.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

namespace uniep::io {
namespace {

using test::Process;
using test::Reporter;
using test::TemporaryFolder;

TEST(FileOwner, IsOneUntilItGoes) {
  const TemporaryFolder folder;
  const auto file = folder / "a";
  EXPECT_FALSE(FileOwner::has_owner(file));
  {
    const std::optional<FileOwner> first = FileOwner::take(file);
    ASSERT_TRUE(first);
    EXPECT_TRUE(FileOwner::has_owner(file));
    EXPECT_FALSE(FileOwner::take(file));
    EXPECT_TRUE(FileOwner::take(folder / "b"));
  }
  EXPECT_FALSE(FileOwner::has_owner(file));
  EXPECT_EQ(folder.entries(), 0u);
  EXPECT_TRUE(FileOwner::take(file));
}

TEST(FileOwner, EverybodyIsWhereNothingCanBeWritten) {
  const std::optional<FileOwner> one = FileOwner::take("/proc/uniep/a"), other = FileOwner::take("/proc/uniep/a");
  EXPECT_TRUE(one && other);
  EXPECT_FALSE(FileOwner::has_owner("/proc/uniep/a"));
}

// Checkpoint writers and loaders of data are forked by training processes and may outlive them.
TEST(FileOwner, ACrashedProcessLeavesNoOwnerThoughItsChildLives) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // to wait for the child, too
  for (const bool asks : {false, true}) {
    const TemporaryFolder folder;
    const auto file = folder / "a";
    Process parent([&](const Reporter& reporter) {
      const std::optional<FileOwner> owner = FileOwner::take(file);
      const std::optional<FileOwner> other = asks ? FileOwner::take(folder / "b") : std::nullopt;
      if (::fork() == 0) {  // the child says who it is, so that it runs
        const bool knows = !asks || (FileOwner::has_owner(file) && !FileOwner::take(file));
        reporter.line(std::to_string(knows ? ::getpid() : -1));
      }
      ::pause();
    });
    const pid_t child = std::stoi(parent.line());
    ASSERT_GT(child, 0);
    EXPECT_TRUE(FileOwner::has_owner(file));
    parent.end();
    EXPECT_EQ(::kill(child, 0), 0);
    EXPECT_FALSE(FileOwner::has_owner(file));
    EXPECT_TRUE(FileOwner::take(file));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
}

TEST(FileOwner, AChildThatEndsTakesNothingAway) {
  const TemporaryFolder folder;
  const auto file = folder / "a";
  std::optional<FileOwner> owner = FileOwner::take(file);
  ASSERT_TRUE(owner);
  const pid_t child = ::fork();
  if (child == 0) {
    const Descriptor reused(::open("/dev/null", O_RDONLY));  // where the parent has its lock
    owner.reset();
    ::_exit(::fcntl(reused.number(), F_GETFD) >= 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(FileOwner::has_owner(file));
  EXPECT_FALSE(FileOwner::take(file));
  owner.reset();
  EXPECT_EQ(folder.entries(), 0u);
}

// A fork while another thread asks: what it shared the lock by does not live on in the child.
TEST(FileOwner, ForksWhileItIsAskedForHoldNothing) {
  const TemporaryFolder folder;
  const auto file = folder / "a";
  for (int turn = 0; turn < 40; ++turn) {
    write_file(file.string() + ".lock", "");  // a crashed owner's
    std::atomic<bool> stop = false;
    std::thread asker([&] {
      while (!stop) FileOwner::has_owner(file);
    });
    std::this_thread::sleep_for(std::chrono::microseconds(100 + 37 * turn));
    const pid_t child = ::fork();
    if (child == 0) {
      ::pause();
      ::_exit(0);
    }
    stop = true;
    asker.join();
    EXPECT_TRUE(FileOwner::take(file)) << turn;
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
}

// Who asks has_owner() has the lock shared for a moment.
TEST(FileOwner, IsTakenThoughOthersAsk) {
  const TemporaryFolder folder;
  const auto file = folder / "a";
  std::atomic<bool> shared = false;
  std::thread asker([&] {
    const Descriptor lock(::open((file.string() + ".lock").c_str(), O_RDWR | O_CREAT, 0644));
    EXPECT_EQ(::flock(lock.number(), LOCK_SH), 0);
    shared = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
  while (!shared) std::this_thread::yield();
  EXPECT_TRUE(FileOwner::take(file));
  asker.join();
}

}  // namespace
}  // namespace uniep::io
