// Kernels of the GPU tests: data, comparison of bytes, and float64 samples.
#include "model/elementwise.h"

using namespace uniep;

// splitmix64's last step.
__device__ __forceinline__ uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

struct FillArguments {
  uint16_t* bf16;  // one of these two
  float* fp32;
  int64_t count;
  uint64_t seed;
  float scale;
  int32_t wide;  // exponents over the whole range, with zeros and subnormals
};

extern "C" __global__ void test_fill(FillArguments args) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const uint64_t bits = mix(args.seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(i) + 1);
    float value = 0.0f;
    for (int part = 0; part < 4; ++part) value += static_cast<float>((bits >> (16 * part)) & 0xffff) / 65536.0f - 0.5f;
    value *= args.scale;
    if (args.wide != 0) {
      const int exponent = static_cast<int>(bits >> 58) - 32;
      value = bits % 61 == 0 ? 0.0f : bits % 59 == 0 ? 1e-40f : value * exp2f(static_cast<float>(exponent) * 0.5f);
    }
    if (args.bf16 != nullptr) args.bf16[i] = to_bfloat16(value).bits;
    if (args.fp32 != nullptr) args.fp32[i] = value;
  }
}

// Sets the padding of every expert's rows to `value`.
struct PaddingArguments {
  uint16_t* data;
  const int32_t* segment_start;
  const int32_t* row_count;
  int64_t columns;
  int32_t value;
};

extern "C" __global__ void test_fill_padding(PaddingArguments args) {
  const int expert = static_cast<int>(blockIdx.x);
  const int count = args.row_count[expert];
  const int padded = (count + 127) / 128 * 128;
  for (int row = count; row < padded; ++row) {
    for (int64_t c = threadIdx.x; c < args.columns; c += blockDim.x) {
      args.data[(args.segment_start[expert] + static_cast<int64_t>(row)) * args.columns + c] =
          static_cast<uint16_t>(args.value);
    }
  }
}

struct CompareArguments {
  const uint16_t* a;
  const uint16_t* b;
  int64_t count;
  unsigned long long* result;  // how many differ, index of the first
};

extern "C" __global__ void test_compare(CompareArguments args) {
  unsigned long long differ = 0;
  unsigned long long first = ~0ull;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    if (args.a[i] != args.b[i]) {
      ++differ;
      if (first == ~0ull) first = static_cast<unsigned long long>(i);
    }
  }
  if (differ != 0) {
    atomicAdd(args.result, differ);
    atomicMin(args.result + 1, first);
  }
}

// The sum of mixed half-words and indices, in whatever order.
struct ChecksumArguments {
  const uint16_t* data;
  int64_t count;
  unsigned long long* sum;
};

extern "C" __global__ void test_checksum(ChecksumArguments args) {
  unsigned long long sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    sum += mix(static_cast<uint64_t>(i) << 16 | args.data[i]);
  }
  atomicAdd(args.sum, sum);
}

// Relative error of sampled elements of D against float64: sums of squares of (got - reference) and of reference.
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

extern "C" __global__ void test_sample(SampleArguments args) {
  const int sample = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (sample >= args.samples) return;
  const uint64_t bits = mix(static_cast<uint64_t>(sample) + 77);
  const int expert = static_cast<int>(bits % args.experts);
  const int rows = args.row_count[expert];
  const int64_t segment = args.segment_start[expert];
  const int m_extent = args.is_wgrad != 0 ? args.m : rows;
  const int k_extent = args.is_wgrad != 0 ? rows : args.k;
  if (m_extent == 0) return;
  const int64_t m = static_cast<int64_t>((bits >> 20) % m_extent);
  const int64_t n = static_cast<int64_t>((bits >> 40) % args.n);
  const uint16_t* const a = args.a + (args.is_wgrad != 0 ? segment * args.a_k : segment * args.a_row);
  const uint16_t* const b = args.is_wgrad != 0 ? args.b[0] + segment * args.b_k : args.b[expert];
  double sum = 0.0;
  for (int64_t k = 0; k < k_extent; ++k) {
    sum += static_cast<double>(to_float(BFloat16{a[m * args.a_row + k * args.a_k]})) *
           static_cast<double>(to_float(BFloat16{b[n * args.b_row + k * args.b_k]}));
  }
  const int64_t row = args.is_wgrad != 0 ? static_cast<int64_t>(expert) * args.m + m : segment + m;
  const double error = static_cast<double>(args.d[row * args.n + n]) - sum;
  atomicAdd(args.sums, error * error);
  atomicAdd(args.sums + 1, sum * sum);
}
