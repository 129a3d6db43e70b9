#pragma once

#include "model/portability.h"

#ifdef __CUDACC__
#include "engine/cuda/device/ptx/memory.h"
#endif

// Flags between ranks: one writer each, an epoch as value. Every wait is bounded, and the first one of a rank that runs
// out of time says what it was for.
namespace uniep::cuda {

enum class SignalKind : uint32_t { kCounter = 0, kFlag = 1 };

// A signal that was waited for: its space is a CounterSpace or a FlagSpace (program/edges.h).
struct AwaitedSignal {
  SignalKind kind;
  int32_t space;
  int64_t index;
  uint32_t expected;  // a counter's threshold, or the epoch that a flag must hold
  uint32_t seen;
};

constexpr int32_t kNoStage = -1;

// What the first wait that ran out was for. One a rank, in ordinary memory. `failed` is 0, or 2 while the report is
// being written, or 1; all other waits of the rank give up once it is not 0.
struct WaitReport {
  uint32_t failed;
  int32_t rank;
  int32_t launch;
  int32_t direction;
  int32_t stage, expert, m, n;  // of the task that waited; kNoStage at the end of a call
  AwaitedSignal awaited;
};

#ifdef __CUDACC__
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
  ptx::store_release_system(&report->failed, 1);
}
#endif

}  // namespace uniep::cuda
