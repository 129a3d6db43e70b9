#include "engine/cuda/calls/bias_calls.h"

#include <algorithm>
#include <cstddef>

#include "engine/cuda/kernels/bias_kernels.h"
#include "engine/workspace.h"
#include "model/activation_choice.h"

namespace uniep::cuda {
namespace {

static_assert(static_cast<int>(BiasGradientKind::kBFloat16) == static_cast<int>(WeightGradient::kBFloat16) &&
              static_cast<int>(BiasGradientKind::kFloat32) == static_cast<int>(WeightGradient::kFloat32) &&
              static_cast<int>(BiasGradientKind::kMainGrad) == static_cast<int>(WeightGradient::kMainGrad));

// A bias's gradient of all local experts: one tensor, or as many as experts.
struct GradientVectors {
  void* whole;
  void* const* experts;
};

void add_gradients(BiasSum& sum, const GradientVectors& vectors, int first, int count, WeightGradient kind) {
  const int64_t bytes = int64_t{sum.columns} * (kind == WeightGradient::kBFloat16 ? 2 : 4);
  sum.is_made = 1;
  for (int i = 0; i < count; ++i) {
    sum.gradients[i] = vectors.experts != nullptr ? vectors.experts[first + i]
                                                  : static_cast<std::byte*>(vectors.whole) + (first + i) * bytes;
  }
}

void add_dots(BiasArguments& arguments, const BiasLaunch& launch, int first, int count) {
  const Weights& weights = *launch.weights;
  const LayerShape& shape = launch.config.shape;
  arguments.dot_stride = launch.prob_stride;
  arguments.dots = launch.prob_chunks + divide_up(shape.intermediate, kProbColumns) * launch.prob_stride;
  for (int i = 0; i < count; ++i) {
    arguments.b2[i] =
        weights.b2_experts != nullptr ? weights.b2_experts[first + i] : weights.b2 + (first + i) * shape.hidden;
  }
}

BiasArguments arguments_of(const BiasLaunch& launch, int first, int count) {
  const RankProgram& p = launch.program;
  const LayerShape& shape = launch.config.shape;
  const Numerics& numerics = launch.config.numerics;
  const bool weighs = internal::weighs_bias(numerics), has_dots = weighs && launch.weights != nullptr;
  const bool db1 = launch.gradients != nullptr && launch.db1, db2 = launch.gradients != nullptr && launch.db2;
  BiasArguments arguments{};
  arguments.rows = p.rows;
  arguments.segment_start = p.segment_start + p.first_expert + first;
  arguments.expert_rows = p.expert_rows + p.first_expert + first;
  arguments.failed = launch.failed;
  arguments.experts = count;
  arguments.kind = static_cast<BiasGradientKind>(numerics.weight_gradient);
  BiasSum& of_dy = arguments.sums[0];
  BiasSum& of_dz = arguments.sums[1];
  of_dy.values = launch.operands.dyg;
  of_dy.columns = db2 || has_dots ? static_cast<int32_t>(shape.hidden) : 0;
  of_dy.weighs = weighs ? 1 : 0;
  of_dz.values = launch.operands.dz;
  of_dz.columns = db1 ? static_cast<int32_t>(z_columns(shape, numerics)) : 0;
  const WeightGradient kind = numerics.weight_gradient;
  if (db2) add_gradients(of_dy, {launch.gradients->db2, launch.gradients->db2_experts}, first, count, kind);
  if (db1) add_gradients(of_dz, {launch.gradients->db1, launch.gradients->db1_experts}, first, count, kind);
  if (has_dots) add_dots(arguments, launch, first, count);
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
