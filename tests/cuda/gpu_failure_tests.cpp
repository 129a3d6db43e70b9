// Ranks, a process and a GPU each, that are killed, stopped or fail by themselves at random moments of a Group's life:
// constructor, place, growth, forward, backward, weight gradients, gather, recover and destructor. Every survivor's
// call must end, within the limit and 5 s, in an error that names the rank; then all of them meet a restarted rank in a
// new Group and run a layer, with the bytes of before. Exit status 77 with less than two GPUs: ranks of two processes
// on one GPU take turns on it, and those that wait for each other there may wait for ever. Usage: gpu_failure_tests
// [--moments N] [--seed N] [--ranks N]
// [--only kill|stop|fail|refuse]
#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <random>
#include <regex>

#include "tests/cuda/failing_rank.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/rank_processes.h"

namespace uniep::cuda::test {
namespace {

constexpr double kSlack = 5;           // beyond the longer limit
constexpr double kFirstMeeting = 300;  // kernels are compiled
constexpr double kMeeting = 60;
constexpr double kStep = 20;    // for a rank to come to the step of its failure
constexpr int64_t kSteps = 70;  // of a Group's life and most of the next one's

enum class Kind { kKill = 0, kStop, kFail, kRefuse };
constexpr Kind kKinds[] = {Kind::kKill, Kind::kStop, Kind::kFail, Kind::kRefuse};
const char* const kKindNames[] = {"kill", "stop", "fail", "refuse"};

// By itself, in its own process, which then ends.
bool fails(Kind kind) {
  return kind == Kind::kFail || kind == Kind::kRefuse;
}

RankFault fault_of(Kind kind, int number) {
  if (kind == Kind::kFail) return static_cast<RankFault>(1 + number % kRankFaults);
  if (kind == Kind::kRefuse) return static_cast<RankFault>(1 + kRankFaults + number % kStayingFaults);
  return RankFault::kNone;
}

struct Options {
  int moments = 20;
  uint64_t seed = 1;
  int ranks = 0;
  std::string only;
};

// "rank 3 ...", or "ranks 1 and 3 ...".
bool names_rank(const std::string& text, int rank) {
  return std::regex_search(text, std::regex("ranks? ([0-9]+(, | and ))*" + std::to_string(rank) + "\\b"));
}

// Of a text that names two calls: the refused one, and the next.
bool follow_each_other(const std::string& text) {
  std::vector<int> numbers;
  const std::regex call("makes call ([0-9]+)");
  for (std::sregex_iterator it(text.begin(), text.end(), call), end; it != end; ++it) {
    numbers.push_back(std::stoi((*it)[1]));
  }
  return numbers.size() < 2 || std::abs(numbers[0] - numbers[1]) == 1;
}

class FailureTests {
 public:
  FailureTests(int ranks, uint64_t seed, Results& results) : random_(seed), results_(results) {
    processes_.resize(static_cast<std::size_t>(ranks));
  }

  void run(Kind kind, int number) {
    const int64_t meeting = ++meetings_;
    victim_ = pick(ranks());
    board_->acted_at = 0;
    board_->victim = victim_;
    board_->fault = static_cast<int>(fault_of(kind, number));
    board_->at_step = pick(kSteps);
    board_->plan = meeting;
    start_missing(meeting);
    std::string wrong = disturb(kind, meeting);
    if (wrong.empty()) wrong = hear_survivors(kind, number, meeting);
    Summary& summary = summaries_[kind];
    summary.moments += 1;
    summary.passed += wrong.empty() ? 1 : 0;
    ++phases_[phase_][static_cast<std::size_t>(kind)];
    results_.record(std::string(kKindNames[static_cast<int>(kind)]) + " " + std::to_string(number), wrong.empty(),
                    wrong);
    if (!wrong.empty()) processes_ = std::vector<ChildProcess>(processes_.size());  // who knows where they are
    std::fflush(stdout);
  }

