// make_tuner_exchange() between processes, a rank each, on a stand-in for the CUDA driver.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/made_up_job.h"
#include "support/processes.h"
#include "uniep/c_api.h"
#include "uniep/uniep.h"

namespace uniep::test {
namespace {

constexpr double kLimitSeconds = 1;  // where a rank is waited for in vain

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string text_of(const std::vector<std::vector<std::byte>>& all) {
  std::string text;
  for (const std::vector<std::byte>& one : all) {
    text += (text.empty() ? "" : "|") + std::string(reinterpret_cast<const char*>(one.data()), one.size());
  }
  return text;
}

using RankBody = std::function<void(int rank, Group& group, const Reporter& reporter)>;

// Each rank in a process of its own, with its end as the last line.
std::vector<Process> start_group(int ranks, const RankBody& body, double limit_seconds = 20) {
  const std::string id = make_unique_id();
  std::vector<Process> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
      ::setenv("UNIEP_LIBNVRTC", UNIEP_FAKE_CUDA, 1);
      const std::string problem = reporter.error_of([&] {
        GroupOptions options;
        options.engine = EngineKind::kCuda;
        options.launch = Launch::kProcesses;
        options.ranks = ranks;
        options.rank = rank;
        options.bootstrap = id;
        options.arrival_timeout_seconds = limit_seconds;
        Group group(options);
        body(rank, group, reporter);
      });
      reporter.line("end: " + problem);
    });
  }
  return processes;
}

// What a Tuner does: a round's message is taken before that of the step before it.
TEST(TunerExchange, GivesAllRanksTheSameInRankOrder) {
  for (const int ranks : {1, 2, 4}) {
    std::vector<Process> processes = start_group(ranks, [](int rank, Group& group, const Reporter& reporter) {
      const std::shared_ptr<TunerExchange> one = make_tuner_exchange(group), other = make_tuner_exchange(group);
      const std::string name = std::to_string(rank);
      for (const char* text : {"a", "b", "c"}) {
        one->give(*text - 'a', bytes_of(text + name + std::string(static_cast<std::size_t>(rank), '+')));
      }
      other->give(0, rank == 0 ? std::vector<std::byte>() : bytes_of("other"));
      for (const int64_t number : {0, 2, 1}) reporter.line(text_of(one->take(number)));
      reporter.line(std::to_string(other->take(0).front().size()));
      reporter.line(reporter.error_of([&] { one->take(1); }));
      reporter.line(reporter.error_of([&] { one->take(3); }));
      reporter.line(reporter.error_of([&] { one->give(4, {}); }));
      reporter.line(reporter.error_of([&] { one->give(3, std::vector<std::byte>(kMaxExchangedBytes + 1)); }));
      const std::vector<std::byte> most(kMaxExchangedBytes, static_cast<std::byte>(rank + 1));
      one->give(3, most);
      const std::vector<std::vector<std::byte>> all = one->take(3);
      const bool whole = all.back() == std::vector<std::byte>(most.size(), static_cast<std::byte>(all.size()));
      reporter.line(whole ? "whole" : "damaged");
    });
    for (Process& process : processes) {
      for (const char* text : {"a", "c", "b"}) {
        std::string expected;
        for (int rank = 0; rank < ranks; ++rank) {
          expected +=
              (rank == 0 ? "" : "|") + (text + std::to_string(rank)) + std::string(static_cast<std::size_t>(rank), '+');
        }
        EXPECT_EQ(process.line(), expected);
      }
      EXPECT_EQ(process.line(), "0");
      for (const char* text : {"take: message 1; it was not given, or was taken", "take: message 3",
                               "give: message 4; must be 3, the next one", "give: 1048577 bytes; must be at most"}) {
        const std::string line = process.line();
        EXPECT_NE(line.find(text), std::string::npos) << line;
      }
      EXPECT_EQ(process.line(), "whole");
      EXPECT_EQ(process.line(), "end: none");
    }
  }
}

TEST(TunerExchange, GivesBackWhatAProcessOfAllRanksGives) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = 3;
  Group group(options);
  const std::shared_ptr<TunerExchange> exchange = make_tuner_exchange(group);
  exchange->give(0, bytes_of("alone"));
  EXPECT_EQ(text_of(exchange->take(0)), "alone");
}

