#pragma once

#include <cstdint>
#include <string>

#include "uniep/export.h"

namespace uniep {

// What an expert does between FC1 and FC2, of z's gate and up columns; with relu2 and silu all of z's columns are gate.
//   kSwiglu     silu(gate) up; with its parameters (see Numerics) gate' sigmoid(alpha gate') (up' + up_offset)
//   kGegluTanh  gelu(gate) up, with the approximation of gelu by tanh
//   kGegluErf   gelu(gate) up, with erf
//   kRelu2      max(gate, 0)^2
//   kSilu       silu(gate)
enum class Activation : int { kSwiglu = 0, kGegluTanh = 1, kGegluErf = 2, kRelu2 = 3, kSilu = 4 };

// Gated: W1 is [2 I, H], gate rows and then up rows, and z [rows, 2 I]. Not gated: W1 is [I, H] and z [rows, I].
constexpr bool is_gated(Activation activation) {
  return activation != Activation::kRelu2 && activation != Activation::kSilu;
}

// Where the router's weight p of a row multiplies:
//   kActivation  a = p act(z), rounded once (Megatron)
//   kOutput      the expert's output: o is rounded, and then p o (torchtitan, Transformers). Backward as kActivation's
//   kInput       the expert's input, which is z by linearity: a = act(p z) (Llama 4)
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
  // Of kSwiglu; with another activation they are as here. gate' = min(gate, gate_limit), up' is up between -up_limit
  // and up_limit; a limit of 0 is none. Legal: alpha above 0, limits 0 or above, all finite.
  float alpha = 1;
  float gate_limit = 0;
  float up_limit = 0;
  float up_offset = 0;
  // Experts have biases: z = W1 x + b1 and o = W2 a + b2, each rounded once. With kOutput p multiplies b2, too, with
  // kActivation it does not. Not with kInput.
  bool bias = false;
  bool operator==(const Numerics&) const = default;
};

// An activation as text: swiglu, geglu_tanh, geglu_erf, relu2 or silu; SwiGLU's parameters follow after a colon:
// swiglu:alpha=1.702,limit=7,up_offset=1, where limit is both limits, and gate_limit and up_limit are one.
UNIEP_API std::string activation_text(const Numerics& numerics);

// Sets activation and its parameters from such a text; those that it does not name as they are by default. Throws
// Error(kInvalidArgument) that names what is wrong and what is legal.
UNIEP_API void set_activation(Numerics& numerics, const std::string& text);

// By the names activation, output and input; throws Error(kInvalidArgument) for another.
UNIEP_API std::string router_weight_text(RouterWeight router_weight);
UNIEP_API RouterWeight router_weight_from(const std::string& text);

}  // namespace uniep