  void print() {
    std::printf("\n%-6s %8s %8s %14s %14s\n", "kind", "moments", "passed", "longest s", "mean s");
    for (const auto& [kind, of] : summaries_) {
      std::printf("%-6s %8d %8d %14.2f %14.2f\n", kKindNames[static_cast<int>(kind)], of.moments, of.passed, of.longest,
                  of.sum / std::max(1, of.heard));
    }
    std::printf("\n%-18s %6s %6s %6s %6s\n", "the victim was in", "kill", "stop", "fail", "refuse");
    for (const auto& [phase, counts] : phases_) {
      std::printf("%-18s %6d %6d %6d %6d\n", phase_name(phase), counts[0], counts[1], counts[2], counts[3]);
    }
    constexpr int kEnough = 60;  // of all kinds, so that some come to every call of a layer
    int moments = 0;
    for (const auto& [kind, of] : summaries_) moments += of.moments;
    if (moments < kEnough) return;
    for (const RankPhase phase : {RankPhase::kForward, RankPhase::kBackward, RankPhase::kWeightGradients}) {
      results_.record(std::string("a victim in ") + phase_name(phase), phases_.count(phase) > 0);
    }
  }

  // Its last ranks have met once more behind the last failure.
  void end() {
    if (meetings_ == 0) return;
    const int64_t meeting = ++meetings_;
    board_->victim = -1;
    start_missing(meeting);
    const std::string wrong = meet(meeting);
    results_.record("the last meeting", wrong.empty(), wrong);
    for (ChildProcess& process : processes_) process.kill();
  }

 private:
  struct Summary {
    int moments = 0, passed = 0, heard = 0;
    double longest = 0, sum = 0;
  };

  int ranks() const { return static_cast<int>(processes_.size()); }
  int pick(int64_t count) { return static_cast<int>(random_() % static_cast<uint64_t>(count)); }
  ChildProcess& process(int rank) { return processes_[static_cast<std::size_t>(rank)]; }

  void start_missing(int64_t meeting) {
    for (int rank = 0; rank < ranks(); ++rank) {
      if (process(rank).started()) continue;
      process(rank) = ChildProcess({"--rank", std::to_string(rank), "--ranks", std::to_string(ranks()), "--board",
                                    std::to_string(board_.number()), "--meeting", std::to_string(meeting)});
    }
  }

  // Empty, or which rank's process is gone that should not be.
  std::string lost(bool without_victim = false) {
    for (int rank = 0; rank < ranks(); ++rank) {
      if ((without_victim && rank == victim_) || !process(rank).has_ended()) continue;
      return "rank " + std::to_string(rank) + "'s process ended with status " +
             std::to_string(process(rank).exit_status());
    }
    return "";
  }

  // Of any rank but the victim.
  bool some_ended(int64_t meeting) {
    for (int rank = 0; rank < ranks(); ++rank) {
      if (rank != victim_ && board_->rank[rank].ended >= meeting) return true;
    }
    return false;
  }

  std::string meet(int64_t meeting) {
    const auto all_met = [&] {
      return std::all_of(&board_->rank[0], &board_->rank[ranks()],
                         [&](const RankWords& of) { return of.met >= meeting; });
    };
    await(meeting == 1 ? kFirstMeeting : kMeeting, [&] { return all_met() || !lost(true).empty(); });
    if (!all_met()) return "the ranks did not meet: " + lost();
    for (int rank = 0; rank < ranks(); ++rank) {
      if (board_->rank[rank].wrong.exchange(0) > 0)
        return "y or gradients of rank " + std::to_string(rank) + " are others";
    }
    return "";
  }

  // Empty once the victim was killed, stopped, or has begun to fail.
  std::string disturb(Kind kind, int64_t meeting) {
    std::string wrong = meet(meeting);
    if (!wrong.empty()) return wrong;
    RankWords& victim = board_->rank[victim_];
    const auto has_come = [&] { return fails(kind) ? board_->acted_at != 0 : victim.step >= board_->at_step; };
    await(kStep, [&] { return has_come() || some_ended(meeting); });
    if (!fails(kind) && some_ended(meeting)) return "an error before anything was done";
    if (!has_come())
      return "rank " + std::to_string(victim_) + " did not come to step " + std::to_string(board_->at_step);
    if (!fails(kind)) {
      const int microseconds = pick(pick(2) == 0 ? 300 : 5000);
      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
      board_->acted_at = seconds_now();
      process(victim_).signal(kind == Kind::kKill ? SIGKILL : SIGSTOP);
    }
    phase_ = static_cast<RankPhase>(victim.phase.load());
    step_ = victim.step;
    return "";
  }

  std::string hear_survivors(Kind kind, int number, int64_t meeting) {
    const auto heard = [&] {
      for (int rank = 0; rank < ranks(); ++rank) {
        if (rank != victim_ && board_->rank[rank].ended < meeting) return false;
      }
      return true;
    };
    await(kArrivalLimit + 2 * kSlack, [&] { return heard() || !lost(true).empty(); });
    std::string wrong = lost(true);
    if (fails(kind)) wrong += end_of_failed();
    process(victim_).kill();
    for (int rank = 0; rank < ranks(); ++rank) {
      if (rank != victim_) wrong += hear(kind, number, meeting, rank);
    }
    return wrong;
  }