TEST(TunerExchange, NamesARankThatDoesNotComeInTime) {
  const RankBody body = [](int rank, Group& group, const Reporter& reporter) {
    const std::shared_ptr<TunerExchange> exchange = make_tuner_exchange(group);
    exchange->give(0, bytes_of("x"));
    if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(4));
    const double begin = monotonic_seconds();
    reporter.line(reporter.error_of([&] { exchange->take(0); }));
    const double seconds = monotonic_seconds() - begin;
    reporter.line(seconds < kLimitSeconds + kSlackSeconds ? "in time" : "late");
  };
  std::vector<Process> processes = start_group(3, body, kLimitSeconds);
  for (const std::size_t rank : {0u, 2u}) {
    const std::string line = processes[rank].line();
    EXPECT_NE(line.find("rank 1 did not take part in all_gather"), std::string::npos) << line;
    EXPECT_EQ(processes[rank].line(), "in time");
  }
}

TEST(TunerExchange, NamesARankThatIsGoneOrLeftAtOnce) {
  for (const bool leaves : {false, true}) {
    std::vector<Process> processes = start_group(2, [&](int rank, Group& group, const Reporter& reporter) {
      const std::shared_ptr<TunerExchange> exchange = make_tuner_exchange(group);
      exchange->give(0, bytes_of("x"));
      if (rank == 1 && !leaves) ::_exit(1);
      if (rank == 1) return group.leave();
      const double begin = monotonic_seconds();
      for (int again = 0; again < 2; ++again) reporter.line(reporter.error_of([&] { exchange->take(0); }));
      reporter.line(monotonic_seconds() - begin < kSlackSeconds ? "at once" : "late");
    });
    for (int again = 0; again < 2; ++again) {
      const std::string line = processes[0].line();
      EXPECT_NE(line.find("device error: rank 1 "), std::string::npos) << line;
    }
    EXPECT_EQ(processes[0].line(), "at once");
  }
}

TEST(TunerExchange, RefusesOnAllRanksWhereTheyTakeOtherMessages) {
  std::vector<Process> processes = start_group(2, [](int rank, Group& group, const Reporter& reporter) {
    const std::shared_ptr<TunerExchange> exchange = make_tuner_exchange(group);
    for (const int64_t number : {0, 1}) exchange->give(number, {});
    reporter.line(reporter.error_of([&] { exchange->take(rank); }));
    reporter.line(reporter.error_of([&] { exchange->take(1 - rank); }));
  });
  for (Process& process : processes) {
    const std::string first = process.line(), second = process.line();
    EXPECT_NE(first.find("take: rank 1 takes another message than rank 0, which takes 0"), std::string::npos) << first;
    EXPECT_NE(second.find("which takes 1"), std::string::npos) << second;
  }
}

TEST(TunerExchange, EndsByAnAbort) {
  std::vector<Process> processes = start_group(2, [](int rank, Group& group, const Reporter& reporter) {
    const std::shared_ptr<TunerExchange> exchange = make_tuner_exchange(group);
    exchange->give(0, {});
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    std::optional<std::thread> other;
    if (rank == 0) {
      other.emplace([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        group.abort();
      });
    }
    for (int again = 0; again < 2; ++again) reporter.line(reporter.error_of([&] { exchange->take(0); }));
    if (other) other->join();
  });
  const std::string waiting = processes[0].line(), later = processes[0].line();
  EXPECT_NE(waiting.find("rank 0 aborted the group"), std::string::npos) << waiting;
  EXPECT_NE(later.find("group: aborted"), std::string::npos) << later;
  const std::string peer = processes[1].line();
  EXPECT_NE(peer.find("rank 0 aborted the group"), std::string::npos) << peer;
}

TEST(TunerExchange, EndsWhereARankRecoversAndGoesOnBehindIt) {
  std::vector<Process> processes = start_group(2, [](int rank, Group& group, const Reporter& reporter) {
    const std::shared_ptr<TunerExchange> exchange = make_tuner_exchange(group);
    exchange->give(0, {});
    if (rank == 1) {
      reporter.line("waits");
      group.recover();
    } else {
      reporter.line(reporter.error_of([&] { exchange->take(0); }));
      group.recover();
    }
    const std::shared_ptr<TunerExchange> next = make_tuner_exchange(group);
    next->give(0, bytes_of("y"));
    reporter.line(text_of(next->take(0)));
  });
  const std::string line = processes[0].line();
  EXPECT_NE(line.find("rank 1 gave up a call that failed there, and waits in recover()"), std::string::npos) << line;
  EXPECT_EQ(processes[1].line(), "waits");
  for (Process& process : processes) {
    EXPECT_EQ(process.line(), "y|y");
    EXPECT_EQ(process.line(), "end: none");
  }
}

