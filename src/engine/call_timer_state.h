#pragma once

#include <atomic>
#include <memory>

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
    own = times;
    std::atomic_ref(own.call).store(number, std::memory_order_release);
  }
  bool is_over() const {
    for (int local = 0; local < count; ++local) {
      if (std::atomic_ref(ranks.get()[local].call).load(std::memory_order_acquire) != call) return false;
    }
    return call != 0;
  }
};

}  // namespace uniep::internal
