#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/engine.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/kernels/grouped_launch.h"
#include "engine/cuda/kernels/place_kernels.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

std::vector<KernelRequest> kernels_of(const CompiledCall& call) {
  const Numerics numerics;
  const bool backward = call.direction == Direction::kBackward;
  std::vector<KernelRequest> requests;
  for (const LayerKernelConfig& config : launch_kernels(call.schedule, numerics, call.direction, backward)) {
    requests.push_back(layer_request(config));
  }
  if (backward) {
    for (const LayerKernelConfig& config :
         recompute_kernels({call.shape, numerics}, call.schedule, call.ranks, call.workers)) {
      requests.push_back(layer_request(config));
    }
  }
  if (!backward || call.schedule.wgrad != WgradOrder::kAfter) return requests;
  for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
    requests.push_back(gemm_request(weight_gradient_kernel(
        call.schedule, numerics, {stage, call.shape.experts / call.ranks, false, call.workers})));
  }
  return requests;
}

}  // namespace

int compile_calls(std::span<const CompiledCall> calls) {
  std::vector<KernelRequest> wanted = placement_kernels();
  for (const CompiledCall& call : calls) {
    try {
      const std::vector<KernelRequest> more = kernels_of(call);
      wanted.insert(wanted.end(), more.begin(), more.end());
    } catch (const Error& error) {
      if (error.status() != Status::kUnsupported && error.status() != Status::kInvalidArgument) throw;
    }
  }
  const std::vector<KernelRequest> requests = distinct_modules(wanted);
  compile_kernels(requests);
  return static_cast<int>(requests.size());
}

}  // namespace uniep::cuda
