#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

#include "support/processes.h"
#include "support/random_layer.h"

// A system that makes no more threads: the cpu engine says so, leaves none running, and works when there are some.
namespace uniep::test {
namespace {

constexpr uid_t kNobodyElse = 54321;  // a user without processes

int running_threads() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Threads:")) return std::stoi(line.substr(8));
  }
  return -1;
}

void set_limit(rlim_t threads) {
  rlimit limit{};
  getrlimit(RLIMIT_NPROC, &limit);
  limit.rlim_cur = std::min(threads, limit.rlim_max);
  setrlimit(RLIMIT_NPROC, &limit);
}

// Limits hold for users other than root, and count all of a user's processes: as root, those of one that has no others,
// so that `made` threads can be made; else none can.
TEST(ThreadLimit, IsAnErrorThatLeavesNoThread) {
  const bool root = ::geteuid() == 0;
  for (int made = 0; made < (root ? 2 : 1); ++made) {
    Process child([&](const Reporter& reporter) {
      GroupOptions options;
      options.engine = EngineKind::kCpu;
      options.ranks = 2;
      options.workers = 1;
      if (root && ::setresuid(kNobodyElse, kNobodyElse, kNobodyElse) != 0) return reporter.line("no other user");
      set_limit(static_cast<rlim_t>(1 + made));
      reporter.line(reporter.error_of([&] { const Group group(options); }));
      reporter.line(std::to_string(running_threads()) + " threads");
      set_limit(RLIM_INFINITY);
      reporter.line(reporter.error_of([&] {
        const RandomLayer layer = random_layer(4, {.ranks = {2}, .fewest_tokens = 8});
        Group group(options);
        const auto schedule = [&](Direction direction) {
          return resolve({}, {.direction = direction,
                              .shape = layer.config.shape,
                              .numerics = layer.config.numerics,
                              .machine = group.machine()});
        };
        const std::string problem = difference(
            run_layer(group, layer.config, layer.data, schedule(Direction::kForward), schedule(Direction::kBackward)),
            run_sequential(layer));
        if (!problem.empty()) throw Error(Status::kInternal, problem);
      }));
    });
    const std::string text = "workers: the system made " + std::to_string(made) + " of 2 threads: ";
    const std::string told = child.line();
    EXPECT_NE(told.find("out of memory"), std::string::npos) << told;
    EXPECT_NE(told.find(text), std::string::npos) << told;
    EXPECT_EQ(child.line(), "1 threads");
    EXPECT_EQ(child.line(), "none");
  }
  std::printf("failed with %s threads made\n", root ? "0 and 1" : "0");
}

}  // namespace
}  // namespace uniep::test
