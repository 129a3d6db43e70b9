// A process a GPU on a stand-in for the CUDA driver, on which kernels do nothing: what one rank alone fails with before
// the ranks would grow their memory together is the same Error on all of them, and the group goes on.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cli/gathered.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/device/arguments/place_arguments.h"
#include "engine/cuda/runtime/dynamic_library.h"
#include "engine/engine.h"
#include "support/failing_heap.h"
#include "support/layer_arrays.h"
#include "support/processes.h"
#include "uniep/tuner.h"

namespace uniep::test {
namespace {

constexpr int kRanks = 2;
constexpr Capacity kCapacity{4096, 128};

enum class Request { kDriver, kHeap };

// One rank's group and calls.
class Rank {
 public:
  Rank(int rank, const std::string& id, int64_t hidden = 64, double arrival_seconds = 20, Allocator allocator = {}) {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.launch = Launch::kProcesses;
    options.ranks = kRanks;
    options.rank = rank;
    options.bootstrap = id;
    options.devices = {0, 1};
    options.arrival_timeout_seconds = arrival_seconds;
    options.allocator = allocator;
    group_.emplace(options);
    LayerConfig& config = layer_.config;
    config.shape.hidden = hidden;
    schedule_ = resolve({}, {.direction = Direction::kForward,
                             .shape = config.shape,
                             .numerics = config.numerics,
                             .machine = group_->machine()});
    arguments_ = {arrays_.forward_arguments()[static_cast<std::size_t>(rank)]};
    routing_ = arrays_.routings[static_cast<std::size_t>(rank)];
    place_again();
  }

  Group& group() { return *group_; }
  void forward(bool misaligned = false) {
    if (misaligned) ++arguments_[0].x;
    const Restore restore{arguments_[0].x, misaligned};
    uniep::forward(*group_, layer_.config, schedule_, placement_, arguments_);
  }
  // Of the calls that follow.
  void set_hidden(int64_t hidden) {
    layer_.config.shape.hidden = hidden;
    place_again();
  }
  const Placement& placement() const { return placement_; }
  void take(const Placement& placement) { placement_ = placement; }
  void place_again() { placement_ = place(*group_, layer_.config.shape, std::vector{routing_}, kCapacity); }
  // What each rank says.
  std::vector<int64_t> all_gather(int64_t own) { return group_->implementation().all_gather(own); }

 private:
  struct Restore {
    const BFloat16*& address;
    bool moved;
    ~Restore() { address -= moved ? 1 : 0; }
  };

  RandomLayer layer_ = random_layer(
      5, {.ranks = {kRanks}, .most_local_experts = 3, .most_tokens = 40, .columns = {{64, 32}}, .fewest_tokens = 40});
  LayerArrays arrays_{layer_};
  std::optional<Group> group_;
  Schedule schedule_;
  std::vector<ForwardArguments> arguments_;
  Routing routing_;
  Placement placement_;
};

void fail_from_now(Request request, int64_t n) {
  heap_countdown = 0;
  ::unsetenv("FAKE_CUDA_FAIL");
  if (n == 0) return;
  if (request == Request::kDriver) ::setenv("FAKE_CUDA_FAIL", ("request:+" + std::to_string(n) + ":2").c_str(), 1);
  if (request == Request::kHeap) heap_countdown = n;
}

std::vector<Process> start(const std::function<void(int rank, const Reporter&)>& body) {
  std::vector<Process> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
      ::setenv("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA, 1);
      const std::string problem = reporter.error_of([&] { body(rank, reporter); });
      reporter.line("end: " + problem);
    });
  }
  return processes;
}

class OneRankFails : public testing::TestWithParam<Request> {};

