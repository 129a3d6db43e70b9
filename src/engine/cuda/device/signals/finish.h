#pragma once

#include "engine/cuda/device/signals/waiting.h"

namespace uniep::cuda {

// Whether later launches of the call reach peers. (Weight gradients do not, and may run in kernels of their own.)
UNIEP_DEVICE bool reaches_peers_later(const RankProgram& p, int32_t launch) {
  for (int32_t later = launch + 1; later < p.launches; ++later) {
    const LaunchStages& stages = p.stages[later];
    if (stages.dispatch || stages.first_gemm || stages.second_gemm || stages.combine) return true;
  }
  return false;
}

// The end of a launch, by one warp of each of the rank's CTAs behind a barrier of all its roles. The last CTA of the
// last launch that reaches peers tells all of them that this rank is done with their memory, and waits until they are
// done with its own.
UNIEP_DEVICE void finish_launch(const RunningCall& running, int32_t ctas) {
  const RankProgram& p = running.call.program;
  const uint32_t lane = ptx::lane_index();
  uint32_t before = 0;
  if (lane == 0) {
    before = ptx::add_acquire_release_gpu(counter_of(running, CounterSpace::kAgentsFinished, running.launch), 1);
  }
  const bool last = ptx::warp_uniform(before) + 1 == static_cast<uint32_t>(ctas);
  __syncwarp();  // what lane 0 has acquired is released by all
  if (!last || reaches_peers_later(p, running.launch) || has_failed(running)) return;
  for (int32_t peer = static_cast<int32_t>(lane); peer < p.ranks; peer += ptx::kThreadsPerWarp) {
    store(running, FlagSignal{peer, FlagSpace::kDone, p.rank});
  }
  const uniep::Task no_task{static_cast<Stage>(kNoStage), -1, -1, -1};
  for (int32_t peer = static_cast<int32_t>(lane); peer < p.ranks; peer += ptx::kThreadsPerWarp) {
    if (!wait_for(running, no_task, FlagWait{FlagSpace::kDone, peer})) return;
  }
}

}  // namespace uniep::cuda
