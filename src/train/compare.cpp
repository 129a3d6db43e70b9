#include "train/compare.h"

#include <fmt/format.h>

#include <bit>
#include <cstdint>

#include "model/elementwise.h"

namespace uniep::train {
namespace {

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

}  // namespace

std::string first_difference(const RunRecord& a, const Parameters& a_weights, const RunRecord& b,
                             const Parameters& b_weights) {
  if (a.steps.size() != b.steps.size() || a.evaluations.size() != b.evaluations.size()) {
    return fmt::format("{} and {} steps, {} and {} evaluations", a.steps.size(), b.steps.size(), a.evaluations.size(),
                       b.evaluations.size());
  }
  for (std::size_t i = 0; i < a.steps.size(); ++i) {
    const StepRecord &x = a.steps[i], &y = b.steps[i];
    if (!same_bits(x.loss, y.loss)) return fmt::format("step {}: loss {} and {}", x.step, x.loss, y.loss);
    if (!same_bits(x.balance_loss, y.balance_loss)) {
      return fmt::format("step {}: balancing loss {} and {}", x.step, x.balance_loss, y.balance_loss);
    }
  }
  for (std::size_t i = 0; i < a.evaluations.size(); ++i) {
    const EvaluationRecord &x = a.evaluations[i], &y = b.evaluations[i];
    if (!same_bits(x.loss, y.loss))
      return fmt::format("held-out loss after step {}: {} and {}", x.step, x.loss, y.loss);
  }
  for (const ParameterTensor& tensor : a_weights.layout().tensors()) {
    for (int64_t i = tensor.offset; i < tensor.offset + tensor.count; ++i) {
      const float x = a_weights.values()[i], y = b_weights.values()[i];
      if (bits_of_float(x) != bits_of_float(y)) {
        return fmt::format("weights {}: element {} is {} and {}", tensor.name, i - tensor.offset, x, y);
      }
    }
  }
  return {};
}

}  // namespace uniep::train
