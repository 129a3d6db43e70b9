#include "train/router.h"

#include <cmath>
#include <stdexcept>

#include "train/kernels.h"

namespace uniep::train {
namespace {

void choose(const float* probabilities, int64_t experts, int64_t topk, int32_t* ids, float* probs) {
  for (int64_t slot = 0; slot < topk; ++slot) {
    int32_t best = -1;
    for (int32_t expert = 0; expert < experts; ++expert) {
      bool taken = false;
      for (int64_t earlier = 0; earlier < slot; ++earlier) taken = taken || ids[earlier] == expert;
      if (!taken && (best < 0 || probabilities[expert] > probabilities[best])) best = expert;
    }
    ids[slot] = best;
    probs[slot] = probabilities[best];
  }
}

}  // namespace

void router_forward(const float* x, const float* weight, int64_t tokens, int64_t hidden, int64_t experts, int64_t topk,
                    const RouterActivations& activations) {
  multiply(x, weight, activations.probabilities, tokens, experts, hidden);
  for (int64_t token = 0; token < tokens; ++token) {
    float* row = activations.probabilities + token * experts;
    const SoftmaxSummary summary = softmax(row, row, experts);
    if (!std::isfinite(summary.largest + summary.sum)) {
      throw std::runtime_error("training diverged: a router logit is not finite; lower --learning-rate");
    }
    choose(row, experts, topk, activations.ids + token * topk, activations.probs + token * topk);
  }
}

void router_backward(const float* x, const float* transposed, int64_t tokens, int64_t hidden, int64_t experts,
                     int64_t topk, const RouterActivations& activations, const float* prob_gradients,
                     const float* balance_gradients, float* x_gradient, float* weight_gradient, float* scratch) {
  for (int64_t token = 0; token < tokens; ++token) {
    const float* row = activations.probabilities + token * experts;
    float* gradient = scratch + token * experts;
    for (int64_t expert = 0; expert < experts; ++expert) gradient[expert] = balance_gradients[expert];
    for (int64_t slot = 0; slot < topk; ++slot) {
      gradient[activations.ids[token * topk + slot]] += prob_gradients[token * topk + slot];
    }
    const float mean = dot(row, gradient, experts);
    for (int64_t expert = 0; expert < experts; ++expert) gradient[expert] = row[expert] * (gradient[expert] - mean);
  }
  multiply_transposed(x, scratch, weight_gradient, hidden, experts, tokens);
  multiply(scratch, transposed, x_gradient, tokens, hidden, experts, Store::kAdd);
}

void add_router_load(const RouterActivations& activations, int64_t tokens, int64_t experts, int64_t topk,
                     const RouterLoad& load) {
  for (int64_t slot = 0; slot < tokens * topk; ++slot) ++load.slots[activations.ids[slot]];
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t expert = 0; expert < experts; ++expert) {
      load.probabilities[expert] += activations.probabilities[token * experts + expert];
    }
  }
}

double balance_loss(const RouterLoad& load, int64_t tokens, int64_t topk, std::span<float> gradients) {
  const double experts = static_cast<double>(load.slots.size());
  double loss = 0;
  for (std::size_t expert = 0; expert < load.slots.size(); ++expert) {
    const double fraction = static_cast<double>(load.slots[expert]) / static_cast<double>(tokens * topk);
    loss += experts * fraction * (load.probabilities[expert] / static_cast<double>(tokens));
    gradients[expert] = static_cast<float>(experts * fraction / static_cast<double>(tokens));
  }
  return loss;
}

}  // namespace uniep::train
