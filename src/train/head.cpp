#include "train/head.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "train/config.h"
#include "train/kernels.h"
#include "train/rms_norm.h"

namespace uniep::train {

void embed(const float* table, const uint8_t* bytes, int64_t count, int64_t hidden, float* out) {
  for (int64_t i = 0; i < count; ++i) std::copy_n(table + bytes[i] * hidden, hidden, out + i * hidden);
}

void embed_backward(const uint8_t* bytes, const float* gradient, int64_t count, int64_t hidden, float* table_gradient) {
  std::fill_n(table_gradient, kVocabulary * hidden, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    float* row = table_gradient + bytes[i] * hidden;
    for (int64_t column = 0; column < hidden; ++column) row[column] += gradient[i * hidden + column];
  }
}

double head_forward(const HeadForward& call) {
  const auto [weights, x, targets, tokens, hidden, activations] = call;
  rms_norm_forward({x, weights.norm, tokens, hidden, activations.normed, activations.inverse_rms});
  multiply(activations.normed, weights.projection, activations.probabilities, {tokens, kVocabulary, hidden});
  double loss = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    float* row = activations.probabilities + token * kVocabulary;
    const double logit = row[targets[token]];
    const SoftmaxSummary summary = softmax(row, row, kVocabulary);
    loss += std::log(static_cast<double>(summary.sum)) + static_cast<double>(summary.largest) - logit;
  }
  return loss;
}

void head_backward(const HeadBackward& call) {
  float* logit_gradients = call.activations.probabilities;
  for (int64_t token = 0; token < call.tokens; ++token) {
    float* row = logit_gradients + token * kVocabulary;
    row[call.targets[token]] -= 1.0f;
    for (int64_t column = 0; column < kVocabulary; ++column) row[column] *= call.scale;
  }
  multiply_transposed(call.activations.normed, logit_gradients, call.gradients.projection,
                      {call.hidden, kVocabulary, call.tokens});
  multiply(logit_gradients, call.transposed, call.scratch, {call.tokens, call.hidden, kVocabulary});
  std::fill_n(call.x_gradient, call.tokens * call.hidden, 0.0f);
  rms_norm_backward({.x = call.x,
                     .gain = call.weights.norm,
                     .inverse_rms = call.activations.inverse_rms,
                     .out_gradient = call.scratch,
                     .rows = call.tokens,
                     .columns = call.hidden,
                     .x_gradient = call.x_gradient,
                     .gain_gradient = call.gradients.norm});
}

}  // namespace uniep::train
