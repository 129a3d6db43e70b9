#pragma once

#include "model/elementwise.h"
#include "model/row_table.h"

// The order of the sums that experts' biases need: one that many threads can share, and the same for every engine.
namespace uniep {

// A bias's gradient: of each column a chain from +0 along every kBiasRows rows of the expert in placement order, and a
// chain from +0 of these.
constexpr int kBiasRows = kRowAlignment;

// dy . b2 of a row is summed by kBiasDotColumns columns: each lane of a warp has kBiasLaneColumns neighbours, a chain
// from +0; then lane i's is added to lane i + n's, for n = 16, 8, 4, 2, 1. These sums are terms of dprob behind those
// of kProbColumns columns of da . a.
constexpr int kBiasLaneColumns = 8;
constexpr int kBiasDotColumns = 32 * kBiasLaneColumns;

UNIEP_HOST_DEVICE float add_bias_term(float sum, BFloat16 dy, BFloat16 bias) {
  return add(sum, mul(to_float(dy), to_float(bias)));
}

}  // namespace uniep
