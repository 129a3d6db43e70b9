#include "engine/cpu/run_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "engine/call_gate.h"
#include "engine/cpu/agent.h"

namespace uniep::cpu {
namespace {

constexpr int64_t kSleepNs = 500'000;     // a sleeper looks again after this long even if nobody woke it
constexpr int64_t kLookNs = 100'000'000;  // of a wait, that one look of a thread counts for at most

// The agents that one thread runs, one tile at a time in turn; in random turns when the call is shuffled.
class ThreadAgents {
 public:
  ThreadAgents(Call& call, int thread, int threads)
      : call_(call), random_(call.disturbance.shuffle_seed * 1000003 + thread) {
    const int workers = call.program.rank(0).workers;
    for (int rank = 0; rank < call.program.ranks(); ++rank) {
      for (int worker = 0; worker < workers; ++worker) {
        for (const AgentRole role : {AgentRole::kCopy, AgentRole::kCompute}) {
          const int64_t unit = static_cast<int64_t>(rank) * workers + worker;
          if (thread_of_agent(call.disturbance, unit, role, threads) != thread) continue;
          agents_.push_back(std::make_unique<Agent>(call, rank, worker, role, random_.next()));
        }
        if (worker == 0 && rank % threads == thread) own_ranks_.push_back(rank);
      }
    }
  }

  void run() {
    for (const int rank : own_ranks_) announce_arrival(rank);
    while (!agents_.empty() && !call_.stopped.load(std::memory_order_relaxed)) {
      if (call_.aborted.load(std::memory_order_relaxed)) internal::CallGate::throw_closed();
      const uint32_t seen = call_.wake_up.seen();
      if (run_round()) continue;
      check_time();
      call_.wake_up.sleep(seen, kSleepNs);
    }
  }

  std::vector<TileEvent>& events() { return events_; }

 private:
  void announce_arrival(int rank) {
    for (int peer = 0; peer < call_.program.ranks(); ++peer) {
      call_.signals[peer].flag(call_.layout, FlagSpace::kArrive, rank).store(call_.epoch, std::memory_order_release);
    }
    call_.wake_up.notify();
  }

  bool run_round() {
    if (call_.disturbance.shuffle_seed != 0) {
      for (std::size_t i = agents_.size() - 1; i > 0; --i) std::swap(agents_[i], agents_[random_.below(i + 1)]);
    }
    bool ran = false;
    bool any_finished = false;
    for (const std::unique_ptr<Agent>& agent : agents_) {
      const Agent::Progress progress = agent->step(events_);
      ran |= progress != Agent::Progress::kBlocked;
      any_finished |= progress == Agent::Progress::kFinished;
      if (call_.stopped.load(std::memory_order_relaxed)) return ran;
    }
    if (any_finished) std::erase_if(agents_, [](const std::unique_ptr<Agent>& agent) { return agent->finished(); });
    return ran;
  }

  // The bound of a wait: no tile runs, and none has finished for so long. (A tile itself never waits.) Of the time
  // between two looks no more counts than kLookNs: a process that was stopped has not waited.
  void check_time() {
    const int64_t now = call_.now_ns(), looked = std::exchange(looked_ns_, now);
    const int64_t progress = call_.last_progress_ns.load(std::memory_order_relaxed);
    if (call_.running_tiles.load(std::memory_order_relaxed) > 0 || progress != progress_ns_) {
      progress_ns_ = progress;
      waited_ns_ = 0;
      return;
    }
    waited_ns_ += std::min(now - looked, kLookNs);
    if (waited_ns_ < static_cast<int64_t>(call_.timeout_seconds * 1e9)) return;
    const auto told = std::find_if(agents_.begin(), agents_.end(),
                                   [](const std::unique_ptr<Agent>& agent) { return agent->waits_for_tile(); });
    const Agent& agent = told != agents_.end() ? **told : *agents_.front();
    call_.fail(std::make_exception_ptr(
        Error(Status::kTimeout, fmt::format("time-out after {} s: {}", call_.timeout_seconds, agent.describe_wait()))));
  }

  Call& call_;
  Random random_;
  std::vector<int> own_ranks_;
  std::vector<std::unique_ptr<Agent>> agents_;
  std::vector<TileEvent> events_;
  int64_t looked_ns_ = 0, progress_ns_ = 0, waited_ns_ = 0;  // of check_time()
};

}  // namespace

int thread_of_agent(const internal::Disturbance& disturbance, int64_t worker, AgentRole role, int threads) {
  if (disturbance.shuffle_seed == 0) return static_cast<int>(worker % threads);
  Random deal(disturbance.shuffle_seed ^ (2 * worker + static_cast<int>(role) + 1));
  return static_cast<int>(deal.below(threads));
}

void run_call(Call& call, WorkerThreads& threads, std::vector<TileEvent>* events) {
  std::vector<std::vector<TileEvent>> recorded(threads.count());
  call.record = events != nullptr;
  threads.run([&](int thread) {
    try {
      ThreadAgents agents(call, thread, threads.count());
      agents.run();
      recorded[thread] = std::move(agents.events());
    } catch (...) {
      call.fail(std::current_exception());
    }
  });
  if (call.failure != nullptr) std::rethrow_exception(call.failure);
  if (events == nullptr) return;
  events->clear();
  for (const std::vector<TileEvent>& some : recorded) events->insert(events->end(), some.begin(), some.end());
}

}  // namespace uniep::cpu
