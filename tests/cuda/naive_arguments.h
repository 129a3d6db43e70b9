#pragma once

#include <cstdint>

#include "model/activation.h"

// Arguments of naive_gemm.cu and test_kernels.cu, as the host passes them.
namespace uniep::cuda::test {

struct NaiveArguments {
  const uint16_t* a;
  const uint16_t* const* b;
  float* d;
  const int32_t* segment_start;
  const int32_t* row_count;
  int64_t a_row, a_k;
  int64_t b_row, b_k;
  int32_t m, n, k;
  int32_t is_wgrad;
};

struct NaiveEpilogueArguments {
  const float* d = nullptr;
  BFloat16* bf16 = nullptr;
  float* fp32 = nullptr;
  BFloat16* activation = nullptr;
  const BFloat16* saved = nullptr;
  const float* prob = nullptr;
  float* dprob = nullptr;
  const int32_t* segment_start = nullptr;
  const int32_t* row_count = nullptr;
  int64_t rows = 0;
  int32_t columns = 0;
  int32_t experts = 0;
  int32_t mask_rows = 0;
  int32_t weighs_output = 0;
  int32_t weighs_z = 0;
  ActivationKind activation_kind = ActivationKind::kSwiglu;
  ActivationParameters parameters = {};
  const BFloat16* bias = nullptr;
  const BFloat16* dyg = nullptr;
  int32_t hidden = 0;
};

struct NaiveBiasArguments {
  const BFloat16* values;
  const float* prob;
  float* sums;
  const int32_t* segment_start;
  const int32_t* row_count;
  int32_t columns, experts;
};

struct FillArguments {
  uint16_t* bf16;
  float* fp32;
  int64_t count;
  uint64_t seed;
  float scale;
  int32_t wide;
};

struct PaddingArguments {
  uint16_t* data;
  const int32_t* segment_start;
  const int32_t* row_count;
  int64_t columns;
  int32_t value;
};

struct CompareArguments {
  const uint16_t* a;
  const uint16_t* b;
  int64_t count;
  unsigned long long* result;
};

struct ChecksumArguments {
  const uint16_t* data;
  int64_t count;
  unsigned long long* sum;
};

struct SampleArguments {
  const float* d;
  const uint16_t* a;
  const uint16_t* const* b;
  const int32_t* segment_start;
  const int32_t* row_count;
  int64_t a_row, a_k, b_row, b_k;
  double* sums;
  int32_t experts, m, n, k, is_wgrad, samples;
};

}  // namespace uniep::cuda::test
