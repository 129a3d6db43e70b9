#pragma once

#include "model/portability.h"
#include "model/row_table.h"
#include "uniep/bfloat16.h"

// Arguments of the kernel of biases' gradients (bias_gradients.cu), of one rank.
namespace uniep::cuda {

constexpr int kBiasThreads = 256;
constexpr int kBiasWarps = kBiasThreads / 32;
constexpr int kMaxBiasExperts = 128;  // of a launch

// As uniep::WeightGradient.
enum class BiasGradientKind : int { kBFloat16 = 0, kFloat32 = 1, kMainGrad = 2 };

// One gradient: of each expert the sum of its rows of `values`.
struct BiasSum {
  const BFloat16* values;            // [rows, columns]
  int32_t columns;                   // 0: nothing is to be done
  int32_t weighs;                    // rows times their prob
  int32_t is_made;                   // else the CTAs make dots alone
  void* gradients[kMaxBiasExperts];  // [columns] each
};

struct BiasArguments {
  const RowSource* rows;         // [rows]
  const int32_t* segment_start;  // [experts]
  const int32_t* expert_rows;    // [experts]
  const uint32_t* failed;        // as GemmArguments::failed
  int32_t experts;               // of this launch; blockIdx.y
  BiasGradientKind kind;
  BiasSum sums[2];  // db2 of rows of dy, db1 of dz
  // dy . b2 of each row by kBiasDotColumns columns [ceil(H / kBiasDotColumns)][dot_stride]; null: it is no part of
  // dprob.
  float* dots;
  int64_t dot_stride;
  const BFloat16* b2[kMaxBiasExperts];  // [H] each
};

}  // namespace uniep::cuda
