#pragma once

#include <cstdint>
#include <span>

// The router: softmax(x W) over the experts; the K most probable experts of a token take it, the lower index first
// among equals. A slot's weight is the expert's softmax value itself, not renormalised over the chosen, so that the
// router learns from the loss for any K.
namespace uniep::train {

struct RouterActivations {
  float* probabilities;  // [T, E] softmax
  int32_t* ids;          // [T, K] chosen experts, most probable first
  float* probs;          // [T, K] their softmax values
};

// x [tokens, hidden], weight [hidden, experts]. Throws std::runtime_error when a logit is not finite.
void router_forward(const float* x, const float* weight, int64_t tokens, int64_t hidden, int64_t experts, int64_t topk,
                    const RouterActivations& activations);

// Adds to x_gradient [tokens, hidden] and writes weight_gradient [hidden, experts]. prob_gradients [tokens, topk] are
// those of the slots' weights; balance_gradients [experts] those of every token's softmax values, from the balancing
// loss. `transposed` is the weight as [experts, hidden]; scratch: tokens * experts floats.
void router_backward(const float* x, const float* transposed, int64_t tokens, int64_t hidden, int64_t experts,
                     int64_t topk, const RouterActivations& activations, const float* prob_gradients,
                     const float* balance_gradients, float* x_gradient, float* weight_gradient, float* scratch);

// What the balancing loss needs of some tokens, to be summed over the global batch.
struct RouterLoad {
  std::span<int64_t> slots;         // [E] slots that go to an expert
  std::span<double> probabilities;  // [E] sum of its softmax values
};
void add_router_load(const RouterActivations& activations, int64_t tokens, int64_t experts, int64_t topk,
                     const RouterLoad& load);

// The balancing loss of one layer, E * sum over e of f_e * P_e: f_e = slots of e / all slots, P_e = mean softmax value
// over all tokens; 1 when balanced. Writes d loss / d (a token's softmax value), the same for every token, as [E].
double balance_loss(const RouterLoad& load, int64_t tokens, int64_t topk, std::span<float> gradients);

}  // namespace uniep::train
