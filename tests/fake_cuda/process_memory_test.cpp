// Symmetric memory of a process a GPU, on a stand-in for the CUDA driver: what all ranks see, and what they say, leave
// behind and can still do when one fails, stalls or dies while memory is taken.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <random>

#include "comm/symmetric_memory.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/dynamic_library.h"
#include "support/environment.h"
#include "support/expect_error.h"
#include "support/fake_cuda.h"
#include "support/loaded_fake_cuda.h"
#include "support/processes.h"
#include "uniep/group.h"

namespace uniep::test {
namespace {

constexpr double kLong = 20;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::ptrdiff_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

using Body = std::function<void(const std::shared_ptr<RankMesh>&, const Reporter&)>;

std::vector<Process> start(int ranks, double wait, const Body& body) {
  static int count = 0;
  const std::string name = "process_memory_test " + std::to_string(::getpid()) + " " + std::to_string(++count);
  std::vector<Process> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    processes.emplace_back([&](const Reporter& reporter) {
      fake();
      const auto mesh = std::make_shared<RankMesh>(MeshBootstrap{rank, ranks, name}, kLong, wait);
      body(mesh, reporter);
    });
  }
  return processes;
}

void expect_lines(std::vector<Process>& processes, const std::string& text) {
  for (std::size_t i = 0; i < processes.size(); ++i) EXPECT_EQ(processes[i].line(), text) << "process " << i;
}

// Each rank writes to all others' memory and reads what they wrote to its own; what was wrong.
std::string use(SymmetricMemory& memory) {
  const int rank = memory.own_ranks().front();
  const auto at = [&](int peer) { return static_cast<int32_t*>(memory.address(rank, peer)); };
  const auto last = memory.bytes() / static_cast<int64_t>(sizeof(int32_t)) - 1;
  if (at(rank)[last] != 0) return "not zero";
  memory.barrier();
  for (int peer = 0; peer < memory.ranks(); ++peer) at(peer)[1 + rank] = 100 * peer + rank;
  if (rank == 0) at(memory.ranks() - 1)[last] = 7;
  memory.barrier();
  for (int peer = 0; peer < memory.ranks(); ++peer) {
    if (at(rank)[1 + peer] != 100 * rank + peer) return "another rank's words";
  }
  return at(memory.ranks() - 1)[last] == 7 && at(rank)[0] == 0 ? "right" : "wrong words";
}

std::string leaks() {
  return std::to_string(fake().live()) + " live";
}

TEST(ProcessMemory, EveryRankReachesAllOthersAndNothingIsLeft) {
  for (const int ranks : {1, 2, 4, 8}) {
    auto processes = start(ranks, kLong, [](const std::shared_ptr<RankMesh>& mesh, const Reporter& reporter) {
      const std::ptrdiff_t files = open_files();
      {
        const auto memory = make_process_memory(mesh, 5'000'000, mesh->rank(), true);
        reporter.line(std::to_string(memory->bytes()) + " " + use(*memory));
        // Growth: another one beside it.
        const auto more = make_process_memory(mesh, 9'000'000, mesh->rank());
        reporter.line(use(*more));
      }
      reporter.line(leaks());
      reporter.line(std::to_string(open_files() - files));
    });
    expect_lines(processes, "6291456 right");
    expect_lines(processes, "right");
    expect_lines(processes, "0 live");
    expect_lines(processes, "0");
  }
}

TEST(ProcessMemory, APeersMemoryOutlivesIt) {
  auto processes = start(2, kLong, [](const std::shared_ptr<RankMesh>& mesh, const Reporter& reporter) {
    auto memory = make_process_memory(mesh, 1000, 0);
    static_cast<int*>(memory->address(mesh->rank(), mesh->rank()))[5] = 40 + mesh->rank();
    memory->barrier();
    if (mesh->rank() == 1) memory.reset();
    mesh->barrier();
    if (mesh->rank() == 1) return reporter.line("41");
    reporter.line(std::to_string(static_cast<int*>(memory->address(0, 1))[5]));
  });
  expect_lines(processes, "41");
}

TEST(ProcessMemory, TakesWhatTheProcessGivesBack) {
  auto processes = start(3, kLong, [&](const std::shared_ptr<RankMesh>& mesh, const Reporter& reporter) {
    int asked = 0;
    if (mesh->rank() == 1) {
      ::setenv("FAKE_CUDA_FAIL", "cuMemCreate:1:2", 1);
      set_memory_reclaimer([](void* count, int /*device*/) { ++*static_cast<int*>(count); }, &asked);
    }
    const auto memory = make_process_memory(mesh, 3'000'000, 0);
    set_memory_reclaimer(nullptr, nullptr);
    reporter.line(use(*memory) + (asked == (mesh->rank() == 1 ? 1 : 0) ? "" : ", asked another number of times"));
  });
  expect_lines(processes, "right");
}

struct Plan {
  const char* call;  // FAKE_CUDA_FAIL of rank 1
  const char* text;
};

TEST(ProcessMemory, WhatFailsOnOneRankIsTheSameErrorOnAllAndTheGroupGoesOn) {
  const Plan plans[] = {
      {"cuMemCreate:2:2", "rank 1: allocating 4194304 bytes of symmetric memory failed: out of memory"},
      {"cuMemAddressReserve:4:2", "rank 1: mapping symmetric memory failed"},
      {"cuMemMap:4:999", "rank 1: mapping symmetric memory failed"},
      {"cuMemSetAccess:4:999", "rank 1: mapping symmetric memory failed"},
      {"cuMemsetD8Async:3:999", "rank 1: clearing symmetric memory failed"},
      {"cuMemExportToShareableHandle:2:304", "rank 1: sharing memory with other processes failed"},
      {"cuMemImportFromShareableHandle:4:304", "rank 1: mapping the memory of rank 2 failed"},
      {"cuMemMap:5:2", "rank 1: mapping the memory of rank 0 failed: out of memory"},
      {"cuMemSetAccess:6:999", "rank 1: mapping the memory of rank 2 failed"}};
  for (const Plan& plan : plans) {
    auto processes = start(3, kLong, [&](const std::shared_ptr<RankMesh>& mesh, const Reporter& reporter) {
      if (mesh->rank() == 1) ::setenv("FAKE_CUDA_FAIL", plan.call, 1);
      const std::ptrdiff_t files = open_files();
      {
        const auto memory = make_process_memory(mesh, 1000, 0, true);
        const int live = fake().live();
        reporter.line(reporter.error_of([&] { make_process_memory(mesh, 3'000'000, 0); }));
        reporter.line(std::to_string(fake().live() - live));
        reporter.line(use(*memory));
        const auto again = make_process_memory(mesh, 3'000'000, 0);
        reporter.line(use(*again));
      }
      reporter.line(leaks());
      reporter.line(std::to_string(open_files() - files));
    });
    const std::string error = processes[0].line();
    EXPECT_TRUE(has(error, plan.text)) << error << ", not " << plan.text;
    const bool no_room = has(plan.call, ":2") && std::string(plan.call).ends_with(":2");
    EXPECT_EQ(error.starts_with(status_name(no_room ? Status::kOutOfMemory : Status::kDevice)), true) << error;
    EXPECT_EQ(processes[1].line(), error);
    EXPECT_EQ(processes[2].line(), error);
    expect_lines(processes, "0");
    expect_lines(processes, "right");
    expect_lines(processes, "right");
    expect_lines(processes, "0 live");
    expect_lines(processes, "0");
  }
}

TEST(ProcessMemory, DifferentSizesAreAnErrorThatNamesBoth) {
  auto processes = start(3, kLong, [](const std::shared_ptr<RankMesh>& mesh, const Reporter& reporter) {
    reporter.line(reporter.error_of([&] { make_process_memory(mesh, mesh->rank() == 2 ? 2000 : 1000, 0); }));
    reporter.line(leaks());
    reporter.line(use(*make_process_memory(mesh, 1000, 0)));
  });
  expect_lines(processes,
               "invalid argument: symmetric memory: rank 2 asks for 2000 bytes, rank 0 for 1000; must be "
               "equal on all ranks");
  expect_lines(processes, "0 live");
  expect_lines(processes, "right");
  expect_error(Status::kInvalidArgument, "symmetric memory of 0 bytes", [] { make_process_memory(nullptr, 0, 0); });
}

TEST(ProcessMemory, TheCallersMemoryIsSharedWhereItLies) {
  auto processes = start(3, kLong, [](const std::shared_ptr<RankMesh>& mesh, const Reporter& reporter) {
    {
      const auto memory = make_process_memory(mesh, 3'000'000, 0);
      const int rank = mesh->rank();
      auto* const base = static_cast<std::byte*>(memory->address(rank, rank)) + 4096;
      auto* const words = reinterpret_cast<int32_t*>(base);
      words[3] = 70 + rank;
      const auto shared = share_memory(mesh, base, 1'000'000, 0);
      shared->barrier();
      bool right = shared->address(rank, rank) == base && shared->bytes() == 1'000'000 && words[0] == 0;
      for (int peer = 0; peer < 3; ++peer) {
        right = right && static_cast<int32_t*>(shared->address(rank, peer))[3] == 70 + peer;
      }
      reporter.line(right ? "right" : "wrong");
      // Too long on one rank; then memory that can not be exported on one.
      reporter.line(reporter.error_of([&] { share_memory(mesh, base, rank == 1 ? 5'000'000 : 1000, 0); }));
      constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
      reporter.line(reporter.error_of([&] { share_memory(mesh, base, kMost, 0); }));
      const cuda::ScopedDevice scope(0);
      CUdeviceptr plain = 0;
      cuda::check(cuda::driver().cuMemAlloc(&plain, 1000), "cuMemAlloc");
      void* const given = rank == 2 ? reinterpret_cast<void*>(plain) : base;
      reporter.line(reporter.error_of([&] { share_memory(mesh, given, 1000, 0); }));
      cuda::driver().cuMemFree(plain);
      mesh->barrier();
    }
    reporter.line(leaks());
  });
  expect_lines(processes, "right");
  for (const char* text : {"of 5000000 bytes", "of 9223372036854775807 bytes", "it is from cudaMalloc or the like"}) {
    const std::string error = processes[0].line();
    EXPECT_TRUE(has(error, text) && error.starts_with("invalid argument: rank ")) << error;
    EXPECT_EQ(has(error, "its allocation ends after"), !has(text, "cudaMalloc")) << error;
    EXPECT_EQ(processes[1].line(), error);
    EXPECT_EQ(processes[2].line(), error);
  }
  expect_lines(processes, "0 live");
}

TEST(ProcessMemory, ADeviceThatIsNeverDoneEndsABarrier) {
  auto processes = start(2, 0.4, [](const std::shared_ptr<RankMesh>& mesh, const Reporter& reporter) {
    const auto memory = make_process_memory(mesh, 1000, 0);
    mesh->barrier();
    if (mesh->rank() == 1) ::setenv("FAKE_CUDA_BUSY", "1", 1);
    const double begin = monotonic_seconds();
    reporter.line(reporter.error_of([&] { memory->barrier(); }));
    reporter.line(monotonic_seconds() - begin < 0.4 + kSlackSeconds ? "in time" : "late");
  });
  expect_lines(processes, "time-out: rank 1: waiting for this rank: its device was not done within 0.4 s");
  expect_lines(processes, "in time");
}

// Rank 1 is killed or stopped, or does not come back from the driver, while all take memory over and over.
void disturb(int signal, int microseconds, const char* stall) {
  constexpr double kLimit = 0.5;
  auto processes = start(3, kLimit, [&](const std::shared_ptr<RankMesh>& mesh, const Reporter& reporter) {
    if (mesh->rank() == 1 && stall != nullptr) ::setenv("FAKE_CUDA_STALL", stall, 1);
    reporter.line("met");
    reporter.line(reporter.error_of([&] {
      for (;;) make_process_memory(mesh, 100'000, 0, true);
    }));
    reporter.line(std::to_string(monotonic_seconds()));
    reporter.line(leaks());
  });
  expect_lines(processes, "met");
  if (stall == nullptr) ::usleep(static_cast<useconds_t>(microseconds));
  if (signal != 0) processes[1].signal(signal);
  const double begin = monotonic_seconds();
  for (const std::size_t rank : {0, 2}) {
    const std::string error = processes[rank].line();
    EXPECT_TRUE(has(error, signal == SIGKILL ? "rank 1 ended" : "did not take part") && has(error, "1")) << error;
    const double seconds = std::stod("0" + processes[rank].line()) - begin;
    EXPECT_LT(seconds, (signal == SIGKILL ? 0 : kLimit) + kSlackSeconds) << error;
    EXPECT_EQ(processes[rank].line(), "0 live");
  }
}

TEST(ProcessMemory, ARankThatDiesStopsOrStallsInGrowthIsNamed) {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) disturb(SIGKILL, static_cast<int>(random() % 20'000), nullptr);
  for (int round = 0; round < 6; ++round) disturb(SIGSTOP, static_cast<int>(random() % 20'000), nullptr);
  for (const char* stall : {"cuMemCreate:3", "cuMemImportFromShareableHandle:5", "cuMemMap:8"}) disturb(0, 0, stall);
}

}  // namespace
}  // namespace uniep::test
