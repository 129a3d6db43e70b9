#pragma once

#include "model/portability.h"
#include "model/row_table.h"
#include "uniep/bfloat16.h"

// Arguments of the kernel of biases' gradients (bias_gradients.cu), of one rank.
namespace uniep::cuda {

constexpr int kBiasThreads = 512;
constexpr int kBiasWarps = kBiasThreads / 32;
constexpr int kBiasColumns = 128;     // of a CTA: four a lane
constexpr int kMaxBiasExperts = 128;  // of a launch

// As uniep::WeightGradient.
enum class BiasGradientKind : int { kBFloat16 = 0, kFloat32 = 1, kMainGrad = 2 };

// One gradient: of each expert the sum of its rows of `values`.
struct BiasSum {
  const BFloat16* values;            // [rows, columns]
  int32_t columns;                   // 0: this gradient is not made
  int32_t weighs;                    // rows times their prob
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
  // dy . b2 of each row, added to its sum of dprob's first columns.
  int32_t dot_ctas;  // that share an expert's rows; 0: it is no part of dprob
  int32_t hidden;
  const BFloat16* dyg;                  // [rows, H]
  float* dprobs;                        // [rows]
  const BFloat16* b2[kMaxBiasExperts];  // [H] each
};

}  // namespace uniep::cuda