TEST_P(OneRankFails, AtEachRequestOfACallThatGrowsMemory) {
  const Request request = GetParam();
  const int stride = request == Request::kHeap ? 7 : 1;
  std::vector<std::string> ids;
  for (int i = 0; i < 200; ++i) ids.push_back(make_unique_id());
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    int (*failures)() = nullptr;
    cuda::DynamicLibrary("the stand-in", "UNIEP_LIBCUDA", {}).bind(failures, "fake_cuda_failures");
    for (int i = 0;; ++i) {
      Rank own(rank, ids.at(static_cast<std::size_t>(i)));
      if (rank == 1) fail_from_now(request, stride * i + 1);
      const int before = failures();
      heap_failed = false;
      std::optional<Error> thrown;
      try {
        own.forward();
      } catch (const Error& error) {
        heap_countdown = 0;
        thrown = error;
      }
      fail_from_now(request, 0);
      const bool hit = rank == 1 && (failures() > before || heap_failed);
      const std::string text = !thrown ? "none" : std::string(status_name(thrown->status())) + " " + thrown->what();
      bool failed = true;
      try {
        failed = own.all_gather(hit ? 1 : 0)[1] != 0;
      } catch (const Error&) {  // the ranks can not go on together
        reporter.line(text);
        continue;
      }
      reporter.line(failed ? text : "over");
      own.group().recover();
      own.forward();
      own.forward();
      if (!failed) return;
    }
  });
  int agreed = 0, alone = 0, borne = 0, broken = 0;
  for (;;) {
    const std::string first = processes[0].line(60), second = processes[1].line(60);
    SCOPED_TRACE("request " + std::to_string(stride * (agreed + alone + borne + broken) + 1) + ": rank 0 " + first +
                 "; rank 1 " + second);
    if (first == "over" && second == "over") break;
    ASSERT_TRUE(second.starts_with("out of memory") || second == "none");
    const bool told = first == "device error rank 1 failed: the C++ heap has no room";
    // Behind the growth the others' kernels are told, which do nothing here.
    ASSERT_TRUE(first == second || first == "none" || (told && request == Request::kHeap));
    ++(second == "none" ? borne : told ? broken : first == second ? agreed : alone);
  }
  for (Process& process : processes) EXPECT_EQ(process.line(), "end: none");
  std::printf(
      "%d failures of rank 1 were agreed on by both ranks, %d came behind the growth, %d were borne, %d ended the "
      "group on both\n",
      agreed, alone, borne, broken);
  EXPECT_GT(agreed, 0);
  EXPECT_GT(alone, 0);
  EXPECT_EQ(broken > 0, request == Request::kHeap);
}

INSTANTIATE_TEST_SUITE_P(Of, OneRankFails, testing::Values(Request::kDriver, Request::kHeap),
                         [](const testing::TestParamInfo<Request>& of) {
                           return of.param == Request::kDriver ? "TheDriver" : "TheHeap";
                         });

TEST(OneRank, GivesAnArrayThatIsNotAligned) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    Rank own(rank, id);
    reporter.line(reporter.error_of([&] { own.forward(rank == 1); }));  // memory is to grow
    own.forward();
    reporter.line(reporter.error_of([&] { own.forward(rank == 1); }));
    own.group().recover();
    own.forward();
  });
  const std::string refused = "x: its address on rank 1 must be a multiple of 16";
  for (Process& process : processes) {
    const std::string line = process.line();
    EXPECT_NE(line.find("rank 1: " + refused), std::string::npos) << line;
  }
  EXPECT_EQ(processes[0].line(), "none");  // its kernels, which do nothing here, hear of it
  EXPECT_NE(processes[1].line().find(refused), std::string::npos);
  for (Process& process : processes) EXPECT_EQ(process.line(), "end: none");
}

TEST(OneRank, ComesTooLateToAnExchangeSoThatANewGroupIsNeeded) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    Rank own(rank, id, 64, 1);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    reporter.line(reporter.error_of([&] { own.forward(); }));  // memory is to grow
    for (int i = 0; i < 2; ++i) reporter.line(reporter.error_of([&] { own.group().recover(); }));
  });
  EXPECT_NE(processes[0].line().find("did not take part in"), std::string::npos);
  EXPECT_NE(processes[1].line(), "none");
  for (Process& process : processes) {
    for (int i = 0; i < 2; ++i) {
      const std::string line = process.line();
      EXPECT_NE(line.find("the ranks that are left need a new Group"), std::string::npos) << line;
    }
    EXPECT_EQ(process.line(), "end: none");
  }
}

// The C++ heap, but for what happens at the n-th request.
struct HookedHeap {
  void (*hook)() = nullptr;
  int in = 0;

