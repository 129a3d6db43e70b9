#include "engine/cuda/calls/call_kernels.h"

#include <algorithm>

#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/kernels/bias_kernels.h"
#include "engine/cuda/kernels/grouped_launch.h"
#include "program/recompute.h"

namespace uniep::cuda {

std::vector<LayerKernelConfig> launch_kernels(const ProgramRequest& request) {
  std::vector<LayerKernelConfig> configs;
  for (const LaunchStages& stages : launch_stages(request)) {
    if (is_weight_gradients_alone(stages)) continue;
    configs.push_back(launch_config(request.schedule, request.numerics, request.direction, stages));
  }
  return configs;
}

std::vector<LayerKernelConfig> launch_kernels(const Schedule& schedule, const Numerics& numerics, Direction direction,
                                              bool weight_gradients) {
  ProgramRequest request;
  request.schedule = schedule;
  request.numerics = numerics;
  request.direction = direction;
  request.weight_gradients = weight_gradients;
  return launch_kernels(request);
}

std::vector<LayerKernelConfig> recompute_kernels(const LayerConfig& layer, const Schedule& backward, int ranks,
                                                 int workers) {
  if (backward.save_z == SaveZ::kKeep) return {};
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = ranks;
  machine.workers = workers;
  ProgramRequest request;
  request.schedule = recompute_schedule(
      backward,
      {.direction = Direction::kBackward, .shape = layer.shape, .numerics = layer.numerics, .machine = machine});
  request.numerics = layer.numerics;
  request.part = ProgramPart::kRecompute;
  request.redispatch = backward.save_xg == SaveXg::kRedispatch;
  return launch_kernels(request);
}

GemmConfig weight_gradient_kernel(const Schedule& schedule, const Numerics& numerics, const WeightGradientForm& form) {
  GemmConfig config = weight_gradient_config(schedule, numerics, form.stage);
  config.cluster = std::min(config.cluster, form.sms);
  config.outputs = addresses_of_launch(form.by_address ? static_cast<int>(form.local_experts) : 0);
  return config;
}

namespace {

void add_weight_gradients(std::vector<KernelRequest>& requests, const LayerConfig& layer, int64_t local_experts,
                          int workers, const Schedule& backward) {
  for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
    for (const bool by_address : {false, true}) {
      requests.push_back(
          gemm_request(weight_gradient_kernel(backward, layer.numerics, {stage, local_experts, by_address, workers})));
    }
  }
}

}  // namespace

std::vector<KernelRequest> call_kernels(const LayerConfig& layer, int ranks, int workers, const Schedule& schedule,
                                        const MemoryOptions& options) {
  const auto& [shape, numerics] = layer;
  const Direction direction = options.direction;
  require_summable(shape, numerics);
  require_instantiable(schedule, numerics, direction);
  const bool now = options.weight_gradients == WeightGradientTime::kNow;
  std::vector<KernelRequest> requests;
  for (const LayerKernelConfig& config : launch_kernels(schedule, numerics, direction, now)) {
    requests.push_back(layer_request(config));
  }
  if (direction == Direction::kBackward) {
    for (const LayerKernelConfig& config : recompute_kernels(layer, schedule, ranks, workers)) {
      requests.push_back(layer_request(config));
    }
  }
  if (direction == Direction::kForward || options.weight_gradients == WeightGradientTime::kNone) return requests;
  const std::vector<LaunchStages> launches = launch_stages(schedule, direction, now);
  const bool alone = !now || std::any_of(launches.begin(), launches.end(), is_weight_gradients_alone);
  if (alone) add_weight_gradients(requests, layer, shape.experts / ranks, workers, schedule);
  if (numerics.bias) requests.push_back(bias_gradients_request());
  return requests;
}

std::vector<KernelRequest> layer_kernels(const LayerConfig& layer, int ranks, int workers, const Schedule& forward,
                                         const Schedule& backward) {
  const auto& [shape, numerics] = layer;
  require_summable(shape, numerics);
  require_instantiable(forward, numerics, Direction::kForward);
  require_instantiable(backward, numerics, Direction::kBackward);
  std::vector<LayerKernelConfig> launches = launch_kernels(forward, numerics, Direction::kForward, true);
  for (const bool now : {true, false}) {
    const std::vector<LayerKernelConfig> more = launch_kernels(backward, numerics, Direction::kBackward, now);
    launches.insert(launches.end(), more.begin(), more.end());
  }
  const std::vector<LayerKernelConfig> again = recompute_kernels(layer, backward, ranks, workers);
  launches.insert(launches.end(), again.begin(), again.end());
  std::vector<KernelRequest> requests;
  for (const LayerKernelConfig& config : launches) requests.push_back(layer_request(config));
  add_weight_gradients(requests, layer, shape.experts / ranks, workers, backward);
  if (numerics.bias) requests.push_back(bias_gradients_request());
  return requests;
}

}  // namespace uniep::cuda
