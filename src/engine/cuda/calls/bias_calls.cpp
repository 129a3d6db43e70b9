#include "engine/cuda/calls/bias_calls.h"

#include <algorithm>
#include <cstddef>

#include "engine/cuda/kernels/bias_kernels.h"
#include "model/activation_choice.h"

namespace uniep::cuda {
namespace {

constexpr int kCtasOfDots = 264;  // two a SM of a Hopper GPU, over all experts

static_assert(static_cast<int>(BiasGradientKind::kBFloat16) == static_cast<int>(WeightGradient::kBFloat16) &&
              static_cast<int>(BiasGradientKind::kFloat32) == static_cast<int>(WeightGradient::kFloat32) &&
              static_cast<int>(BiasGradientKind::kMainGrad) == static_cast<int>(WeightGradient::kMainGrad));

// A bias's gradient of all local experts: one tensor, or as many as experts.
struct GradientVectors {
  const BFloat16* values;
  int64_t columns;
  bool weighs;
  void* whole;
  void* const* experts;
};

BiasSum sum_of(const GradientVectors& vectors, int first, int count, int64_t element_bytes) {
  BiasSum sum{};
  sum.values = vectors.values;
  sum.columns = static_cast<int32_t>(vectors.columns);
  sum.weighs = vectors.weighs ? 1 : 0;
  for (int i = 0; i < count; ++i) {
    sum.gradients[i] = vectors.experts != nullptr
                           ? vectors.experts[first + i]
                           : static_cast<std::byte*>(vectors.whole) + (first + i) * vectors.columns * element_bytes;
  }
  return sum;
}

BiasArguments arguments_of(const BiasLaunch& launch, int first, int count) {
  const RankProgram& p = launch.program;
  const LayerShape& shape = launch.config.shape;
  const Numerics& numerics = launch.config.numerics;
  const bool weighs_bias = numerics.router_weight == RouterWeight::kOutput;
  BiasArguments arguments{};
  arguments.rows = p.rows;
  arguments.segment_start = p.segment_start + p.first_expert + first;
  arguments.expert_rows = p.expert_rows + p.first_expert + first;
  arguments.failed = launch.failed;
  arguments.experts = count;
  arguments.kind = static_cast<BiasGradientKind>(numerics.weight_gradient);
  if (launch.gradients != nullptr) {
    const WeightGradients& gradients = *launch.gradients;
    const int64_t element_bytes = numerics.weight_gradient == WeightGradient::kBFloat16 ? 2 : 4;
    const GradientVectors db2{launch.operands.dyg, shape.hidden, weighs_bias, gradients.db2, gradients.db2_experts};
    const GradientVectors db1{launch.operands.dz, z_columns(shape, numerics), false, gradients.db1,
                              gradients.db1_experts};
    if (launch.db2) arguments.sums[0] = sum_of(db2, first, count, element_bytes);
    if (launch.db1) arguments.sums[1] = sum_of(db1, first, count, element_bytes);
  }
  if (launch.weights == nullptr || !weighs_bias) return arguments;
  arguments.dot_ctas = std::max(1, kCtasOfDots / p.local_experts);
  arguments.hidden = static_cast<int32_t>(shape.hidden);
  arguments.dyg = launch.operands.dyg;
  arguments.dprobs = launch.prob_chunks;
  for (int i = 0; i < count; ++i) {
    const Weights& weights = *launch.weights;
    arguments.b2[i] =
        weights.b2_experts != nullptr ? weights.b2_experts[first + i] : weights.b2 + (first + i) * shape.hidden;
  }
  return arguments;
}

}  // namespace

void launch_biases(KernelStore& kernels, const BiasLaunch& launch) {
  const int experts = launch.program.local_experts;
  for (int first = 0; first < experts; first += kMaxBiasExperts) {
    launch_bias_gradients(kernels, arguments_of(launch, first, std::min(kMaxBiasExperts, experts - first)),
                          launch.stream);
  }
}

}  // namespace uniep::cuda
