#include "uniep/compile.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/exchange_request.h"
#include "engine/cuda/calls/rank_devices.h"
#include "engine/cuda/kernels/exchange.h"
#include "engine/cuda/kernels/place_kernels.h"
#include "engine/cuda/runtime/kernel_cache.h"
#include "model/place.h"
#include "uniep/error.h"

namespace uniep {
namespace {

std::vector<cuda::KernelRequest> kernels_of(const CompileRequest& request, Operation operation) {
  const LayerConfig& layer = request.layer;
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = request.ranks;
  machine.workers = request.workers;
  const auto resolved = [&](const PartialSchedule& given, Direction direction) {
    return resolve(given, {.direction = direction,
                           .shape = layer.shape,
                           .numerics = layer.numerics,
                           .machine = machine,
                           .operation = operation});
  };
  const Schedule forward = resolved(request.forward, Direction::kForward);
  if (operation == Operation::kLayer) {
    return cuda::layer_kernels(layer, request.ranks, request.workers, forward,
                               resolved(request.backward, Direction::kBackward));
  }
  const ProgramPart part = operation == Operation::kDispatch ? ProgramPart::kDispatch : ProgramPart::kCombine;
  const ProgramRequest program = cuda::exchange_program(layer, forward, part, request.workers);
  return {cuda::exchange_request(cuda::exchange_config(program))};
}

[[noreturn]] void refuse_folder(const std::string& folder) {
  throw Error(Status::kIo, fmt::format("folder: '{}' can not be written, or its disk is full", folder));
}

// Compiling takes a minute: what can not be kept is not begun.
void require_room(const cuda::KernelCache& cache, const std::vector<cuda::KernelRequest>& requests) {
  const bool complete = std::all_of(requests.begin(), requests.end(), [&](const cuda::KernelRequest& kernel) {
    std::string stored;
    return cache.load(cuda::cache_key(kernel), stored);
  });
  if (complete) return;
  cache.make_folder();
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(cache.directory(), error);
  if (!is_folder || ::access(cache.directory().c_str(), W_OK) != 0) refuse_folder(cache.directory());
}

}  // namespace

std::vector<KernelFile> compile_kernels(const CompileRequest& request, const std::string& folder, int threads) {
  cuda::require_ranks_of_group(request.ranks);
  if (request.workers < 1) {
    throw Error(Status::kInvalidArgument, fmt::format("workers: {}; must be at least 1", request.workers));
  }
  if (folder.empty()) throw Error(Status::kInvalidArgument, "folder: empty; must name a folder");
  check_shape(request.layer.shape, request.ranks);
  std::vector<cuda::KernelRequest> wanted = cuda::placement_kernels();
  for (const Operation operation : request.operations) {
    const std::vector<cuda::KernelRequest> more = kernels_of(request, operation);
    wanted.insert(wanted.end(), more.begin(), more.end());
  }
  const std::vector<cuda::KernelRequest> requests = cuda::distinct_modules(wanted);
  const cuda::KernelCache cache(folder);
  require_room(cache, requests);
  const std::vector<cuda::CompiledKernel> kernels = cuda::compile_kernels(requests, cache, threads);
  std::vector<KernelFile> files;
  for (size_t i = 0; i < requests.size(); ++i) {
    const std::string key = cuda::cache_key(requests[i]);
    std::string stored;
    if (!cache.load(key, stored)) refuse_folder(folder);
    files.push_back({requests[i].description(), cache.path(key), kernels[i].from_cache, kernels[i].seconds});
  }
  return files;
}

}  // namespace uniep
