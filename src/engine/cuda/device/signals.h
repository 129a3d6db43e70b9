#pragma once

#include "model/portability.h"

#ifdef __CUDACC__
#include "engine/cuda/device/ptx/memory.h"
#endif

// Flags between ranks: one writer each, an epoch as value, compared modulo 2^32. Every wait is bounded.
namespace uniep::cuda {

constexpr int kMaxRanks = 64;

// At the start of every rank's symmetric memory; element p is written by rank p only.
struct SignalBlock {
  uint32_t arrive[kMaxRanks];  // p's inputs of this epoch are in place
  uint32_t done[kMaxRanks];    // p has finished its last access to this rank's memory in this epoch
};

enum class SignalKind : uint32_t { kArrive = 0, kDone = 1 };

// What the first wait that ran out was for. One a rank, in ordinary memory; `failed` is set last.
struct WaitReport {
  uint32_t failed;
  uint32_t rank;
  uint32_t kind;
  uint32_t peer;
  uint32_t expected;
  uint32_t seen;
};

UNIEP_HOST_DEVICE bool epoch_reached(uint32_t seen, uint32_t expected) {
  return static_cast<int32_t>(seen - expected) >= 0;
}

#ifdef __CUDACC__
// One thread. False when `limit_nanoseconds` pass first; the report then says what was missing.
UNIEP_DEVICE bool wait_for_signal(const uint32_t* flag, uint32_t expected, uint64_t limit_nanoseconds, uint32_t rank,
                                  SignalKind kind, uint32_t peer, WaitReport* report) {
  const uint64_t begin = ptx::nanoseconds();
  for (;;) {
    const uint32_t seen = ptx::load_acquire_system(flag);
    if (epoch_reached(seen, expected)) return true;
    if (ptx::nanoseconds() - begin > limit_nanoseconds) {
      if (atomicCAS(&report->failed, 0u, 2u) == 0u) {
        report->rank = rank;
        report->kind = static_cast<uint32_t>(kind);
        report->peer = peer;
        report->expected = expected;
        report->seen = seen;
        ptx::store_release_system(&report->failed, 1);
      }
      return false;
    }
    __nanosleep(64);
  }
}
#endif

}  // namespace uniep::cuda
