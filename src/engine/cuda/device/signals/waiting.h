#pragma once

#include "engine/cuda/device/arguments/rank_call.h"
#include "engine/cuda/device/ptx/mbarrier.h"
#include "engine/cuda/device/ptx/warpgroup.h"
#include "engine/cuda/device/signals/disturbance.h"

// Waiting for counters and flags, and advancing them. Every wait is bounded: it ends with `false` when its time is over
// or when another wait of the rank has failed, and the role that waited then ends. Counters and data behind them are
// local to a rank (gpu scope), flags and data behind them are not (system scope).
namespace uniep::cuda {

// One CTA's part in a running call. References, so that kernels can keep the values in shared memory and their roles
// need no registers for them.
struct RunningCall {
  const RankCall& call;
  const uint32_t& epoch;
  const int32_t& launch;
  const int32_t& worker;
  const uint64_t& leaves_ns;  // a lent worker takes nothing more from then on; 0: it stays to the end
};

UNIEP_DEVICE uint32_t* counter_of(const RunningCall& running, CounterSpace space, int64_t index) {
  const RankCall& call = running.call;
  return counter_bank(call, running.epoch) + call.layout.counters[static_cast<int>(space)] + index;
}

// The flag of `rank`, as this rank reaches it.
UNIEP_DEVICE uint32_t* flag_of(const RunningCall& running, int32_t rank, FlagSpace space, int64_t index) {
  const RankCall& call = running.call;
  return call.flags[rank] + call.layout.flags[static_cast<int>(space)] + index;
}

// A task of a known stage, so that what other stages wait for and signal is not compiled.
template <Stage kStage>
UNIEP_DEVICE uniep::Task as_stage(const uniep::Task& task) {
  return {kStage, task.expert, task.m, task.n};
}

// ---- Waits

UNIEP_DEVICE bool has_failed(const RunningCall& running) {
  return ptx::load_relaxed_gpu(&running.call.state->report.failed) != 0;
}

UNIEP_DEVICE void report_wait(const RunningCall& running, const uniep::Task& task, const AwaitedSignal& awaited) {
  WaitReport content;
  content.rank = running.call.program.rank;
  content.launch = running.launch;
  content.direction = static_cast<int32_t>(running.call.program.direction);
  content.stage = static_cast<int32_t>(task.stage);
  content.expert = task.expert;
  content.m = task.m;
  content.n = task.n;
  content.awaited = awaited;
  content.ranks = running.call.program.ranks;
  content.blocks = running.call.program.most_blocks;
  content.units = combine_units(running.call.program);
  write_report(&running.call.state->report, content);
}

// What this rank, and a peer that has arrived, have said of the running call.
UNIEP_DEVICE const CallDescription& description_of(const RunningCall& running, int32_t rank) {
  return running.call.state->board[running.call.program.rank]->call[running.epoch & 1u][rank];
}

// A peer that does not take part in the call, or -1.
UNIEP_DEVICE int32_t failed_peer(const RunningCall& running) {
  const int32_t own = running.call.program.rank;
  const uint32_t number = description_of(running, own).number;
  for (int32_t peer = 0; peer < running.call.program.ranks; ++peer) {
    if (takes_no_part(load_given_up(running.call.state->board[own]->given_up[peer]), number)) return peer;
  }
  return -1;
}

__device__ __noinline__ bool is_peers_call(const CallBoard* board, uint32_t bank, int32_t own, int32_t peer) {
  return is_same_call(board->call[bank][own], board->call[bank][peer]);
}

// Whether a peer that has arrived makes the same call. If not, the rank has a report.
UNIEP_DEVICE bool makes_same_call(const RunningCall& running, const uniep::Task& task, int32_t peer) {
  const int32_t own = running.call.program.rank;
  if (is_peers_call(running.call.state->board[own], running.epoch & 1u, own, peer)) return true;
  const auto number = static_cast<int32_t>(description_of(running, own).number);
  report_wait(running, task,
              {SignalKind::kOtherCall, number, peer, running.epoch, description_of(running, peer).number});
  return false;
}

// A whole warp, once all peers have arrived: whether this lane's make the same call.
UNIEP_DEVICE bool all_make_same_call(const RunningCall& running, const uniep::Task& task) {
  bool same = true;
  for (int32_t peer = static_cast<int32_t>(ptx::lane_index()); peer < running.call.program.ranks; peer += 32) {
    same = same && makes_same_call(running, task, peer);
  }
  return same;
}

UNIEP_DEVICE bool flag_holds(FlagSpace space, uint32_t seen, uint32_t epoch) {
  return space == FlagSpace::kArrive || space == FlagSpace::kDone ? is_reached(seen, epoch) : seen == epoch;
}

// The first peer that has not arrived, or -1.
UNIEP_DEVICE int32_t missing_peer(const RunningCall& running) {
  for (int32_t peer = 0; peer < running.call.program.ranks; ++peer) {
    const uint32_t* flag = flag_of(running, running.call.program.rank, FlagSpace::kArrive, peer);
    if (!is_reached(ptx::load_acquire_system(flag), running.epoch)) return peer;
  }
  return -1;
}

// Bounds a wait of one thread: arrival_limit_ns until all peers have arrived, then wait_limit_ns.
class WaitClock {
 public:
  UNIEP_DEVICE WaitClock() : begin_(now()) {}

