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

double head_forward(const HeadWeights& weights, const float* x, const uint8_t* targets, int64_t tokens, int64_t hidden,
                    const HeadActivations& activations) {
  rms_norm_forward(x, weights.norm, tokens, hidden, activations.normed, activations.inverse_rms);
  multiply(activations.normed, weights.projection, activations.probabilities, tokens, kVocabulary, hidden);
  double loss = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    float* row = activations.probabilities + token * kVocabulary;
    const double logit = row[targets[token]];
    const SoftmaxSummary summary = softmax(row, row, kVocabulary);
    loss += std::log(static_cast<double>(summary.sum)) + static_cast<double>(summary.largest) - logit;
  }
  return loss;
}

void head_backward(const HeadWeights& weights, const float* transposed, const float* x, const uint8_t* targets,
                   int64_t tokens, int64_t hidden, float scale, const HeadActivations& activations, float* x_gradient,
                   const HeadGradients& gradients, float* scratch) {
  float* logit_gradients = activations.probabilities;
  for (int64_t token = 0; token < tokens; ++token) {
    float* row = logit_gradients + token * kVocabulary;
    row[targets[token]] -= 1.0f;
    for (int64_t column = 0; column < kVocabulary; ++column) row[column] *= scale;
  }
  multiply_transposed(activations.normed, logit_gradients, gradients.projection, hidden, kVocabulary, tokens);
  multiply(logit_gradients, transposed, scratch, tokens, hidden, kVocabulary);
  std::fill_n(x_gradient, tokens * hidden, 0.0f);
  rms_norm_backward(x, weights.norm, activations.inverse_rms, scratch, tokens, hidden, x_gradient, gradients.norm);
}

}  // namespace uniep::train
