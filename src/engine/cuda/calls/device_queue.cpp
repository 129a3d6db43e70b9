#include "engine/cuda/calls/device_queue.h"

#include <algorithm>
#include <string>

#include "engine/cuda/kernels/exchange.h"
#include "engine/cuda/kernels/layer_kernels.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/stream_capture.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

constexpr int kBeginThreads = 1024;

int resident_ctas(CUfunction function, const LayerKernelConfig& config) {
  CUlaunchAttribute attribute = {};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim = {static_cast<unsigned>(config.gemm.cluster), 1, 1};
  CUlaunchConfig launch = {};
  launch.gridDimX = static_cast<unsigned>(config.gemm.cluster);
  launch.gridDimY = launch.gridDimZ = 1;
  launch.blockDimX = kGemmThreads;
  launch.blockDimY = launch.blockDimZ = 1;
  launch.sharedMemBytes = static_cast<unsigned>(shared_memory_bytes(config.gemm));
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  int clusters = 0;
  check(driver().cuOccupancyMaxActiveClusters(&clusters, function, &launch), "cuOccupancyMaxActiveClusters");
  return clusters * config.gemm.cluster;
}

}  // namespace

DeviceQueue::DeviceQueue(int device, std::vector<int> ranks, UploadRing::Wait wait)
    : device_(device),
      ranks_(std::move(ranks)),
      order_(DeviceOrder::of(device)),
      kernels_(KernelStore::of_device(device)),
      wait_(std::move(wait)),
      uploads_(device, wait_) {}

DeviceQueue::~DeviceQueue() {
  if (call_over_) driver().cuEventSynchronize(call_over_.get());
}

const DeviceQueue::LoadedKernel* DeviceQueue::find(const LayerKernelConfig& config) const {
  const auto found =
      std::find_if(loaded_.begin(), loaded_.end(), [&](const LoadedKernel& one) { return one.config == config; });
  return found == loaded_.end() ? nullptr : &*found;
}

void DeviceQueue::load(std::span<const LayerKernelConfig> configs) {
  const ScopedDevice scope(device_);
  std::vector<KernelRequest> requests = {begin_call_request()};
  for (const LayerKernelConfig& config : configs) requests.push_back(layer_request(config));
  kernels_.prepare(requests);
  begin_ = kernels_.get(begin_call_request(), 0);
  for (const LayerKernelConfig& config : configs) {
    if (find(config) != nullptr) continue;
    CUfunction function = kernels_.get(layer_request(config), shared_memory_bytes(config.gemm));
    loaded_.push_back({config, function, resident_ctas(function, config)});
  }
}

void DeviceQueue::prepare(std::span<const LayerKernelConfig> configs, int ctas) {
  if (generation_ != kernels_.generation()) {
    loaded_.clear();
    begin_ = nullptr;
    generation_ = kernels_.generation();
  }
  const auto is_loaded = [this](const LayerKernelConfig& config) { return find(config) != nullptr; };
  if (begin_ == nullptr || !std::all_of(configs.begin(), configs.end(), is_loaded)) load(configs);
  for (const LayerKernelConfig& config : configs) {
    const int most = find(config)->resident_ctas;
    if (most >= ctas) continue;
    throw Error(Status::kInvalidArgument, "workers: " + std::to_string(ctas) + " CTAs on device " +
                                              std::to_string(device_) + " for " + std::to_string(ranks_.size()) +
                                              " ranks; at most " + std::to_string(most) +
                                              " run at once in clusters of " + std::to_string(config.gemm.cluster));
  }
}

CUstream DeviceQueue::begin(std::span<const CUstream> streams) {
  const ScopedDevice scope(device_);
  CUstream stream = streams.front();
  if (!is_captured(stream)) order_->follow(stream);
  for (CUstream other : streams.subspan(1)) {
    if (other == stream) continue;
    rank_ready_.record(device_, other);
    check(driver().cuStreamWaitEvent(stream, rank_ready_.get(), 0), "cuStreamWaitEvent");
  }
  return stream;
}

void DeviceQueue::end(std::span<const CUstream> streams) {
  const ScopedDevice scope(device_);
  CUstream stream = streams.front();
  const bool captured = is_captured(stream);
  DeviceEvent& over = captured ? rank_ready_ : call_over_;
  over.record(device_, stream);
  if (!captured) order_->lead(stream);
  for (CUstream other : streams.subspan(1)) {
    if (other != stream) check(driver().cuStreamWaitEvent(other, over.get(), 0), "cuStreamWaitEvent");
  }
}

std::byte* DeviceQueue::call_memory(std::size_t bytes, CUstream stream) {
  if (is_captured(stream)) {
    captured_calls_.emplace_back(device_, bytes, "the arguments of a captured call");
    return captured_calls_.back().data();
  }
  if (call_memory_.size() < bytes) {
    wait_([this] { return is_over(); });
    call_memory_ = DeviceBlock();
    call_memory_ = DeviceBlock(device_, std::max<std::size_t>(2 * bytes, 64 << 10), "the arguments of calls");
  }
  return call_memory_.data();
}

void DeviceQueue::launch_begin(const BeginArguments& arguments, int absent_ranks, CUstream stream) {
  const ScopedDevice scope(device_);
  Launch shape;
  shape.grid_x = static_cast<int>(ranks_.size()) - absent_ranks;
  if (shape.grid_x == 0) return;
  shape.threads = kBeginThreads;
  shape.stream = stream;
  BeginArguments argument = arguments;
  launch_kernel(begin_, shape, &argument, "launching the begin of a call");
}

void DeviceQueue::launch(const LayerKernelConfig& config, const LayerLaunch& launch, int absent_ranks,
                         CUstream stream) {
  const ScopedDevice scope(device_);
  Launch shape;
  shape.grid_x = (static_cast<int>(ranks_.size()) - absent_ranks) * launch.ctas;
  if (shape.grid_x == 0) return;
  shape.threads = kGemmThreads;
  shape.cluster = config.gemm.cluster;
  shape.shared_bytes = shared_memory_bytes(config.gemm);
  shape.cooperative = launch.slice_ns == 0;  // else lent workers begin where and when SMs are free
  shape.stream = stream;
  LayerLaunch argument = launch;
  launch_kernel(find(config)->function, shape, &argument, "launching the layer");
}

void DeviceQueue::trim() {
  call_memory_ = DeviceBlock();
  kernels_.trim();
}

bool DeviceQueue::is_over() const {
  if (!call_over_) return true;
  const ScopedDevice scope(device_);
  const CUresult result = driver().cuEventQuery(call_over_.get());
  if (result != CUDA_ERROR_NOT_READY) check(result, "waiting for a call");
  return result == CUDA_SUCCESS;
}

}  // namespace uniep::cuda
