#pragma once

#include "engine/cuda/device/signals/waiting.h"

// When an agent's tiles ran, for the profiler; the call says whether anybody wants to know.
namespace uniep::cuda {

struct TileTimes {
  uint64_t wait_begin_ns, begin_ns, end_ns;  // %globaltimer
};

UNIEP_DEVICE bool is_recorded(const RankCall& call) {
  return call.records != nullptr;
}

// One thread.
UNIEP_DEVICE void write_record(const RunningCall& running, AgentRole role, const uniep::Task& task,
                               const TileTimes& times) {
  constexpr int32_t kAgentsPerWorker = 2;
  const RankCall& call = running.call;
  const int32_t agent = running.worker * kAgentsPerWorker + static_cast<int32_t>(role);
  const uint32_t index = atomicAdd(call.record_counts + agent, 1u) % call.record_capacity;
  TileRecord& record = call.records[agent * static_cast<int64_t>(call.record_capacity) + index];
  record.task = task;
  record.launch = static_cast<uint32_t>(running.launch);
  record.wait_begin_ns = times.wait_begin_ns;
  record.begin_ns = times.begin_ns;
  record.end_ns = times.end_ns;
}

constexpr uint32_t kNobody = 0xffffffffu;

// Of the tile that a warp is at. In shared memory, since registers are scarce.
struct RecordState {
  TileTimes times;
  uint32_t thread;  // threadIdx.x of the one that records, or kNobody
};

// Records the tiles of a warp that begins and ends them itself.
class TileRecorder {
 public:
  UNIEP_DEVICE TileRecorder(const RunningCall& running, RecordState& state, AgentRole role)
      : running_(running), state_(state), role_(role) {}

  UNIEP_DEVICE void wait_begins() const {
    if (is_on()) state_.times.wait_begin_ns = ptx::nanoseconds();
  }
  UNIEP_DEVICE void begins() const {
    if (is_on()) state_.times.begin_ns = ptx::nanoseconds();
  }
  UNIEP_DEVICE void ends(const uniep::Task& task) const {
    if (!is_on()) return;
    state_.times.end_ns = ptx::nanoseconds();
    write_record(running_, role_, task, state_.times);
  }

 private:
  UNIEP_DEVICE bool is_on() const { return is_recorded(running_.call) && ptx::thread_index() == state_.thread; }

  const RunningCall& running_;
  RecordState& state_;
  const AgentRole role_;
};

}  // namespace uniep::cuda
