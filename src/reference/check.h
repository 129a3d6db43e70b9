#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "reference/compare.h"
#include "reference/layer.h"
#include "uniep/numerics.h"

namespace uniep::reference {

// What an engine made of a LayerInput, in global order. A null pointer leaves its tensor out of the check.
struct EngineOutput {
  const BFloat16* y = nullptr;    // [T, H]
  const BFloat16* z = nullptr;    // [rows, Z], rows as in RoutedRows: no padding
  const BFloat16* dx = nullptr;   // [T, H]; this and all below: without dy not looked at
  const float* dprobs = nullptr;  // [T, K]
  WeightGradient weight_gradient = WeightGradient::kBFloat16;
  const void* dw1 = nullptr;  // [E, Z, H], bf16 or fp32 as weight_gradient says
  const void* dw2 = nullptr;  // [E, H, I]
  const void* db1 = nullptr;  // [E, Z], and db2 [E, H]: with biases
  const void* db2 = nullptr;
  // kMainGrad: what the element `index` of each of these four held before the call; null: zero. The sum with it is
  // rounded once, which is no error.
  float (*main_grad)(uint64_t index) = nullptr;
};

struct CheckOptions {
  uint64_t seed = 0;          // of the sample
  double whole_flops = 1e10;  // a layer of more operations is checked on a sample
  double sample_flops = 5e9;  // what the sample may cost
};

struct CheckReport {
  std::vector<std::pair<std::string, Comparison>> tensors;  // by the names y, z, dx, dprobs, dw1, dw2, db1, db2, in
                                                            // this order
  bool sampled = false;
  int64_t sampled_tokens = 0;          // of y, z, dx and dprobs; 0 when not sampled
  int64_t sampled_weight_columns = 0;  // two lines of dw1 and a column of dw2 each; 0 when not sampled
  bool passed() const;
};

// Compares with the reference. A row is: a token of y and dx, its K slots in dprobs, a routed row of z, a line of one
// expert in dw1 and dw2 - in a sample of dw2 one of its columns - and all of an expert in db1
// and db2, in a sample of db1 one of its columns. Beside what Comparer asks for, the dprob of an unused
// slot must be +0 to the bit, whether its token is in the sample or not.
CheckReport check(const LayerInput& input, const EngineOutput& got, const CheckOptions& options = {});

}  // namespace uniep::reference
