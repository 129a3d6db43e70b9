#include "api/check_arrays.h"

#include <fmt/format.h>

#include <cstring>
#include <string>

#include "api/check_call.h"
#include "model/activation_choice.h"
#include "model/refuse.h"

namespace uniep::api {
namespace {

// All experts' as one tensor, or an address each.
struct ExpertArrays {
  const void* whole;
  const void* const* experts;
};

void check_expert_arrays(const ExpertArrays& arrays, const char* name, int rank, int64_t count) {
  const auto& [whole, experts] = arrays;
  if (experts == nullptr) return check_array(whole, name, rank, true);
  for (int64_t expert = 0; expert < count; ++expert) {
    if (experts[expert] == nullptr) refuse(fmt::format("{}: null for local expert {} on rank {}", name, expert, rank));
  }
}

// Of gate and up: both in `gate`, or each in its own, given alike.
void check_gate_and_up(const ExpertArrays& gate, const ExpertArrays& up, const char* name, int rank, int64_t count) {
  check_expert_arrays(gate, name, rank, count);
  if (up.whole == nullptr && up.experts == nullptr) return;
  if ((up.experts != nullptr) != (gate.experts != nullptr)) {
    const auto form = [](bool addresses) { return addresses ? "addresses" : "one tensor"; };
    refuse(fmt::format("{0}_up: {1} on rank {2}, and {0} {3}; gate and up are both one tensor or both addresses", name,
                       form(up.experts != nullptr), rank, form(gate.experts != nullptr)));
  }
  check_expert_arrays(up, fmt::format("{}_up", name).c_str(), rank, count);
}

// Where there is no gate w1 is one matrix.
void check_no_up(const void* up, const void* up_experts, const char* name, int rank, const LayerConfig& config) {
  if (is_gated(config.numerics.activation) || (up == nullptr && up_experts == nullptr)) return;
  refuse(fmt::format("{}: given on rank {}; activation {} has no gate, so that {} is one matrix", name, rank,
                     activation_name(config.numerics.activation), std::string(name).substr(0, std::strlen(name) - 3)));
}

// Biases and their gradients, by Numerics::bias.
void check_bias(const ExpertArrays& bias, const char* name, int rank, const LayerConfig& config, int64_t count) {
  if (config.numerics.bias) return check_expert_arrays(bias, name, rank, count);
  if (bias.whole == nullptr && bias.experts == nullptr) return;
  refuse(fmt::format("{}: given on rank {}; the layer has no biases (bias = 0)", name, rank));
}

}  // namespace

void check_dw1(const WeightGradients& gradients, const LayerConfig& config, int rank, int64_t local_experts) {
  check_no_up(gradients.dw1_up, gradients.dw1_up_experts, "dw1_up", rank, config);
  check_gate_and_up({gradients.dw1, gradients.dw1_experts}, {gradients.dw1_up, gradients.dw1_up_experts}, "dw1", rank,
                    local_experts);
  check_bias({gradients.db1, gradients.db1_experts}, "db1", rank, config, local_experts);
}

void check_dw2(const WeightGradients& gradients, const LayerConfig& config, int rank, int64_t local_experts) {
  check_expert_arrays({gradients.dw2, gradients.dw2_experts}, "dw2", rank, local_experts);
  check_bias({gradients.db2, gradients.db2_experts}, "db2", rank, config, local_experts);
}

void check_weights(const Weights& weights, const LayerConfig& config, int rank, int64_t local_experts) {
  check_no_up(weights.w1_up, weights.w1_up_experts, "w1_up", rank, config);
  check_gate_and_up({weights.w1, reinterpret_cast<const void* const*>(weights.w1_experts)},
                    {weights.w1_up, reinterpret_cast<const void* const*>(weights.w1_up_experts)}, "w1", rank,
                    local_experts);
  check_expert_arrays({weights.w2, reinterpret_cast<const void* const*>(weights.w2_experts)}, "w2", rank,
                      local_experts);
  check_bias({weights.b2, reinterpret_cast<const void* const*>(weights.b2_experts)}, "b2", rank, config, local_experts);
}

void check_b1(const Weights& weights, const LayerConfig& config, int rank, int64_t local_experts) {
  check_bias({weights.b1, reinterpret_cast<const void* const*>(weights.b1_experts)}, "b1", rank, config, local_experts);
}

void check_routing(const Routing& routing, int rank) {
  if (routing.tokens <= 0) return;
  const bool given = routing.topk_ids != nullptr || routing.routing_map != nullptr;
  check_array(given ? &routing : nullptr, "topk_ids", rank, true);
  check_array(routing.probs, "probs", rank, true);
}

}  // namespace uniep::api
