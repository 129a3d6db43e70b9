#include "reference/layer.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "reference/expert.h"
#include "uniep/error.h"

namespace uniep::reference {
namespace {

void require_at_least(const char* name, int64_t value, int64_t minimum) {
  if (value >= minimum) return;
  throw Error(Status::kInvalidArgument, std::string("reference: ") + name + " is " + std::to_string(value) +
                                            "; legal is " + std::to_string(minimum) + " or more");
}

void require_sizes(const LayerShape& shape, int64_t tokens) {
  require_at_least("hidden", shape.hidden, 1);
  require_at_least("intermediate", shape.intermediate, 1);
  require_at_least("experts", shape.experts, 1);
  require_at_least("topk", shape.topk, 1);
  require_at_least("tokens", tokens, 0);
}

}  // namespace

RoutedRows route(const LayerShape& shape, int64_t tokens, const int32_t* ids) {
  require_sizes(shape, tokens);
  const int64_t entries = tokens * shape.topk;
  RoutedRows routed;
  routed.expert_begin.assign(shape.experts + 1, 0);
  for (int64_t entry = 0; entry < entries; ++entry) {
    const int64_t expert = ids[entry];
    if (expert < -1 || expert >= shape.experts) {
      throw Error(Status::kInvalidArgument, "reference: ids[" + std::to_string(entry / shape.topk) + ", " +
                                                std::to_string(entry % shape.topk) + "] is " + std::to_string(expert) +
                                                "; legal are -1 and 0 to " + std::to_string(shape.experts - 1));
    }
    if (expert >= 0) ++routed.expert_begin[expert + 1];
  }
  std::partial_sum(routed.expert_begin.begin(), routed.expert_begin.end(), routed.expert_begin.begin());
  routed.slots.resize(routed.expert_begin.back());
  std::vector<int64_t> next(routed.expert_begin.begin(), routed.expert_begin.end() - 1);
  for (int64_t entry = 0; entry < entries; ++entry) {
    if (ids[entry] >= 0) routed.slots[next[ids[entry]]++] = entry;
  }
  return routed;
}

template <typename Value, typename Prob>
LayerOutput evaluate(const BasicLayerInput<Value, Prob>& input, const WeightGradientSink& sink) {
  const RoutedRows routed = route(input.shape, input.tokens, input.ids);
  const int64_t hidden = input.shape.hidden;
  const int64_t intermediate = input.shape.intermediate;
  const bool backward = input.dy != nullptr;
  LayerOutput output;
  output.y.assign(input.tokens * hidden, 0.0);
  const int64_t z_columns = halves_of(input.numerics) * intermediate;
  output.z.resize(routed.rows() * z_columns);
  if (backward) {
    output.dx.assign(input.tokens * hidden, 0.0);
    output.dprobs.assign(input.tokens * input.shape.topk, 0.0);
  }
  std::vector<int64_t> all_columns(intermediate);
  std::iota(all_columns.begin(), all_columns.end(), 0);

  for (int64_t index = 0; index < input.shape.experts; ++index) {
    const Expert<Value, Prob> expert(input, routed, index);
    const ExpertColumns columns = expert.columns(all_columns);
    std::copy(columns.z.begin(), columns.z.end(), output.z.begin() + routed.expert_begin[index] * z_columns);
    const auto combine = [&](const std::vector<double>& rows, std::vector<double>* tokens) {
      for (int64_t m = 0; m < expert.rows(); ++m) {
        double* target = tokens->data() + expert.token(m) * hidden;
        for (int64_t h = 0; h < hidden; ++h) target[h] += rows[m * hidden + h];
      }
    };
    combine(expert.output(columns), &output.y);
    if (!backward) continue;
    combine(expert.input_gradient(columns), &output.dx);
    for (int64_t m = 0; m < expert.rows(); ++m) output.dprobs[expert.slot(m)] = columns.dprob[m] + expert.bias_dprob(m);
    if (input.numerics.bias && sink) {
      const std::vector<double> db1 = expert.db1(columns, intermediate), db2 = expert.db2();
      output.db1.insert(output.db1.end(), db1.begin(), db1.end());
      output.db2.insert(output.db2.end(), db2.begin(), db2.end());
    }
    if (sink) sink(index, expert.dw1(columns, intermediate), expert.dw2(columns, intermediate));
  }
  return output;
}

template <typename Value, typename Prob>
LayerOutput evaluate(const BasicLayerInput<Value, Prob>& input) {
  std::vector<double> dw1;
  std::vector<double> dw2;
  LayerOutput output =
      evaluate(input, [&](int64_t, std::span<const double> expert_dw1, std::span<const double> expert_dw2) {
        dw1.insert(dw1.end(), expert_dw1.begin(), expert_dw1.end());
        dw2.insert(dw2.end(), expert_dw2.begin(), expert_dw2.end());
      });
  output.dw1 = std::move(dw1);
  output.dw2 = std::move(dw2);
  return output;
}

double layer_flops(const LayerInput& input, const RoutedRows& routed) {
  const double products = static_cast<double>(2 * (halves_of(input.numerics) + 1));
  const double per_row =
      products * static_cast<double>(input.shape.hidden) * static_cast<double>(input.shape.intermediate);
  return per_row * static_cast<double>(routed.rows()) * (input.dy ? 3.0 : 1.0);
}

template LayerOutput evaluate(const LayerInput& input);
template LayerOutput evaluate(const LayerInput& input, const WeightGradientSink& sink);
template LayerOutput evaluate(const DoubleLayerInput& input);
template LayerOutput evaluate(const DoubleLayerInput& input, const WeightGradientSink& sink);

}  // namespace uniep::reference
