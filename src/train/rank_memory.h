#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "train/device_arrays.h"
#include "train/parallel_checksum.h"

namespace uniep::train {

// What one call of a rank reads and writes, where its engine wants it: the host's own arrays on the cpu engine, copies
// on a GPU.
class RankMemory {
 public:
  // A NaN in bf16 and in fp32.
  static constexpr unsigned char kUnwritten = 0xff;
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
  // What nobody reads but checksums(); all its bytes are `before` before the call.
  template <typename T>
  T* unread_result(int64_t count, unsigned char before = kUnwritten) {
    const int64_t bytes = bytes_of<T>(count);
    if (device_ >= 0) {
      unread_.push_back({device_arrays_->make_filled(device_, before, bytes), bytes});
    } else {
      const auto room = static_cast<std::size_t>(std::max<int64_t>(bytes, 1));  // never null
      const auto own = std::make_shared<std::vector<std::byte>>(room, std::byte{before});
      unread_.push_back({{own, own->data()}, bytes});
    }
    return static_cast<T*>(unread_.back().array.get());
  }
  // Of unread results, once the rank's call is over.
  std::vector<uint64_t> checksums() const {
    std::vector<uint64_t> all;
    for (const Unread& own : unread_) {
      all.push_back(device_ >= 0 ? device_arrays_->checksum(device_, own.array.get(), own.bytes)
                                 : byte_checksum(own.array.get(), own.bytes));
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
