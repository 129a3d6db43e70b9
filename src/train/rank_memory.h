#pragma once

#include <cstdint>
#include <vector>

#include "engine/cuda/runtime/device_array.h"

namespace uniep::train {

// What one call of a rank reads and writes, where its engine wants it: the host's own arrays on the cpu engine, copies
// on a GPU.
class RankMemory {
 public:
  explicit RankMemory(int device) : device_(device) {}  // -1: the cpu engine

  template <typename T>
  const T* input(const T* values, int64_t count) {
    if (device_ < 0) return values;
    return static_cast<const T*>(arrays_.emplace_back(device_, values, bytes_of<T>(count)).data());
  }
  // read_results() brings it to `values`.
  template <typename T>
  T* result(T* values, int64_t count) {
    if (device_ < 0) return values;
    results_.push_back({arrays_.size(), values, bytes_of<T>(count)});
    return static_cast<T*>(arrays_.emplace_back(device_, bytes_of<T>(count)).data());
  }
  // Once the rank's call is over.
  void read_results() {
    for (const Result& result : results_) arrays_[result.array].read(result.values, result.bytes);
  }

 private:
  struct Result {
    std::size_t array;
    void* values;
    int64_t bytes;
  };
  template <typename T>
  static int64_t bytes_of(int64_t count) {
    return count * static_cast<int64_t>(sizeof(T));
  }

  int device_;
  std::vector<cuda::DeviceArray> arrays_;
  std::vector<Result> results_;
};

}  // namespace uniep::train
