#pragma once

#include "model/portability.h"
#include "uniep/bfloat16.h"

#ifndef __CUDA_ARCH__
#include <bit>
#include <cmath>
#endif

// The element-wise arithmetic of the layer, for every engine. Each operation is written out (one rounding each, no
// contraction, no libm), so the same inputs give the same bits on a CPU, on every instruction set, and on a GPU; but
// for sigmoid(), of which each engine has its own.
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

// sigmoid(x) = 1 / (1 + exp(-x)), relative error below 1e-5: a two-hundredth of what rounding to bf16 adds. In two
// steps, since what needs 1 - sigmoid(x) = exp(-x) sigmoid(x) to the last digits takes the power, too. Each engine has
// its own, with the same bits wherever it runs.
#ifdef __CUDA_ARCH__
// The GPU's own 2^x and 1 / x: four instructions where the other way takes 15, and next to GEMMs each instruction
// costs the tensor cores half a cycle, whichever warp issues it. 0 where the value is below 2^-126.
UNIEP_HOST_DEVICE float exp_of_minus(float x) {
  const float kMinusLog2E = -1.44269504f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(mul(x, kMinusLog2E)));
  return power;
}
// Of any d from 1 on.
UNIEP_HOST_DEVICE float reciprocal(float d) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(d));
  return result;
}
#else
// a * b + c, clamped to [0, 1] after its one rounding. Of NaN: 0 or 1; callers' results are NaN then.
UNIEP_HOST_DEVICE float saturated_multiply_add(float a, float b, float c) {
  // As integers, in which order floats above zero are, too: compilers do not vectorise two comparisons of floats in a
  // row.
  const auto bits = static_cast<int32_t>(bits_of_float(fused_multiply_add(a, b, c)));
  const int32_t kOne = 0x3f800000;
  const int32_t not_negative = bits < 0 ? 0 : bits;
  return float_from_bits(static_cast<uint32_t>(not_negative < kOne ? not_negative : kOne));
}

// 1 / d for d in [1, 1e36], relative error below 3e-6: a linear seed through the exponent field (error below 5.5 %), a
// Newton step whose constant spreads its error evenly (1.5e-3), and one that squares that. Written out, since a loop
// keeps GCC from vectorising.
UNIEP_HOST_DEVICE float reciprocal(float d) {
  const float kTwoEvenly = 2.0015f;
  const float seed = float_from_bits(0x7ef23000u - bits_of_float(d));
  const float y = mul(seed, fused_multiply_add(-d, seed, kTwoEvenly));
  return fused_multiply_add(y, fused_multiply_add(-d, y, 1.0f), y);
}

// Relative error below 4e-6 for |x| <= 44.3, beyond which the value is that at the bound: 2^64 or 2^-64.
//
// exp(-x) = 2^t with t = -x log2(e), |t| <= 64 = n + f, n a whole number and |f| <= 1/2: a polynomial of degree 4 in f
// (minimax but for 2^0 = 1, error below 3e-6), scaled by 2^n through the exponent field. t travels as t / 128 + 1/2,
// which saturates for nothing.
UNIEP_HOST_DEVICE float exp_of_minus(float x) {
  const float kMinusLog2EOver128 = -0.0112710550f;
  const float kRoundToInteger =
      12582912.0f - 64.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float scaled = saturated_multiply_add(x, kMinusLog2EOver128, 0.5f);
  const float shifted = fused_multiply_add(scaled, 128.0f, kRoundToInteger);
  const float f = fused_multiply_add(scaled, 128.0f, -add(shifted, -kRoundToInteger));
  float p = 0.00958285294f;
  p = fused_multiply_add(p, f, 0.0559064262f);
  p = fused_multiply_add(p, f, 0.240240991f);
  p = fused_multiply_add(p, f, 0.693124175f);
  p = fused_multiply_add(p, f, 1.0f);
  // The low 9 bits of `shifted` are n's; the shift drops the others.
  return float_from_bits(bits_of_float(p) + (bits_of_float(shifted) << 23));
}
#endif

// On a CPU beyond |x| = 44.3 the value is that at the bound: 0.999998, or 5.4e-20 where the true value is smaller.
UNIEP_HOST_DEVICE float sigmoid(float x) {
  return reciprocal(add(1.0f, exp_of_minus(x)));
}

// dprob: the columns of I are summed in chunks of 64, each chunk by a fixed tree: four partial sums, partial q over the
// columns 8 j + 2 q and 8 j + 2 q + 1 for j ascending (what one thread of a wgmma accumulator holds), one fused
// multiply-add each, then (p0 + p1) + (p2 + p3). Missing columns of a tail count as +0.
constexpr int kProbColumns = 64;

UNIEP_HOST_DEVICE float add_prob_term(float partial, float activation_gradient, float unweighted) {
  return fused_multiply_add(activation_gradient, unweighted, partial);
}

UNIEP_HOST_DEVICE float join_prob_partials(float p0, float p1, float p2, float p3) {
  return add(add(p0, p1), add(p2, p3));
}

}  // namespace uniep
