// Places the tokens of all ranks: from each rank's top-k ids and probs to its tables (design: prefix sums give every
// address, no atomics do). The CTAs of a rank run side by side (a cooperative launch). Order of a placement:
//   count    each CTA checks and counts its run of slots, and its tokens by class; all CTAs of the rank meet; counts of
//            slots go to all ranks
//   lay out  when all counts have come, every CTA derives segments and offsets from them
//   assign   slots get rows, in order; {rank, token, slot, prob} goes straight into the owner's row table; tokens get
//            their places in the order of the sums
//   finish   the last CTA tells all ranks, and the rank ends when all have told it
// A peer's counts are also its word that its tables may be written: it sends them after all earlier work of its stream.
// A rank that gives up says so instead of `placed`, so that the placement fails on all ranks that wait for it; on those
// that do not, calls on it end when the failed ranks begin them.
#include "engine/cuda/device/place/assign.h"
#include "engine/cuda/device/place/layout.h"
#include "engine/cuda/device/place/order_tokens.h"

using namespace uniep;
using namespace uniep::cuda;

extern "C" __global__ void __launch_bounds__(kPlaceThreads) uniep_place(const __grid_constant__ PlaceArguments args) {
  extern __shared__ int32_t shared_memory[];
  __shared__ RowSource* rows_of[kMaxCudaRanks];
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  const PlaceRank& own = args.rank[block / args.ctas];
  const bool counts = (args.phases & kCountPhase) != 0;
  const bool assigns = (args.phases & kAssignPhase) != 0;
  const PlaceCta cta{args, own, PlaceShared(shared_memory, args.terms.experts), block % args.ctas,
                     own.state->epoch + (counts ? 1u : 0u)};
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kPlaceWarps * args.terms.experts; i += kPlaceThreads) {
    cta.shared.warp_rows[i] = 0;
  }
  cta.warp_tokens()[threadIdx.x % 32] = 0;
  if (threadIdx.x < kMaxCudaRanks) rows_of[threadIdx.x] = own.rows_of[threadIdx.x];
  __syncthreads();

  if (!counts) {
    count_again(cta);
    count_tokens(cta, own.tables.expert_of_slot);
  } else if (own.wide_ids != 0) {
    count_slots(cta, static_cast<const int64_t*>(own.topk_ids));
    count_tokens(cta, static_cast<const int64_t*>(own.topk_ids));
  } else {
    count_slots(cta, static_cast<const int32_t*>(own.topk_ids));
    count_tokens(cta, static_cast<const int32_t*>(own.topk_ids));
  }
  __syncthreads();
  const bool sums_tokens = threadIdx.x / 32 == kPlaceWarps - 1;
  sum_warps(cta);
  if (sums_tokens) sum_warp_tokens(cta);
  bool came = true;
  if (counts) came = meet_ctas(cta);
  sum_ctas(cta);
  if (sums_tokens) sum_cta_tokens(cta);
  __syncthreads();
  if (counts && came) {
    send_counts(cta);
    came = wait_for_ranks(cta, {cta.inbox().counted, cta.epoch, PlaceFault::kCountsMissing, args.arrival_limit_ns},
                          [](uint32_t) { return false; });
    if (came) came = !has_other_arguments(cta);
  }

  bool empty = !came || has_routing_problem(cta);
  lay_out(cta, empty);
  if (!empty && overflows(cta)) {
    empty = true;
    __syncthreads();
    lay_out(cta, empty);
  }
  if (counts) write_tables(cta, empty, came);
  if (empty && came && cta.index == 0 && threadIdx.x == 0 && own.tables.whole != nullptr) {
    atomicCAS(own.tables.whole, kWhole, kEmptied);
  }
  if (!assigns) return;

  for (int32_t expert = static_cast<int32_t>(threadIdx.x); expert < args.terms.experts && !empty;
       expert += kPlaceThreads) {
    cta.shared.first_row[expert] += cta.shared.own_offset[expert] + cta.segment_start(expert);
  }
  __syncthreads();
  if (empty) {
    assign_nothing(cta);
    order_ascending(cta);
  } else {
    assign_rows(cta, rows_of);
    order_tokens(cta);
    write_padding(cta, rows_of[own.rank]);
  }
  const bool last = publish_rows(cta);
  const bool copies = rows_of[own.rank] != own.tables.rows;
  if (!last && !copies) return;
  const uint32_t expected = placed_word(cta.epoch, false);
  const auto gave_up = [&](uint32_t word) { return word == placed_word(cta.epoch, true); };
  if (!wait_for_ranks(cta, {cta.inbox().placed, expected, PlaceFault::kRowsMissing, args.wait_limit_ns}, gave_up))
    return;
  if (copies) copy_rows(cta, rows_of[own.rank]);
}

// From a rank's rows to row_of_source, which holds -1 everywhere before. blockIdx.y says which rank.
extern "C" __global__ void uniep_row_of_source(const __grid_constant__ RowOfSourceArguments args) {
  const PlacementTables& tables = args.tables[blockIdx.y];
  if (*tables.whole == 0) return;
  const int32_t last_expert = (args.rank[blockIdx.y] + 1) * (args.experts / args.ranks) - 1;
  const int64_t rows = tables.segment_start[last_expert] + round_up(tables.expert_rows[last_expert], kRowAlignment);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; row < rows;
       row += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const RowSource source = tables.rows[row];
    if (source.rank < 0) continue;
    tables.row_of_source[tables.source_begin[source.rank] + static_cast<int64_t>(source.token) * args.topk +
                         source.slot] = static_cast<int32_t>(row);
  }
}
