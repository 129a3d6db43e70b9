// Two Groups on the same GPUs whose streams are held up unevenly: in one process in any order, beside NCCL's
// all-reduces, too; with a process a GPU in one order, and in two, which must end in an error that says so. Then ranks
// of one Group that do not make the same call. On one GPU what needs two is left out; exit status 77 without a Hopper
// GPU. Usage: gpu_groups_tests [--rounds N] [--verbose]
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>

#include "engine/engine.h"
#include "tests/cuda/all_reduces.h"
#include "tests/cuda/delay_arguments.h"
#include "tests/cuda/rank_processes.h"
#include "tests/cuda/small_layer.h"

namespace uniep::cuda::test {
namespace {

constexpr int64_t kTokens = 300;
constexpr int kRanks = 2;
constexpr LayerShape kShapes[] = {{.hidden = 256, .intermediate = 128, .experts = 8, .topk = 2},
                                  {.hidden = 512, .intermediate = 192, .experts = 16, .topk = 4}};

// Streams that do not wait for the default one, and kernels that hold them up.
class Delays {
 public:
  explicit Delays(int device) : device_(device), kernels_(device, kernel_folder()) {}
  ~Delays() {
    const ScopedDevice scope(device_);
    for (CUstream stream : streams_) driver().cuStreamDestroy(stream);
  }
  Delays(const Delays&) = delete;
  Delays& operator=(const Delays&) = delete;

