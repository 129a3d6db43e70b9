#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/engine.h"
#include "engine/cuda/kernels/place_kernels.h"
#include "uniep/error.h"

namespace uniep::cuda {

int compile_calls(std::span<const CompiledCall> calls, int threads) {
  std::vector<KernelRequest> wanted = placement_kernels();
  for (const CompiledCall& call : calls) {
    try {
      const std::vector<KernelRequest> more =
          call_kernels(call.layer, call.ranks, call.workers, call.schedule, {.direction = call.direction});
      wanted.insert(wanted.end(), more.begin(), more.end());
    } catch (const Error& error) {
      if (error.status() != Status::kUnsupported && error.status() != Status::kInvalidArgument) throw;
    }
  }
  const std::vector<KernelRequest> requests = distinct_modules(wanted);
  compile_kernels(requests, threads);
  return static_cast<int>(requests.size());
}

}  // namespace uniep::cuda
