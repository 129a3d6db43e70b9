#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "engine/cuda/runtime/device_array.h"
#include "uniep/group.h"

// Memory of a rank, on its device: the host's on the cpu engine. Each function waits until it is done.
namespace uniep::verify {

class RankArray {
 public:
  RankArray() = default;
  RankArray(const Group& group, int rank, std::size_t bytes) {
    if (group.engine() == EngineKind::kCuda) {
      on_device_ = cuda::DeviceArray(group.device(rank), static_cast<int64_t>(bytes));
    } else {
      on_host_.resize(bytes / sizeof(float) + 1);
    }
  }
  RankArray(const Group& group, int rank, const void* values, std::size_t bytes) {
    if (group.engine() == EngineKind::kCuda) {
      on_device_ = cuda::DeviceArray(group.device(rank), values, static_cast<int64_t>(bytes));
    } else {
      on_host_.resize(bytes / sizeof(float) + 1);
      if (bytes > 0) std::memcpy(on_host_.data(), values, bytes);
    }
  }

  template <typename T>
  T* as() {
    return static_cast<T*>(on_host_.empty() ? on_device_.data() : on_host_.data());
  }

 private:
  std::vector<float> on_host_;
  cuda::DeviceArray on_device_;
};

// What lies on a rank's device, as the host reads it.
template <typename T>
class HostView {
 public:
  HostView(const Group& group, int rank, const T* values, int64_t count) : data_(values) {
    if (group.engine() != EngineKind::kCuda || count == 0) return;
    copy_.resize(static_cast<std::size_t>(count));
    cuda::DeviceArray::read_device(group.device(rank), values, copy_.data(), count * static_cast<int64_t>(sizeof(T)));
    data_ = copy_.data();
  }
  const T* data() const { return data_; }

 private:
  std::vector<T> copy_;
  const T* data_;
};

}  // namespace uniep::verify
