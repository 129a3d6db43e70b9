// Begins a call on each rank of `calls`, a CTA a rank: advances the epoch, clears the epoch's counters and tells all
// peers what the call is and that the rank's inputs are in place. What the stream did before it (the inputs, the
// tables, `calls`) lies before that signal. The rank's last call has waited until all peers were done with its memory.
// On a placement that failed the call does nothing, and says so to everybody.
#include "engine/cuda/device/arguments/begin_arguments.h"
#include "engine/cuda/device/signals/waiting.h"

using namespace uniep;
using namespace uniep::cuda;

namespace {

UNIEP_DEVICE void tell_peer(const RunningCall& running, int32_t peer, const CallDescription& description, bool whole) {
  const int32_t own = running.call.program.rank;
  CallBoard& board = *running.call.state->board[peer];
  board.call[running.epoch & 1u][own] = description;
  if (!whole && description.number != kReplayed) {
    ptx::store_release_system(&board.given_up[own].number[CallsGivenUp::kOfHost], description.number);
  }
  store(running, FlagSignal{peer, FlagSpace::kArrive, own});
}

UNIEP_DEVICE void report_placement(const RunningCall& running) {
  WaitReport content{};
  content.rank = running.call.program.rank;
  content.direction = static_cast<int32_t>(running.call.program.direction);
  content.stage = kNoStage;
  content.awaited.kind = SignalKind::kPlacement;
  write_report(&running.call.state->report, content);
}

}  // namespace

extern "C" __global__ void uniep_begin_call(const __grid_constant__ BeginArguments args) {
  RankCall& call = args.calls[blockIdx.x];
  const uint32_t* const of_placement = args.whole[blockIdx.x];
  const bool whole = of_placement == nullptr || *of_placement != 0;
  const uint32_t epoch = epoch_after(call.state->epoch);
  constexpr int32_t kNone = 0;
  const uint64_t stays = 0;
  const RunningCall running{call, epoch, kNone, kNone, stays};
  __syncthreads();
  if (threadIdx.x == 0) {
    call.state->epoch = epoch;
    for (int32_t launch = 0; launch < kMaxLaunches; ++launch) {
      call.program.stages[launch] = whole ? args.stages[launch] : LaunchStages{};
    }
    for (int32_t group = 0; group < args.groups; ++group) args.boards[group]->running = args.running;
    if (!whole) report_placement(running);
  }
  uint32_t* const bank = counter_bank(call, epoch);
  for (int64_t i = threadIdx.x; i < call.layout.counter_total; i += blockDim.x) bank[i] = 0;
  __syncthreads();
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < call.program.ranks;
       peer += static_cast<int32_t>(blockDim.x)) {
    tell_peer(running, peer, args.description, whole);
  }
}
