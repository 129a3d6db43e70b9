#include "train/mixer.h"

#include <algorithm>

#include "train/config.h"
#include "train/kernels.h"
#include "train/rms_norm.h"

namespace uniep::train {

int64_t mixer_scratch(int64_t sequence, int64_t hidden) {
  return 5 * sequence * hidden;
}

void mixer_forward(const MixerForward& call) {
  const auto [weights, sequence, hidden, x, activations, out, scratch] = call;
  const int64_t elements = sequence * hidden;
  rms_norm_forward({x, weights.norm, sequence, hidden, activations.normed, activations.inverse_rms});
  multiply(activations.normed, weights.in, scratch, {sequence, 2 * hidden, hidden});
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
  multiply(activations.gated, weights.out, out, {sequence, hidden, hidden}, Store::kAdd);
}

void mixer_backward(const MixerBackward& call) {
  const int64_t elements = call.sequence * call.hidden;
  float* gated_gradient = call.scratch;
  float* convolved_gradient = call.scratch + elements;
  float* gate_gradient = call.scratch + 2 * elements;
  float* projected_gradient = call.scratch + 3 * elements;  // [S, 2 H]
  float* normed_gradient = gated_gradient;                  // gated_gradient is read no more by then
  float* value_gradient = call.scratch;                     // likewise

  multiply_transposed(call.activations.gated, call.gradient, call.gradients.out,
                      {call.hidden, call.hidden, call.sequence});
  multiply(call.gradient, call.transposed.out, gated_gradient, {call.sequence, call.hidden, call.hidden});
  gate_backward({call.activations.convolved, call.activations.gate, gated_gradient, convolved_gradient, gate_gradient},
                elements);

  std::fill_n(value_gradient, elements, 0.0f);
  std::fill_n(call.gradients.filter, kMixerTaps * call.hidden, 0.0f);
  for (int64_t tap = 0; tap < std::min(kMixerTaps, call.sequence); ++tap) {
    for (int64_t t = tap; t < call.sequence; ++t) {
      const float* incoming = convolved_gradient + t * call.hidden;
      add_product(call.weights.filter + tap * call.hidden, incoming, value_gradient + (t - tap) * call.hidden,
                  call.hidden);
      add_product(call.activations.value + (t - tap) * call.hidden, incoming, call.gradients.filter + tap * call.hidden,
                  call.hidden);
    }
  }
  for (int64_t t = 0; t < call.sequence; ++t) {
    std::copy_n(value_gradient + t * call.hidden, call.hidden, projected_gradient + t * 2 * call.hidden);
    std::copy_n(gate_gradient + t * call.hidden, call.hidden, projected_gradient + t * 2 * call.hidden + call.hidden);
  }
  multiply_transposed(call.activations.normed, projected_gradient, call.gradients.in,
                      {call.hidden, 2 * call.hidden, call.sequence});
  multiply(projected_gradient, call.transposed.in, normed_gradient, {call.sequence, call.hidden, 2 * call.hidden});
  rms_norm_backward({.x = call.x,
                     .gain = call.weights.norm,
                     .inverse_rms = call.activations.inverse_rms,
                     .out_gradient = normed_gradient,
                     .rows = call.sequence,
                     .columns = call.hidden,
                     .x_gradient = call.gradient,
                     .gain_gradient = call.gradients.norm});
}

}  // namespace uniep::train
