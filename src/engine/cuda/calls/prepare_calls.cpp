#include <algorithm>
#include <thread>

#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/kernels/exchange.h"
#include "engine/cuda/runtime/background_compiler.h"

// What a call needs, made ready beside other calls.
namespace uniep::cuda {
namespace {

constexpr int kMostThreads = 4;

// Half of the machine's, shared by the processes of the group, which are on one host.
int compiling_threads(int processes) {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2 / processes, 1, kMostThreads);
}

}  // namespace

Preparation CudaEngine::prepare(const LayerConfig& config, const Schedule& schedule, const MemoryOptions& options) {
  std::vector<KernelRequest> missing = call_kernels(config, options_.ranks, options_.workers, schedule, options);
  missing.push_back(begin_call_request());
  std::erase_if(missing, [&](const KernelRequest& request) {
    return std::all_of(queues_.begin(), queues_.end(),
                       [&](const std::unique_ptr<DeviceQueue>& queue) { return queue->kernels().is_loaded(request); });
  });
  if (missing.empty()) return {};
  const int processes = in_processes() ? options_.ranks : 1;
  return BackgroundCompiler::of_process().prepare(missing, {this, compiling_threads(processes), first_local_rank()});
}

int CudaEngine::spilled_bytes(const LayerConfig& config, const Schedule& schedule, const MemoryOptions& options) {
  int most = 0;
  for (const KernelRequest& request : call_kernels(config, options_.ranks, options_.workers, schedule, options)) {
    for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
      most = std::max(most, queue->kernels().local_bytes(request));
    }
  }
  return most;
}

}  // namespace uniep::cuda
