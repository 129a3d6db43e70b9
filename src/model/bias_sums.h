#pragma once

#include "model/elementwise.h"
#include "model/row_table.h"

// The order of the sums that experts' biases need: one that many threads can share, and the same for every engine.
namespace uniep {

// A bias's gradient: of each column a chain from +0 along every kBiasRows rows of the expert in placement order, and a
// chain from +0 of these.
constexpr int kBiasRows = kRowAlignment;

// dy . b2 of a row: kBiasDotChains chains from +0, which take kBiasDotColumns columns each in turn. Then chain i is
// added to chain i + n, for n = 16, 8, 4, 2, 1.
constexpr int kBiasDotChains = 32;
constexpr int kBiasDotColumns = 8;

UNIEP_HOST_DEVICE float add_bias_term(float sum, BFloat16 dy, BFloat16 bias) {
  return add(sum, mul(to_float(dy), to_float(bias)));
}

}  // namespace uniep
