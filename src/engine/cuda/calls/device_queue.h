#pragma once

#include <cuda.h>

#include <memory>
#include <span>
#include <vector>

#include "engine/cuda/calls/device_order.h"
#include "engine/cuda/device/arguments/begin_arguments.h"
#include "engine/cuda/kernels/layer_kernels.h"
#include "engine/cuda/memory/device_block.h"
#include "engine/cuda/memory/upload_ring.h"
#include "engine/cuda/runtime/kernel.h"

namespace uniep::cuda {

// One GPU of a group: its kernels, and the group's calls on it. A call runs in the stream of the device's first rank,
// behind all earlier calls of the process there and behind what the streams of its other ranks hold. Calls that are
// captured into a graph are in the order of their stream alone.
class DeviceQueue {
 public:
  DeviceQueue(int device, std::vector<int> ranks, UploadRing::Wait wait);
  ~DeviceQueue();
  DeviceQueue(const DeviceQueue&) = delete;
  DeviceQueue& operator=(const DeviceQueue&) = delete;

  int device() const { return device_; }
  const std::vector<int>& ranks() const { return ranks_; }
  UploadRing& uploads() { return uploads_; }
  KernelStore& kernels() { return kernels_; }

  // Compiles and loads kernels, and makes sure that `ctas` CTAs of each fit at once. May take seconds the first time.
  void prepare(std::span<const LayerKernelConfig> configs, int ctas);

  DeviceOrder& order() { return *order_; }

  // `streams`: one a rank of this device. Returns the stream that the call runs in.
  CUstream begin(std::span<const CUstream> streams);
  // What the ranks' streams hold from now on comes after the call.
  void end(std::span<const CUstream> streams);

  // Device memory for the RankCalls of a call and the tensor maps that they point to; and their upload. A call that is
  // captured keeps its own as long as the group lives, and is written at once: a graph's replays find it there.
  std::byte* call_memory(std::size_t bytes, CUstream stream);

  // `absent_ranks`: for tests; the last ranks of the device do not run.
  void launch_begin(const BeginArguments& arguments, int absent_ranks, CUstream stream);
  void launch(const LayerKernelConfig& config, const LayerLaunch& launch, int absent_ranks, CUstream stream);

  // Gives back kernels and the memory of arguments. The device's order must be locked, and the group's calls over.
  void trim();

  // Whether the group's calls are over on this device.
  bool is_over() const;

 private:
  // A layer's kernel, and how many of its CTAs fit at once.
  struct LoadedKernel {
    LayerKernelConfig config;
    CUfunction function = nullptr;
    int resident_ctas = 0;
  };
  const LoadedKernel* find(const LayerKernelConfig& config) const;
  void load(std::span<const LayerKernelConfig> configs);

  int device_;
  std::vector<int> ranks_;
  std::shared_ptr<DeviceOrder> order_;
  KernelStore& kernels_;
  UploadRing::Wait wait_;
  UploadRing uploads_;
  DeviceBlock call_memory_;
  std::vector<DeviceBlock> captured_calls_;
  DeviceEvent call_over_;
  DeviceEvent rank_ready_;
  // Of the store's generation; so that a call does not spell out its kernels' names again.
  std::vector<LoadedKernel> loaded_;
  CUfunction begin_ = nullptr;
  uint64_t generation_ = 0;
};

}  // namespace uniep::cuda
