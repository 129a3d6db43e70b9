#pragma once

#include <cstdint>
#include <cstring>

#include "engine/cpu/kernels.h"
#include "model/activation.h"

// The row kernels: plain loops over the scalar functions of elementwise.h, which the compiler vectorises for the
// instruction set at hand. Internal linkage for the reason that kernels_gemm.h gives.
//
// Rows are worked off in blocks of 64 columns through local arrays: outputs may then be the inputs' own memory, loops
// have a constant length, and a block is a chunk of dprob.
namespace uniep::cpu {
namespace {

constexpr int kBlock = kProbColumns;

inline float canonical_nan(float value) {
  return value == value ? value : float_from_bits(0x7fc00000u);
}

inline BFloat16 round_result(float value) {
  return to_bfloat16(canonical_nan(value));
}

inline int64_t block_size(int64_t left) {
  return left < kBlock ? left : kBlock;
}

// Columns beyond `count` are +0.
template <class T>
void load_block(const T* from, int64_t count, T (&block)[kBlock]) {
  if (count == kBlock) {
    std::memcpy(block, from, sizeof(block));
  } else {
    std::memset(block, 0, sizeof(block));
    std::memcpy(block, from, static_cast<std::size_t>(count) * sizeof(T));
  }
}

template <class T>
void store_block(const T (&block)[kBlock], int64_t count, T* to) {
  if (count == kBlock) {
    std::memcpy(to, block, sizeof(block));
  } else {
    std::memcpy(to, block, static_cast<std::size_t>(count) * sizeof(T));
  }
}

void round_row(const float* in, BFloat16* out, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = block_size(n - begin);
    float values[kBlock];
    BFloat16 rounded[kBlock];
    load_block(in + begin, count, values);
    for (int j = 0; j < kBlock; ++j) rounded[j] = to_bfloat16(values[j]);
    store_block(rounded, count, out + begin);
  }
}

void weigh_row(const float* in, float weight, BFloat16* out, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = block_size(n - begin);
    float values[kBlock];
    BFloat16 weighted[kBlock];
    load_block(in + begin, count, values);
    for (int j = 0; j < kBlock; ++j) weighted[j] = round_result(mul(weight, to_float(to_bfloat16(values[j]))));
    store_block(weighted, count, out + begin);
  }
}

void add_weighted(const BFloat16* in, float weight, float* sums, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = block_size(n - begin);
    BFloat16 values[kBlock];
    float sum[kBlock];
    load_block(in + begin, count, values);
    load_block(sums + begin, count, sum);
    for (int j = 0; j < kBlock; ++j) {
      sum[j] = canonical_nan(fused_multiply_add(weight, to_float(values[j]), sum[j]));
    }
    store_block(sum, count, sums + begin);
  }
}

template <ActivationKind kKind, bool kWeighsZ>
struct RowsOf {
  using Expert = ExpertActivation<kKind, kWeighsZ>;

  static void activate(const ActivationParameters& parameters, const ActivationRow& row, BFloat16* a) {
    const auto [gate, up, prob, n] = row;
    const Expert expert(parameters);
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = block_size(n - begin);
      BFloat16 g[kBlock], u[kBlock] = {}, result[kBlock];
      load_block(gate + begin, count, g);
      if constexpr (Expert::kGated) load_block(up + begin, count, u);
      for (int j = 0; j < kBlock; ++j) result[j] = round_result(expert.activate(to_float(g[j]), to_float(u[j]), prob));
      store_block(result, count, a + begin);
    }
  }

  static void gradient(const ActivationParameters& parameters, const ActivationRow& row,
                       const ActivationRowGradient& results) {
    const auto [gate, up, prob, n] = row;
    const auto [da, a, dgate, dup, chunk_sums] = results;
    const Expert expert(parameters);
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = block_size(n - begin);
      BFloat16 g[kBlock], u[kBlock] = {}, activation[kBlock], gate_gradient[kBlock], up_gradient[kBlock];
      float incoming[kBlock], terms[kBlock];
      load_block(gate + begin, count, g);
      if constexpr (Expert::kGated) load_block(up + begin, count, u);
      load_block(da + begin, count, incoming);
      for (int j = 0; j < kBlock; ++j) {
        const ActivationGradient own = expert.gradient(to_float(g[j]), to_float(u[j]), prob, incoming[j]);
        activation[j] = round_result(own.activation);
        gate_gradient[j] = round_result(own.gate);
        if constexpr (Expert::kGated) up_gradient[j] = round_result(own.up);
        terms[j] = own.prob_term;
      }
      for (int64_t j = count; j < kBlock; ++j) terms[j] = 0.0f;  // a weight that is infinite makes them NaN
      store_block(activation, count, a + begin);
      store_block(gate_gradient, count, dgate + begin);
      if constexpr (Expert::kGated) store_block(up_gradient, count, dup + begin);
      chunk_sums[begin / kBlock] = sum_prob_terms(incoming, terms);
    }
  }

  static constexpr ActivationRows kRows = {activate, gradient};

 private:
  static float sum_prob_terms(const float (&da)[kBlock], const float (&terms)[kBlock]) {
    float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int j = 0; j < kBlock; j += 8) {
      for (int q = 0; q < 4; ++q) partial[q] = Expert::add_prob(partial[q], da[j + 2 * q], terms[j + 2 * q]);
      for (int q = 0; q < 4; ++q) partial[q] = Expert::add_prob(partial[q], da[j + 2 * q + 1], terms[j + 2 * q + 1]);
    }
    return canonical_nan(join_prob_partials(partial[0], partial[1], partial[2], partial[3]));
  }
};

void sum_rows(const BFloat16* const* rows, int64_t count, BFloat16* y, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t columns = block_size(n - begin);
    float sum[kBlock] = {};
    BFloat16 values[kBlock], rounded[kBlock];
    for (int64_t i = 0; i < count; ++i) {
      load_block(rows[i] + begin, columns, values);
      for (int j = 0; j < kBlock; ++j) sum[j] = add(sum[j], to_float(values[j]));
    }
    for (int j = 0; j < kBlock; ++j) rounded[j] = round_result(sum[j]);
    store_block(rounded, columns, y + begin);
  }
}

void add_row(const float* c, float* main_grad, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = block_size(n - begin);
    float increment[kBlock], value[kBlock];
    load_block(c + begin, count, increment);
    load_block(main_grad + begin, count, value);
    for (int j = 0; j < kBlock; ++j) value[j] = canonical_nan(add(value[j], increment[j]));
    store_block(value, count, main_grad + begin);
  }
}

// The table of an instruction set, whose gemm is its own.
constexpr Kernels table_of(decltype(Kernels::gemm) gemm) {
  Kernels table{gemm, round_row, weigh_row, add_weighted, {}, sum_rows, add_row};
  const auto add = [&]<ActivationKind kKind>() {
    table.activations[static_cast<int>(kKind)][0] = RowsOf<kKind, false>::kRows;
    table.activations[static_cast<int>(kKind)][1] = RowsOf<kKind, true>::kRows;
  };
  add.template operator()<ActivationKind::kSwiglu>();
  add.template operator()<ActivationKind::kGegluTanh>();
  add.template operator()<ActivationKind::kGegluErf>();
  add.template operator()<ActivationKind::kRelu2>();
  add.template operator()<ActivationKind::kSilu>();
  add.template operator()<ActivationKind::kShapedSwiglu>();
  return table;
}

}  // namespace
}  // namespace uniep::cpu
