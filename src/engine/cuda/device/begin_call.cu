// Begins a call on each rank of `calls`, a CTA a rank: advances the epoch, clears the epoch's counters and tells all
// peers that the rank's inputs are in place. What the stream did before it (the inputs, the tables, `calls`) lies
// before that signal. The rank's last call has waited until all peers were done with its memory.
#include "engine/cuda/device/waiting.h"

using namespace uniep;
using namespace uniep::cuda;

extern "C" __global__ void uniep_begin_call(const RankCall* calls) {
  const RankCall& call = calls[blockIdx.x];
  const uint32_t epoch = epoch_after(*call.epoch);
  constexpr int32_t kNone = 0;
  const RunningCall running{call, epoch, kNone, kNone};
  __syncthreads();
  if (threadIdx.x == 0) *call.epoch = epoch;
  uint32_t* const bank = counter_bank(call, epoch);
  for (int64_t i = threadIdx.x; i < call.layout.counter_total; i += blockDim.x) bank[i] = 0;
  __syncthreads();
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < call.program.ranks;
       peer += static_cast<int32_t>(blockDim.x)) {
    store(running, FlagSignal{peer, FlagSpace::kArrive, call.program.rank});
  }
}
