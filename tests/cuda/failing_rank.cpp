#include "tests/cuda/failing_rank.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "cli/gathered.h"
#include "tests/cuda/delay_arguments.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/rank_processes.h"
#include "tests/cuda/small_layer.h"

namespace uniep::cuda::test {
namespace {

constexpr int64_t kMaxTokens = 1000, kMeetingTokens = 200;
constexpr int kTurns = 6;
constexpr int64_t kTokens[kTurns] = {16, 16, 120, 120, 400, 900};  // each jump makes symmetric memory grow
constexpr double kLate = 0.2;  // seconds; longer than a rank takes to refuse a call and make another
constexpr int kRow = 3;        // layers that are queued without a wait

LayerShape shape_for(int ranks) {
  return {.hidden = 256, .intermediate = 128, .experts = int64_t{4} * ranks, .topk = 2};
}

// The end of a rank that fails by itself.
struct PlannedEnd {};

// A caller's allocator out of one block, over and over: more than a row of layers takes.
class RingAllocator {
 public:
  RingAllocator(int device, int ranks) : bytes_(int64_t{64 << 20} * ranks), block_(device, bytes_) {}

  Allocator allocator() { return {allocate, release, this}; }
  // The n-th request from now on gets nothing.
  void fail_at(int n) { fail_in_ = n; }

 private:
  static void* allocate(void* context, std::size_t bytes, std::size_t /*alignment*/, int /*rank*/, Stream /*stream*/) {
    auto& own = *static_cast<RingAllocator*>(context);
    if (own.fail_in_ > 0 && --own.fail_in_ == 0) return nullptr;
    const int64_t size = round_up(static_cast<int64_t>(bytes), kAlignment);
    if (size > own.bytes_) return nullptr;
    if (own.next_ + size > own.bytes_) own.next_ = 0;
    own.next_ += size;
    return static_cast<std::byte*>(own.block_.data()) + own.next_ - size;
  }
  static void release(void* /*context*/, void* /*memory*/, std::size_t /*bytes*/, int /*rank*/, Stream /*stream*/) {}

  static constexpr int64_t kAlignment = 1024;
  int64_t bytes_;
  DeviceArray block_;
  int64_t next_ = 0;
  int fail_in_ = 0;
};

class FailingRank {
 public:
  FailingRank(int rank, int ranks, int board)
      : rank_(rank),
        ranks_(ranks),
        board_(board),
        words_(board_->rank[rank]),
        memory_(rank, ranks),
        layer_(shape_for(ranks), ranks, rank, rank, kMaxTokens),
        kernels_(rank, kernel_folder()) {}

  // All ranks run one layer, with time for those that start anew and kernels that are compiled.
  void meet(int64_t meeting) {
    words_.phase = static_cast<int>(RankPhase::kMeeting);
    words_.step = 0;
    Group group(options(meeting, 0, 60, 300));
    const Schedule schedule = schedule_of(group);
    const Routing routing = layer_.routing(kMeetingTokens);
    const Placement placement = place(group, layer_.shape(), {&routing, 1}, {});
    const ForwardArguments arguments = layer_.arguments();
    layer_.poison();
    hold_up(0);
    const Saved saved = forward(group, {layer_.shape(), {}}, schedule, placement, {&arguments, 1});
    // Both times, so that lives compile nothing.
    const uint64_t now = gradients_of(group, saved, WeightGradientTime::kNow);
    const uint64_t later = gradients_of(group, saved, WeightGradientTime::kLater);
    constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;
    const uint64_t result = layer_.checksum(kMeetingTokens) * kOdd + now;
    if (later != now) ++words_.wrong;
    uint64_t first = 0;
    if (!words_.result.compare_exchange_strong(first, result) && first != result) ++words_.wrong;
    cli::gathered(group, std::vector<uint64_t>{result});
    words_.met = meeting;
  }

  // Makes calls until one fails. False where this rank failed as planned.
  bool go_on(int64_t meeting) {
    failing_ = false;
    try {
      for (int generation = 1;; ++generation) live(meeting, generation);
    } catch (const PlannedEnd&) {
      return false;
    } catch (const Error& error) {
      if (failing_) return false;
      tell(meeting, static_cast<int>(error.status()), error.what());
    } catch (const std::exception& error) {
      tell(meeting, -1, error.what());
    }
    return true;
  }

