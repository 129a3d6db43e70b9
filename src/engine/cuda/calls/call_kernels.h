#pragma once

#include <vector>

#include "engine/cuda/kernels/layer_kernels.h"
#include "program/build.h"
#include "uniep/layer.h"

// Which kernels calls launch. The engine prepares exactly these before a call; compile_kernels() before a job.
namespace uniep::cuda {

// Of a call's launches, but for those of weight gradients alone.
std::vector<LayerKernelConfig> launch_kernels(const ProgramRequest& request);
std::vector<LayerKernelConfig> launch_kernels(const Schedule& schedule, const Numerics& numerics, Direction direction,
                                              bool weight_gradients);

// Of what backward runs first with save.z = recompute; none with keep.
std::vector<LayerKernelConfig> recompute_kernels(const LayerConfig& layer, const Schedule& backward, int ranks,
                                                 int workers);

// Of weight gradients alone on so many SMs, into matrices behind each other, or into those that addresses name.
struct WeightGradientForm {
  GemmStage stage;
  int64_t local_experts;
  bool by_address;
  int sms;
};
GemmConfig weight_gradient_kernel(const Schedule& schedule, const Numerics& numerics, const WeightGradientForm& form);

// Of one call; of weight gradients, where it makes any, in both forms. Throws likewise.
std::vector<KernelRequest> call_kernels(const LayerConfig& layer, int ranks, int workers, const Schedule& schedule,
                                        const MemoryOptions& options);

// Of forward and backward, of weight gradients made now or later, in both forms. Throws uniep::Error (kUnsupported)
// where the engine has none.
std::vector<KernelRequest> layer_kernels(const LayerConfig& layer, int ranks, int workers, const Schedule& forward,
                                         const Schedule& backward);

}  // namespace uniep::cuda