  CUstream new_stream() {
    const ScopedDevice scope(device_);
    check(driver().cuStreamCreate(&streams_.emplace_back(), CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    hold_up(streams_.back(), 0);  // loads the kernel
    return streams_.back();
  }
  void hold_up(CUstream stream, int64_t microseconds) {
    const ScopedDevice scope(device_);
    Launch launch;
    launch.threads = 1;
    launch.stream = stream;
    kernels_.run("delay_kernels.cu", "test_delay", launch, DelayArguments{static_cast<uint64_t>(microseconds) * 1000});
  }

 private:
  int device_;
  Kernels kernels_;
  std::vector<CUstream> streams_;
};

// A Group and a layer on it, of this process's ranks.
class GroupWithLayer {
 public:
  GroupWithLayer(const GroupOptions& options, const LayerShape& shape, const PartialSchedule& given,
                 const std::vector<Delays*>& delays)
      : delays_(delays), group_(options), shape_(shape) {
    schedule_ = resolve(given, {.direction = Direction::kForward, .shape = shape, .machine = group_.machine()});
    backward_schedule_ =
        resolve(given, {.direction = Direction::kBackward, .shape = shape, .machine = group_.machine()});
    for (int local = 0; local < group_.local_ranks(); ++local) {
      const int rank = group_.first_local_rank() + local;
      const auto i = static_cast<std::size_t>(local);
      layers_.push_back(std::make_unique<SmallLayer>(shape, group_.ranks(), rank, group_.device(rank), kTokens,
                                                     delays_[i]->new_stream()));
    }
  }

  Group& group() { return group_; }

  // Queues place, forward and backward; every stream is held up for a time of its own before each of them. Within a
  // capacity the weight gradients come later.
  void call(bool within, std::mt19937_64& random, int64_t most_microseconds) {
    std::vector<Routing> routings;
    for (const auto& layer : layers_) routings.push_back(layer->routing(kTokens));
    hold_up(random, most_microseconds);
    Placement placement = place(group_, shape_, routings, within ? layers_.front()->capacity(kTokens) : Capacity{});
    hold_up(random, most_microseconds);
    const Saved saved = run_forward(placement, schedule_);
    hold_up(random, most_microseconds);
    const PendingWeightGradients work =
        run_backward(saved, within ? WeightGradientTime::kLater : WeightGradientTime::kNow);
    if (!within) return;
    hold_up(random, most_microseconds);
    std::vector<WeightGradientArguments> arguments;
    for (const auto& layer : layers_) {
      arguments.push_back(layer->gradient_arguments());
      arguments.back().sms = group_.workers() - backward_schedule_.comm.reserve_sms;
    }
    weight_gradients(group_, work, arguments);
  }
  Saved run_forward(const Placement& placement, const Schedule& schedule) {
    std::vector<ForwardArguments> arguments;
    for (const auto& layer : layers_) {
      layer->poison();
      arguments.push_back(layer->arguments());
    }
    return forward(group_, {shape_, {}}, schedule, placement, arguments);
  }
  PendingWeightGradients run_backward(const Saved& saved, WeightGradientTime time) {
    std::vector<BackwardArguments> arguments;
    for (const auto& layer : layers_) {
      layer->poison_gradients();
      arguments.push_back(layer->backward_arguments(time));
    }
    return backward(group_, {shape_, {}}, backward_schedule_, saved, arguments);
  }
  Placement place_by_need() {
    std::vector<Routing> routings;
    for (const auto& layer : layers_) routings.push_back(layer->routing(kTokens));
    return place(group_, shape_, routings);
  }
  const Schedule& schedule() const { return schedule_; }

  // Waits for the group's calls.
  std::vector<uint64_t> results() {
    group_.synchronize();
    std::vector<uint64_t> sums;
    for (const auto& layer : layers_) {
      sums.push_back(layer->checksum(kTokens));
      sums.push_back(layer->gradient_checksum(kTokens));
    }
    return sums;
  }

 private:
  void hold_up(std::mt19937_64& random, int64_t most_microseconds) {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const auto microseconds = static_cast<int64_t>(random() % static_cast<uint64_t>(most_microseconds + 1));
      if (microseconds > 0 && random() % 2 == 0) delays_[i]->hold_up(layers_[i]->stream(), microseconds);
    }
  }

  std::vector<Delays*> delays_;                      // of each local rank
  std::vector<std::unique_ptr<SmallLayer>> layers_;  // outlive the group's calls
  Group group_;
  LayerShape shape_;
  Schedule schedule_, backward_schedule_;
};

// Calls of two Groups in an order that `order` says, delays that `own` says. Empty, or what was wrong.
std::string run_rounds(std::array<std::unique_ptr<GroupWithLayer>, 2>& groups,
                       const std::array<std::vector<uint64_t>, 2>& expected, int rounds, uint64_t seed,
                       uint64_t own_seed) {
  constexpr int64_t kMaxMicroseconds = 400;
  constexpr int kBetweenLooks = 25;
  std::mt19937_64 order(seed), own(own_seed);
  for (int round = 0; round < rounds; ++round) {
    const std::size_t first = order() % 2;
    for (const std::size_t which : {first, 1 - first}) {
      groups[which]->call(order() % 3 != 0, own, kMaxMicroseconds);
    }
    if (round % kBetweenLooks != 0 && round + 1 != rounds) continue;
    for (const std::size_t which : {first, 1 - first}) {
      if (groups[which]->results() == expected[which]) continue;
      return "group " + std::to_string(which) + " has other bytes in round " + std::to_string(round);
    }
  }
  return "";
}

// ---- One process

// Two Groups of two ranks on these devices. `beside`: NCCL's all-reduces, too.
void run_in_one_process(Results& results, const std::vector<int>& devices, int rounds, bool beside) {
  std::vector<std::unique_ptr<Delays>> of_devices;
  std::vector<Delays*> delays;
  for (const int device : devices) {
    of_devices.push_back(std::make_unique<Delays>(device));
    delays.push_back(of_devices.back().get());
  }
  PartialSchedule schedule;
  if (beside) schedule.set("comm.reserve_sms", kSmsForAllReduces);
  GroupOptions options;
  options.engine = EngineKind::kCuda;
  options.ranks = kRanks;
  options.devices = devices;
  std::array<std::unique_ptr<GroupWithLayer>, 2> groups;
  std::array<std::vector<uint64_t>, 2> expected;
  std::mt19937_64 none(0);
  for (std::size_t which = 0; which < 2; ++which) {
    groups[which] = std::make_unique<GroupWithLayer>(options, kShapes[which], schedule, delays);
    groups[which]->call(true, none, 0);  // both kinds, so that later rounds take no memory
    groups[which]->call(false, none, 0);
    expected[which] = groups[which]->results();
  }
  std::unique_ptr<AllReduces> all_reduces;
  if (beside) all_reduces = std::make_unique<AllReduces>(devices);
  const std::string wrong = run_rounds(groups, expected, rounds, 1, 2);
  const std::string where = std::to_string(rounds) + " rounds of two groups on devices " + std::to_string(devices[0]) +
                            " and " + std::to_string(devices[1]);
  results.record(where + (beside ? " beside all-reduces" : ""), wrong.empty(), wrong);
  if (!beside) return;
  const int64_t done = all_reduces->stop();
  results.record(std::to_string(done) + " all-reduces beside them", done > 1);
}

// ---- A process a GPU

struct GroupsBoard {
  std::atomic<int> timeouts;       // of calls in two orders
  std::atomic<int> named_running;  // of those: that say what the other rank's GPU runs
};

class GroupsRank {
 public:
  GroupsRank(int rank, int board, bool verbose) : rank_(rank), board_(board), delays_(rank) {
    results_.verbose = verbose;
  }

