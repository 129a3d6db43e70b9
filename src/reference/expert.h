#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "reference/activation.h"
#include "reference/layer.h"
#include "reference/multiply.h"

namespace uniep::reference {

inline double to_double(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
inline double to_double(float value) {
  return value;
}
inline double to_double(double value) {
  return value;
}

// Nearest value with 8 significant bits, as bf16 has (Veltkamp's splitting; the exponents of a layer are far from the
// ends of the range).
inline double rounded_to_bf16(double value) {
  constexpr double kSplitter = 0x1p45 + 1;
  const double scaled = value * kSplitter;
  return scaled - (scaled - value);
}

// One expert's rows, restricted to n of its I activation columns. Everything that is element-wise in the columns is
// here, so the whole layer (n = I) and a sample of columns run the same arithmetic.
struct ExpertColumns {
  std::vector<double> z;           // [rows, halves n]: gate columns, then up columns; not rounded
  std::vector<double> activation;  // [rows, n]: what FC2 multiplies, as stored
  std::vector<double> weighted;    // [rows, n]: what dW2 multiplies, as stored; empty without dy
  std::vector<double> dz;          // [rows, halves n], as stored; empty without dy
  std::vector<double> dprob;       // [rows]: these columns' part; empty without dy
};

template <typename Value, typename Prob>
class Expert {
 public:
  Expert(const BasicLayerInput<Value, Prob>& input, const RoutedRows& routed, int64_t index)
      : input_(input),
        hidden_(input.shape.hidden),
        intermediate_(input.shape.intermediate),
        halves_(halves_of(input.numerics)),
        rows_(routed.rows_of(index)),
        slots_(routed.slots.data() + routed.expert_begin[index]),
        w1_(input.w1 + index * halves_ * intermediate_ * hidden_),
        w2_(input.w2 + index * intermediate_ * hidden_),
        b1_(input.numerics.bias ? input.b1 + index * halves_ * intermediate_ : nullptr),
        b2_(input.numerics.bias ? input.b2 + index * hidden_ : nullptr) {
    tokens_.reserve(rows_);
    for (int64_t row = 0; row < rows_; ++row) tokens_.push_back(slots_[row] / input.shape.topk);
  }

  int64_t rows() const { return rows_; }
  int64_t token(int64_t row) const { return tokens_[row]; }
  int64_t slot(int64_t row) const { return slots_[row]; }  // flat: token * K + slot

  ExpertColumns columns(std::span<const int64_t> columns) const {
    const int64_t n = static_cast<int64_t>(columns.size());
    ExpertColumns result;
    result.z.resize(rows_ * halves_ * n);
    multiply(
        {rows_, halves_ * n, hidden_}, [&](int64_t m, int64_t h) { return x(m, h); },
        [&](int64_t h, int64_t j) { return w1(j < n ? columns[j] : intermediate_ + columns[j - n], h); },
        result.z.data());
    for (int64_t m = 0; m < rows_ && b1_ != nullptr; ++m) {
      for (int64_t j = 0; j < halves_ * n; ++j) {
        result.z[m * halves_ * n + j] += to_double(b1_[j < n ? columns[j] : intermediate_ + columns[j - n]]);
      }
    }
    std::vector<double> da;
    if (input_.dy) {
      da.resize(rows_ * n);
      multiply(
          {rows_, n, hidden_}, [&](int64_t m, int64_t h) { return dy(m, h); },
          [&](int64_t h, int64_t j) { return w2(h, columns[j]); }, da.data());
    }
    apply_activation(n, da, &result);
    return result;
  }

  // The contract rounds what it saves or sends between stages (z, a, o, dz, dxg) to bf16, and so does the reference of
  // a bf16 layer: otherwise a dW1 line of an expert with few rows shows z's and dz's rounding instead of the engine's
  // errors. The double layer is the plain function, for finite differences. Results themselves are never rounded.
  static double stored(double value) {
    if constexpr (std::is_same_v<Value, BFloat16>) return rounded_to_bf16(value);
    return value;
  }

  // o = W2 a + b2, as stored, and times the router's weight where that is its place, as stored: [rows, H]. All columns.
  std::vector<double> output(const ExpertColumns& all) const {
    std::vector<double> o(rows_ * hidden_);
    multiply(
        {rows_, hidden_, intermediate_}, [&](int64_t m, int64_t i) { return all.activation[m * intermediate_ + i]; },
        [&](int64_t i, int64_t h) { return w2(h, i); }, o.data());
    for (int64_t m = 0; m < rows_ && b2_ != nullptr; ++m) {
      for (int64_t h = 0; h < hidden_; ++h) o[m * hidden_ + h] += to_double(b2_[h]);
    }
    for (double& value : o) value = stored(value);
    if (input_.numerics.router_weight != RouterWeight::kOutput) return o;
    for (int64_t m = 0; m < rows_; ++m) {
      for (int64_t h = 0; h < hidden_; ++h) o[m * hidden_ + h] = stored(prob(m) * o[m * hidden_ + h]);
    }
    return o;
  }

  // dxg = dz W1, as stored: [rows, H]. All columns.
  std::vector<double> input_gradient(const ExpertColumns& all) const {
    std::vector<double> dxg(rows_ * hidden_);
    multiply(
        {rows_, hidden_, halves_ * intermediate_},
        [&](int64_t m, int64_t j) { return all.dz[m * halves_ * intermediate_ + j]; },
        [&](int64_t j, int64_t h) { return w1(j, h); }, dxg.data());
    for (double& value : dxg) value = stored(value);
    return dxg;
  }

  // The lines of dW1 that belong to n columns: [halves n, H], gate lines, then up lines.
  std::vector<double> dw1(const ExpertColumns& some, int64_t n) const {
    std::vector<double> result(halves_ * n * hidden_);
    multiply(
        {halves_ * n, hidden_, rows_}, [&](int64_t j, int64_t m) { return some.dz[m * halves_ * n + j]; },
        [&](int64_t m, int64_t h) { return x(m, h); }, result.data());
    return result;
  }

  // The n columns of dW2: [H, n].
  std::vector<double> dw2(const ExpertColumns& some, int64_t n) const {
    std::vector<double> result(hidden_ * n);
    multiply(
        {hidden_, n, rows_}, [&](int64_t h, int64_t m) { return dy(m, h); },
        [&](int64_t m, int64_t j) { return some.weighted[m * n + j]; }, result.data());
    return result;
  }

  // What b2 is of d loss / d prob of a row: dy b2 where the router's weight multiplies it, too.
  double bias_dprob(int64_t row) const {
    double sum = 0.0;
    if (b2_ == nullptr || input_.numerics.router_weight != RouterWeight::kOutput) return sum;
    for (int64_t h = 0; h < hidden_; ++h) sum += dy(row, h) * to_double(b2_[h]);
    return sum;
  }

  // db1 of n columns: [halves n].
  std::vector<double> db1(const ExpertColumns& some, int64_t n) const {
    std::vector<double> result(halves_ * n, 0.0);
    for (int64_t m = 0; m < rows_; ++m) {
      for (int64_t j = 0; j < halves_ * n; ++j) result[j] += some.dz[m * halves_ * n + j];
    }
    return result;
  }

  // db2: [H], all columns.
  std::vector<double> db2() const {
    std::vector<double> result(hidden_, 0.0);
    for (int64_t m = 0; m < rows_; ++m) {
      const double weight = input_.numerics.router_weight == RouterWeight::kOutput ? prob(m) : 1.0;
      for (int64_t h = 0; h < hidden_; ++h) result[h] += weight * dy(m, h);
    }
    return result;
  }

 private:
  double x(int64_t row, int64_t h) const { return to_double(input_.x[token(row) * hidden_ + h]); }
  double dy(int64_t row, int64_t h) const { return to_double(input_.dy[token(row) * hidden_ + h]); }
  double prob(int64_t row) const { return to_double(input_.probs[slots_[row]]); }
  double w1(int64_t line, int64_t h) const { return to_double(w1_[line * hidden_ + h]); }
  double w2(int64_t h, int64_t i) const { return to_double(w2_[h * intermediate_ + i]); }

  // act(z) p, or act(p z); with `output` p waits, and dW2 = (p dy)^T a is dy^T (p a).
  void apply_activation(int64_t n, const std::vector<double>& da, ExpertColumns* result) const {
    const bool backward = input_.dy != nullptr;
    const RouterWeight place = input_.numerics.router_weight;
    result->activation.resize(rows_ * n);
    if (backward) {
      result->weighted.resize(rows_ * n);
      result->dz.resize(rows_ * halves_ * n);
      result->dprob.assign(rows_, 0.0);
    }
    for (int64_t m = 0; m < rows_; ++m) {
      const double p = prob(m);
      const double inside = place == RouterWeight::kInput ? p : 1.0, outside = place == RouterWeight::kInput ? 1.0 : p;
      for (int64_t j = 0; j < n; ++j) {
        double* const row = result->z.data() + m * halves_ * n;
        const double gate = stored(row[j]), up = halves_ == 2 ? stored(row[n + j]) : 0.0;
        const Activated act = activated(input_.numerics, inside * gate, inside * up);
        const double weighted = stored(act.value * outside);
        result->activation[m * n + j] = place == RouterWeight::kOutput ? stored(act.value) : weighted;
        if (!backward) continue;
        const double incoming = da[m * n + j];
        const double by_gate = incoming * outside * act.by_gate, by_up = incoming * outside * act.by_up;
        result->weighted[m * n + j] = weighted;
        result->dz[m * halves_ * n + j] = stored(by_gate * inside);
        if (halves_ == 2) result->dz[m * halves_ * n + n + j] = stored(by_up * inside);
        result->dprob[m] += place == RouterWeight::kInput ? by_gate * gate + by_up * up : incoming * act.value;
      }
    }
  }

  const BasicLayerInput<Value, Prob>& input_;
  int64_t hidden_;
  int64_t intermediate_;
  int64_t halves_;
  int64_t rows_;
  const int64_t* slots_;
  std::vector<int64_t> tokens_;
  const Value* w1_;
  const Value* w2_;
  const Value* b1_;  // null: no biases
  const Value* b2_;
};

}  // namespace uniep::reference
