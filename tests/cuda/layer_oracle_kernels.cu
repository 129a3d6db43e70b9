// The byte oracle's data movement: one thread an element, nothing shared with the megakernel.
#include "model/elementwise.h"
#include "model/row_table.h"
#include "tests/cuda/layer_oracle_arguments.h"

using namespace uniep;
using namespace uniep::cuda::test;

extern "C" __global__ void oracle_gather(OracleGatherArguments args) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.rows * args.hidden) return;
  const int token = args.token_of_row[i / args.hidden];
  args.gathered[i] = token < 0 ? BFloat16{0} : args.x[token * args.hidden + i % args.hidden];
}

// Slots ascending; with groups, the slots of each group of experts first, rounded, groups ascending.
extern "C" __global__ void oracle_combine(OracleCombineArguments args) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= args.tokens * args.hidden) return;
  const long long token = i / args.hidden, column = i % args.hidden;
  const int* rows = args.row_of_slot + token * args.topk;
  const int* experts = args.expert_of_slot + token * args.topk;
  float sum = 0.0f;
  if (args.groups == 0) {
    for (int slot = 0; slot < args.topk; ++slot) {
      if (rows[slot] >= 0) sum = add(sum, to_float(args.out[rows[slot] * args.hidden + column]));
    }
  } else {
    const int experts_per_group = args.experts / args.groups;
    for (int group = 0; group < args.groups; ++group) {
      float inside = 0.0f;
      bool any = false;
      for (int slot = 0; slot < args.topk; ++slot) {
        if (rows[slot] < 0 || experts[slot] / experts_per_group != group) continue;
        inside = add(inside, to_float(args.out[rows[slot] * args.hidden + column]));
        any = true;
      }
      if (any) sum = add(sum, to_float(to_bfloat16(inside)));
    }
  }
  args.y[i] = to_bfloat16(sum);
}