  // To be asked after every poll. True when the wait is to be given up; the rank then has a report, which names the
  // peer that never arrived where there is one.
  UNIEP_DEVICE bool is_over(const RunningCall& running, const uniep::Task& task, const AwaitedSignal& awaited) {
    if (++polls_ % kPollsBetweenLooks != 0) return false;
    if (has_failed(running)) return true;
    const int32_t failed = failed_peer(running);
    if (failed >= 0) {
      // A peer that has left may have signalled before: then the next polls see it.
      if (!peer_failed_) {
        peer_failed_ = true;
        return false;
      }
      report_wait(running, task, {SignalKind::kPeerFailed, 0, failed, 0, 0});
      return true;
    }
    if (!all_arrived_) {
      const int32_t peer = missing_peer(running);
      if (peer >= 0) return is_arrival_over(running, task, peer);
      all_arrived_ = true;
      begin_ = now();
    }
    if (!is_past(running.call.wait_limit_ns)) return false;
    report_wait(running, task, awaited);
    return true;
  }

 private:
  static constexpr uint32_t kPollsBetweenLooks = 32;

  UNIEP_DEVICE bool is_arrival_over(const RunningCall& running, const uniep::Task& task, int32_t peer) {
    if (!is_past(running.call.arrival_limit_ns)) return false;
    const uint32_t* flag = flag_of(running, running.call.program.rank, FlagSpace::kArrive, peer);
    report_wait(running, task,
                {SignalKind::kFlag, static_cast<int32_t>(FlagSpace::kArrive), peer, running.epoch,
                 ptx::load_acquire_system(flag)});
    return true;
  }

  // About milliseconds, in one register: good for 49 days.
  static constexpr int kShift = 20;
  UNIEP_DEVICE static uint32_t now() { return static_cast<uint32_t>(ptx::nanoseconds() >> kShift); }
  UNIEP_DEVICE bool is_past(uint64_t limit_ns) const { return now() - begin_ > limit_ns >> kShift; }