  Allocator allocator() {
    const auto allocate = [](void* context, std::size_t bytes, std::size_t alignment, int, Stream) {
      auto& own = *static_cast<HookedHeap*>(context);
      if (own.in > 0 && --own.in == 0) own.hook();
      return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    return {allocate, [](void*, void* memory, std::size_t, int, Stream) { std::free(memory); }, this};
  }
};

TEST(OneRank, NoticesFirstThatACallHasFailedWhileTheOtherGrowsMemory) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    const cuda::DynamicLibrary stand_in("the stand-in", "UNIEP_LIBCUDA", {});
    HookedHeap heap;
    stand_in.bind(heap.hook, "fake_cuda_fail_last_call");
    Rank own(rank, id, 32, 20, heap.allocator());
    own.forward();
    own.set_hidden(64);
    if (rank == 0) heap.in = 1;  // behind the look that its call begins with
    if (rank == 1) heap.hook();
    const auto begin = std::chrono::steady_clock::now();
    reporter.line(reporter.error_of([&] { own.forward(); }));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    reporter.line(seconds.count() < 10 ? "at once" : "late");
    reporter.line(heap.in == 0 ? "failed" : "not failed");
    own.group().recover();
    own.forward();
  });
  for (Process& process : processes) {
    const std::string line = process.line();
    EXPECT_NE(line.find("recover() makes the group usable again"), std::string::npos) << line;
    EXPECT_EQ(process.line(), "at once");
    EXPECT_EQ(process.line(), "failed");
    EXPECT_EQ(process.line(), "end: none");
  }
}

// It says so to the others in recover(), where they wait for it in an exchange of hosts.
TEST(OneRank, RecoversFromAFailureThatTheOtherHasNotSeen) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    const cuda::DynamicLibrary stand_in("the stand-in", "UNIEP_LIBCUDA", {});
    void (*fail)() = nullptr;
    stand_in.bind(fail, "fake_cuda_fail_last_call");
    Rank own(rank, id, 32);
    own.forward();
    own.set_hidden(64);
    if (rank == 1) fail();
    const auto begin = std::chrono::steady_clock::now();
    for (int again = 0; again < 2; ++again) reporter.line(reporter.error_of([&] { own.forward(); }));
    own.group().recover();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    reporter.line(seconds.count() < 10 ? "at once" : "late");
    reporter.line(reporter.error_of([&] { own.forward(); }));
  });
  const std::string told = processes[0].line(), failed = processes[1].line();
  EXPECT_NE(told.find("rank 1 gave up a call that failed there, and waits in recover()"), std::string::npos) << told;
  EXPECT_NE(failed.find("recover() makes the group usable again"), std::string::npos) << failed;
  for (Process& process : processes) {
    const std::string again = process.line();
    EXPECT_NE(again.find("call Group::recover() before the next one"), std::string::npos) << again;
    EXPECT_EQ(process.line(), "at once");
    EXPECT_EQ(process.line(), "none");
    EXPECT_EQ(process.line(), "end: none");
  }
}

// Or in the call itself, where it alone has been told of an overflow.
TEST(OneRank, HearsOfAnOverflowWhileTheOtherGrowsMemory) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    const cuda::DynamicLibrary stand_in("the stand-in", "UNIEP_LIBCUDA", {});
    void (*fail)(int) = nullptr;
    stand_in.bind(fail, "fake_cuda_fail_last_place");
    Rank own(rank, id, 32);
    own.forward();
    own.set_hidden(64);
    if (rank == 1) fail(static_cast<int>(cuda::PlaceFault::kOverflow));
    const auto begin = std::chrono::steady_clock::now();
    reporter.line(reporter.error_of([&] { own.forward(); }));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    reporter.line(seconds.count() < 10 ? "at once" : "late");
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    own.group().recover();
    own.place_again();
    own.forward();
  });
  const std::string told = processes[0].line(), overflown = processes[1].line();
  EXPECT_NE(told.find("rank 1 refused the call: capacity"), std::string::npos) << told;
  EXPECT_NE(overflown.find("capacity"), std::string::npos) << overflown;
  for (Process& process : processes) {
    EXPECT_EQ(process.line(), "at once");
    EXPECT_EQ(process.line(), "end: none");
  }
}

