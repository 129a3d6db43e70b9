#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "io/checksum.h"
#include "train/device_arrays.h"

namespace uniep::train {

// What one call of a rank reads and writes, where its engine wants it: the host's own arrays on the cpu engine, copies
// on a GPU.
class RankMemory {
 public:
  // -1: the cpu engine, and no `device_arrays` are needed.
  RankMemory(int device, const DeviceArrays* device_arrays) : device_(device), device_arrays_(device_arrays) {}

  template <typename T>
  const T* input(const T* values, int64_t count) {
    if (device_ < 0) return values;
    return static_cast<const T*>(array(values, bytes_of<T>(count)));
  }
  // read_results() brings it to `values`.
  template <typename T>
  T* result(T* values, int64_t count) {
    if (device_ < 0) return values;
    results_.push_back({arrays_.size(), values, bytes_of<T>(count)});
    return static_cast<T*>(array(nullptr, bytes_of<T>(count)));
  }
  // What nobody reads but checksums(); all its bytes are kUnwritten before the call.
  template <typename T>
  T* unread_result(int64_t count) {
    const int64_t bytes = bytes_of<T>(count);
    if (device_ >= 0) {
      unread_.push_back({device_arrays_->make_filled(device_, kUnwritten, bytes), bytes});
    } else {
      const auto own = std::make_shared<std::vector<float>>(static_cast<std::size_t>(bytes / sizeof(float) + 1));
      std::memset(own->data(), kUnwritten, static_cast<std::size_t>(bytes));
      unread_.push_back({{own, own->data()}, bytes});
    }
    return static_cast<T*>(unread_.back().array.get());
  }
  // Of unread results, once the rank's call is over. Comparable where the same device has summed.
  std::vector<uint64_t> checksums() const {
    std::vector<uint64_t> all;
    for (const Unread& own : unread_) {
      const auto* const words = static_cast<const float*>(own.array.get());
      all.push_back(device_ >= 0 ? device_arrays_->checksum(device_, words, own.bytes)
                                 : io::checksum(words, own.bytes / int64_t{sizeof(float)} + 1, 0));
    }
    return all;
  }
  // Once the rank's call is over.
  void read_results() {
    for (const Result& result : results_) {
      device_arrays_->read(device_, arrays_[result.array].get(), result.values, result.bytes);
    }
  }

 private:
  struct Result {
    std::size_t array;
    void* values;
    int64_t bytes;
  };
  // A NaN in bf16 and in fp32.
  static constexpr unsigned char kUnwritten = 0xff;
  struct Unread {
    std::shared_ptr<void> array;
    int64_t bytes;
  };
  template <typename T>
  static int64_t bytes_of(int64_t count) {
    return count * static_cast<int64_t>(sizeof(T));
  }
  void* array(const void* values, int64_t bytes) {
    return arrays_.emplace_back(device_arrays_->make(device_, values, bytes)).get();
  }

  int device_;
  const DeviceArrays* device_arrays_;
  std::vector<std::shared_ptr<void>> arrays_;
  std::vector<Result> results_;
  std::vector<Unread> unread_;
};

}  // namespace uniep::train
