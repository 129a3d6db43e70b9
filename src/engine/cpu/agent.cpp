#include "engine/cpu/agent.h"

#include <fmt/format.h>

#include <optional>
#include <thread>
#include <utility>

#include "engine/cpu/bit_fault.h"
#include "program/signal_names.h"

namespace uniep::cpu {
namespace {

constexpr int kAgentRoles = 2;
constexpr int64_t kLongestRandomDelayNs = 200'000;

}  // namespace

Agent::Agent(Call& call, int rank, int worker, AgentRole role, uint64_t seed)
    : call_(call),
      program_(call.program.rank(rank)),
      worker_(worker),
      role_(role),
      random_(seed),
      walk_(program_, worker, role) {
  scratch_.ring.configure(call.schedule.comm.chunk_bytes, call.schedule.comm.stages);
}

Agent::Progress Agent::step(std::vector<TileEvent>& events) {
  if (finished()) return Progress::kFinished;
  if (delayed()) return Progress::kBlocked;
  if (pending_ == Pending::kNothing) {
    wait_begin_ns_ = call_.now_ns();
    if (!fetch()) {
      finish_launch();
      return finished() ? Progress::kFinished : Progress::kRan;
    }
  }
  if (!waits_hold()) return Progress::kBlocked;
  const Pending held = std::exchange(pending_, Pending::kNothing);
  if (held == Pending::kTile) begin_tile(events);
  if (held == Pending::kHandedOver) take_handed_over(events);
  return Progress::kRan;
}

// Lent workers stay, but in disturbed calls, where they leave a launch at random, some before their first task.
bool Agent::leaves_early() {
  if (worker_ < kept_workers(program_) || call_.disturbance.shuffle_seed == 0) return false;
  has_left_ = has_left_ || random_.below(4) == 0;
  return has_left_;
}

bool Agent::delayed() {
  return delayed_until_ns_ > 0 && call_.now_ns() < delayed_until_ns_;
}

bool Agent::fetch() {
  struct Counters {
    Agent& agent;
    std::atomic<uint32_t>& of(int64_t counter) const {
      Call& call = agent.call_;
      return call.signals[agent.program_.rank].counter(call.layout, call.epoch, CounterSpace::kTickets, counter);
    }
    int64_t taken(int64_t counter) const { return of(counter).load(std::memory_order_relaxed); }
    int64_t take(int64_t counter) {
      return agent.leaves_early() ? kNoTicket : of(counter).fetch_add(1, std::memory_order_relaxed);
    }
  };
  for (;;) {
    switch (walk_.next(Counters{*this})) {
      case AgentWalk::Step::kTask:
        task_ = walk_.task();
        if (walk_.leads_pair()) pair_ = &call_.pair(program_.rank, walk_.launch(), worker_);
        wait_for_tiles();
        return true;
      case AgentWalk::Step::kPairBegins:
        pair_ = &call_.pair(program_.rank, walk_.launch(), worker_);
        pair_->come();
        call_.wake_up.notify();
        break;
      case AgentWalk::Step::kHandedOver:
        waits_.assign(1, {&pair_->handed(), pair_->taken() + 1, false, "tiles handed over", worker_ / 2});
        satisfied_ = 0;
        pending_ = Pending::kHandedOver;
        return true;
      case AgentWalk::Step::kPairEnds:
        call_.pair(program_.rank, walk_.launch(), worker_).end();
        call_.wake_up.notify();
        break;
      case AgentWalk::Step::kLaunchEnds:
        return false;
    }
  }
}

// Neither worker of a pair begins before the other can.
void Agent::wait_for_tiles() {
  waits_.clear();
  satisfied_ = 0;
  collect_waits(task_);
  if (walk_.leads_pair()) {
    collect_waits(walk_.partners_task());
    waits_.push_back({&pair_->room(), pair_->handed().load(std::memory_order_relaxed) + 1, false,
                      "tiles that may be handed over", worker_ / 2});
  }
  pending_ = Pending::kTile;
}

void Agent::begin_tile(std::vector<TileEvent>& events) {
  if (walk_.leads_pair()) {
    pair_->hand_over(walk_.partners_task());
    call_.wake_up.notify();
  }
  if (task_.has_tile()) run(events);
}

void Agent::take_handed_over(std::vector<TileEvent>& events) {
  const std::optional<Task> task = pair_->take();
  call_.wake_up.notify();
  if (!task) {
    walk_.leave_pair();
    return;
  }
  task_ = *task;
  if (task_.has_tile()) run(events);
}

void Agent::collect_waits(const Task& task) {
  RankSignals& own = call_.signals[program_.rank];
  struct Collector {
    Agent& agent;
    RankSignals& own;
    void operator()(const CounterWait& wait) {
      uint32_t threshold = wait.threshold;
      const bool rows = wait.space == CounterSpace::kFullRows;
      if (agent.call_.fault == Fault::kMissingWait && rows) return;
      if (agent.call_.fault == Fault::kSwappedThreshold && wait.space == CounterSpace::kFirstTiles) threshold = 1;
      agent.waits_.push_back({&own.counter(agent.call_.layout, agent.call_.epoch, wait.space, wait.index), threshold,
                              false, counter_name(wait.space), wait.index});
    }
    void operator()(const FlagWait& wait) {
      agent.waits_.push_back({&own.flag(agent.call_.layout, wait.space, wait.index), agent.call_.epoch, true,
                              flag_name(wait.space), wait.index});
    }
  };
  for_each_wait(program_, task, Collector{*this, own});
}

// A flag holds for exactly this epoch; a counter once it has reached its threshold.
bool Agent::waits_hold() {
  for (; satisfied_ < waits_.size(); ++satisfied_) {
    const PendingWait& wait = waits_[satisfied_];
    const uint32_t seen = wait.word->load(std::memory_order_acquire);
    const bool any_epoch = call_.fault == Fault::kStaleEpoch && wait.is_flag && seen != 0;
    if (wait.is_flag ? seen != wait.expected && !any_epoch : seen < wait.expected) return false;
  }
  return true;
}

void Agent::pause_at_random() {
  if (call_.disturbance.shuffle_seed == 0 || random_.below(8) != 0) return;
  std::this_thread::sleep_for(std::chrono::nanoseconds(random_.below(kLongestRandomDelayNs / 4)));
}

void Agent::run(std::vector<TileEvent>& events) {
  call_.running_tiles.fetch_add(1, std::memory_order_relaxed);
  const int64_t begin_ns = call_.record ? call_.now_ns() : 0;
  const bool flags_first =
      call_.fault == Fault::kEarlyFlag && (task_.stage == Stage::kSend || task_.stage == Stage::kGroupSend);
  if (flags_first) {
    store_flags();
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
  switch (task_.stage) {
    case Stage::kPull:
    case Stage::kPush:
    case Stage::kReceive:
      run_dispatch_tile(call_, program_, task_, scratch_);
      break;
    case Stage::kFirstGemm:
    case Stage::kSecondGemm:
      run_row_gemm_tile(call_, program_, task_, scratch_);
      break;
    case Stage::kWgradFc2:
    case Stage::kWgradFc1:
      run_wgrad_tile(call_, program_, task_, scratch_);
      break;
    case Stage::kSend:
    case Stage::kGroupSend:
    case Stage::kReduce:
      run_combine_tile(call_, program_, task_, scratch_);
      break;
  }
  if (call_.bit_fault != nullptr) flip_bit(call_, *call_.bit_fault, program_, worker_, task_);
  const bool returns_probs = returns_prob_gradients(program_, task_), late = call_.fault == Fault::kLateProb;
  if (returns_probs && !late) return_prob_gradients(call_, program_, task_);
  pause_at_random();
  if (!flags_first) signal();
  if (returns_probs && late) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    return_prob_gradients(call_, program_, task_);
  }
  const int64_t end_ns = call_.now_ns();
  call_.last_progress_ns.store(end_ns, std::memory_order_relaxed);
  call_.running_tiles.fetch_sub(1, std::memory_order_relaxed);
  call_.wake_up.notify();
  if (call_.record) {
    const bool local_expert = task_.stage != Stage::kPush && task_.expert >= 0 && task_.stage != Stage::kGroupSend;
    const int expert =
        local_expert ? program_.first_expert + task_.expert : (task_.stage == Stage::kPush ? task_.expert : -1);
    events.push_back({program_.rank, worker_, role_ == AgentRole::kCopy, stage_name(task_.stage, program_.direction),
                      expert, task_.m, task_.n, wait_begin_ns_, begin_ns, end_ns});
  }
  int64_t delay_ns = program_.rank == call_.disturbance.delayed_rank ? call_.disturbance.delay_microseconds * 1000 : 0;
  if (call_.disturbance.shuffle_seed != 0 && random_.below(8) == 0) delay_ns += random_.below(kLongestRandomDelayNs);
  if (delay_ns > 0) delayed_until_ns_ = end_ns + delay_ns;
}

// Data before signal: every store of the tile is released by the counter or flag that promises it.
void Agent::signal() {
  if (call_.fault == Fault::kSilentWorker && program_.rank == 0 && worker_ == 0 && task_.stage == Stage::kFirstGemm) {
    return;
  }
  RankSignals& own = call_.signals[program_.rank];
  bool stores_flags = !is_flag_guarded(program_, task_);
  for_each_counter_signal(program_, task_, [&](const CounterSignal& signal) {
    const uint32_t before = own.counter(call_.layout, call_.epoch, signal.space, signal.index)
                                .fetch_add(signal.amount, std::memory_order_acq_rel);
    // The last column tile of a block has acquired the others' stores here and releases them with the flags.
    if (is_flag_guarded(program_, task_)) {
      stores_flags = before + signal.amount == flag_guard(program_, task_).threshold;
    }
  });
  if (stores_flags) store_flags();
}

void Agent::store_flags() {
  for_each_flag_signal(program_, task_, [&](const FlagSignal& signal) {
    call_.signals[signal.peer]
        .flag(call_.layout, signal.space, signal.index)
        .store(call_.epoch, std::memory_order_release);
  });
}

// The last agent of a rank that leaves the last launch tells all peers that the rank is done with their memory.
void Agent::finish_launch() {
  RankSignals& own = call_.signals[program_.rank];
  std::atomic<uint32_t>& agents = own.counter(call_.layout, call_.epoch, CounterSpace::kAgentsFinished, walk_.launch());
  const uint32_t all = static_cast<uint32_t>(program_.workers * kAgentRoles);
  const bool last = agents.fetch_add(1, std::memory_order_acq_rel) + 1 == all;
  walk_.next_launch();
  has_left_ = false;
  if (!finished()) {
    waits_.assign(1, {&agents, all, false, counter_name(CounterSpace::kAgentsFinished), walk_.launch() - 1});
    satisfied_ = 0;
    pending_ = Pending::kNextLaunch;
  } else if (last) {
    for (int peer = 0; peer < program_.ranks; ++peer) {
      call_.signals[peer]
          .flag(call_.layout, FlagSpace::kDone, program_.rank)
          .store(call_.epoch, std::memory_order_release);
    }
  }
  call_.wake_up.notify();
}

std::string Agent::describe_wait() const {
  const PendingWait& wait = waits_[satisfied_ < waits_.size() ? satisfied_ : 0];
  std::string what = fmt::format("stage {}, tile (expert {}, m {}, n {})", stage_name(task_.stage, program_.direction),
                                 task_.expert, task_.m, task_.n);
  if (pending_ == Pending::kHandedOver) what = "the next tile of a pair";
  if (pending_ == Pending::kNextLaunch) what = fmt::format("start of launch {}", walk_.launch());
  return fmt::format("rank {}, worker {}, {} waits for {} {}[{}]: expected {}, seen {}", program_.rank, worker_, what,
                     wait.is_flag ? "flag" : "counter", wait.name, wait.index, wait.expected,
                     wait.word->load(std::memory_order_relaxed));
}

}  // namespace uniep::cpu
