// Two ranks on one GPU that place apart from each other, the second one just before, at and behind each deadline of the
// first: of the counts, and of the rows. Per rank a placement is then whole, with the host's tables, or empty, with a
// report; never anything else. Behind each of them the ranks place again. Exit status 77 without a GPU.
// Usage: gpu_place_failure_tests [--verbose] [--rounds N]
#include <cstdlib>
#include <functional>
#include <map>

#include "tests/cuda/delay_arguments.h"
#include "tests/cuda/place_fixture.h"

namespace uniep::cuda::test {
namespace {

using StatePointer = std::shared_ptr<const internal::PlacementState>;

constexpr double kLimit = 0.01;  // both waits
constexpr int64_t kRowsOfRank = 16 * 1024;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Two ranks, each with a Placer and a stream of its own.
class TwoRanks {
 public:
  TwoRanks(PlaceDevices& gpus, const std::string& folder)
      : kernels_(0, folder),
        group_({0, 0}, gpus, true, kRowsOfRank * static_cast<int64_t>(sizeof(RowSource))),
        halves_{HalfMemory(group_.memory(), 0), HalfMemory(group_.memory(), 1)} {
    std::mt19937_64 random(31);
    const std::vector<HostRouting> routings = {random_routing(case_, 0, random), random_routing(case_, 1, random)};
    host_ = place_on_host(shape_, 2, host_views(case_, routings), {});
    group_.upload(case_, routings, placed_);
    int64_t slots = 0;
    for (const int64_t tokens : case_.tokens) slots += tokens * case_.topk;
    group_.take_rows(placed_, {kRowsOfRank, kRowsOfRank}, slots);
    for (size_t rank = 0; rank < 2; ++rank) {
      placers_[rank] =
          std::make_unique<Placer>(halves_[rank], std::vector<KernelStore*>{&gpus.kernels(0)}, kLimit, kLimit);
      placers_[rank]->set_row_inbox(group_.inbox());
      check(driver().cuStreamCreate(&streams_[rank], CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      own_[rank] = {placed_.ranks[rank]};
      own_[rank][0].routing.stream = Stream{streams_[rank]};
    }
    hold_up(0);  // loads the kernel
    check(driver().cuCtxSynchronize(), "loading");
  }
  ~TwoRanks() {
    for (CUstream stream : streams_) driver().cuStreamDestroy(stream);
  }
  TwoRanks(const TwoRanks&) = delete;
  TwoRanks& operator=(const TwoRanks&) = delete;

  // What the ranks have come to: "whole" or "empty" for each, or what is wrong.
  struct Outcome {
    std::string kind, wrong, texts;
  };

  // The second rank's counts come so much later than the first's; the whole placement is one launch.
  Outcome place_late(double seconds) {
    poison();
    place(0);
    hold_up(seconds);
    place(1);
    return outcome();
  }

  // All counts come in time, the second rank's rows so much later than the first's.
  Outcome assign_late(double seconds) {
    poison();
    for (const size_t rank : {0, 1}) placers_[rank]->count(shape_, own_[rank]);
    Outcome early;
    for (const size_t rank : {0, 1}) {
      early.wrong += error_of([&] { placers_[rank]->read_counts(shape_, own_[rank]); });
    }
    if (!early.wrong.empty()) return early;
    assign(0);
    hold_up(seconds);
    assign(1);
    return outcome();
  }

  // Both at once, after a failure.
  std::string place_again() {
    for (const auto& placer : placers_) placer->clear();
    poison();
    for (const size_t rank : {0, 1}) place(rank);
    const Outcome again = outcome();
    return again.kind == "whole, whole" ? again.wrong : again.kind + again.wrong + again.texts;
  }

 private:
  // All tables, and where rows come in: placements are alike, and an earlier one's rows would do for a later one.
  void poison() {
    constexpr size_t kTables[] = {2, 5, 6, 7};  // behind the ids and probs of each rank, and the rows of both
    for (const size_t which : kTables) placed_.memory[which].set_bytes(0xee);
    for (const int rank : {0, 1}) {
      check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(group_.inbox()(rank, rank)), 0xee,
                                     kRowsOfRank * sizeof(RowSource), nullptr),
            "poisoning");
    }
    check(driver().cuCtxSynchronize(), "poisoning");
  }
  void hold_up(double seconds) {
    Launch launch;
    launch.threads = 1;
    launch.stream = streams_[1];
    kernels_.run("delay_kernels.cu", "test_delay", launch, DelayArguments{static_cast<uint64_t>(seconds * 1e9)});
  }
  void place(size_t rank) {
    placers_[rank]->place(shape_, own_[rank], {.rows = kRowsOfRank});
    placers_[rank]->invert_rows(shape_, own_[rank]);
  }
  void assign(size_t rank) {
    placers_[rank]->assign(shape_, own_[rank]);
    placers_[rank]->invert_rows(shape_, own_[rank]);
  }

