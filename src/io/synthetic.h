#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "io/synthetic_value.h"
#include "uniep/bfloat16.h"

// Synthetic inputs of a layer for any part of the global batch. Global token and expert indices go into each value, so
// that a batch is the same however it is cut among ranks. Arrays are row-major and dense; counts may be 0.
namespace uniep::io {

// Rows [first_global_token, first_global_token + tokens) of x or dy (kX, kDy) into out [tokens, hidden].
void fill_tokens(SyntheticTensor tensor, uint64_t seed, int64_t first_global_token, int64_t tokens, int64_t hidden,
                 BFloat16* out);

// Experts [first_global_expert, first_global_expert + experts) into out: kW1 [experts, halves I, H], kW2 [experts, H,
// I]. halves: 2, or 1 where there is no gate.
void fill_weights(SyntheticTensor tensor, uint64_t seed, int64_t first_global_expert, int64_t experts, int64_t hidden,
                  int64_t intermediate, BFloat16* out, int64_t halves = 2);

// Biases of the experts [first_global_expert, first_global_expert + experts) into out [experts, columns] (kB1, kB2).
void fill_biases(SyntheticTensor tensor, uint64_t seed, int64_t first_global_expert, int64_t experts, int64_t columns,
                 BFloat16* out);

// Router weights [tokens, topk]: positive and summing to about one over a token's used slots, +0 in an unused slot
// (ids -1). `ids` [tokens, topk] are the same tokens' experts.
void fill_probs(uint64_t seed, int64_t first_global_token, int64_t tokens, int64_t topk, const int32_t* ids,
                float* out);

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

// Top-k ids of the tokens [first_global_token, first_global_token + tokens) into ids [tokens, topk]. uniform and zipf:
// `topk` different experts per token, drawn one after the other without replacement with P(e) ~ (e + 1)^-S (uniform: S
// = 0). one: expert 0 in slot 0, -1 in the others. Legal: 1 <= topk <= experts.
void make_routing(const RoutingKind& kind, uint64_t seed, int64_t first_global_token, int64_t tokens, int64_t experts,
                  int64_t topk, int32_t* ids);

// The weight that make_routing draws expert e with: max(1, floor(2^40 / (e + 1)^S)), the power by IEEE-exact operations
// only, so that it is the same everywhere.
uint64_t zipf_weight(int64_t expert, double exponent);

}  // namespace uniep::io
