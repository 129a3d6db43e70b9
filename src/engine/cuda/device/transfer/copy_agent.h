#pragma once

#include "engine/cuda/device/signals/tickets.h"
#include "engine/cuda/device/signals/tile_recorder.h"
#include "engine/cuda/device/transfer/dispatch.h"
#include "engine/cuda/device/transfer/send.h"

// The copy agent: walks its worker's share of a list of copies, in order.
namespace uniep::cuda {

// One of the agents that share a worker's tasks: with n of them agent i takes every n-th task from the i-th on.
struct Share {
  uint32_t index = 0;
  uint32_t count = 1;
};

// Where the walk of one warp through a list stands, in shared memory, since registers are scarce.
struct WalkState {
  uniep::Task task;
  int64_t length;
  ListCursor cursor;
  uint32_t index;
  bool found;
  bool all_arrived;    // the peers; then pulls and pushes have nothing to wait for
  RecordState record;  // set at the begin of the launch
};

UNIEP_DEVICE TileRecorder copy_recorder(const RunningCall& running, WalkState& state) {
  return {running, state.record, AgentRole::kCopy};
}

// The tasks of a list that fall to an agent, one after the other. A whole warp.
class ListWalk {
 public:
  UNIEP_DEVICE ListWalk(const RunningCall& running, WalkState& state, Share share, ListKind kind)
      : running_(running), state_(state), stride_(share.count), kind_(kind) {
    const Participants who = participants_of(running.call.program, running.launch, kind);
    const bool walks = running.worker >= who.begin && running.worker < who.end;
    __syncwarp();
    if (ptx::lane_index() != 0) return;
    state_.length = walks ? list_length(running.call.program, running.launch, kind) : 0;
    state_.cursor = {};
    state_.index = share.index;
    state_.all_arrived = false;
  }

  // False at the end of the list.
  UNIEP_DEVICE bool next() {
    __syncwarp();
    if (ptx::lane_index() == 0) step();
    __syncwarp();
    return state_.found;
  }

  UNIEP_DEVICE const uniep::Task& task() const { return state_.task; }

 private:
  UNIEP_DEVICE void step() {
    do {
      const int64_t position = state_.length == 0 ? 0 : take_position();
      state_.found = position < state_.length;
      if (!state_.found) return;
      state_.task = copy_list_task(running_.call.program, running_.launch, kind_, position, state_.cursor);
    } while (!state_.task.has_tile());
  }

  UNIEP_DEVICE int64_t take_position() {
    const RankProgram& p = running_.call.program;
    if (p.dynamic) return take_ticket(running_, ticket_counter(running_.launch, kind_));
    const uint32_t index = state_.index;
    state_.index += stride_;
    const Participants who = participants_of(p, running_.launch, kind_);
    return even_position(who, running_.worker, index);
  }

  const RunningCall& running_;
  WalkState& state_;
  uint32_t stride_;
  ListKind kind_;
};

// What a copying warp has in shared memory.
template <int kChunkBytes, int kStages>
struct CopyStorage {
  CopyRingStorage<kChunkBytes, kStages> ring;
  WalkState walk;
};

// Until a copy may begin. A whole warp.
template <Stage kStage>
UNIEP_DEVICE bool wait_for_copy(const RunningCall& running, const uniep::Task& task, WalkState& state) {
  constexpr bool kOnlyArrivals = kStage == Stage::kPull || kStage == Stage::kPush;
  if (kOnlyArrivals && state.all_arrived) return true;
  if (!wait_for_task(running, task)) return false;
  if (kOnlyArrivals) {
    const bool all_arrived = all_lanes(missing_peer(running) < 0);
    // No later task asks its sources. So all are asked now whether they make the same call.
    if (all_arrived && !all_lanes(all_make_same_call(running, task))) return false;
    if (ptx::lane_index() == 0) state.all_arrived = all_arrived;
    __syncwarp();
  }
  return true;
}

template <Stage kStage, typename Ring>
UNIEP_DEVICE bool run_copy(const RunningCall& running, const uniep::Task& task, WalkState& state, Ring& ring) {
  const uniep::Task staged = as_stage<kStage>(task);
  const TileRecorder recorder = copy_recorder(running, state);
  recorder.wait_begins();
  if (!wait_for_copy<kStage>(running, staged, state)) return false;
  recorder.begins();
  disturb(running, DisturbedAt::kCopy);
  ptx::fence_proxy_async_global();  // bulk copies read what ordinary stores have written
  if constexpr (kStage == Stage::kPull) pull_rows(running, staged, ring);
  if constexpr (kStage == Stage::kPush) push_rows(running, staged, ring);
  if constexpr (kStage == Stage::kReceive) receive_rows(running, staged, ring);
  if constexpr (kStage == Stage::kSend) send_rows(running, staged, ring);
  recorder.ends(task);
  return true;
}

// One warp with a ring of its own: pull, push or receive what stands in the list. False once the call has failed.
template <typename Ring>
UNIEP_DEVICE bool run_dispatch(const RunningCall& running, Ring& ring, WalkState& state, Share share,
                               ListKind kind = ListKind::kDispatch) {
  ListWalk walk(running, state, share, kind);
  bool holds = true;
  while (holds && walk.next()) {
    const uniep::Task& task = walk.task();
    if (task.stage == Stage::kPull) {
      holds = run_copy<Stage::kPull>(running, task, state, ring);
    } else if (task.stage == Stage::kPush) {
      holds = run_copy<Stage::kPush>(running, task, state, ring);
    } else {
      holds = run_copy<Stage::kReceive>(running, task, state, ring);
    }
  }
  return holds;
}

// One warp with a ring of its own: the staged combine without groups. False once the call has failed.
template <typename Ring>
UNIEP_DEVICE bool run_send(const RunningCall& running, Ring& ring, WalkState& state, Share share) {
  ListWalk walk(running, state, share, ListKind::kSend);
  bool holds = true;
  while (holds && walk.next()) holds = run_copy<Stage::kSend>(running, walk.task(), state, ring);
  return holds;
}

// The combine with groups, by a team of warps that share each task; `share` is the team's. Where a team has several
// warps the queue must be static, so that they see the same tasks. False once the call has failed.
template <typename Sum>
UNIEP_DEVICE bool run_group_send(const RunningCall& running, WalkState& state, Share share, const SendTeam& team,
                                 Sum& sum) {
  ListWalk walk(running, state, share, ListKind::kSend);
  const TileRecorder recorder = copy_recorder(running, state);
  while (walk.next()) {
    recorder.wait_begins();
    if (!team.agrees(wait_for_group_send(running, walk.task()))) return false;
    recorder.begins();
    disturb(running, DisturbedAt::kCopy);
    ptx::fence_proxy_async_global();
    send_groups(running, walk.task(), team, sum);
    recorder.ends(walk.task());
  }
  return true;
}

}  // namespace uniep::cuda
