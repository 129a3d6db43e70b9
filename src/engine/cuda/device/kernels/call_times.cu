// Contract: one CTA behind a call's launches, in the order of its stream. Adds up what the agents of a rank wrote down
// (TileRecord) as program/call_times.h says, and tells the host: RankTimes in its memory, which it may read at any
// time, so `call` is 0 meanwhile.
#include "engine/cuda/device/arguments/call_times_arguments.h"
#include "engine/cuda/device/ptx/common.h"

namespace uniep::cuda {

using program::CallSpan;
using program::FirstWaits;
using program::TileSpan;
using SharedWord = unsigned long long;  // as atomics take it

struct TimesStorage {
  SharedWord begin, gemms_end, sums_end, end, arrival, waits;
  uint32_t workers, lost;
};

UNIEP_DEVICE TileSpan tile_of(const TileRecord& record) {
  return {record.task.stage, record.wait_begin_ns, record.begin_ns, record.end_ns};
}

UNIEP_DEVICE const TileRecord* records_of(const CallTimesArguments& args, uint32_t agent) {
  return args.records + agent * static_cast<int64_t>(args.capacity);
}

UNIEP_DEVICE uint32_t kept(const CallTimesArguments& args, uint32_t agent) {
  const uint32_t count = args.counts[agent];
  return count < args.capacity ? count : args.capacity;
}

UNIEP_DEVICE uint64_t warp_min(uint64_t value) {
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, value, step);
    value = other < value ? other : value;
  }
  return value;
}

UNIEP_DEVICE uint64_t warp_sum(uint64_t value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// A warp an agent.
UNIEP_DEVICE void find_span(const CallTimesArguments& args, TimesStorage& shared) {
  CallSpan own;
  for (uint32_t agent = ptx::warp_index(); agent < args.agents; agent += kCallTimesThreads / 32) {
    if (args.counts[agent] > args.capacity) shared.lost = 1;
    for (uint32_t i = ptx::lane_index(); i < kept(args, agent); i += 32) own.add(tile_of(records_of(args, agent)[i]));
  }
  atomicMin(&shared.begin, own.begin_ns);
  atomicMax(&shared.gemms_end, own.gemms_end_ns);
  atomicMax(&shared.sums_end, own.sums_end_ns);
  atomicMax(&shared.end, own.end_ns);
}

UNIEP_DEVICE void add_waits(const CallTimesArguments& args, const CallSpan& call, TimesStorage& shared) {
  uint64_t arrival = 0;
  for (uint32_t agent = ptx::warp_index(); agent < args.agents; agent += kCallTimesThreads / 32) {
    FirstWaits own;
    for (uint32_t i = ptx::lane_index(); i < kept(args, agent); i += 32) {
      const TileSpan tile = tile_of(records_of(args, agent)[i]);
      own.add(tile);
      const uint64_t late = call.arrival_ns(tile);
      arrival = late > arrival ? late : arrival;
    }
    own = {warp_min(own.first_ns), warp_min(own.first_of_first_ns), warp_sum(own.waits_ns)};
    const bool computes = agent % 2 == 1;
    if (computes && own.has_tiles() && ptx::lane_index() == 0) {
      atomicAdd(&shared.waits, own.total_ns(call));
      atomicAdd(&shared.workers, 1u);
    }
  }
  atomicMax(&shared.arrival, arrival);
}

UNIEP_DEVICE void tell_host(const CallTimesArguments& args, const CallSpan& call, const TimesStorage& shared) {
  program::RankTimes& times = *args.times;
  volatile uint32_t& number = times.call;
  const uint32_t runs = number == args.call ? times.runs + 1 : 1;
  number = 0;
  __threadfence_system();
  times.first_waits_ns = shared.waits;
  times.arrival_ns = shared.arrival;
  times.sum_ns = call.sum_ns();
  times.call_ns = call.call_ns();
  times.workers = shared.workers;
  times.lost = shared.lost;
  times.runs = runs;
  __threadfence_system();
  number = args.call;
}

extern "C" __global__ void __launch_bounds__(kCallTimesThreads)
    uniep_call_times(const __grid_constant__ CallTimesArguments args) {
  __shared__ TimesStorage shared;
  if (ptx::thread_index() == 0) shared = {~0ull, 0, 0, 0, 0, 0, 0, 0};
  __syncthreads();
  find_span(args, shared);
  __syncthreads();
  const CallSpan call{shared.begin, shared.gemms_end, shared.sums_end, shared.end};
  add_waits(args, call, shared);
  __syncthreads();
  if (ptx::thread_index() != 0) return;
  tell_host(args, call, shared);
}

}  // namespace uniep::cuda
