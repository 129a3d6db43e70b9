#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>

#include "engine/call_times.h"
#include "uniep/call_timer.h"

namespace uniep::internal {

// A CallTimer's: what the engine's calls write, one entry a local rank. An entry counts if it has the newest call's
// number: an earlier call may still be about to write it, of another timer, too, which had the memory before.
struct CallTimerState {
  uint64_t owner = 0;  // the Engine::number() that it comes from
  int first_rank = 0, count = 0;
  std::shared_ptr<RankTimes> ranks;
  uint32_t call = 0;  // a number of the newest call that was given it, of no other call or timer; 0: none

  void begin() {
    static std::atomic<uint32_t> calls{0};
    while ((call = ++calls) == 0) continue;
  }
  void write(int local, RankTimes times) {
    RankTimes& own = ranks.get()[local];
    const uint32_t number = call;
    times.call = own.call;
    times.runs = 1;
    own = times;
    std::atomic_ref(own.call).store(number, std::memory_order_release);
  }
  bool is_over() const {
    for (int local = 0; local < count; ++local) {
      if (std::atomic_ref(ranks.get()[local].call).load(std::memory_order_acquire) != call) return false;
    }
    return call != 0;
  }
  // Empty also while a replay is writing it.
  std::optional<RankTimes> read(int local) const {
    if (!is_over()) return std::nullopt;
    RankTimes& own = ranks.get()[local];
    RankTimes copy;
    std::memcpy(&copy, &own, sizeof(copy));
    std::atomic_thread_fence(std::memory_order_acquire);
    const bool whole = std::atomic_ref(own.runs).load(std::memory_order_relaxed) == copy.runs &&
                       std::atomic_ref(own.call).load(std::memory_order_relaxed) == call && copy.call == call;
    return whole ? std::optional(copy) : std::nullopt;
  }
};

}  // namespace uniep::internal