  int run() {
    const int rounds = 200;
    {
      auto groups = two_groups("equal", 60, 300);
      std::array<std::vector<uint64_t>, 2> expected;
      std::mt19937_64 none(0);
      for (std::size_t which = 0; which < 2; ++which) {
        groups[which]->call(true, none, 0);
        groups[which]->call(false, none, 0);
        expected[which] = groups[which]->results();
      }
      const std::string wrong = run_rounds(groups, expected, rounds, 3, 4 + static_cast<uint64_t>(rank_));
      record(std::to_string(rounds) + " rounds of two groups in one order", wrong.empty(), wrong);
    }
    run_in_two_orders();
    run_other_calls();
    return results_.failed == 0 ? 0 : 1;
  }

 private:
  void record(const std::string& name, bool good, const std::string& detail) {
    results_.record("rank " + std::to_string(rank_) + ": " + name, good, detail);
  }

  GroupOptions options(const std::string& name, double wait, double arrival) const {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.launch = uniep::Launch::kProcesses;
    options.ranks = kRanks;
    options.rank = rank_;
    options.timeout_seconds = wait;
    options.arrival_timeout_seconds = arrival;
    options.bootstrap = "gpu_groups_tests " + std::to_string(::getppid()) + " " + name;
    options.bootstrap.resize(128, ' ');
    return options;
  }

  std::unique_ptr<GroupWithLayer> group(const std::string& name, const LayerShape& shape, double wait, double arrival) {
    return std::make_unique<GroupWithLayer>(options(name, wait, arrival), shape, PartialSchedule(),
                                            std::vector<Delays*>{&delays_});
  }
  std::array<std::unique_ptr<GroupWithLayer>, 2> two_groups(const std::string& name, double wait, double arrival) {
    return {group(name + " first", kShapes[0], wait, arrival), group(name + " second", kShapes[1], wait, arrival)};
  }

  // Rank 0 calls the first group, then the second one; rank 1 the other way round.
  void run_in_two_orders() {
    auto groups = two_groups("unequal", 2, 4);
    std::array<Placement, 2> placements;
    for (std::size_t which = 0; which < 2; ++which) {
      placements[which] = groups[which]->place_by_need();
      groups[which]->run_forward(placements[which], groups[which]->schedule());
      groups[which]->group().synchronize();
    }
    groups[0]->group().implementation().meet();
    const double begin = seconds_now();
    const auto first = static_cast<std::size_t>(rank_);
    for (const std::size_t which : {first, 1 - first}) {
      groups[which]->run_forward(placements[which], groups[which]->schedule());
    }
    std::string texts;
    int timeouts = 0;
    for (const std::size_t which : {first, 1 - first}) {
      try {
        groups[which]->group().synchronize();
      } catch (const Error& error) {
        const std::string text = error.what();
        texts += text + " | ";
        timeouts += error.status() == Status::kTimeout ? 1 : 0;
        const bool named = text.find("rank " + std::to_string(1 - rank_) + "'s GPU began call") != std::string::npos &&
                           text.find("group") != std::string::npos;
        board_->named_running += named ? 1 : 0;
      }
    }
    board_->timeouts += timeouts;
    const double seconds = seconds_now() - begin;
    std::printf("rank %d, calls in two orders: %.2f s: %s\n", rank_, seconds, texts.c_str());
    record("calls in two orders end", timeouts > 0 && seconds < 4 + 2 + 5, texts);
  }

  // What both ranks make of a call that only rank 1 makes otherwise.
  void expect_refused(GroupWithLayer& own, const std::string& name, Status status,
                      const std::vector<std::string>& parts, const std::function<void()>& call) {
    std::string text = "nothing was thrown";
    bool good = false;
    try {
      call();
      own.group().synchronize();
    } catch (const Error& error) {
      text = error.what();
      good = error.status() == status;
      for (const std::string& part : parts) good = good && text.find(part) != std::string::npos;
    }
    std::printf("rank %d, %s: %s\n", rank_, name.c_str(), text.c_str());
    record(name, good, text);
    own.group().recover();
  }

