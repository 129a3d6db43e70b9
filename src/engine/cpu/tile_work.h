#pragma once

#include <vector>

#include "engine/cpu/call.h"
#include "engine/cpu/copy_ring.h"
#include "model/elementwise.h"

namespace uniep::cpu {

// What one agent keeps from tile to tile.
struct AgentScratch {
  GemmScratch gemm;
  std::vector<float> accumulators, chunk_sums;
  CopyRing ring;
  std::vector<BFloat16*> destinations;
  std::vector<const BFloat16*> sources;
};

// One NaN for all, as the kernels store it.
inline float canonical_nan(float value) {
  return value == value ? value : float_from_bits(0x7fc00000u);
}

// The work of one tile: reads what its waits have promised, writes what its signals will promise.
void run_dispatch_tile(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch);
void run_row_gemm_tile(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch);
void run_wgrad_tile(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch);
void run_combine_tile(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch);

// The dprobs of a task's rows, each the sum of its 64-column chunks, ascending; see returns_prob_gradients().
void return_prob_gradients(Call& call, const RankProgram& p, const Task& task);

// Where a row goes on its way back: the source rank's slot, from a column on.
BFloat16* slot_of(Call& call, int32_t destination, int32_t token, int64_t slot, int64_t column);

}  // namespace uniep::cpu
