#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "io/synthetic_value.h"
#include "uniep/bfloat16.h"

// Synthetic inputs of a layer for any part of the global batch. Global token and expert indices go into each value, so
// that a batch is the same however it is cut among ranks. Arrays are row-major and dense; counts may be 0.
namespace uniep::io {

// Tokens of the global batch, or experts of all ranks: [first, first + count).
struct SyntheticPart {
  uint64_t seed;
  int64_t first;
  int64_t count;
};

// Tokens of x or dy (kX, kDy) into out [count, hidden].
void fill_tokens(SyntheticTensor tensor, const SyntheticPart& tokens, int64_t hidden, BFloat16* out);

struct ExpertSizes {
  int64_t hidden;
  int64_t intermediate;
  int64_t halves = 2;  // of w1; 1 where there is no gate
};
// Experts into out: kW1 [count, halves I, H], kW2 [count, H, I].
void fill_weights(SyntheticTensor tensor, const SyntheticPart& experts, const ExpertSizes& sizes, BFloat16* out);

// Biases of experts into out [count, columns] (kB1, kB2).
void fill_biases(SyntheticTensor tensor, const SyntheticPart& experts, int64_t columns, BFloat16* out);

// Router weights [count, topk]: positive and summing to about one over a token's used slots, +0 in an unused slot
// (ids -1). `ids` [count, topk] are the same tokens' experts.
void fill_probs(const SyntheticPart& tokens, int64_t topk, const int32_t* ids, float* out);

enum class RoutingPattern : int { kUniform = 0, kZipf = 1, kOne = 2 };

struct RoutingKind {
  RoutingPattern pattern = RoutingPattern::kUniform;
  double exponent = 0.0;  // kZipf: S in [0, 8]; otherwise 0
};

// "uniform", "zipf:S" or "one".
RoutingKind parse_routing_kind(std::string_view text);
std::string to_string(const RoutingKind& kind);

// Experts that a routing may have: their integer weights must add up below 2^64.
constexpr int64_t kMaxRoutingExperts = int64_t{1} << 20;

// Top-k ids of tokens into ids [count, topk]. uniform and zipf:
// `topk` different experts per token, drawn one after the other without replacement with P(e) ~ (e + 1)^-S (uniform: S
// = 0). one: expert 0 in slot 0, -1 in the others. Legal: 1 <= topk <= experts.
void make_routing(const RoutingKind& kind, const SyntheticPart& tokens, int64_t experts, int64_t topk, int32_t* ids);

// The weight that make_routing draws expert e with: max(1, floor(2^40 / (e + 1)^S)), the power by IEEE-exact operations
// only, so that it is the same everywhere.
uint64_t zipf_weight(int64_t expert, double exponent);

}  // namespace uniep::io