  void run_other_calls() {
    auto own = group("calls", kShapes[0], 2, 4);
    Group& group = own->group();
    std::mt19937_64 none(0);
    LayerShape narrow = kShapes[0];
    narrow.hidden = 128;
    const SmallLayer narrow_layer(narrow, kRanks, rank_, group.device(rank_), kTokens);
    PartialSchedule other;
    other.set("order.source_rotation", own->schedule().order.source_rotation ? "off" : "on");
    const Schedule other_schedule =
        resolve(other, {.direction = Direction::kForward, .shape = kShapes[0], .machine = group.machine()});
    const Schedule narrow_schedule =
        resolve({}, {.direction = Direction::kForward, .shape = narrow, .machine = group.machine()});
    const auto run_narrow = [&] {
      const Routing routing = narrow_layer.routing(kTokens);
      const ForwardArguments arguments = narrow_layer.arguments();
      const Placement placement = place(group, narrow, {&routing, 1});
      const Saved saved = forward(group, {narrow, {}}, narrow_schedule, placement, {&arguments, 1});
    };
    // All of them once, alike on both ranks: kernels are there then, and symmetric memory does not grow any more.
    own->call(true, none, 0);
    own->run_forward(own->place_by_need(), other_schedule);
    run_narrow();
    own->call(false, none, 0);
    const std::vector<uint64_t> expected = own->results();
    const auto works = [&](const std::string& name) {
      own->call(true, none, 0);
      const bool right = own->results() == expected;
      own->call(false, none, 0);
      record("the group works after " + name, right && own->results() == expected, "");
    };
    const std::vector<std::string> both = {"do not make the same call", "rank 0 makes call", "rank 1 makes call"};

    const Placement placement = own->place_by_need();
    expect_refused(*own, "another schedule", Status::kTimeout, both,
                   [&] { own->run_forward(placement, rank_ == 1 ? other_schedule : own->schedule()); });
    works("another schedule");
    expect_refused(*own, "another hidden size", Status::kTimeout, both, [&] {
      if (rank_ == 1) return run_narrow();
      own->call(false, none, 0);
    });
    works("another hidden size");
    {
      const Saved saved = own->run_forward(placement, own->schedule());
      expect_refused(*own, "backward beside forward", Status::kTimeout, both, [&] {
        if (rank_ == 1) own->run_backward(saved, WeightGradientTime::kNow);
        if (rank_ == 0) own->run_forward(placement, own->schedule());
      });
    }
    works("backward beside forward");
    const SmallLayer layer(kShapes[0], kRanks, rank_, group.device(rank_), kTokens);
    Capacity capacity = layer.capacity(kTokens);
    if (rank_ == 1) capacity.rows -= kRowAlignment;
    expect_refused(*own, "another capacity", Status::kInvalidArgument,
                   {"must be the same on all ranks", "rank 0 gives", "rank 1 gives"}, [&] {
                     const Routing routing = layer.routing(kTokens);
                     place(group, kShapes[0], {&routing, 1}, capacity);
                   });
    works("another capacity");
  }

  int rank_;
  SharedObject<GroupsBoard> board_;
  Delays delays_;
  Results results_;
};

void run_in_processes(Results& results) {
  SharedObject<GroupsBoard> board;
  std::vector<ChildProcess> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<std::string> arguments = {"--rank", std::to_string(rank), "--board", std::to_string(board.number())};
    if (results.verbose) arguments.emplace_back("--verbose");
    processes.emplace_back(arguments);
  }
  constexpr double kLongest = 300;  // kernels may have to be compiled
  await(kLongest,
        [&] { return std::all_of(processes.begin(), processes.end(), [](auto& of) { return of.has_ended(); }); });
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    const bool ended = processes[rank].has_ended();
    const std::string text = ended ? "status " + std::to_string(processes[rank].exit_status()) : "it does not end";
    results.record("the process of rank " + std::to_string(rank), ended && processes[rank].exit_status() == 0, text);
  }
  results.record("calls in two orders: what the other GPU runs is said", board->named_running > 0,
                 std::to_string(board->named_running) + " of " + std::to_string(board->timeouts));
}

bool has_nccl() {
  try {
    nccl_caller();
    return true;
  } catch (const Error& error) {
    std::printf("no all-reduces: %s\n", error.what());
    return false;
  }
}

int run(int argc, char** argv) {
  Results results;
  int rounds = 1000, rank = -1, board = -1;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] { return i + 1 < argc ? std::atoi(argv[++i]) : 0; };
    if (name == "--verbose") results.verbose = true;
    if (name == "--rounds") rounds = value();
    if (name == "--rank") rank = value();
    if (name == "--board") board = value();
  }
  if (rank >= 0) return GroupsRank(rank, board, results.verbose).run();
  limit_all_reduces();
  run_in_one_process(results, {0, 0}, rounds, false);
  if (device_count() > 1) {
    run_in_one_process(results, {0, 1}, rounds, false);
    run_in_processes(results);
    if (has_nccl()) run_in_one_process(results, {0, 1}, rounds, true);
  } else {
    std::printf("one GPU: no groups of several GPUs or processes\n");
  }
  std::printf("groups tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
