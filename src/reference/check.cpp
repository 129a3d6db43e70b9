#include "reference/check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

#include "reference/sample.h"

namespace uniep::reference {
namespace {

template <typename T>
void add(Comparer* comparer, const T* got, std::span<const double> reference) {
  comparer->add(std::span<const T>(got, reference.size()), reference);
}

// What was added to `start` to make `got`: of all values whose sum with it is rounded to `got`, the nearest to the
// reference.
float added(float start, float got, double reference) {
  if (!std::isfinite(got)) return got;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const double value = got, before = std::nextafter(got, -kInfinity), behind = std::nextafter(got, kInfinity);
  const double least = (before + value) / 2 - start, most = (value + behind) / 2 - start;
  return static_cast<float>(std::clamp(reference, least, most));
}

// A weight gradient, read as what it is.
class GradientTensor {
 public:
  GradientTensor(const void* data, const EngineOutput& of)
      : data_(data), bfloat16_(of.weight_gradient == WeightGradient::kBFloat16) {
    if (of.weight_gradient == WeightGradient::kMainGrad) start_ = of.main_grad;
  }
  bool given() const { return data_ != nullptr; }

  void compare_at(int64_t offset, std::span<const double> reference, Comparer* comparer) const {
    if (bfloat16_) {
      add(comparer, static_cast<const BFloat16*>(data_) + offset, reference);
    } else if (start_ != nullptr) {
      add(comparer, sums(offset, 1, reference).data(), reference);
    } else {
      add(comparer, static_cast<const float*>(data_) + offset, reference);
    }
  }

  // `reference.size()` values that lie `stride` apart, as one row.
  void compare_strided(int64_t offset, int64_t stride, std::span<const double> reference, Comparer* comparer) const {
    if (bfloat16_) {
      add(comparer, gather<BFloat16>(offset, stride, reference.size()).data(), reference);
    } else if (start_ != nullptr) {
      add(comparer, sums(offset, stride, reference).data(), reference);
    } else {
      add(comparer, gather<float>(offset, stride, reference.size()).data(), reference);
    }
  }

 private:
  template <typename T>
  std::vector<T> gather(int64_t offset, int64_t stride, size_t count) const {
    std::vector<T> values;
    values.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      values.push_back(static_cast<const T*>(data_)[offset + static_cast<int64_t>(i) * stride]);
    }
    return values;
  }

  std::vector<float> sums(int64_t offset, int64_t stride, std::span<const double> reference) const {
    std::vector<float> values = gather<float>(offset, stride, reference.size());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] =
          added(start_(static_cast<uint64_t>(offset + static_cast<int64_t>(i) * stride)), values[i], reference[i]);
    }
    return values;
  }

  const void* data_;
  bool bfloat16_;
  float (*start_)(uint64_t index) = nullptr;
};

struct Comparers {
  Comparers(const LayerShape& shape, int64_t halves, bool sampled)
      : y(shape.hidden),
        z(halves * shape.intermediate),
        dx(shape.hidden),
        dprobs(shape.topk),
        dw1(shape.hidden),
        dw2(sampled ? shape.hidden : shape.intermediate),
        db1(sampled ? halves : halves * shape.intermediate),
        db2(shape.hidden) {}
  Comparer y, z, dx, dprobs, dw1, dw2, db1, db2;
};

void compare_whole(const LayerInput& input, const EngineOutput& got, Comparers* comparers) {
  const int64_t halves = halves_of(input.numerics);
  const int64_t expert_size = input.shape.hidden * input.shape.intermediate;
  const GradientTensor dw1(got.dw1, got);
  const GradientTensor dw2(got.dw2, got);
  const GradientTensor db1(got.db1, got), db2(got.db2, got);
  WeightGradientSink sink;
  if (dw1.given() || dw2.given() || db1.given() || db2.given()) {
    sink = [&](int64_t expert, std::span<const double> expert_dw1, std::span<const double> expert_dw2) {
      if (dw1.given()) dw1.compare_at(expert * halves * expert_size, expert_dw1, &comparers->dw1);
      if (dw2.given()) dw2.compare_at(expert * expert_size, expert_dw2, &comparers->dw2);
    };
  }
  const LayerOutput output = evaluate(input, sink);
  if (got.y) add(&comparers->y, got.y, output.y);
  if (got.z) add(&comparers->z, got.z, output.z);
  if (got.dx) add(&comparers->dx, got.dx, output.dx);
  if (got.dprobs) add(&comparers->dprobs, got.dprobs, output.dprobs);
  if (db1.given()) db1.compare_at(0, output.db1, &comparers->db1);
  if (db2.given()) db2.compare_at(0, output.db2, &comparers->db2);
}

