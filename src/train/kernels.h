#pragma once

#include <cstdint>

// The fp32 arithmetic that the dense parts of a training step spend their time in, compiled for several instruction
// sets and chosen at run time. Each element comes from one fixed chain of rounded operations, so all give the same
// bits. Matrices are row-major and dense.
namespace uniep::train {

enum class Store { kWrite, kAdd };

struct ProductSizes {
  int64_t m, n, k;
};

// c[m, n] (+)= a[m, k] b[k, n]: one sum along k ascending from zero, a product and an addition rounded each.
void multiply(const float* a, const float* b, float* c, const ProductSizes& sizes, Store store = Store::kWrite);

// c[m, n] = a^T b with a[k, m] and b[k, n]; as above.
void multiply_transposed(const float* a, const float* b, float* c, const ProductSizes& sizes);

// out[i] += x[i] * y[i]
void add_product(const float* x, const float* y, float* out, int64_t count);

// out[i] = value[i] * silu(gate[i])
void gate_forward(const float* value, const float* gate, float* out, int64_t count);

// The gradients of `value` and `gate` for an incoming gradient of `out`.
struct GateBackward {
  const float* value;
  const float* gate;
  const float* out_gradient;
  float* value_gradient;
  float* gate_gradient;
};
void gate_backward(const GateBackward& arrays, int64_t count);

// probabilities = softmax(logits) over `count` columns of one row. May be in place.
struct SoftmaxSummary {
  float largest;  // logit
  float sum;      // of exp(logit - largest), differences below -80 counted as -80
};
SoftmaxSummary softmax(const float* logits, float* probabilities, int64_t count);

// sum of x[i] * y[i] in eight interleaved partial sums, joined in a fixed order.
float dot(const float* x, const float* y, int64_t count);

}  // namespace uniep::train
