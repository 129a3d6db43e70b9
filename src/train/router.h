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

struct RouterForward {
  const float* x;       // [tokens, hidden]
  const float* weight;  // [hidden, experts]
  int64_t tokens, hidden, experts, topk;
  RouterActivations activations;  // written
};
// Throws std::runtime_error when a logit is not finite.
void router_forward(const RouterForward& call);

struct RouterBackward {
  const float* x;           // [tokens, hidden]
  const float* transposed;  // the weight as [experts, hidden]
  int64_t tokens, hidden, experts, topk;
  RouterActivations activations;
  const float* prob_gradients;     // [tokens, topk] of the slots' weights
  const float* balance_gradients;  // [experts] of every token's softmax values, from the balancing loss
  float* x_gradient;               // [tokens, hidden], added to
  float* weight_gradient;          // [hidden, experts], written
  float* scratch;                  // [tokens, experts]
};
void router_backward(const RouterBackward& call);

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
