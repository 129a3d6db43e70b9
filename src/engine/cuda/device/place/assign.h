#pragma once

#include "engine/cuda/device/place/count.h"

// The second half of a placement: every slot gets its row, and the row's owner is told.
namespace uniep::cuda {

UNIEP_DEVICE void store_row(RowSource* row, int32_t rank, uint32_t token, uint32_t slot, float prob) {
  ptx::store_global_16(row, {{static_cast<uint32_t>(rank), token, slot, __float_as_uint(prob)}});
}

// A warp. Lanes with the same expert take rows in the order of their slots, so the order is that of the slots whatever
// the timing.
UNIEP_DEVICE void assign_rows(const PlaceCta& cta, RowSource* const* rows_of) {
  const PlacementTables& tables = cta.own.tables;
  const WarpRange mine = slots_of_warp(cta);
  const uint32_t topk = static_cast<uint32_t>(cta.args.terms.topk);
  const uint32_t local_experts = static_cast<uint32_t>(cta.local_experts());
  int32_t* const before = cta.warp_rows();
  for (uint32_t base = mine.begin; base < mine.end; base += kSlotBatch * 32) {
    int32_t expert[kSlotBatch];
    float prob[kSlotBatch];
#pragma unroll
    for (uint32_t line = 0; line < kSlotBatch; ++line) {
      const uint32_t slot = base + line * 32 + ptx::lane_index();
      expert[line] = slot < mine.end ? tables.expert_of_slot[slot] : -1;
      prob[line] = slot < mine.end ? cta.own.probs[slot] : 0.0f;
    }
#pragma unroll
    for (uint32_t line = 0; line < kSlotBatch; ++line) {
      const uint32_t slot = base + line * 32 + ptx::lane_index();
      const uint32_t same = __match_any_sync(0xffffffffu, expert[line]);
      const int32_t rank_in_line = __popc(same & ptx::lanes_before());
      int32_t row = -1;
      if (expert[line] >= 0) row = cta.shared.first_row[expert[line]] + before[expert[line]] + rank_in_line;
      __syncwarp();
      if (expert[line] >= 0 && rank_in_line == 0) before[expert[line]] += __popc(same);
      __syncwarp();
      if (slot >= mine.end) continue;
      tables.row_of_slot[slot] = row;
      if (row < 0) continue;
      store_row(rows_of[static_cast<uint32_t>(expert[line]) / local_experts] + row, cta.own.rank, slot / topk,
                slot % topk, prob[line]);
    }
  }
}

// A warp: all slots are unused.
UNIEP_DEVICE void assign_nothing(const PlaceCta& cta) {
  const WarpRange mine = slots_of_warp(cta);
  for (uint32_t slot = mine.begin + ptx::lane_index(); slot < mine.end; slot += 32) {
    cta.own.tables.expert_of_slot[slot] = -1;
    cta.own.tables.row_of_slot[slot] = -1;
  }
}

// The rank's CTAs share the padding of its own segments.
UNIEP_DEVICE void write_padding(const PlaceCta& cta, RowSource* rows) {
  const int32_t first_expert = cta.own.rank * cta.local_experts();
  const int32_t places = cta.local_experts() * kRowAlignment;
  for (int32_t place = cta.index * kPlaceThreads + static_cast<int32_t>(threadIdx.x); place < places;
       place += cta.args.ctas * kPlaceThreads) {
    const int32_t expert = first_expert + place / kRowAlignment;
    const int32_t count = cta.shared.expert_rows[expert];
    const int32_t row = count + place % kRowAlignment;
    if (row < round_up(count, kRowAlignment)) {
      store_row(rows + cta.segment_start(expert) + row, -1, 0xffffffffu, 0xffffffffu, 0.0f);
    }
  }
}

// All threads: tells all ranks when the whole rank has written, or given up. True in the CTA that came last.
UNIEP_DEVICE bool publish_rows(const PlaceCta& cta) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    const uint32_t final_cta = static_cast<uint32_t>(cta.args.ctas) - 1;
    ptx::fence_system();
    last = atomicInc(&cta.own.state->placed_ctas, final_cta) == final_cta;
    if (last) {
      ptx::fence_system();
      const bool gave_up = ptx::load_relaxed_gpu(&cta.own.state->gave_up) == cta.epoch;
      for (int32_t peer = 0; peer < cta.args.ranks; ++peer) {
        ptx::store_release_system(&cta.own.control[peer]->place.placed[cta.own.rank], placed_word(cta.epoch, gave_up));
      }
    }
  }
  return __syncthreads_or(last) != 0;
}

// The rank's CTAs share its rows: out of the memory that peers write, into the table.
UNIEP_DEVICE void copy_rows(const PlaceCta& cta, const RowSource* from) {
  const int32_t rows = cta.padded_rows(cta.own.rank);
  for (int32_t row = cta.index * kPlaceThreads + static_cast<int32_t>(threadIdx.x); row < rows;
       row += cta.args.ctas * kPlaceThreads) {
    cta.own.tables.rows[row] = from[row];
  }
}

}  // namespace uniep::cuda
