#include "support/layer_arrays.h"

namespace uniep::test {

LayerArrays::LayerArrays(const RandomLayer& layer) : source(layer) {
  const LayerShape& shape = layer.config.shape;
  for (int rank = 0; rank < layer.ranks; ++rank) {
    const int64_t first = layer.data.first_token(rank) * shape.topk;
    routings.push_back({layer.data.tokens[rank], layer.data.ids.data() + first, IndexType::kInt32,
                        layer.data.probs.data() + first, Stream{}});
  }
  reset();
}

void LayerArrays::reset() {
  const LayerShape& shape = source.config.shape;
  const int64_t tokens = source.data.all_tokens(), weights = shape.experts * shape.intermediate * shape.hidden;
  result.y.assign(tokens * shape.hidden, BFloat16{0xffff});
  result.dx.assign(tokens * shape.hidden, BFloat16{0xffff});
  result.dprobs.assign(tokens * shape.topk, -1.0f);
  if (source.config.numerics.weight_gradient == WeightGradient::kBFloat16) {
    result.dw1_bf16.assign(source.data.halves * weights, BFloat16{0xffff});
    result.dw2_bf16.assign(weights, BFloat16{0xffff});
    result.db1_bf16.assign(source.data.b1.size(), BFloat16{0xffff});
    result.db2_bf16.assign(source.data.b2.size(), BFloat16{0xffff});
    return;
  }
  result.dw1_fp32.resize(source.data.halves * weights);
  result.dw2_fp32.resize(weights);
  result.db1_fp32.resize(source.data.b1.size());
  result.db2_fp32.resize(source.data.b2.size());
  for (auto* const gradient : {&result.dw1_fp32, &result.dw2_fp32, &result.db1_fp32, &result.db2_fp32}) {
    for (std::size_t i = 0; i < gradient->size(); ++i) (*gradient)[i] = cli::start_main_grad(i);
  }
}

void LayerArrays::gather_z(const Saved& saved) {
  const LayerShape& shape = source.config.shape;
  const Placement& placement = saved.placement();
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    const int64_t rows = placement.expert_rows(expert), columns = source.data.halves * shape.intermediate;
    if (rows == 0) continue;
    const int rank = static_cast<int>(expert / (shape.experts / source.ranks));
    if (saved.z(rank) == nullptr) continue;
    const BFloat16* z = saved.z(rank) + placement.expert_segment(expert) * columns;
    result.z.insert(result.z.end(), z, z + rows * columns);
  }
}

cli::LayerResult LayerArrays::expected(WeightGradientTime time) const {
  cli::LayerResult expected = run_sequential(source);
  if (result.z.empty()) expected.z.clear();
  if (time == WeightGradientTime::kNone) {
    const LayerArrays untouched(source);
    expected.dw1_bf16 = untouched.result.dw1_bf16;
    expected.dw2_bf16 = untouched.result.dw2_bf16;
    expected.dw1_fp32 = untouched.result.dw1_fp32;
    expected.dw2_fp32 = untouched.result.dw2_fp32;
    expected.db1_bf16 = untouched.result.db1_bf16;
    expected.db2_bf16 = untouched.result.db2_bf16;
    expected.db1_fp32 = untouched.result.db1_fp32;
    expected.db2_fp32 = untouched.result.db2_fp32;
  }
  return expected;
}

std::vector<ForwardArguments> LayerArrays::forward_arguments() {
  std::vector<ForwardArguments> arguments(source.ranks);
  for (int rank = 0; rank < source.ranks; ++rank) {
    arguments[rank].x = source.data.x_of(rank);
    arguments[rank].y = result.y.data() + source.data.first_token(rank) * source.config.shape.hidden;
    arguments[rank].weights.w1 = source.data.w1_of(rank);
    arguments[rank].weights.w2 = source.data.w2_of(rank);
    if (!source.config.numerics.bias) continue;
    arguments[rank].weights.b1 = source.data.b1_of(rank);
    arguments[rank].weights.b2 = source.data.b2_of(rank);
  }
  return arguments;
}

WeightGradients LayerArrays::gradients(int rank) {
  const LayerShape& shape = source.config.shape;
  const int64_t offset = rank * (shape.experts / source.ranks) * shape.intermediate * shape.hidden;
  const int64_t halves = source.data.halves;
  WeightGradients own;
  if (source.config.numerics.weight_gradient == WeightGradient::kBFloat16) {
    own.dw1 = result.dw1_bf16.data() + halves * offset;
    own.dw2 = result.dw2_bf16.data() + offset;
    if (source.config.numerics.bias) own.db1 = result.db1_bf16.data() + halves * offset / shape.hidden;
    if (source.config.numerics.bias) own.db2 = result.db2_bf16.data() + offset / shape.intermediate;
  } else {
    own.dw1 = result.dw1_fp32.data() + halves * offset;
    own.dw2 = result.dw2_fp32.data() + offset;
    if (source.config.numerics.bias) own.db1 = result.db1_fp32.data() + halves * offset / shape.hidden;
    if (source.config.numerics.bias) own.db2 = result.db2_fp32.data() + offset / shape.intermediate;
  }
  return own;
}

std::vector<BackwardArguments> LayerArrays::backward_arguments(WeightGradientTime time, bool last_use,
                                                               bool recomputes) {
  const std::vector<ForwardArguments> forward = forward_arguments();
  std::vector<BackwardArguments> arguments(source.ranks);
  for (int rank = 0; rank < source.ranks; ++rank) {
    BackwardArguments& own = arguments[rank];
    own.dy = source.data.dy_of(rank);
    if (time != WeightGradientTime::kNone || recomputes) own.x = forward[rank].x;
    own.weights = forward[rank].weights;
    own.dx = result.dx.data() + source.data.first_token(rank) * source.config.shape.hidden;
    own.dprobs = result.dprobs.data() + source.data.first_token(rank) * source.config.shape.topk;
    if (time == WeightGradientTime::kNow) own.gradients = gradients(rank);
    own.weight_gradients = time;
    own.last_use = last_use;
  }
  return arguments;
}

std::vector<WeightGradientArguments> LayerArrays::weight_gradient_arguments(bool dw1, bool dw2) {
  std::vector<WeightGradientArguments> arguments(source.ranks);
  for (int rank = 0; rank < source.ranks; ++rank) {
    WeightGradients& own = arguments[rank].gradients = gradients(rank);
    if (!dw1) own.dw1 = own.db1 = nullptr;
    if (!dw2) own.dw2 = own.db2 = nullptr;
  }
  return arguments;
}

}  // namespace uniep::test
