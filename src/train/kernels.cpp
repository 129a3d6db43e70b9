#include "train/kernels.h"

#include <algorithm>

#include "model/elementwise.h"

namespace uniep::train {
namespace {

constexpr int kFloatSums = 8;

struct Matrix {
  const float* data;
  int64_t row_stride;
  int64_t k_stride;
};

// c[Rows][Vectors * Lanes], all sums in registers. A lane is a column: no vector operation joins two steps of k.
template <int Rows, int Lanes, int Vectors>
UNIEP_HOST_DEVICE void multiply_block(const Matrix& a, const float* b, float* c, const ProductSizes& sizes,
                                      Store store) {
  const int64_t n = sizes.n, k = sizes.k;
  using Vector [[gnu::vector_size(Lanes * sizeof(float))]] = float;
  Vector sum[Rows][Vectors] = {};
  for (int64_t step = 0; step < k; ++step) {
    Vector column[Vectors];
    __builtin_memcpy(column, b + step * n, sizeof(column));
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const float factor = a.data[row * a.row_stride + step * a.k_stride];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[row][v] = sum[row][v] + factor * column[v];
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < Rows; ++row) {
    Vector old[Vectors] = {};
    if (store == Store::kAdd) {
      __builtin_memcpy(old, c + row * n, sizeof(old));
      for (int v = 0; v < Vectors; ++v) sum[row][v] = old[v] + sum[row][v];
    }
    __builtin_memcpy(c + row * n, sum[row], sizeof(old));
  }
}

// Columns that fill no vector.
UNIEP_HOST_DEVICE void multiply_column(const Matrix& a, const float* b, float* c, const ProductSizes& sizes,
                                       Store store) {
  const auto [m, n, k] = sizes;
  for (int64_t row = 0; row < m; ++row) {
    float sum = 0;
    for (int64_t step = 0; step < k; ++step) {
      sum = sum + a.data[row * a.row_stride + step * a.k_stride] * b[step * n];
    }
    c[row * n] = store == Store::kAdd ? c[row * n] + sum : sum;
  }
}

template <int Lanes, int Vectors>
UNIEP_HOST_DEVICE void multiply_columns(const Matrix& a, const float* b, float* c, const ProductSizes& sizes,
                                        Store store) {
  const int64_t m = sizes.m, n = sizes.n;
  constexpr int kRows = 4;
  int64_t row = 0;
  for (; row + kRows <= m; row += kRows) {
    const Matrix rows{a.data + row * a.row_stride, a.row_stride, a.k_stride};
    multiply_block<kRows, Lanes, Vectors>(rows, b, c + row * n, sizes, store);
  }
  for (; row < m; ++row) {
    const Matrix rows{a.data + row * a.row_stride, a.row_stride, a.k_stride};
    multiply_block<1, Lanes, Vectors>(rows, b, c + row * n, sizes, store);
  }
}

template <int Lanes>
UNIEP_HOST_DEVICE void multiply_all(const Matrix& a, const float* b, float* c, const ProductSizes& sizes, Store store) {
  const int64_t n = sizes.n;
  constexpr int64_t kTwoVectors = 2 * int64_t{Lanes};
  int64_t column = 0;
  for (; column + kTwoVectors <= n; column += kTwoVectors) {
    multiply_columns<Lanes, 2>(a, b + column, c + column, sizes, store);
  }
  for (; column + 8 <= n; column += 8) multiply_columns<4, 2>(a, b + column, c + column, sizes, store);
  for (; column < n; ++column) multiply_column(a, b + column, c + column, sizes, store);
}

UNIEP_HOST_DEVICE void add_product_all(const float* x, const float* y, float* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = out[i] + x[i] * y[i];
}

// exp(x) for |x| <= 80 (callers clamp): x = n ln2 + r with |r| <= ln2 / 2, a Taylor polynomial of degree 6 in r
// (relative error below 2^-22), then an exact scaling by 2^n through the exponent field.
UNIEP_HOST_DEVICE float exp_bounded(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  constexpr float kLn2High = 0.693359375f;        // 9 significant bits: n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  const float shifted = fused_multiply_add(x, kLog2E, kRoundToInteger);
  const float n = shifted - kRoundToInteger;
  const float r = fused_multiply_add(n, -kLn2Low, fused_multiply_add(n, -kLn2High, x));
  float p = 1.0f / 720.0f;
  p = fused_multiply_add(p, r, 1.0f / 120.0f);
  p = fused_multiply_add(p, r, 1.0f / 24.0f);
  p = fused_multiply_add(p, r, 1.0f / 6.0f);
  p = fused_multiply_add(p, r, 0.5f);
  p = fused_multiply_add(p, r, 1.0f);
  p = fused_multiply_add(p, r, 1.0f);
  return float_from_bits(bits_of_float(p) + ((bits_of_float(shifted) - bits_of_float(kRoundToInteger)) << 23));
}

UNIEP_HOST_DEVICE void gate_forward_all(const float* value, const float* gate, float* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = value[i] * (gate[i] * sigmoid(gate[i]));
}

UNIEP_HOST_DEVICE void gate_backward_all(const GateBackward& arrays, int64_t count) {
  const float* const value = arrays.value;
  const float* const gate = arrays.gate;
  const float* const out_gradient = arrays.out_gradient;
  float* __restrict value_gradient = arrays.value_gradient;
  float* __restrict gate_gradient = arrays.gate_gradient;
  for (int64_t i = 0; i < count; ++i) {
    const float s = sigmoid(gate[i]);
    const float silu = gate[i] * s;
    value_gradient[i] = out_gradient[i] * silu;
    gate_gradient[i] = out_gradient[i] * value[i] * (s + silu * (1.0f - s));
  }
}

UNIEP_HOST_DEVICE float join(const float (&sums)[kFloatSums]) {
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

UNIEP_HOST_DEVICE SoftmaxSummary softmax_all(const float* logits, float* probabilities, int64_t count) {
  float maxima[kFloatSums];
  for (float& maximum : maxima) maximum = logits[0];
  int64_t i = 0;
  for (; i + kFloatSums <= count; i += kFloatSums) {
    for (int lane = 0; lane < kFloatSums; ++lane) {
      maxima[lane] = logits[i + lane] > maxima[lane] ? logits[i + lane] : maxima[lane];
    }
  }
  float largest = maxima[0];
  for (int lane = 1; lane < kFloatSums; ++lane) largest = maxima[lane] > largest ? maxima[lane] : largest;
  for (; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
  for (i = 0; i < count; ++i) {
    const float difference = logits[i] - largest;
    probabilities[i] = exp_bounded(difference < -80.0f ? -80.0f : difference);
  }
  float sums[kFloatSums] = {};
  for (i = 0; i + kFloatSums <= count; i += kFloatSums) {
    for (int lane = 0; lane < kFloatSums; ++lane) sums[lane] = sums[lane] + probabilities[i + lane];
  }
  for (int lane = 0; i < count; ++i, ++lane) sums[lane] = sums[lane] + probabilities[i];
  const float sum = join(sums);
  const float scale = 1.0f / sum;
  for (i = 0; i < count; ++i) probabilities[i] = probabilities[i] * scale;
  return {largest, sum};
}

struct KernelTable {
  void (*multiply)(const Matrix&, const float*, float*, const ProductSizes&, Store);
  void (*add_product)(const float*, const float*, float*, int64_t);
  void (*gate_forward)(const float*, const float*, float*, int64_t);
  void (*gate_backward)(const GateBackward&, int64_t);
  SoftmaxSummary (*softmax)(const float*, float*, int64_t);
};

// The functions above once more, as one instruction set.
#define UNIEP_TRAIN_KERNELS(name, lanes, target)                                                                      \
  struct name {                                                                                                       \
    target static void multiply(const Matrix& a, const float* b, float* c, const ProductSizes& sizes, Store store) {  \
      multiply_all<lanes>(a, b, c, sizes, store);                                                                     \
    }                                                                                                                 \
    target static void add_product(const float* x, const float* y, float* out, int64_t count) {                       \
      add_product_all(x, y, out, count);                                                                              \
    }                                                                                                                 \
    target static void gate_forward(const float* value, const float* gate, float* out, int64_t count) {               \
      gate_forward_all(value, gate, out, count);                                                                      \
    }                                                                                                                 \
    target static void gate_backward(const GateBackward& arrays, int64_t count) { gate_backward_all(arrays, count); } \
    target static SoftmaxSummary softmax(const float* logits, float* probabilities, int64_t count) {                  \
      return softmax_all(logits, probabilities, count);                                                               \
    }                                                                                                                 \
    static constexpr KernelTable kTable = {multiply, add_product, gate_forward, gate_backward, softmax};              \
  }

UNIEP_TRAIN_KERNELS(Portable, 4, );
#ifdef __x86_64__
UNIEP_TRAIN_KERNELS(Avx2, 8, __attribute__((target("avx2,fma"))));
UNIEP_TRAIN_KERNELS(Avx512, 16, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))));
#endif
#undef UNIEP_TRAIN_KERNELS

const KernelTable& choose() {
#ifdef __x86_64__
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return Avx512::kTable;
  if (avx2) return Avx2::kTable;
#endif
  return Portable::kTable;
}

const KernelTable& kernels() {
  static const KernelTable& table = choose();
  return table;
}

// Without a product a and b may be null; the sum is then zero, which makes -0 to 0.
void multiply_strided(const Matrix& a, const float* b, float* c, const ProductSizes& sizes, Store store) {
  if (sizes.k > 0) return kernels().multiply(a, b, c, sizes, store);
  for (int64_t i = 0; i < sizes.m * sizes.n; ++i) c[i] = store == Store::kAdd ? c[i] + 0.0f : 0.0f;
}

}  // namespace

