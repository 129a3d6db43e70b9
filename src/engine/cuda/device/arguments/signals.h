#pragma once

#include "model/portability.h"

#ifdef __CUDACC__
#include "engine/cuda/device/ptx/memory.h"
#endif

// Flags between ranks: one writer each, an epoch as value. Every wait is bounded, and the first one of a rank that runs
// out of time says what it was for.
namespace uniep::cuda {

constexpr int kMaxCudaRanks = 8;

enum class SignalKind : uint32_t {
  kCounter = 0,
  kFlag,
  kPlacement,   // the call's placement failed on this rank
  kPeerFailed,  // rank `index` gave up the call, or left the group
  kOtherCall,   // rank `index` makes another call than this rank in epoch `expected`
};

// A signal that was waited for: its space is a CounterSpace or a FlagSpace (program/edges.h). Of kOtherCall `space` and
// `seen` are the numbers of this rank's and the peer's call.
struct AwaitedSignal {
  SignalKind kind;
  int32_t space;
  int64_t index;
  uint32_t expected;  // a counter's threshold, or the epoch that a flag must have reached
  uint32_t seen;
};

constexpr int32_t kNoStage = -1;

enum class CallKind : uint32_t { kForward = 0, kBackward, kDispatch, kCombine, kRecompute };

// What must be the same on all ranks of a call.
struct CallDescription {
  uint32_t number;  // of this rank's calls on its group; kReplayed in a graph
  CallKind kind;
  int32_t hidden, intermediate, experts, topk;
  uint32_t schedule;  // a hash of Schedule, Numerics and the number of the placement's call
  uint32_t input;     // a hash of where x lies: 0 is a copy, else a symmetric buffer and an offset
};
constexpr uint32_t kReplayed = 0xffffffffu;

// A rank that refuses a call makes its next one in the same epoch: then the numbers differ. Replays have none.
UNIEP_HOST_DEVICE bool is_same_call(const CallDescription& a, const CallDescription& b) {
  const bool numbers = a.number == b.number || a.number == kReplayed || b.number == kReplayed;
  return numbers && a.kind == b.kind && a.hidden == b.hidden && a.intermediate == b.intermediate &&
         a.experts == b.experts && a.topk == b.topk && a.schedule == b.schedule && a.input == b.input;
}

// What a GPU runs, of whichever of its process's groups.
struct RunningNote {
  uint32_t group;  // the process's n-th group
  uint32_t call;   // of that group
};

// Numbers of the last calls that a rank gave up, or kLeft; 0: none. Several, because a peer's GPU may be that far
// behind its host: one that refuses two calls in a row is to be seen in the first, too. Its host writes one after the
// other in turn, its GPU the last.
struct alignas(16) CallsGivenUp {
  static constexpr int kOfHost = 3;
  uint32_t number[kOfHost + 1];
};
constexpr uint32_t kLeft = 0xfffffffeu;  // the rank makes no more calls

UNIEP_HOST_DEVICE bool takes_no_part(const CallsGivenUp& given_up, uint32_t call) {
  bool without = false;
  for (const uint32_t number : given_up.number) {
    without = without || number == kLeft || (number == call && call != kReplayed && call != 0);
  }
  return without;
}

// A rank's memory in which peers tell of their calls; element p only rank p writes.
struct CallBoard {
  CallsGivenUp given_up[kMaxCudaRanks];
  CallDescription call[2][kMaxCudaRanks];  // of the epoch with this lowest bit
  RunningNote running;                     // of this rank's GPU, for peers that wait for it to arrive
};

// What the first wait that ran out was for. One a rank, in ordinary memory. `failed` is 0, or 2 while the report is
// being written, or 1; all other waits of the rank give up once it is not 0.
struct WaitReport {
  uint32_t failed;
  int32_t rank;
  int32_t launch;
  int32_t direction;
  int32_t stage, expert, m, n;  // of the task that waited; kNoStage at the begin or end of a call
  AwaitedSignal awaited;
  int32_t ranks, blocks,
      units;  // how a flag's index says whose it is: RankProgram's ranks, most_blocks, combine_units()
};

// A rank's state of its own on its GPU, from call to call.
struct RankState {
  WaitReport report;
  uint32_t epoch;                   // of the running or last call
  CallBoard* board[kMaxCudaRanks];  // of every rank, as this one reaches it
};

// Flags of calls that may be over when they are looked at: a peer may be a call ahead. 0 is no epoch.
UNIEP_HOST_DEVICE bool is_reached(uint32_t seen, uint32_t epoch) {
  return seen != 0 && static_cast<int32_t>(seen - epoch) >= 0;
}

#ifdef __CUDACC__
UNIEP_DEVICE CallsGivenUp load_given_up(const CallsGivenUp& given_up) {
  const ptx::Vector16 words = ptx::load_acquire_system_16(&given_up);
  return {{words.word[0], words.word[1], words.word[2], words.word[3]}};
}

// One thread. Only the first report of a rank is kept.
UNIEP_DEVICE void write_report(WaitReport* report, const WaitReport& content) {
  if (atomicCAS(&report->failed, 0u, 2u) != 0u) return;
  report->rank = content.rank;
  report->launch = content.launch;
  report->direction = content.direction;
  report->stage = content.stage;
  report->expert = content.expert;
  report->m = content.m;
  report->n = content.n;
  report->awaited = content.awaited;
  report->ranks = content.ranks;
  report->blocks = content.blocks;
  report->units = content.units;
  ptx::store_release_system(&report->failed, 1);
}
#endif

}  // namespace uniep::cuda