  uint32_t begin_;
  uint32_t polls_ = 0;
  bool all_arrived_ = false;
  bool peer_failed_ = false;
};

constexpr uint32_t kPollPauseNs = 32;

// One thread. Counters, arrive and done hold once they have reached what is waited for, other flags for exactly this
// epoch.
UNIEP_DEVICE bool wait_for(const RunningCall& running, const uniep::Task& task, const CounterWait& wait) {
  disturb(running, DisturbedAt::kWait);
  const uint32_t* counter = counter_of(running, wait.space, wait.index);
  uint32_t seen = ptx::load_acquire_gpu(counter);
  if (seen >= wait.threshold) return true;
  for (WaitClock clock; seen < wait.threshold; seen = ptx::load_acquire_gpu(counter)) {
    if (clock.is_over(running, task,
                      {SignalKind::kCounter, static_cast<int32_t>(wait.space), wait.index, wait.threshold, seen})) {
      return false;
    }
    __nanosleep(kPollPauseNs);
  }
  return true;
}

UNIEP_DEVICE bool wait_for(const RunningCall& running, const uniep::Task& task, const FlagWait& wait) {
  disturb(running, DisturbedAt::kWait);
  const uint32_t* flag = flag_of(running, running.call.program.rank, wait.space, wait.index);
  uint32_t seen = ptx::load_acquire_system(flag);
  for (WaitClock clock; !flag_holds(wait.space, seen, running.epoch); seen = ptx::load_acquire_system(flag)) {
    if (clock.is_over(running, task,
                      {SignalKind::kFlag, static_cast<int32_t>(wait.space), wait.index, running.epoch, seen})) {
      return false;
    }
    __nanosleep(kPollPauseNs);
  }
  return wait.space != FlagSpace::kArrive || makes_same_call(running, task, static_cast<int32_t>(wait.index));
}

// A whole warp: whether all lanes say so; then what any lane has acquired lies before what the others do next.
UNIEP_DEVICE bool all_lanes(bool holds) {
  const bool all = __all_sync(0xffffffffu, holds);
  __syncwarp();
  return all;
}

// A whole warp: until everything that the task waits for holds. The lanes share the signals among them. What was
// written before the signals is then seen by the warp's loads; ptx::fence_proxy_async_global() must follow before bulk
// copies read it.
UNIEP_DEVICE bool wait_for_task(const RunningCall& running, const uniep::Task& task) {
  bool holds = true;
  uint32_t turn = 0;
  for_each_wait(running.call.program, task, [&](const auto& wait) {
    if (holds && turn % ptx::kThreadsPerWarp == ptx::lane_index()) holds = wait_for(running, task, wait);
    ++turn;
  });
  return all_lanes(holds);
}

// ---- Signals: one thread, behind which all data of the signal lies

UNIEP_DEVICE void advance(const RunningCall& running, const CounterSignal& signal) {
  disturb(running, DisturbedAt::kSignal);
  ptx::add_release_gpu(counter_of(running, signal.space, signal.index), signal.amount);
}

UNIEP_DEVICE void store(const RunningCall& running, const FlagSignal& signal) {
  disturb(running, DisturbedAt::kSignal);
  ptx::store_release_system(flag_of(running, signal.peer, signal.space, signal.index), running.epoch);
}

// A whole warp, after a barrier behind everything that the task has written: its counters, and its flags. Where flags
// are guarded by a counter, whoever brings that to its threshold stores them.
UNIEP_DEVICE void signal_task(const RunningCall& running, const uniep::Task& task) {
  const RankProgram& p = running.call.program;
  const bool guarded = is_flag_guarded(p, task);
  bool stores_flags = !guarded;
  uint32_t turn = 0;
  for_each_counter_signal(p, task, [&](const CounterSignal& signal) {
    if (turn++ % ptx::kThreadsPerWarp != ptx::lane_index()) return;
    if (guarded) {
      const uint32_t before =
          ptx::add_acquire_release_gpu(counter_of(running, signal.space, signal.index), signal.amount);
      stores_flags = before + signal.amount == flag_guard(p, task).threshold;
    } else {
      advance(running, signal);
    }
  });
  if (!__any_sync(0xffffffffu, stores_flags)) return;
  __syncwarp();  // what one lane has acquired is released by all
  turn = 0;
  for_each_flag_signal(p, task, [&](const FlagSignal& signal) {
    if (turn++ % ptx::kThreadsPerWarp == ptx::lane_index()) store(running, signal);
  });
}

}  // namespace uniep::cuda
