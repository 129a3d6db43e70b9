#include "cli/bench_tensors.h"

#include "model/activation_choice.h"

namespace uniep::cli {
namespace {

constexpr auto kElement = static_cast<int64_t>(sizeof(BFloat16));
// As models begin: with it z is about 1, so that the activation and its gradient have no zeros.
constexpr float kWeightScale = 0.02f;

}  // namespace

LayerTensors::LayerTensors(BenchRanks& ranks, const LayerConfig& config, Parts parts) : ranks_(ranks), config_(config) {
  for (int rank = ranks_.first_local(); rank < ranks_.end_local(); ++rank) {
    add_arguments(rank, parts.backward);
    if (parts.gemms) add_rows(rank, parts.backward);
  }
}

int LayerTensors::halves() const {
  return is_gated(config_.numerics.activation) ? 2 : 1;
}

void LayerTensors::add_arguments(int rank, bool backward) {
  const std::size_t gpu = ranks_.gpu_of(rank);
  BenchGpus& gpus = ranks_.gpus();
  const int64_t h = config_.shape.hidden, tokens = ranks_.on_host().tokens(rank);
  const int64_t weights = config_.shape.experts / ranks_.group().ranks() * config_.shape.intermediate * h;
  ForwardArguments& arguments = forward_.emplace_back();
  arguments.weights.w1 = static_cast<BFloat16*>(gpus.random_bfloat16(gpu, halves() * weights, kWeightScale));
  arguments.weights.w2 = static_cast<BFloat16*>(gpus.random_bfloat16(gpu, weights, kWeightScale));
  const int64_t bias_rows = config_.shape.experts / ranks_.group().ranks();
  const int64_t z_bias = bias_rows * z_columns(config_.shape, config_.numerics), o_bias = bias_rows * h;
  if (config_.numerics.bias) {
    arguments.weights.b1 = static_cast<BFloat16*>(gpus.random_bfloat16(gpu, z_bias));
    arguments.weights.b2 = static_cast<BFloat16*>(gpus.random_bfloat16(gpu, o_bias));
  }
  arguments.x = static_cast<BFloat16*>(gpus.random_bfloat16(gpu, tokens * h));
  arguments.y = static_cast<BFloat16*>(gpus.zeros(gpu, tokens * h * kElement));
  if (!backward) return;
  const bool bf16 = config_.numerics.weight_gradient == WeightGradient::kBFloat16;
  const int64_t gradient_bytes = bf16 ? kElement : static_cast<int64_t>(sizeof(float));
  BackwardArguments& gradients = backward_.emplace_back();
  gradients.dy = static_cast<BFloat16*>(gpus.random_bfloat16(gpu, tokens * h));
  gradients.x = arguments.x;
  gradients.weights = arguments.weights;
  gradients.dx = static_cast<BFloat16*>(gpus.zeros(gpu, tokens * h * kElement));
  gradients.dprobs = static_cast<float*>(gpus.zeros(gpu, tokens * config_.shape.topk * 4));
  gradients.gradients.dw1 = gpus.zeros(gpu, halves() * weights * gradient_bytes);
  gradients.gradients.dw2 = gpus.zeros(gpu, weights * gradient_bytes);
  if (!config_.numerics.bias) return;
  gradients.gradients.db1 = gpus.zeros(gpu, z_bias * gradient_bytes);
  gradients.gradients.db2 = gpus.zeros(gpu, o_bias * gradient_bytes);
}

void LayerTensors::add_rows(int rank, bool backward) {
  const std::size_t gpu = ranks_.gpu_of(rank);
  BenchGpus& gpus = ranks_.gpus();
  const Placement& on_host = ranks_.on_host();
  const int64_t h = config_.shape.hidden, i = config_.shape.intermediate, padded = on_host.padded_rows(rank);
  const int64_t experts = config_.shape.experts / ranks_.group().ranks();
  Rank own;
  const std::vector<float> probs(static_cast<std::size_t>(padded), 1.0f / static_cast<float>(config_.shape.topk));
  own.probs = static_cast<float*>(gpus.copy_of(gpu, probs.data(), padded * 4));
  own.xg = gpus.random_bfloat16(gpu, padded * h);
  const int64_t of_z = padded * halves() * i;
  own.z = backward ? gpus.random_bfloat16(gpu, of_z) : gpus.zeros(gpu, of_z * kElement);
  own.a = gpus.zeros(gpu, padded * i * kElement);
  own.out = gpus.zeros(gpu, padded * h * kElement);
  if (backward) {
    own.dyg = gpus.random_bfloat16(gpu, padded * h);
    own.dz = gpus.zeros(gpu, of_z * kElement);
    own.dprobs = static_cast<float*>(gpus.zeros(gpu, padded * 4));
    own.workspace = gpus.zeros(gpu, GroupedGemm::swiglu_gradient_workspace_bytes(padded, static_cast<int>(i)));
  }
  std::vector<int32_t> starts, counts;
  for (int64_t expert = rank * experts; expert < (rank + 1) * experts; ++expert) {
    starts.push_back(static_cast<int32_t>(on_host.expert_segment(expert)));
    counts.push_back(static_cast<int32_t>(on_host.expert_rows(expert)));
  }
  own.rows = {static_cast<int>(experts), padded, static_cast<int32_t*>(gpus.copy_of(gpu, starts.data(), experts * 4)),
              static_cast<int32_t*>(gpus.copy_of(gpu, counts.data(), experts * 4))};
  rows_.push_back(own);
  gemms_.push_back(std::make_unique<GroupedGemm>(ranks_.group().device(rank)));
}

void LayerTensors::multiply_forward() {
  const int h = static_cast<int>(config_.shape.hidden), i = static_cast<int>(config_.shape.intermediate);
  for (std::size_t local = 0; local < rows_.size(); ++local) {
    const Rank& own = rows_[local];
    const Weights& weights = forward_[local].weights;
    GroupedGemm& gemm = *gemms_[local];
    if (halves() == 2) {
      gemm.forward_swiglu({.rows = own.rows,
                           .x = own.xg,
                           .w1 = {weights.w1, {}},
                           .prob = own.probs,
                           .z = own.z,
                           .a = own.a,
                           .i = i,
                           .k = h});
    } else {
      gemm.forward({.rows = own.rows, .x = own.xg, .w = {weights.w1, {}}, .out = own.z, .n = i, .k = h});
    }
    gemm.forward({.rows = own.rows, .x = own.a, .w = {weights.w2, {}}, .out = own.out, .n = h, .k = i});
  }
}

void LayerTensors::multiply_backward() {
  const int h = static_cast<int>(config_.shape.hidden), i = static_cast<int>(config_.shape.intermediate);
  const WeightGradient form = config_.numerics.weight_gradient;
  for (std::size_t local = 0; local < rows_.size(); ++local) {
    const Rank& own = rows_[local];
    const Weights& weights = forward_[local].weights;
    const WeightGradients& gradients = backward_[local].gradients;
    GroupedGemm& gemm = *gemms_[local];
    if (halves() == 2) {
      gemm.input_gradient_swiglu({.rows = own.rows,
                                  .dy = own.dyg,
                                  .w2 = {weights.w2, {}},
                                  .z = own.z,
                                  .prob = own.probs,
                                  .a = own.a,
                                  .dz = own.dz,
                                  .dprob = own.dprobs,
                                  .workspace = own.workspace,
                                  .i = i,
                                  .k = h});
    } else {
      gemm.input_gradient({.rows = own.rows, .dy = own.dyg, .w = {weights.w2, {}}, .dx = own.dz, .n = i, .k = h});
    }
    gemm.input_gradient(
        {.rows = own.rows, .dy = own.dz, .w = {weights.w1, {}}, .dx = own.out, .n = h, .k = halves() * i});
    gemm.weight_gradient({.rows = own.rows,
                          .dy = own.dyg,
                          .x = own.a,
                          .dw = {gradients.dw2, {}},
                          .m = h,
                          .n = i,
                          .weight_gradient = form});
    gemm.weight_gradient({.rows = own.rows,
                          .dy = own.dz,
                          .x = own.xg,
                          .dw = {gradients.dw1, {}},
                          .m = halves() * i,
                          .n = h,
                          .weight_gradient = form});
  }
}

}  // namespace uniep::cli