  // A rank that fails by itself ends by itself.
  std::string end_of_failed() {
    ChildProcess& failed = process(victim_);
    if (!await(kArrivalLimit + 2 * kSlack, [&] { return failed.has_ended(); })) return "the failed rank does not end; ";
    if (failed.exit_status() == 0) return "";
    return "the failed rank ended with status " + std::to_string(failed.exit_status()) + "; ";
  }

  std::string hear(Kind kind, int number, int64_t meeting, int rank) {
    const RankWords& words = board_->rank[rank];
    if (words.ended < meeting) return "rank " + std::to_string(rank) + " goes on; ";
    const double seconds = words.error_at - board_->acted_at;
    const std::string how = fails(kind) ? fault_name(fault_of(kind, number)) : "";
    std::printf("%s %2d: rank %d in %s (step %lld)%s%s: rank %d after %.2f s: %s\n", kKindNames[static_cast<int>(kind)],
                number, victim_, phase_name(phase_), static_cast<long long>(step_), how.empty() ? "" : ", ",
                how.c_str(), rank, seconds, words.text);
    Summary& summary = summaries_[kind];
    summary.longest = std::max(summary.longest, seconds);
    summary.sum += seconds;
    summary.heard += 1;
    std::string wrong;
    if (words.status < 0) wrong += "not a uniep::Error; ";
    if (!names_rank(words.text, victim_)) wrong += "rank " + std::to_string(victim_) + " is not named; ";
    // Its peers hear of a refused call, and do not find out by their limits.
    const std::regex heard("gave up the call|do not make the same call");
    if (kind == Kind::kRefuse && !follow_each_other(words.text)) wrong += "other calls are named; ";
    if (kind == Kind::kRefuse && !std::regex_search(words.text, heard)) wrong += "nothing of the refused call; ";
    if (seconds > kArrivalLimit + kSlack) wrong += "too late; ";
    if (seconds < 0) wrong += "too early; ";
    return wrong.empty() ? "" : "rank " + std::to_string(rank) + ": " + wrong;
  }

  std::mt19937_64 random_;
  Results& results_;
  SharedObject<FailureBoard> board_;
  std::vector<ChildProcess> processes_;
  int64_t meetings_ = 0;
  int victim_ = -1;
  RankPhase phase_ = RankPhase::kMeeting;
  int64_t step_ = 0;
  std::map<Kind, Summary> summaries_;
  std::map<RankPhase, std::array<int, 4>> phases_;
};

int run(int argc, char** argv) {
  Options options;
  int rank = -1, board = -1;
  int64_t meeting = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--moments") options.moments = std::atoi(argv[i + 1]);
    if (name == "--seed") options.seed = std::strtoull(argv[i + 1], nullptr, 10);
    if (name == "--ranks") options.ranks = std::atoi(argv[i + 1]);
    if (name == "--only") options.only = argv[i + 1];
    if (name == "--rank") rank = std::atoi(argv[i + 1]);
    if (name == "--board") board = std::atoi(argv[i + 1]);
    if (name == "--meeting") meeting = std::atoll(argv[i + 1]);
  }
  if (rank >= 0) {
    try {
      return run_failing_rank(rank, options.ranks, board, meeting);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      return 1;
    }
  }
  const int gpus = std::min(device_count(), kMaxCudaRanks);
  const int ranks = options.ranks == 0 ? gpus : options.ranks;
  if (ranks < 2 || ranks > gpus) {
    std::printf("skipped: needs two GPUs, a GPU a rank; processes that wait for each other can not share one\n");
    return 77;
  }
  setenv("UNIEP_TIMEOUT_S", std::to_string(kWaitLimit).c_str(), 1);
  setenv("UNIEP_ARRIVAL_TIMEOUT_S", std::to_string(kArrivalLimit).c_str(), 1);
  Results results;
  FailureTests tests(ranks, options.seed, results);
  for (const Kind kind : kKinds) {
    if (!options.only.empty() && options.only != kKindNames[static_cast<int>(kind)]) continue;
    for (int number = 0; number < options.moments; ++number) tests.run(kind, number);
  }
  tests.end();
  tests.print();
  std::printf("failure tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
