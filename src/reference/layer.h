#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "uniep/bfloat16.h"
#include "uniep/numerics.h"
#include "uniep/shape.h"

// The MoE layer in float64, written from its formulas alone: it shares no code with the engines. It knows no ranks: it
// takes the global batch (the tokens of all ranks, in rank order) and all experts, and rounds nothing.
namespace uniep::reference {

// Row-major and dense. Value is BFloat16 and Prob float for an engine's inputs; both are double where a test perturbs
// them.
template <typename Value, typename Prob>
struct BasicLayerInput {
  LayerShape shape;
  int64_t tokens = 0;            // T of the global batch
  const Value* x = nullptr;      // [T, H]
  const Value* dy = nullptr;     // [T, H]; nullptr: forward only (give backward of T = 0 any address)
  const int32_t* ids = nullptr;  // [T, K] expert of a slot, -1 = unused
  const Prob* probs = nullptr;   // [T, K]; an unused slot's is not read
  const Value* w1 = nullptr;     // [E, Z, H]: gate rows, then up rows, Z = 2 I; not gated: Z = I
  const Value* w2 = nullptr;     // [E, H, I]
  Numerics numerics{};           // activation, router_weight and bias
  const Value* b1 = nullptr;     // [E, Z]; this and b2 with numerics.bias
  const Value* b2 = nullptr;     // [E, H]
};

// Of z and W1: gate and up, or one.
constexpr int64_t halves_of(const Numerics& numerics) {
  return is_gated(numerics.activation) ? 2 : 1;
}

using LayerInput = BasicLayerInput<BFloat16, float>;
using DoubleLayerInput = BasicLayerInput<double, double>;

// The routed rows, by expert and then by (token, slot) ascending. No padding.
struct RoutedRows {
  std::vector<int64_t> expert_begin;  // [E + 1] first row of an expert
  std::vector<int64_t> slots;         // [rows] flat index token * K + slot of a row
  int64_t rows() const { return static_cast<int64_t>(slots.size()); }
  int64_t rows_of(int64_t expert) const { return expert_begin[expert + 1] - expert_begin[expert]; }
};
// Throws Error(kInvalidArgument) for an id outside [-1, E).
RoutedRows route(const LayerShape& shape, int64_t tokens, const int32_t* ids);

struct LayerOutput {
  std::vector<double> y;       // [T, H]
  std::vector<double> z;       // [rows, Z], rows as in RoutedRows
  std::vector<double> dx;      // [T, H]; this and all below: empty without dy
  std::vector<double> dprobs;  // [T, K]; an unused slot's is 0
  std::vector<double> dw1;     // [E, Z, H]
  std::vector<double> dw2;     // [E, H, I]
  std::vector<double> db1;     // [E, Z]; this and db2: with biases alone
  std::vector<double> db2;     // [E, H]
};

// Takes dW1[expert] ([Z, H]) and dW2[expert] ([H, I]), which are valid during the call only.
using WeightGradientSink =
    std::function<void(int64_t expert, std::span<const double> dw1, std::span<const double> dw2)>;

// The whole layer. Throws Error(kInvalidArgument) for sizes below 1 (tokens: below 0) and as route() does.
template <typename Value, typename Prob>
LayerOutput evaluate(const BasicLayerInput<Value, Prob>& input);

// The same, but weight gradients go to the sink, one expert at a time and ascending, and LayerOutput holds none: in
// float64 they may be too many to keep. Without a sink none are computed.
template <typename Value, typename Prob>
LayerOutput evaluate(const BasicLayerInput<Value, Prob>& input, const WeightGradientSink& sink);

// Floating-point operations of the whole layer: 6 H I per row forward (not gated: 4), and twice that backward when
// there is a dy.
double layer_flops(const LayerInput& input, const RoutedRows& routed);

}  // namespace uniep::reference
