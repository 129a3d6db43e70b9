// From a placement to the tables of a Program, on the device: a CTA a rank, before the call begins. The host has filled
// everything of the RankCall that does not depend on the routing.
#include "engine/cuda/device/arguments/place_arguments.h"
#include "engine/cuda/device/place/block_sum.h"
#include "program/program_tables.h"

using namespace uniep;
using namespace uniep::cuda;

namespace {

// All threads: out[i] = sum of value(j) over j < i, for i up to and with `count`.
template <typename Value>
UNIEP_DEVICE void write_sums(int32_t* out, int32_t count, Value&& value) {
  __shared__ int32_t warp_sums[kPlaceWarps];
  int32_t before = 0;
  for (int32_t base = 0; base < count; base += kPlaceThreads) {
    const int32_t i = base + static_cast<int32_t>(threadIdx.x);
    int32_t all;
    const int32_t inside = exclusive_sum(i < count ? value(i) : 0, warp_sums, all);
    if (i < count) out[i] = before + inside;
    before += all;
  }
  if (threadIdx.x == 0) out[count] = before;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kPlaceThreads)
    uniep_program_tables(const __grid_constant__ ProgramTablesArguments args) {
  __shared__ int32_t block_sums[kMaxPlaceExperts + 1];  // blocks of all experts before, over all ranks
  __shared__ unsigned int rows;
  RankCall& call = args.calls[blockIdx.x];
  const ProgramTables& tables = args.tables[blockIdx.x];
  RankProgram& p = call.program;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const auto blocks_of = [&](int32_t expert) { return blocks_of_rows(p.expert_rows[expert], p.tile_m); };
  if (thread == 0) rows = 0;
  for (int32_t expert = thread; expert < p.experts; expert += kPlaceThreads) {
    const int32_t first = expert / p.local_experts * p.local_experts, local = expert - first;
    const int32_t turn = p.heavy_first ? heavy_turn(p, expert) : local;
    tables.local_of_turn[first + turn] = local;
    if (first == p.first_expert) tables.turn_of_local[local] = turn;
  }
  __syncthreads();
  const auto blocks_of_turn = [&](int32_t turn) { return blocks_of(p.first_expert + expert_of_turn(p, turn)); };
  write_sums(block_sums, p.experts, blocks_of);
  write_sums(tables.blocks_before, p.local_experts, blocks_of_turn);
  write_sums(tables.odd_blocks, p.local_experts, [&](int32_t turn) { return blocks_of_turn(turn) % 2; });
  write_sums(tables.spans_before, p.local_experts,
             [&](int32_t turn) { return spans_of_blocks(p, blocks_of_turn(turn)); });
  write_sums(tables.push_begin, p.local_experts * p.ranks, [&](int32_t i) { return push_run_in_order(p, i).blocks; });
  __syncthreads();

  for (int32_t expert = thread; expert < p.experts; expert += kPlaceThreads) {
    const int32_t first = expert / p.local_experts * p.local_experts;
    tables.expert_block[expert] = block_sums[expert] - block_sums[first];
  }
  for (int32_t local = thread; local <= p.local_experts; local += kPlaceThreads) {
    tables.block_begin[local] = block_sums[p.first_expert + local] - block_sums[p.first_expert];
    if (local == p.local_experts) break;
    tables.rotation[local] = first_block_in_order(p, local);
    atomicAdd(&rows, static_cast<unsigned int>(p.expert_rows[p.first_expert + local]));
  }
  for (int32_t i = thread; i < p.local_experts * p.ranks; i += kPlaceThreads) {
    tables.push_block[i] = push_run_in_order(p, i).first;
  }
  __syncthreads();
  if (thread != 0) return;
  p.tokens = p.tokens_of_rank[p.rank];
  p.most_blocks = 0;
  p.most_token_blocks = 0;
  for (int32_t rank = 0; rank < p.ranks; ++rank) {
    const int32_t blocks = block_sums[(rank + 1) * p.local_experts] - block_sums[rank * p.local_experts];
    const int32_t token_blocks = p.token_block_begin[rank + 1] - p.token_block_begin[rank];
    tables.blocks_of_rank[rank] = blocks;
    p.most_blocks = blocks > p.most_blocks ? blocks : p.most_blocks;
    p.most_token_blocks = token_blocks > p.most_token_blocks ? token_blocks : p.most_token_blocks;
  }
  call.layout = signal_layout(p);
  p.late_position = late_position_of(p, rows, call.hidden, call.intermediate);
}