// The other's kernels, which wait for its next call.
TEST(OneRank, TellsInRecoverThatItMakesNoCall) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    Rank own(rank, id);
    own.forward();
    auto& engine = dynamic_cast<cuda::CudaEngine&>(own.group().implementation());
    if (rank == 1) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!engine.is_told_by(0, 1) && std::chrono::steady_clock::now() < end) continue;
      reporter.line(engine.is_told_by(0, 1) ? "told" : "not told");
    }
    own.group().recover();
    reporter.line(engine.is_told_by(1 - rank, rank) ? "told" : "not told");
    own.all_gather(0);
    own.forward();
  });
  EXPECT_EQ(processes[1].line(), "told");
  for (Process& process : processes) {
    EXPECT_EQ(process.line(), "not told");
    EXPECT_EQ(process.line(), "end: none");
  }
}

// Each rank captures where it has not yet: what is captured counts as no call.
TEST(OneRank, CapturesAloneAndTheirCallsStayTheSame) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    const cuda::DynamicLibrary stand_in("the stand-in", "UNIEP_LIBCUDA", {});
    void (*capture)(int) = nullptr;
    stand_in.bind(capture, "fake_cuda_capture");
    Rank own(rank, id, 32);
    own.forward();
    if (rank == 1) {
      capture(1);
      own.forward();
      own.forward();
      reporter.line(reporter.error_of([&] { own.forward(true); }));
      capture(0);
    }
    own.set_hidden(64);
    reporter.line(reporter.error_of([&] { own.forward(); }));  // memory is to grow: they compare their calls
  });
  const std::string refused = processes[1].line();
  EXPECT_NE(refused.find("must be a multiple of 16"), std::string::npos) << refused;
  for (Process& process : processes) {
    EXPECT_EQ(process.line(), "none");
    EXPECT_EQ(process.line(), "end: none");
  }
}

// A tuner's, which has no look at GPUs.
TEST(OneRank, ExchangesWhileItsCallRunsAndAfterItHasFailed) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    const cuda::DynamicLibrary stand_in("the stand-in", "UNIEP_LIBCUDA", {});
    void (*fail)() = nullptr;
    stand_in.bind(fail, "fake_cuda_fail_last_call");
    Rank own(rank, id);
    const std::shared_ptr<TunerExchange> exchange = make_tuner_exchange(own.group());
    int64_t number = 0;
    const auto exchanged = [&] {
      exchange->give(number, std::vector<std::byte>(static_cast<std::size_t>(rank + 1)));
      reporter.line(std::to_string(exchange->take(number++).back().size()));
    };
    own.forward();
    ::setenv("FAKE_CUDA_BUSY", "1", 1);
    exchanged();
    ::unsetenv("FAKE_CUDA_BUSY");
    if (rank == 1) fail();
    exchanged();
    const std::string failure = reporter.error_of([&] { own.group().synchronize(); });
    reporter.line(failure == "none" ? "none" : "failed");
    exchanged();
    own.group().recover();
    exchanged();
  });
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    for (const char* line : {"2", "2", rank == 1 ? "failed" : "none", "2", "2", "end: none"}) {
      EXPECT_EQ(processes[rank].line(), line);
    }
  }
}

TEST(OneRank, KnowsTheSlowestRanksTimes) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    Rank own(rank, id);
    const std::vector<double> times = cli::slowest_times(own.group(), {rank == 1 ? 5.0 : 1.0, rank == 1 ? 2.0 : 3.0});
    reporter.line(std::to_string(times.at(0)) + " " + std::to_string(times.at(1)));
  });
  EXPECT_EQ(processes[0].line(), "5.000000 3.000000");
  EXPECT_EQ(processes[1].line(), "5.000000 2.000000");
}

TEST(OneRank, LeavesBehindACallThatItIsDoneWith) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    std::optional<Rank> own(std::in_place, rank, id);
    own->forward();
    own->all_gather(0);
    own->forward();
    if (rank == 1) {
      own->group().leave();
      return;
    }
    ::setenv("FAKE_CUDA_BUSY", "1", 1);  // this rank's kernels run on
    std::atomic<bool> over = false;
    std::thread end([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1000));
      ::unsetenv("FAKE_CUDA_BUSY");
      over = true;
    });
    const std::string behind = reporter.error_of([&] { own->group().synchronize(); });
    reporter.line(over ? behind : "it did not wait");
    end.join();
    reporter.line(reporter.error_of([&] { own->forward(); }));
  });
  EXPECT_EQ(processes[0].line(), "none");
  const std::string next = processes[0].line();
  EXPECT_NE(next.find("rank 1"), std::string::npos) << next;
  EXPECT_NE(next.find("the ranks that are left need a new Group"), std::string::npos) << next;
  for (Process& process : processes) EXPECT_EQ(process.line(), "end: none");
}

