#pragma once

#include <vector>

#include "model/placement_state.h"
#include "model/routing_check.h"

// Placement as pure functions. Each source's slots are cut into chunks that any number of threads (or CTAs) may work on
// in any order: count every chunk, turn the counts into starting rows by prefix sums, assign every chunk. No atomics
// decide an address.
namespace uniep {

// The first slot with something wrong.
struct RoutingProblem {
  RoutingFault fault = RoutingFault::kNone;
  int64_t token = 0;
  int64_t slot = 0;
};

// The tokens [begin, end).
struct TokenChunk {
  int64_t begin, end;
};

// What counting writes.
struct CountedRows {
  int32_t* counts;          // [E]
  int32_t* expert_of_slot;  // [T, K]
};

// Adds to counts[E] the rows that the chunk's tokens send to each expert and writes their experts as int32. Returns the
// first problem; the counts then mean nothing.
template <typename Id>
RoutingProblem count_chunk(const Id* topk_ids, const float* probs, TokenChunk tokens, const LayerShape& shape,
                           CountedRows rows) {
  const int64_t topk = shape.topk;
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    for (int64_t slot = 0; slot < topk; ++slot) {
      const int64_t entry = token * topk + slot;
      const RoutingFault fault = check_slot(topk_ids, probs[entry], entry, static_cast<int32_t>(slot), shape.experts);
      if (fault != RoutingFault::kNone) return {fault, token, slot};
      rows.expert_of_slot[entry] = static_cast<int32_t>(topk_ids[entry]);
      if (topk_ids[entry] >= 0) ++rows.counts[topk_ids[entry]];
    }
  }
  return {};
}

// Gives the slots of the chunk's tokens their rows. next_row[E] holds the row of the chunk's first
// slot of each expert and is advanced.
inline void assign_chunk(const int32_t* expert_of_slot, TokenChunk tokens, int64_t topk, int32_t* next_row,
                         int32_t* row_of_slot) {
  for (int64_t entry = tokens.begin * topk; entry < tokens.end * topk; ++entry) {
    const int32_t expert = expert_of_slot[entry];
    row_of_slot[entry] = expert < 0 ? -1 : next_row[expert]++;
  }
}

// A rank's tokens in the order of their sums: by class, inside a class ascending.
std::vector<int32_t> order_by_last_expert(const std::vector<int32_t>& expert_of_slot, int64_t tokens,
                                          const LayerShape& shape, int ranks);

// From counts[W, E]: offsets, segments and row totals of every rank.
void lay_out_rows(internal::PlacementState& state);

// The first row that a source's slots take, by expert: segment start + offset of the source.
std::vector<int32_t> first_rows(const internal::PlacementState& state, int source_rank);

// What a source writes into the row tables of all owners.
void write_row_tables(internal::PlacementState& state, int source_rank, const float* probs);

}  // namespace uniep