 private:
  GroupOptions options(int64_t meeting, int generation, double wait, double arrival) {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = ranks_;
    options.rank = rank_;
    options.launch = uniep::Launch::kProcesses;
    options.timeout_seconds = wait;
    options.arrival_timeout_seconds = arrival;
    options.allocator = memory_.allocator();
    options.bootstrap = "gpu_failure_tests " + std::to_string(::getppid()) + " " + std::to_string(meeting) + " " +
                        std::to_string(generation);
    options.bootstrap.resize(128, ' ');
    return options;
  }

  Schedule schedule_of(const Group& group) const {
    return resolve({}, {.direction = Direction::kForward, .shape = layer_.shape(), .machine = group.machine()});
  }

  // Of a meeting.
  uint64_t gradients_of(Group& group, const Saved& saved, WeightGradientTime time) {
    layer_.poison_gradients();
    const BackwardArguments arguments = layer_.backward_arguments(time);
    const PendingWeightGradients work =
        backward(group, {layer_.shape(), {}}, backward_schedule_of(group), saved, {&arguments, 1});
    const WeightGradientArguments gradients = layer_.gradient_arguments();
    if (!work.empty()) weight_gradients(group, work, {&gradients, 1});
    group.synchronize();
    return layer_.gradient_checksum(kMeetingTokens);
  }

  Schedule backward_schedule_of(const Group& group) const {
    return resolve({}, {.direction = Direction::kBackward, .shape = layer_.shape(), .machine = group.machine()});
  }

  void tell(int64_t meeting, int status, const char* text) {
    words_.error_at = seconds_now();
    words_.status = status;
    std::snprintf(words_.text, sizeof(words_.text), "%s", text);
    words_.ended = meeting;
  }

  void step(RankPhase phase) {
    words_.phase = static_cast<int>(phase);
    ++words_.step;
  }

  // Whether the plan's fault is to come now.
  bool is_due(RankFault fault) {
    if (failing_ || board_->victim != rank_ || board_->fault != static_cast<int>(fault)) return false;
    if (words_.step < board_->at_step) return false;
    failing_ = true;
    board_->acted_at = seconds_now();
    return true;
  }

  // A whole life of a Group. Numbers of tokens are equal on all ranks.
  void live(int64_t meeting, int generation) {
    step(RankPhase::kConstructor);
    std::optional<Group> group;
    group.emplace(options(meeting, generation, 0, 0));  // limits out of the environment
    std::mt19937_64 random(static_cast<uint64_t>(meeting * 1000 + generation));
    int64_t most = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t tokens = kTokens[turn] + static_cast<int64_t>(random() % 16);
      run_layers(*group, tokens, turn % 2 == 1, turn == 3 ? kRow : 1, tokens > most);
      most = std::max(most, tokens);
      step(RankPhase::kGather);
      cli::gathered(*group, std::vector<int64_t>{tokens});
    }
    step(RankPhase::kRecover);
    group->recover();
    run_layers(*group, kTokens[0], true, 1, false);
    step(RankPhase::kGather);
    cli::gathered(*group, std::vector<int64_t>{turns_++});
    step(RankPhase::kDestructor);
    group.reset();
  }

  void run_layers(Group& group, int64_t tokens, bool within, int count, bool grows) {
    const Schedule schedule = schedule_of(group);
    std::vector<Saved> saved;
    for (int i = 0; i < count; ++i) {
      step(grows ? RankPhase::kGrowingPlace : within ? RankPhase::kPlaceWithin : RankPhase::kPlaceByNeed);
      Routing routing = layer_.routing(tokens);
      if (is_due(RankFault::kPlaceArgument)) routing.topk_ids = nullptr;
      const Placement placement =
          place(group, layer_.shape(), {&routing, 1}, within ? layer_.capacity(tokens) : Capacity{});
      if (is_due(RankFault::kException)) throw PlannedEnd();
      if (is_due(RankFault::kLeave)) {
        group.leave();
        throw PlannedEnd();
      }
      step(grows ? RankPhase::kGrowingForward : RankPhase::kForward);
      ForwardArguments arguments = layer_.arguments();
      if (is_due(RankFault::kForwardArgument)) ++arguments.y;
      if (is_due(RankFault::kOutOfMemory)) memory_.fail_at(1 + static_cast<int>(tokens % 2));
      // Of a call that grows the others' hosts hear by themselves.
      if (!grows && is_due(RankFault::kRefusesAndGoesOn)) refuse(group, placement, 1);
      if (!grows && is_due(RankFault::kRefusesTwice)) refuse(group, placement, 2);
      if (!grows && another_refuses()) hold_up(kLate);
      saved.push_back(forward(group, {layer_.shape(), {}}, schedule, placement, {&arguments, 1}));
      if (stays(fault())) await_survivors();
      require_failure();
    }
    for (std::size_t i = saved.size(); i-- > 0;) run_backward(group, saved[i], tokens);
  }