TEST(OneRank, LeavesBehindAPlacementThatHasFailedForTheOther) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    const cuda::DynamicLibrary stand_in("the stand-in", "UNIEP_LIBCUDA", {});
    void (*fail)(int) = nullptr;
    stand_in.bind(fail, "fake_cuda_fail_last_place");
    std::optional<Rank> own(std::in_place, rank, id);
    own->forward();
    own->all_gather(0);
    own->place_again();
    if (rank == 1) {
      own->group().leave();
      return;
    }
    ::setenv("FAKE_CUDA_BUSY", "1", 1);  // so that synchronize() comes to know of the other
    fail(static_cast<int>(cuda::PlaceFault::kOverflow));
    std::thread end([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1000));
      ::unsetenv("FAKE_CUDA_BUSY");
    });
    reporter.line(reporter.error_of([&] { own->group().synchronize(); }));
    end.join();
  });
  const std::string line = processes[0].line();
  EXPECT_NE(line.find("capacity"), std::string::npos) << line;
  for (Process& process : processes) EXPECT_EQ(process.line(), "end: none");
}

TEST(OneRank, MakesAnotherCallThanTheOther) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    Rank own(rank, id, rank == 0 ? 64 : 32);
    for (int again = 0; again < 2; ++again) reporter.line(reporter.error_of([&] { own.forward(); }));
  });
  for (Process& process : processes) {
    for (const char* call : {"2", "3"}) {
      const std::string line = process.line();
      for (const char* part : {"rank 0 makes call ", ", forward of hidden 64, ", "; rank 1 makes call ",
                               ", forward of hidden 32, ", "; all ranks must make the same calls in the same order"}) {
        EXPECT_NE(line.find(part), std::string::npos) << "call " << call << ": " << line;
      }
      EXPECT_NE(line.find(std::string("makes call ") + call), std::string::npos) << line;
    }
    EXPECT_EQ(process.line(), "end: none");
  }
}

TEST(OneRank, TakesAnotherPlacementOfTheSameSizesThanTheOther) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    Rank own(rank, id);
    const Placement first = own.placement();
    own.place_again();
    if (rank == 0) own.take(first);
    reporter.line(reporter.error_of([&] { own.forward(); }));
    own.take(first);
    reporter.line(reporter.error_of([&] { own.forward(); }));
  });
  for (Process& process : processes) {
    const std::string line = process.line();
    EXPECT_NE(line.find("schedule, numerics and placement "), std::string::npos) << line;
    EXPECT_NE(line.find("all ranks must make the same calls in the same order"), std::string::npos) << line;
    EXPECT_EQ(process.line(), "none");
    EXPECT_EQ(process.line(), "end: none");
  }
}

TEST(OneRank, AbortsWhileTheOtherWaitsForItInAnExchangeOfHosts) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    Rank own(rank, id);
    if (rank == 1) own.group().abort();
    reporter.line(reporter.error_of([&] { own.forward(); }));
  });
  const std::string first = processes[0].line(), second = processes[1].line();
  EXPECT_NE(first.find("rank 1 failed: it has aborted the group"), std::string::npos) << first;
  EXPECT_NE(second.find("group: aborted; the ranks need a new Group"), std::string::npos) << second;
  for (Process& process : processes) EXPECT_EQ(process.line(), "end: none");
}

TEST(OneRank, IsAbortedWhileItWaitsInAnExchangeOfHosts) {
  const std::string id = make_unique_id();
  std::vector<Process> processes = start([&](int rank, const Reporter& reporter) {
    Rank own(rank, id);
    std::optional<std::thread> other;
    if (rank == 0) {
      other.emplace([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        own.group().abort();
      });
      reporter.line(reporter.error_of([&] { own.forward(); }));
      other->join();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1000));
      reporter.line(reporter.error_of([&] { own.forward(); }));
    }
  });
  for (Process& process : processes) {
    const std::string line = process.line();
    EXPECT_NE(line.find("rank 0 aborted the group"), std::string::npos) << line;
    EXPECT_EQ(process.line(), "end: none");
  }
}

}  // namespace
}  // namespace uniep::test
