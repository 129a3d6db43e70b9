#include "train/rms_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "train/kernels.h"

namespace uniep::train {
namespace {

constexpr float kEpsilon = 1e-5f;

}  // namespace

void rms_norm_forward(const float* x, const float* gain, int64_t rows, int64_t columns, float* out,
                      float* inverse_rms) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    const float mean_square = dot(in, in, columns) / static_cast<float>(columns);
    const float inverse = 1.0f / std::sqrt(mean_square + kEpsilon);
    inverse_rms[row] = inverse;
    for (int64_t column = 0; column < columns; ++column) {
      out[row * columns + column] = in[column] * inverse * gain[column];
    }
  }
}

void rms_norm_backward(const float* x, const float* gain, const float* inverse_rms, const float* out_gradient,
                       int64_t rows, int64_t columns, float* x_gradient, float* gain_gradient) {
  std::fill_n(gain_gradient, columns, 0.0f);
  std::vector<float> weighted(columns);  // the gradient of the normalised row
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    const float* incoming = out_gradient + row * columns;
    float* outgoing = x_gradient + row * columns;
    const float inverse = inverse_rms[row];
    for (int64_t column = 0; column < columns; ++column) {
      weighted[column] = incoming[column] * gain[column];
      gain_gradient[column] += incoming[column] * in[column] * inverse;
    }
    const float along = dot(weighted.data(), in, columns) * inverse * inverse / static_cast<float>(columns);
    for (int64_t column = 0; column < columns; ++column) {
      outgoing[column] += inverse * (weighted[column] - in[column] * along);
    }
  }
}

}  // namespace uniep::train
