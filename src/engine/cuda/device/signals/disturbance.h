#pragma once

#include "engine/cuda/device/ptx/common.h"

// Delays for tests: with UNIEP_DISTURBED ranks, CTAs and roles come late at random, in other places and by other times
// in each call. Kernels without it have none of this.
namespace uniep::cuda {

enum class DisturbedAt : uint32_t { kWait, kSignal, kCopy, kTile };

#ifdef UNIEP_DISTURBED
UNIEP_DEVICE uint32_t mixed(uint32_t bits) {
  bits = (bits ^ bits >> 16) * 0x85ebca6bu;
  bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
  return bits ^ bits >> 16;
}

// A fourth of the times, in half of the calls. Who is slow is so for the whole call: a fourth of the ranks and an
// eighth of the roles of CTAs. No branches: the compiler is to see that the warp stays together.
template <typename Running>
UNIEP_DEVICE void disturb(const Running& running, DisturbedAt at) {
  constexpr uint32_t kShortNs = 1024, kLongNs = 16384;
  const uint32_t call = mixed(running.epoch);
  const uint32_t rank = mixed(call + static_cast<uint32_t>(running.call.program.rank));
  const uint32_t role = mixed(rank + (blockIdx.x << 4) + ptx::thread_index() / 32);
  const uint32_t turn = mixed(role + ptx::nanoseconds_low());
  const bool delays = (call >> static_cast<uint32_t>(at) & 1u) != 0 && (turn & 3u) == 0;
  const uint32_t limit = (rank & 3u) == 0 || (role & 7u) == 0 ? kLongNs : kShortNs;
  __nanosleep(delays ? (turn >> 8) & (limit - 1) : 0);
}
#else
template <typename Running>
UNIEP_DEVICE void disturb(const Running& /*running*/, DisturbedAt /*at*/) {}
#endif

}  // namespace uniep::cuda
