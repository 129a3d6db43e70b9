#pragma once

#include "engine/cuda/device/signals/waiting.h"

// The tickets of dynamic queues. A lent worker (RankProgram::lent_workers) whose time is over gets none, as at the end
// of a list. What it has taken it runs, and that waits for its own rank alone: so it leaves soon, whatever peers do.
namespace uniep::cuda {

UNIEP_DEVICE bool has_to_leave(const RunningCall& running) {
  return running.leaves_ns != 0 && ptx::nanoseconds() >= running.leaves_ns;
}

// One thread.
UNIEP_DEVICE uint32_t take_ticket(const RunningCall& running, int64_t counter) {
  if (has_to_leave(running)) return kNoTicket;
  return atomicAdd(counter_of(running, CounterSpace::kTickets, counter), 1u);
}

// One thread of a lent worker: until all peers have arrived, or its time is over.
UNIEP_DEVICE void wait_for_peers_or_leave(const RunningCall& running) {
  constexpr uint32_t kPauseNs = 256;
  while (missing_peer(running) >= 0 && !has_to_leave(running)) __nanosleep(kPauseNs);
}

}  // namespace uniep::cuda
