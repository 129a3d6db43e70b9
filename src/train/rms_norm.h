#pragma once

#include <cstdint>

// RMSNorm: out = x / sqrt(mean(x^2) + 1e-5) * gain, for each row of x [rows, columns].
namespace uniep::train {

// inverse_rms [rows] is kept for backward.
void rms_norm_forward(const float* x, const float* gain, int64_t rows, int64_t columns, float* out, float* inverse_rms);

// Adds to x_gradient [rows, columns]; writes gain_gradient [columns].
void rms_norm_backward(const float* x, const float* gain, const float* inverse_rms, const float* out_gradient,
                       int64_t rows, int64_t columns, float* x_gradient, float* gain_gradient);

}  // namespace uniep::train
