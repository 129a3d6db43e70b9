#pragma once

#include "engine/cuda/device/roles/dispatch.h"
#include "engine/cuda/device/roles/send.h"

// The copy agent: walks its worker's share of a list of copies, in order.
namespace uniep::cuda {

// One of the agents that share a worker's tasks: with n of them agent i takes every n-th task from the i-th on.
struct Share {
  uint32_t index = 0;
  uint32_t count = 1;
};

// The tasks of a list that fall to an agent. A whole warp.
class ListWalk {
 public:
  UNIEP_DEVICE ListWalk(const RunningCall& running, ListKind kind, Share share)
      : running_(running), kind_(kind), index_(share.index), stride_(share.count) {
    const Participants who = participants_of(running.call.program, running.launch, kind);
    const bool walks = running.worker >= who.begin && running.worker < who.end;
    length_ = walks ? list_length(running.call.program, running.launch, kind) : 0;
  }

  // False at the end of the list.
  UNIEP_DEVICE bool next(uniep::Task& task) {
    const RankProgram& p = running_.call.program;
    do {
      const int64_t position = next_position();
      if (position >= length_) return false;
      task = list_task(p, running_.launch, kind_, position, cursor_);
    } while (!task.has_tile());
    return true;
  }

 private:
  UNIEP_DEVICE int64_t next_position() {
    const RankProgram& p = running_.call.program;
    if (length_ == 0) return 0;
    if (!p.dynamic) {
      const int64_t index = index_;
      index_ += stride_;
      return static_position(p, participants_of(p, running_.launch, kind_), running_.worker, index);
    }
    uint32_t ticket = 0;
    if (ptx::lane_index() == 0) {
      ticket = atomicAdd(
          counter_of(running_, CounterSpace::kTickets, running_.launch * kListKinds + static_cast<int32_t>(kind_)), 1u);
    }
    return __shfl_sync(0xffffffffu, ticket, 0);
  }

  const RunningCall& running_;
  ListKind kind_;
  uint32_t index_, stride_;
  int64_t length_;
  ListCursor cursor_;
};

// One warp with a ring of its own: pull, or push and receive. False once the call has failed.
template <typename Storage>
UNIEP_DEVICE bool run_dispatch(const RunningCall& running, CopyRing<Storage>& ring, Share share) {
  ListWalk walk(running, ListKind::kDispatch, share);
  for (uniep::Task task; walk.next(task);) {
    if (!wait_for_task(running, task)) return false;
    ptx::fence_proxy_async_global();  // bulk copies read what ordinary stores have written
    if (task.stage == Stage::kPull) {
      pull_rows(running, task, ring, Storage::kBytes);
    } else if (task.stage == Stage::kPush) {
      push_rows(running, task, ring, Storage::kBytes);
    } else {
      receive_rows(running, task, ring, Storage::kBytes);
    }
  }
  return true;
}

// One warp with a ring of its own: the staged combine without groups. False once the call has failed.
template <typename Storage>
UNIEP_DEVICE bool run_send(const RunningCall& running, CopyRing<Storage>& ring, Share share) {
  ListWalk walk(running, ListKind::kSend, share);
  for (uniep::Task task; walk.next(task);) {
    if (!wait_for_task(running, task)) return false;
    ptx::fence_proxy_async_global();
    send_rows(running, task, ring, Storage::kBytes);
  }
  return true;
}

// The combine with groups, by a team of warps that share each task. `share` is the team's. False once the call has
// failed. The queue is static when a team has several warps: they must see the same tasks.
template <SumDepth kDepth>
UNIEP_DEVICE bool run_group_send(const RunningCall& running, Share share, const SendTeam& team) {
  ListWalk walk(running, ListKind::kSend, share);
  for (uniep::Task task; walk.next(task);) {
    if (!wait_for_group_send(running, task)) return false;
    send_groups<kDepth>(running, task, team);
  }
  return true;
}

}  // namespace uniep::cuda