TEST(TunerExchange, CarriesATunersRanks) {
  MadeUpJob job;
  job.ranks = 4;
  job.factors = {1, 1.2, 0.8, 1.1};
  std::vector<Process> processes = start_group(job.ranks, [&](int rank, Group& group, const Reporter& reporter) {
    const JobOutcome outcome = run_made_up_rank(job, rank, make_tuner_exchange(group));
    reporter.line(outcome.error.empty() ? std::to_string(outcome.incumbent) + " " + std::to_string(outcome.calls_hash)
                                        : outcome.error);
  });
  std::vector<std::string> lines;
  for (Process& process : processes) lines.push_back(process.line(60));
  EXPECT_TRUE(lines[0].starts_with("2 ")) << lines[0];
  for (const std::string& line : lines) EXPECT_EQ(line, lines[0]);
}

// Of the options' rank and ranks, or where these are left 0 of the group's.
void run_tuners_in_c(bool given) {
  const std::string id = make_unique_id();
  std::vector<Process> processes;
  for (int rank = 0; rank < 2; ++rank) {
    processes.emplace_back([&, rank](const Reporter& reporter) {
      ::setenv("UNIEP_LIBCUDA", UNIEP_FAKE_CUDA, 1);
      uniep_group_options of_group{};
      of_group.size = sizeof(of_group);
      of_group.engine = UNIEP_ENGINE_CUDA;
      of_group.ranks = 2;
      of_group.launch = UNIEP_LAUNCH_PROCESSES;
      of_group.rank = rank;
      of_group.unique_id = id.data();
      uniep_group* group = nullptr;
      const auto succeeds = [&](uniep_status status) {
        if (status != UNIEP_OK) reporter.line(uniep_last_error());
      };
      succeeds(uniep_group_create(&of_group, &group));
      uniep_layer_config config{};
      config.size = sizeof(config);
      config.hidden = 64;
      config.intermediate = 32;
      config.experts = 8;
      config.topk = 2;
      uniep_tuner_layer layer{};
      layer.size = sizeof(layer);
      layer.config = &config;
      layer.tokens = 64;
      uniep_tuner_options options{};
      options.size = sizeof(options);
      options.layers = &layer;
      options.layer_count = 1;
      options.rank = given ? rank : 0;
      options.ranks = given ? 2 : 0;
      options.check = [](void*, int32_t, int32_t, const char*, const char*, uniep_tuner_check*) { return UNIEP_OK; };
      options.until = rank == 0 ? 2 : 7;  // rank 0's counts
      uniep_tuner* tuner = nullptr;
      succeeds(uniep_tuner_create(group, &options, &tuner));
      for (int step = 0; step < 3; ++step) succeeds(uniep_tuner_step(tuner));
      uniep_tuner_state state{};
      state.size = sizeof(state);
      succeeds(uniep_tuner_describe(tuner, &state));
      reporter.line(state.frozen != 0 ? "frozen" : "not frozen");
      uniep_tuner_destroy(tuner);
      // Alone it would soon run other Schedules than its peer.
      options.rank = 0;
      options.ranks = 1;
      reporter.line(uniep_tuner_create(group, &options, &tuner) == UNIEP_OK ? "alone" : uniep_last_error());
      options.give = [](void*, int64_t, const void*, size_t) { return UNIEP_OK; };
      options.take = [](void*, int64_t, void*, void (*)(void*, const void*, size_t)) { return UNIEP_OK; };
      reporter.line(uniep_tuner_create(group, &options, &tuner) == UNIEP_OK ? "alone" : uniep_last_error());
      options.rank = 1 - rank;
      options.ranks = 0;
      options.give = nullptr;
      options.take = nullptr;
      reporter.line(rank == 1 ? "is the default"
                              : std::to_string(uniep_tuner_create(group, &options, &tuner)) + uniep_last_error());
      uniep_group_destroy(group);
    });
  }
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    Process& process = processes[rank];
    EXPECT_EQ(process.line(), "frozen");
    EXPECT_EQ(process.line(),
              "options.give and take: NULL, and options.rank and ranks are 0 and 1; over the group's own connection "
              "they must be " +
                  std::to_string(rank) + " and 2");
    EXPECT_EQ(process.line(),
              "ranks: 1; the machine has a process for each of 2 ranks, which tune together: must be 2");
    EXPECT_EQ(process.line(), rank == 1 ? "is the default"
                                        : "1options.give and take: NULL, and options.rank and ranks are 1 and 0; over "
                                          "the group's own connection they must be 0 and 2");
  }
}

TEST(TunerExchange, CarriesTheRanksOfTunersInC) {
  run_tuners_in_c(true);
}

TEST(TunerExchange, TakesTheRanksOfTunersInCFromTheGroup) {
  run_tuners_in_c(false);
}

}  // namespace
}  // namespace uniep::test
