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

void router_forward(const RouterForward& call) {
  const auto [x, weight, tokens, hidden, experts, topk, activations] = call;
  multiply(x, weight, activations.probabilities, {tokens, experts, hidden});
  for (int64_t token = 0; token < tokens; ++token) {
    float* row = activations.probabilities + token * experts;
    const SoftmaxSummary summary = softmax(row, row, experts);
    if (!std::isfinite(summary.largest + summary.sum)) {
      throw std::runtime_error("training diverged: a router logit is not finite; lower --learning-rate");
    }
    choose(row, experts, topk, activations.ids + token * topk, activations.probs + token * topk);
  }
}

void router_backward(const RouterBackward& call) {
  for (int64_t token = 0; token < call.tokens; ++token) {
    const float* row = call.activations.probabilities + token * call.experts;
    float* gradient = call.scratch + token * call.experts;
    for (int64_t expert = 0; expert < call.experts; ++expert) gradient[expert] = call.balance_gradients[expert];
    for (int64_t slot = 0; slot < call.topk; ++slot) {
      gradient[call.activations.ids[token * call.topk + slot]] += call.prob_gradients[token * call.topk + slot];
    }
    const float mean = dot(row, gradient, call.experts);
    for (int64_t expert = 0; expert < call.experts; ++expert)
      gradient[expert] = row[expert] * (gradient[expert] - mean);
  }
  multiply_transposed(call.x, call.scratch, call.weight_gradient, {call.hidden, call.experts, call.tokens});
  multiply(call.scratch, call.transposed, call.x_gradient, {call.tokens, call.hidden, call.experts}, Store::kAdd);
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
