#pragma once

#include <cstdint>

// RMSNorm: out = x / sqrt(mean(x^2) + 1e-5) * gain, for each row of x [rows, columns].
namespace uniep::train {

struct RmsNormForward {
  const float* x;     // [rows, columns]
  const float* gain;  // [columns]
  int64_t rows, columns;
  float* out;          // [rows, columns], written
  float* inverse_rms;  // [rows], written, for backward
};
void rms_norm_forward(const RmsNormForward& call);

struct RmsNormBackward {
  const float* x;             // [rows, columns]
  const float* gain;          // [columns]
  const float* inverse_rms;   // [rows]
  const float* out_gradient;  // [rows, columns]
  int64_t rows, columns;
  float* x_gradient;     // [rows, columns], added to
  float* gain_gradient;  // [columns], written
};
void rms_norm_backward(const RmsNormBackward& call);

}  // namespace uniep::train
