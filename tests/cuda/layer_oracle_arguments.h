#pragma once

#include "uniep/bfloat16.h"

// Arguments of layer_oracle_kernels.cu, as the host passes them.
namespace uniep::cuda::test {

struct OracleGatherArguments {
  const BFloat16* x;
  const int* token_of_row;  // -1: padding
  BFloat16* gathered;
  long long rows, hidden;
};

struct OracleCombineArguments {
  const BFloat16* out;
  const int* row_of_slot;
  const int* expert_of_slot;
  BFloat16* y;
  long long tokens, hidden;
  int topk, experts, groups;
};

}  // namespace uniep::cuda::test
