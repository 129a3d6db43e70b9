#include "train/mixer.h"

#include <algorithm>

#include "train/config.h"
#include "train/kernels.h"
#include "train/rms_norm.h"

namespace uniep::train {

int64_t mixer_scratch(int64_t sequence, int64_t hidden) {
  return 5 * sequence * hidden;
}

void mixer_forward(const MixerWeights& weights, int64_t sequence, int64_t hidden, const float* x,
                   const MixerActivations& activations, float* out, float* scratch) {
  const int64_t elements = sequence * hidden;
  rms_norm_forward(x, weights.norm, sequence, hidden, activations.normed, activations.inverse_rms);
  multiply(activations.normed, weights.in, scratch, sequence, 2 * hidden, hidden);
  for (int64_t t = 0; t < sequence; ++t) {
    const float* projected = scratch + t * 2 * hidden;
    std::copy_n(projected, hidden, activations.value + t * hidden);
    std::copy_n(projected + hidden, hidden, activations.gate + t * hidden);
  }
  std::fill_n(activations.convolved, elements, 0.0f);
  for (int64_t tap = 0; tap < std::min(kMixerTaps, sequence); ++tap) {
    for (int64_t t = tap; t < sequence; ++t) {
      add_product(weights.filter + tap * hidden, activations.value + (t - tap) * hidden,
                  activations.convolved + t * hidden, hidden);
    }
  }
  gate_forward(activations.convolved, activations.gate, activations.gated, elements);
  std::copy_n(x, elements, out);
  multiply(activations.gated, weights.out, out, sequence, hidden, hidden, Store::kAdd);
}

void mixer_backward(const MixerWeights& weights, const MixerWeights& transposed, int64_t sequence, int64_t hidden,
                    const float* x, const MixerActivations& activations, float* gradient,
                    const MixerGradients& gradients, float* scratch) {
  const int64_t elements = sequence * hidden;
  float* gated_gradient = scratch;
  float* convolved_gradient = scratch + elements;
  float* gate_gradient = scratch + 2 * elements;
  float* projected_gradient = scratch + 3 * elements;  // [S, 2 H]
  float* normed_gradient = gated_gradient;             // gated_gradient is read no more by then
  float* value_gradient = scratch;                     // likewise

  multiply_transposed(activations.gated, gradient, gradients.out, hidden, hidden, sequence);
  multiply(gradient, transposed.out, gated_gradient, sequence, hidden, hidden);
  gate_backward(activations.convolved, activations.gate, gated_gradient, convolved_gradient, gate_gradient, elements);

  std::fill_n(value_gradient, elements, 0.0f);
  std::fill_n(gradients.filter, kMixerTaps * hidden, 0.0f);
  for (int64_t tap = 0; tap < std::min(kMixerTaps, sequence); ++tap) {
    for (int64_t t = tap; t < sequence; ++t) {
      const float* incoming = convolved_gradient + t * hidden;
      add_product(weights.filter + tap * hidden, incoming, value_gradient + (t - tap) * hidden, hidden);
      add_product(activations.value + (t - tap) * hidden, incoming, gradients.filter + tap * hidden, hidden);
    }
  }
  for (int64_t t = 0; t < sequence; ++t) {
    std::copy_n(value_gradient + t * hidden, hidden, projected_gradient + t * 2 * hidden);
    std::copy_n(gate_gradient + t * hidden, hidden, projected_gradient + t * 2 * hidden + hidden);
  }
  multiply_transposed(activations.normed, projected_gradient, gradients.in, hidden, 2 * hidden, sequence);
  multiply(projected_gradient, transposed.in, normed_gradient, sequence, hidden, 2 * hidden);
  rms_norm_backward(x, weights.norm, activations.inverse_rms, normed_gradient, sequence, hidden, gradient,
                    gradients.norm);
}

}  // namespace uniep::train