  Outcome outcome() {
    check(driver().cuCtxSynchronize(), "placement");
    Outcome outcome;
    for (size_t rank = 0; rank < 2; ++rank) {
      const PlacementTables& tables = placed_.ranks[rank].tables;
      uint32_t word = 0;
      check(
          driver().cuMemcpyDtoHAsync(&word, reinterpret_cast<CUdeviceptr>(tables.whole), sizeof(word), streams_[rank]),
          "reading a word");
      check(driver().cuStreamSynchronize(streams_[rank]), "reading a word");
      const std::string text = error_of([&] { placers_[rank]->check(own_[rank]); });
      const std::string at = " rank " + std::to_string(rank);
      const bool whole = word != 0;
      outcome.kind += (rank > 0 ? ", " : "") + std::string(whole ? "whole" : "empty");
      outcome.texts += text.empty() ? "" : " | " + text;
      if (whole != text.empty())
        outcome.wrong += at + (whole ? " is whole and reports" : " is empty and reports nothing");
      if (!whole) continue;
      TableComparison comparison;
      comparison.expect_rank(*host_, rank, tables, true);
      if (!comparison.different.empty()) outcome.wrong += at + " is whole, but not" + comparison.different;
    }
    return outcome;
  }

  const PlaceCase case_{"", 8, 2, {300, 200}, Spread::kUniform, false, 0.1};
  const LayerShape shape_ = PlaceGroup::shape_of(case_);
  Kernels kernels_;
  PlaceGroup group_;
  HalfMemory halves_[2] = {HalfMemory(group_.memory(), 0), HalfMemory(group_.memory(), 1)};
  std::unique_ptr<Placer> placers_[2];
  CUstream streams_[2] = {};
  PlacedOnDevice placed_;
  std::vector<RankToPlace> own_[2];
  StatePointer host_;
};

using Late = TwoRanks::Outcome (TwoRanks::*)(double seconds);

// Points around a deadline, the closest of them microseconds from it. Both ends of it must have been seen.
void run_around(Results& results, TwoRanks& ranks, const std::string& deadline, Late late, int rounds) {
  constexpr double kSteps[] = {2e-3, 1e-3, 500e-6, 200e-6, 100e-6, 60e-6, 40e-6, 20e-6, 10e-6, 5e-6, 0};
  std::map<std::string, int> kinds;
  for (int round = 0; round < rounds; ++round) {
    for (const double step : kSteps) {
      for (const double sign : {-1.0, 1.0}) {
        const double jitter = static_cast<double>((round * 7 + 3) % 10) * 0.5e-6;
        const TwoRanks::Outcome seen = (ranks.*late)(kLimit + sign * step + jitter);
        ++kinds[seen.kind];
        const std::string name = deadline + ", " + std::to_string(static_cast<int>(sign * step * 1e6)) + " us";
        results.record(name, seen.wrong.empty(), seen.kind + seen.wrong + seen.texts);
        if (seen.kind == "whole, whole") continue;
        const std::string wrong = ranks.place_again();
        results.record(name + ", and again", wrong.empty(), wrong);
      }
    }
  }
  int failures = 0;
  for (const auto& [kind, count] : kinds) {
    std::printf("%-24s %-14s %d times\n", deadline.c_str(), kind.c_str(), count);
    if (kind != "whole, whole") failures += count;
  }
  results.record(deadline + ": placements in time", kinds["whole, whole"] > 0);
  results.record(deadline + ": placements too late", failures > 0);
}

int run(int argc, char** argv) {
  Results results;
  int rounds = 5;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--verbose") == 0) results.verbose = true;
    if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) rounds = std::atoi(argv[++i]);
  }
  const ScopedDevice scope(0);
  const std::string path = __FILE__;
  const char* const folder = std::getenv("UNIEP_TEST_KERNELS");
  PlaceDevices gpus;
  TwoRanks ranks(gpus, folder != nullptr ? folder : path.substr(0, path.rfind('/')));
  run_around(results, ranks, "deadline of the counts", &TwoRanks::place_late, rounds);
  run_around(results, ranks, "deadline of the rows", &TwoRanks::assign_late, rounds);
  std::printf("placement failure tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
