#pragma once

#include "model/portability.h"

// Arguments of the kernels between dense routing and slots (dense.cu); of one rank.
namespace uniep::cuda {

constexpr int kDenseThreads = 256;

struct SlotsOfMapArguments {
  const uint8_t* map;  // [T, E]
  const float* probs;  // [T, E]
  int32_t* ids;        // [T, K], written
  float* slot_probs;   // [T, K], written
  int32_t tokens, experts, topk;
};

struct DenseDprobsArguments {
  const int32_t* expert_of_slot;  // [T, K]
  const float* slot_dprobs;       // [T, K]
  float* dprobs;                  // [T, E], written
  int32_t tokens, experts, topk;
};

}  // namespace uniep::cuda
