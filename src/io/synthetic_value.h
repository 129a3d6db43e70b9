#pragma once

#include "io/hash64.h"
#include "model/elementwise.h"
#include "uniep/bfloat16.h"

// Synthetic values, each a pure function of (seed, tensor, global index): the same on every engine, device and EP
// degree. docs/synthetic_data.md is the specification, with known values.
namespace uniep::io {

enum class SyntheticTensor : int { kX = 0, kDy = 1, kW1 = 2, kW2 = 3, kProbs = 4, kRouting = 5, kB1 = 6, kB2 = 7 };

// The splitmix64 sequence of a starting state that seed and tensor scatter: element `index` takes number index.
UNIEP_HOST_DEVICE uint64_t synthetic_hash(uint64_t seed, SyntheticTensor tensor, uint64_t index) {
  const uint64_t state = avalanche64(avalanche64(seed + kGolden64) + static_cast<uint64_t>(tensor));
  return avalanche64(state + (index + 1) * kGolden64);
}

// Uniform on the 2^24 multiples of 2^-23 in [-1, 1). Exact: 24 bits fit into fp32.
UNIEP_HOST_DEVICE float uniform_value(uint64_t hash) {
  const auto integer = static_cast<int32_t>(hash >> 40) - (1 << 23);
  return mul(static_cast<float>(integer), 0x1p-23f);
}

// Uniform on the 2^24 multiples of 2^-24 in (0, 1]. Exact.
UNIEP_HOST_DEVICE float positive_value(uint64_t hash) {
  const auto integer = static_cast<int32_t>(hash >> 40) + 1;
  return mul(static_cast<float>(integer), 0x1p-24f);
}

// 7/4: about sqrt(3), so that scaled values have a variance of about one.
constexpr float kUnitScale = 1.75f;

// 7/4 * 2^-floor(log2(fan_in) / 2) for fan_in >= 1: a dot product with values of variance one then has a standard
// deviation between one and two.
UNIEP_HOST_DEVICE float weight_scale(int64_t fan_in) {
  uint32_t half_log2 = 0;
  for (int64_t rest = fan_in; rest >= 4; rest /= 4) ++half_log2;
  return mul(float_from_bits((127u - half_log2) << 23), kUnitScale);
}

// An element of x, dy, b1 or b2 (kUnitScale) or of w1 or w2 (weight_scale(H) or weight_scale(I)).
UNIEP_HOST_DEVICE BFloat16 synthetic_value(uint64_t seed, SyntheticTensor tensor, uint64_t index, float scale) {
  return to_bfloat16(mul(uniform_value(synthetic_hash(seed, tensor, index)), scale));
}

// A slot's router weight before its token's weights are divided by their sum.
UNIEP_HOST_DEVICE float synthetic_prob(uint64_t seed, uint64_t index) {
  return positive_value(synthetic_hash(seed, SyntheticTensor::kProbs, index));
}

}  // namespace uniep::io
