#pragma once

#include <cstdint>
#include <vector>

#include "reference/layer.h"

// A part of the layer's results, for sizes at which the whole would take too long.
namespace uniep::reference {

// One of the I activation columns of an expert. It gives the lines `column` and I + `column` of dW1[expert] and the
// column `column` of dW2[expert]: 12 H operations per row of the expert.
struct WeightColumn {
  int64_t expert = 0;
  int64_t column = 0;
  auto operator<=>(const WeightColumn&) const = default;
};

struct Sample {
  std::vector<int64_t> tokens;               // ascending, none twice
  std::vector<WeightColumn> weight_columns;  // ascending, none twice; without dy: none
};

// A seeded choice that costs about `flops` operations at most: half for tokens, half for weight columns. Where even
// one token, or one column of the expert with the fewest rows, costs more, that one is taken all the same. An expert
// without rows is among the columns where there is one: its gradients must be zero.
Sample choose_sample(const LayerInput& input, const RoutedRows& routed, uint64_t seed, double flops);

// The chosen part, equal to the whole evaluation's values in every bit.
struct SampleOutput {
  std::vector<double> y;        // [tokens, H] in the order of Sample::tokens
  std::vector<int64_t> z_rows;  // the chosen tokens' rows, as in RoutedRows, ascending
  std::vector<double> z;        // [z_rows, 2 I]
  std::vector<double> dx;       // [tokens, H]
  std::vector<double> dprobs;   // [tokens, K]
  std::vector<double> dw1;      // [weight columns, 2, H]: the gate line, then the up line
  std::vector<double> dw2;      // [weight columns, H]
  std::vector<double> db1;      // [weight columns, 2], and with biases alone, as the next
  std::vector<double> db2;      // [weight columns, H]: of the column's expert
};
SampleOutput evaluate_sample(const LayerInput& input, const RoutedRows& routed, const Sample& sample);

}  // namespace uniep::reference
