#pragma once

#include <cstdint>

namespace uniep {

enum class Activation : int { kSwiglu = 0 };

// Where the router's weight multiplies: onto the activation before FC2 (Megatron), or, not built yet and refused,
// onto the expert's output or input (torchtitan).
enum class RouterWeight : int { kActivation = 0, kOutput = 1, kInput = 2 };

// How a weight gradient leaves: written as bf16, written as fp32, or added to the fp32 main_grad that is there (exactly
// one rounded addition per element and call).
enum class WeightGradient : int { kBFloat16 = 0, kFloat32 = 1, kMainGrad = 2 };

// Everything that may change a bit of the result. No tuner touches it. The contract is in docs/numerics.md.
struct Numerics {
  Activation activation = Activation::kSwiglu;
  RouterWeight router_weight = RouterWeight::kActivation;
  WeightGradient weight_gradient = WeightGradient::kBFloat16;
  // 0: y is one fp32 sum over the slots, ascending. G > 0: slots are summed inside each of G equal groups of experts,
  // rounded to bf16, and the groups summed ascending. E must be a multiple of G, and G of the number of ranks.
  int64_t combine_groups = 0;
  bool operator==(const Numerics&) const = default;
};

}  // namespace uniep