// Compares the i-th row of the reference with row chosen[i] of `got`.
template <typename T>
void compare_rows(const T* got, const std::vector<int64_t>& chosen, const std::vector<double>& reference,
                  int64_t columns, Comparer* comparer) {
  if (!got || reference.empty()) return;
  for (size_t i = 0; i < chosen.size(); ++i) {
    add(comparer, got + chosen[i] * columns,
        std::span<const double>(reference).subspan(i * static_cast<size_t>(columns), static_cast<size_t>(columns)));
  }
}

void compare_sample(const LayerInput& input, const EngineOutput& got, const RoutedRows& routed, const Sample& sample,
                    Comparers* comparers) {
  const int64_t hidden = input.shape.hidden;
  const int64_t intermediate = input.shape.intermediate;
  const int64_t halves = halves_of(input.numerics);
  const SampleOutput output = evaluate_sample(input, routed, sample);
  compare_rows(got.y, sample.tokens, output.y, hidden, &comparers->y);
  compare_rows(got.z, output.z_rows, output.z, halves * intermediate, &comparers->z);
  compare_rows(got.dx, sample.tokens, output.dx, hidden, &comparers->dx);
  compare_rows(got.dprobs, sample.tokens, output.dprobs, input.shape.topk, &comparers->dprobs);

  const GradientTensor dw1(got.dw1, got);
  const GradientTensor dw2(got.dw2, got);
  std::span<const double> dw1_reference(output.dw1);
  std::span<const double> dw2_reference(output.dw2);
  const GradientTensor db1(got.db1, got), db2(got.db2, got);
  std::span<const double> db1_reference(output.db1), db2_reference(output.db2);
  const size_t line = static_cast<size_t>(hidden);
  for (const WeightColumn& chosen : sample.weight_columns) {
    for (int64_t half = 0; half < halves && dw1.given(); ++half) {
      const int64_t own = chosen.expert * halves * intermediate + half * intermediate + chosen.column;
      dw1.compare_at(own * hidden, dw1_reference.subspan(static_cast<size_t>(half) * line, line), &comparers->dw1);
    }
    if (dw2.given()) {
      dw2.compare_strided(chosen.expert * hidden * intermediate + chosen.column, intermediate,
                          dw2_reference.first(line), &comparers->dw2);
    }
    if (!db1_reference.empty()) {
      const auto own = static_cast<size_t>(halves);
      if (db1.given()) {
        db1.compare_strided(chosen.expert * halves * intermediate + chosen.column, intermediate,
                            db1_reference.first(own), &comparers->db1);
      }
      if (db2.given()) db2.compare_at(chosen.expert * hidden, db2_reference.first(line), &comparers->db2);
      db1_reference = db1_reference.subspan(own);
      db2_reference = db2_reference.subspan(line);
    }
    dw1_reference = dw1_reference.subspan(static_cast<size_t>(halves) * line);
    dw2_reference = dw2_reference.subspan(line);
  }
}

void require_unused_dprobs_zero(const LayerInput& input, const float* dprobs, Comparison* comparison) {
  for (int64_t entry = 0; entry < input.tokens * input.shape.topk; ++entry) {
    if (input.ids[entry] >= 0 || std::bit_cast<uint32_t>(dprobs[entry]) == 0) continue;
    comparison->passed = false;
    comparison->message = "token " + std::to_string(entry / input.shape.topk) + ", slot " +
                          std::to_string(entry % input.shape.topk) + " is unused, but its value is not +0";
    return;
  }
}

}  // namespace

bool CheckReport::passed() const {
  for (const auto& [name, comparison] : tensors) {
    if (!comparison.passed) return false;
  }
  return true;
}

CheckReport check(const LayerInput& input, const EngineOutput& got, const CheckOptions& options) {
  const RoutedRows routed = route(input.shape, input.tokens, input.ids);
  CheckReport report;
  report.sampled = layer_flops(input, routed) > options.whole_flops;
  Comparers comparers(input.shape, halves_of(input.numerics), report.sampled);
  if (report.sampled) {
    const Sample sample = choose_sample(input, routed, options.seed, options.sample_flops);
    report.sampled_tokens = static_cast<int64_t>(sample.tokens.size());
    report.sampled_weight_columns = static_cast<int64_t>(sample.weight_columns.size());
    compare_sample(input, got, routed, sample, &comparers);
  } else {
    compare_whole(input, got, &comparers);
  }

  const auto take = [&](const char* name, const void* tensor, const Comparer& comparer) {
    if (tensor) report.tensors.emplace_back(name, comparer.result());
  };
  take("y", got.y, comparers.y);
  take("z", got.z, comparers.z);
  if (!input.dy) return report;
  take("dx", got.dx, comparers.dx);
  take("dprobs", got.dprobs, comparers.dprobs);
  if (got.dprobs) require_unused_dprobs_zero(input, got.dprobs, &report.tensors.back().second);
  take("dw1", got.dw1, comparers.dw1);
  take("dw2", got.dw2, comparers.dw2);
  take("db1", got.db1, comparers.db1);
  take("db2", got.db2, comparers.db2);
  return report;
}

}  // namespace uniep::reference
