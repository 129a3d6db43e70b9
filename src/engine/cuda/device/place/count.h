#pragma once

#include "engine/cuda/device/place/sums.h"

// The first half of a placement: how many slots each source sends to each expert, and that all of them are legal.
namespace uniep::cuda {

constexpr uint32_t kSlotBatch = 4;  // lines of 32 slots whose loads a warp has under way together

// A warp: checks its slots, writes their experts, and counts.
template <typename Id>
UNIEP_DEVICE void count_slots(const PlaceCta& cta, const Id* __restrict__ ids) {
  const WarpRange mine = slots_of_warp(cta);
  const uint32_t topk = static_cast<uint32_t>(cta.args.terms.topk);
  int32_t* const rows = cta.warp_rows();
  uint64_t problem = 0;
  for (uint32_t base = mine.begin; base < mine.end; base += kSlotBatch * 32) {
    Id id[kSlotBatch];
    float prob[kSlotBatch];
#pragma unroll
    for (uint32_t line = 0; line < kSlotBatch; ++line) {
      const uint32_t slot = base + line * 32 + ptx::lane_index();
      if (slot < mine.end) {
        id[line] = ids[slot];
        prob[line] = cta.own.probs[slot];
      }
    }
#pragma unroll
    for (uint32_t line = 0; line < kSlotBatch; ++line) {
      const uint32_t slot = base + line * 32 + ptx::lane_index();
      if (slot >= mine.end) continue;
      const RoutingFault fault =
          check_slot(ids, prob[line], slot, static_cast<int32_t>(slot % topk), cta.args.terms.experts);
      if (fault != RoutingFault::kNone) {
        const uint64_t word = problem_word(slot, fault);
        problem = word > problem ? word : problem;
        continue;
      }
      const int32_t expert = static_cast<int32_t>(id[line]);
      cta.own.tables.expert_of_slot[slot] = expert;
      if (expert >= 0) atomicAdd(rows + expert, 1);
    }
  }
  if (problem != 0) {
    atomicMax(reinterpret_cast<unsigned long long*>(&cta.own.state->problem[cta.bank()]),
              static_cast<unsigned long long>(problem));
  }
}

// A warp: counts slots whose experts another launch has written.
UNIEP_DEVICE void count_again(const PlaceCta& cta) {
  const WarpRange mine = slots_of_warp(cta);
  int32_t* const rows = cta.warp_rows();
  for (uint32_t slot = mine.begin + ptx::lane_index(); slot < mine.end; slot += 32) {
    const int32_t expert = cta.own.tables.expert_of_slot[slot];
    if (expert >= 0) atomicAdd(rows + expert, 1);
  }
}

// All threads: turns the warps' counts into what comes before each warp, and leaves the CTA's counts for the others.
UNIEP_DEVICE void sum_warps(const PlaceCta& cta) {
  const int32_t experts = cta.args.terms.experts;
  for (int32_t expert = static_cast<int32_t>(threadIdx.x); expert < experts; expert += kPlaceThreads) {
    const int32_t count = sum_over_warps(cta.shared.warp_rows, experts, expert);
    if ((cta.args.phases & kCountPhase) != 0) cta.own.chunk_counts[cta.index * experts + expert] = count;
  }
}

// All threads: until all CTAs of the rank have counted. The epoch is advanced behind it, when all have read it.
UNIEP_DEVICE bool meet_ctas(const PlaceCta& cta) {
  __syncthreads();
  bool late = false;
  if (threadIdx.x == 0) {
    PlaceState& state = *cta.own.state;
    ptx::fence_gpu();
    atomicAdd(&state.counted_ctas, 1u);
    late = wait_until_reached(&state.counted_ctas, cta.epoch * static_cast<uint32_t>(cta.args.ctas),
                              cta.args.wait_limit_ns, nullptr, 0) != WaitEnd::kReached;
    if (late) {
      PlaceReport report{};
      report.fault = PlaceFault::kStalled;
      report.rank = cta.own.rank;
      report_failure(cta, report);
      give_up(cta);
    } else if (cta.index == 0) {
      state.epoch = cta.epoch;
      state.problem[cta.bank() ^ 1u] = 0;
    }
  }
  return __syncthreads_or(late) == 0;
}

// All threads: how many slots of the rank come before the CTA's, and how many there are.
UNIEP_DEVICE void sum_ctas(const PlaceCta& cta) {
  const int32_t experts = cta.args.terms.experts;
  for (int32_t expert = static_cast<int32_t>(threadIdx.x); expert < experts; expert += kPlaceThreads) {
    const CtaSums slots =
        sum_over_ctas(cta, [&](int32_t other) { return cta.own.chunk_counts[other * experts + expert]; });
    cta.shared.first_row[expert] = slots.before;
    cta.shared.expert_rows[expert] = slots.all;  // of this source, until lay_out()
  }
}

// The rank's CTAs share the peers: all threads of a CTA send counts, one thread signals.
UNIEP_DEVICE void send_counts(const PlaceCta& cta) {
  const PlaceRank& own = cta.own;
  for (int32_t peer = cta.index; peer < cta.args.ranks; peer += cta.args.ctas) {
    PlaceExchange& target = own.control[peer]->place;
    for (int32_t expert = static_cast<int32_t>(threadIdx.x); expert < cta.args.terms.experts; expert += kPlaceThreads) {
      target.counts[cta.bank()][own.rank][expert] = cta.shared.expert_rows[expert];
    }
    if (threadIdx.x == 0) {
      const uint64_t problem = own.state->problem[cta.bank()];
      SourceHeader header{own.tokens, problem, 0, 0.0f, own.dense, cta.args.terms};
      if (problem != 0) {
        const int64_t entry = problem_entry(problem);
        header.id = own.wide_ids != 0 ? static_cast<const int64_t*>(own.topk_ids)[entry]
                                      : static_cast<const int32_t*>(own.topk_ids)[entry];
        header.prob = own.probs[entry];
      }
      target.header[cta.bank()][own.rank] = header;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::fence_system();
      ptx::store_release_system(&target.counted[own.rank], cta.epoch);
    }
  }
}

}  // namespace uniep::cuda
