// Dense routing: from a map of experts to slots before a placement, and from the slots' dprobs to dense ones behind a
// call. A warp a token.
#include "engine/cuda/device/arguments/dense_arguments.h"
#include "engine/cuda/device/ptx/common.h"
#include "model/dense_routing.h"

namespace uniep::cuda {

UNIEP_DEVICE int32_t first_token() {
  return static_cast<int32_t>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
}
UNIEP_DEVICE int32_t token_step() {
  return static_cast<int32_t>(gridDim.x * blockDim.x / 32);
}

extern "C" __global__ void __launch_bounds__(kDenseThreads)
    uniep_slots_of_map(const __grid_constant__ SlotsOfMapArguments args) {
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  for (int32_t token = first_token(); token < args.tokens; token += token_step()) {
    const int64_t row = static_cast<int64_t>(token) * args.experts, slots = static_cast<int64_t>(token) * args.topk;
    int32_t count = 0;
    for (int32_t base = 0; base < args.experts; base += 32) {
      const int32_t expert = base + lane;
      const bool is_set = expert < args.experts && args.map[row + expert] != 0;
      const uint32_t set = __ballot_sync(0xffffffffu, is_set);
      const int32_t slot = count + __popc(set & ptx::lanes_before());
      if (is_set && slot < args.topk) {
        args.ids[slots + slot] = expert;
        args.slot_probs[slots + slot] = args.probs[row + expert];
      }
      count += __popc(set);
    }
    for (int32_t slot = count + lane; slot < args.topk; slot += 32) {
      args.ids[slots + slot] = -1;
      args.slot_probs[slots + slot] = 0.0f;
    }
    __syncwarp();
    if (count > args.topk && lane == 0) args.ids[slots] = id_of_too_many(count);
  }
}

extern "C" __global__ void __launch_bounds__(kDenseThreads)
    uniep_dense_dprobs(const __grid_constant__ DenseDprobsArguments args) {
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  for (int32_t token = first_token(); token < args.tokens; token += token_step()) {
    const int64_t row = static_cast<int64_t>(token) * args.experts, slots = static_cast<int64_t>(token) * args.topk;
    for (int32_t expert = lane; expert < args.experts; expert += 32) args.dprobs[row + expert] = 0.0f;
    __syncwarp();
    for (int32_t slot = lane; slot < args.topk; slot += 32) {
      const int32_t expert = args.expert_of_slot[slots + slot];
      if (expert >= 0) args.dprobs[row + expert] = args.slot_dprobs[slots + slot];
    }
  }
}

}  // namespace uniep::cuda