void multiply(const float* a, const float* b, float* c, const ProductSizes& sizes, Store store) {
  multiply_strided(Matrix{a, sizes.k, 1}, b, c, sizes, store);
}

void multiply_transposed(const float* a, const float* b, float* c, const ProductSizes& sizes) {
  multiply_strided(Matrix{a, 1, sizes.m}, b, c, sizes, Store::kWrite);
}

void add_product(const float* x, const float* y, float* out, int64_t count) {
  kernels().add_product(x, y, out, count);
}

void gate_forward(const float* value, const float* gate, float* out, int64_t count) {
  kernels().gate_forward(value, gate, out, count);
}

void gate_backward(const GateBackward& arrays, int64_t count) {
  kernels().gate_backward(arrays, count);
}

SoftmaxSummary softmax(const float* logits, float* probabilities, int64_t count) {
  return kernels().softmax(logits, probabilities, count);
}

float dot(const float* x, const float* y, int64_t count) {
  float sums[kFloatSums] = {};
  int64_t i = 0;
  for (; i + kFloatSums <= count; i += kFloatSums) {
    for (int lane = 0; lane < kFloatSums; ++lane) sums[lane] = sums[lane] + x[i + lane] * y[i + lane];
  }
  for (int lane = 0; i < count; ++i, ++lane) sums[lane] = sums[lane] + x[i] * y[i];
  return join(sums);
}

}  // namespace uniep::train
