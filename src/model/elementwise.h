#pragma once

#include "model/portability.h"
#include "uniep/bfloat16.h"

#ifndef __CUDA_ARCH__
#include <bit>
#include <cmath>
#endif

// The element-wise arithmetic of the layer, for every engine. Each operation is written out (one rounding each, no
// contraction, no libm), so the same inputs give the same bits on a CPU, on every instruction set, and on a GPU.
namespace uniep {

#ifdef __CUDA_ARCH__
UNIEP_HOST_DEVICE float add(float a, float b) {
  return __fadd_rn(a, b);
}
UNIEP_HOST_DEVICE float mul(float a, float b) {
  return __fmul_rn(a, b);
}
UNIEP_HOST_DEVICE float fused_multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
UNIEP_HOST_DEVICE float float_from_bits(uint32_t bits) {
  return __uint_as_float(bits);
}
UNIEP_HOST_DEVICE uint32_t bits_of_float(float value) {
  return __float_as_uint(value);
}
#else
// The host build forbids contraction (-ffp-contract=off), so plain operators round once each.
UNIEP_HOST_DEVICE float add(float a, float b) {
  return a + b;
}
UNIEP_HOST_DEVICE float mul(float a, float b) {
  return a * b;
}
UNIEP_HOST_DEVICE float fused_multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
UNIEP_HOST_DEVICE float float_from_bits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
UNIEP_HOST_DEVICE uint32_t bits_of_float(float value) {
  return __builtin_bit_cast(uint32_t, value);
}
#endif

UNIEP_HOST_DEVICE float to_float(BFloat16 value) {
  return float_from_bits(static_cast<uint32_t>(value.bits) << 16);
}

// Rounds to nearest even; a NaN stays a (quiet) NaN. Written without branches so that it vectorises.
UNIEP_HOST_DEVICE BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x0040u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BFloat16{static_cast<uint16_t>(is_nan ? quiet_nan : rounded)};
}

// exp(x) for |x| <= 80 (callers clamp): x = n ln2 + r with |r| <= ln2 / 2, a degree-6 polynomial in r (minimax-like
// Taylor coefficients, relative error below 2^-22), then an exact scaling by 2^n through the exponent field.
UNIEP_HOST_DEVICE float exp_bounded(float x) {
  const float kLog2E = 1.44269504f;
  const float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float kLn2High = 0.693359375f;        // 9 significant bits: n * kLn2High is exact
  const float kLn2Low = -2.12194440e-4f;
  const float shifted = fused_multiply_add(x, kLog2E, kRoundToInteger);
  const float n = add(shifted, -kRoundToInteger);
  float r = fused_multiply_add(n, -kLn2High, x);
  r = fused_multiply_add(n, -kLn2Low, r);
  float p = 1.0f / 720.0f;
  p = fused_multiply_add(p, r, 1.0f / 120.0f);
  p = fused_multiply_add(p, r, 1.0f / 24.0f);
  p = fused_multiply_add(p, r, 1.0f / 6.0f);
  p = fused_multiply_add(p, r, 0.5f);
  p = fused_multiply_add(p, r, 1.0f);
  p = fused_multiply_add(p, r, 1.0f);
  const uint32_t exponent = (bits_of_float(shifted) - bits_of_float(kRoundToInteger)) << 23;
  return float_from_bits(bits_of_float(p) + exponent);
}

// Squares the relative error of y as 1 / d.
UNIEP_HOST_DEVICE float reciprocal_newton_step(float d, float y) {
  return fused_multiply_add(y, fused_multiply_add(-d, y, 1.0f), y);
}

// 1 / d for d in [1, 1e36]: a linear seed through the exponent field (relative error below 12 %), then Newton steps
// that square the error: 0.12, 1.5e-2, 2.2e-4, 4.6e-8, rounding. Written out, since a loop keeps GCC from vectorising.
UNIEP_HOST_DEVICE float reciprocal_bounded(float d) {
  float y = float_from_bits(0x7ef311c7u - bits_of_float(d));
  y = reciprocal_newton_step(d, y);
  y = reciprocal_newton_step(d, y);
  y = reciprocal_newton_step(d, y);
  return reciprocal_newton_step(d, y);
}

// 1 / (1 + exp(-x)). Beyond |x| = 80 the value is that at the bound: 1, or 1.8e-35 where the true value is smaller.
UNIEP_HOST_DEVICE float sigmoid(float x) {
  float bounded = x < -80.0f ? -80.0f : x;
  bounded = bounded > 80.0f ? 80.0f : bounded;
  return reciprocal_bounded(add(1.0f, exp_bounded(-bounded)));
}

// a = silu(gate) * up * prob, products from left to right.
UNIEP_HOST_DEVICE float swiglu(float gate, float up, float prob) {
  return mul(mul(mul(gate, sigmoid(gate)), up), prob);
}

struct SwigluGradient {
  float activation;  // silu(gate) * up * prob: the same bits as swiglu()
  float gate;        // d loss / d gate
  float up;          // d loss / d up
  float prob_term;   // this column's term of d loss / d prob
};

// The derivative for an incoming d loss / d a: silu'(g) = s + g s (1 - s) with s = sigmoid(g).
UNIEP_HOST_DEVICE SwigluGradient swiglu_gradient(float gate, float up, float prob, float activation_gradient) {
  const float s = sigmoid(gate);
  const float silu = mul(gate, s);
  const float silu_up = mul(silu, up);
  const float silu_derivative = fused_multiply_add(silu, add(1.0f, -s), s);
  const float weighted = mul(prob, activation_gradient);
  SwigluGradient gradient;
  gradient.activation = mul(silu_up, prob);
  gradient.gate = mul(mul(weighted, up), silu_derivative);
  gradient.up = mul(weighted, silu);
  gradient.prob_term = mul(activation_gradient, silu_up);
  return gradient;
}

// dprob: the columns of I are summed in chunks of 64, each chunk by a fixed tree: four partial sums, partial q over the
// columns 8 j + 2 q and 8 j + 2 q + 1 for j ascending (what one thread of a wgmma accumulator holds), then
// (p0 + p1) + (p2 + p3). Missing columns of a tail count as +0.
constexpr int kProbChunkColumns = 64;

UNIEP_HOST_DEVICE float join_prob_partials(float p0, float p1, float p2, float p3) {
  return add(add(p0, p1), add(p2, p3));
}

}  // namespace uniep
