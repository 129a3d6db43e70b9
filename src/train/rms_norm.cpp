#include "train/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "train/kernels.h"

namespace uniep::train {
namespace {

constexpr float kNormEpsilon = 1e-5f;

}  // namespace

void rms_norm_forward(const RmsNormForward& call) {
  const auto [x, gain, rows, columns, out, inverse_rms] = call;
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    const float mean_square = dot(in, in, columns) / static_cast<float>(columns);
    const float inverse = 1.0f / std::sqrt(mean_square + kNormEpsilon);
    inverse_rms[row] = inverse;
    for (int64_t column = 0; column < columns; ++column) {
      out[row * columns + column] = in[column] * inverse * gain[column];
    }
  }
}

void rms_norm_backward(const RmsNormBackward& call) {
  std::fill_n(call.gain_gradient, call.columns, 0.0f);
  std::vector<float> weighted(call.columns);  // the gradient of the normalised row
  for (int64_t row = 0; row < call.rows; ++row) {
    const float* in = call.x + row * call.columns;
    const float* incoming = call.out_gradient + row * call.columns;
    float* outgoing = call.x_gradient + row * call.columns;
    const float inverse = call.inverse_rms[row];
    for (int64_t column = 0; column < call.columns; ++column) {
      weighted[column] = incoming[column] * call.gain[column];
      call.gain_gradient[column] += incoming[column] * in[column] * inverse;
    }
    const float along = dot(weighted.data(), in, call.columns) * inverse * inverse / static_cast<float>(call.columns);
    for (int64_t column = 0; column < call.columns; ++column) {
      outgoing[column] += inverse * (weighted[column] - in[column] * along);
    }
  }
}

}  // namespace uniep::train