  RankFault fault() const { return static_cast<RankFault>(board_->fault.load()); }
  // At the same step as the victim.
  bool another_refuses() { return stays(fault()) && board_->victim != rank_ && words_.step >= board_->at_step; }
  void hold_up(double seconds) {
    const ScopedDevice scope(rank_);
    kernels_.run("delay_kernels.cu", "test_delay", {.threads = 1, .stream = layer_.stream()},
                 DelayArguments{static_cast<uint64_t>(seconds * 1e9)});
  }

  // Calls that this rank alone refuses: it goes on as a caller that takes no notice. Twice: ends behind them.
  void refuse(Group& group, const Placement& placement, int count) {
    ForwardArguments arguments = layer_.arguments();
    ++arguments.y;
    for (int i = 0; i < count; ++i) {
      try {
        forward(group, {layer_.shape(), {}}, schedule_of(group), placement, {&arguments, 1});
      } catch (const Error& error) {
        if (error.status() == Status::kInvalidArgument) continue;
        throw;
      }
      require_failure();
    }
    if (count > 1) await_survivors();
  }

  // Where this rank has failed: the others hear of it though it stays in the group.
  void await_survivors() {
    if (!failing_) return;
    const auto heard = [&] {
      for (int rank = 0; rank < ranks_; ++rank) {
        if (rank != rank_ && board_->rank[rank].ended < board_->plan) return false;
      }
      return true;
    };
    await(2 * kArrivalLimit, heard);
    throw PlannedEnd();
  }

  // The last that was saved first. Odd numbers of tokens leave their weight gradients for later.
  void run_backward(Group& group, const Saved& saved, int64_t tokens) {
    step(RankPhase::kBackward);
    const bool later = tokens % 2 == 1;
    BackwardArguments arguments =
        layer_.backward_arguments(later ? WeightGradientTime::kLater : WeightGradientTime::kNow);
    arguments.last_use = tokens % 4 < 2;
    if (is_due(RankFault::kBackwardArgument)) ++arguments.dx;
    if (is_due(RankFault::kBackwardOutOfMemory)) memory_.fail_at(1);
    const PendingWeightGradients work =
        backward(group, {layer_.shape(), {}}, backward_schedule_of(group), saved, {&arguments, 1});
    require_failure();
    if (is_due(RankFault::kExceptionAfterBackward)) throw PlannedEnd();
    if (!later) return;
    step(RankPhase::kWeightGradients);
    const WeightGradientArguments gradients = layer_.gradient_arguments();
    weight_gradients(group, work, {&gradients, 1});
    if (is_due(RankFault::kExceptionAfterWeightGradients)) throw PlannedEnd();
  }

  // Where a planned failure is behind this rank.
  void require_failure() const {
    if (!failing_) return;
    std::fprintf(stderr, "rank %d: the planned failure was none\n", rank_);
    std::_Exit(3);
  }

  const int rank_, ranks_;
  SharedObject<FailureBoard> board_;
  RankWords& words_;
  RingAllocator memory_;
  SmallLayer layer_;
  Kernels kernels_;
  bool failing_ = false;
  int64_t turns_ = 0;
};

}  // namespace

const char* phase_name(RankPhase phase) {
  static constexpr const char* kNames[kRankPhases] = {
      "meeting",         "constructor", "place by need",    "place within", "growing place", "forward",
      "growing forward", "backward",    "weight gradients", "gather",       "recover",       "destructor"};
  return kNames[static_cast<int>(phase)];
}

const char* fault_name(RankFault fault) {
  static constexpr const char* kNames[kRankFaults + kStayingFaults + 1] = {"none",
                                                                           "out of memory",
                                                                           "leave()",
                                                                           "no ids in place",
                                                                           "unaligned y in forward",
                                                                           "exception after place",
                                                                           "unaligned dx in backward",
                                                                           "out of memory in backward",
                                                                           "exception after backward",
                                                                           "exception after weight gradients",
                                                                           "unaligned y in forward, and a call",
                                                                           "unaligned y in forward, twice"};
  return kNames[static_cast<int>(fault)];
}

int run_failing_rank(int rank, int ranks, int board, int64_t meeting) {
  FailingRank own(rank, ranks, board);
  for (;; ++meeting) {
    own.meet(meeting);
    if (!own.go_on(meeting)) return 0;
  }
}

}  // namespace uniep::cuda::test
