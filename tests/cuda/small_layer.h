#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "engine/cuda/runtime/device_array.h"
#include "model/elementwise.h"
#include "model/row_table.h"
#include "tests/cuda/gpu_support.h"
#include "uniep/uniep.h"

namespace uniep::cuda::test {

// One rank's part of a small layer, on its GPU. What a token has depends on the rank and the token alone, so that
// layers of fewer tokens begin alike. `busiest`: the rank whose experts have as many of a token's slots as they can;
// -1: no rank has more than others.
class SmallLayer {
 public:
  SmallLayer(const LayerShape& shape, int ranks, int rank, int device, int64_t most_tokens, CUstream stream = nullptr,
             int busiest = -1)
      : shape_(shape),
        ranks_(ranks),
        device_(device),
        stream_(stream),
        y_bytes_(most_tokens * shape.hidden * kElement) {
    std::mt19937_64 random(static_cast<uint64_t>(rank) + 1);
    const int64_t experts = shape.experts / ranks, weights = experts * shape.intermediate * shape.hidden;
    std::vector<int32_t> order(static_cast<std::size_t>(shape.experts)), ids;
    std::iota(order.begin(), order.end(), 0);
    std::vector<float> probs;
    for (int64_t token = 0; token < most_tokens; ++token) {
      std::shuffle(order.begin(), order.end(), random);
      if (busiest >= 0) {
        std::stable_partition(order.begin(), order.end(), [&](int32_t one) { return one / experts == busiest; });
      }
      ids.insert(ids.end(), order.begin(), order.begin() + shape.topk);
      for (int64_t slot = 0; slot < shape.topk; ++slot) probs.push_back(static_cast<float>(random() % 1000) / 1000);
    }
    ids_ = on_device(ids);
    probs_ = on_device(probs);
    const std::vector<BFloat16> x = values(most_tokens * shape.hidden, random);
    x_ = on_device(x);
    kept_x_ = on_device(x);
    w1_ = on_device(values(2 * weights, random));
    w2_ = on_device(values(weights, random));
    y_ = DeviceArray(device, y_bytes_);
    dy_ = on_device(values(most_tokens * shape.hidden, random));
    dx_ = DeviceArray(device, y_bytes_);
    dprobs_bytes_ = most_tokens * shape.topk * static_cast<int64_t>(sizeof(float));
    dprobs_ = DeviceArray(device, dprobs_bytes_);
    dw2_bytes_ = weights * kElement;
    dw1_ = DeviceArray(device, 2 * dw2_bytes_);
    dw2_ = DeviceArray(device, dw2_bytes_);
  }

  const LayerShape& shape() const { return shape_; }
  CUstream stream() const { return stream_; }
  int device() const { return device_; }

  Routing routing(int64_t tokens) const {
    return {tokens, ids_.data(), IndexType::kInt32, static_cast<const float*>(probs_.data()), Stream{stream_}};
  }
  ForwardArguments arguments() const {
    ForwardArguments arguments;
    arguments.x = static_cast<const BFloat16*>(x_.data());
    arguments.weights.w1 = static_cast<const BFloat16*>(w1_.data());
    arguments.weights.w2 = static_cast<const BFloat16*>(w2_.data());
    arguments.y = static_cast<BFloat16*>(y_.data());
    arguments.stream = Stream{stream_};
    return arguments;
  }
  BackwardArguments backward_arguments(WeightGradientTime time = WeightGradientTime::kNow) const {
    BackwardArguments arguments;
    arguments.dy = static_cast<const BFloat16*>(dy_.data());
    arguments.x = static_cast<const BFloat16*>(x_.data());
    arguments.weights = this->arguments().weights;
    arguments.dx = static_cast<BFloat16*>(dx_.data());
    arguments.dprobs = static_cast<float*>(dprobs_.data());
    if (time == WeightGradientTime::kNow) arguments.gradients = gradients();
    arguments.stream = Stream{stream_};
    arguments.weight_gradients = time;
    return arguments;
  }
  WeightGradientArguments gradient_arguments() const { return {gradients(), Stream{stream_}, 0}; }
  // Room for any routing of so many tokens a rank.
  Capacity capacity(int64_t tokens) const {
    const int64_t slots = ranks_ * tokens * shape_.topk;
    return {.rows = round_up(slots, kRowAlignment) + shape_.experts / ranks_ * kRowAlignment, .tokens = tokens};
  }

  // In the order of the stream.
  void poison() const { poison(y_, y_bytes_); }
  void poison_x() const { poison(x_, y_bytes_); }
  void restore_x() const {
    const ScopedDevice scope(device_);
    check(driver().cuMemcpyDtoDAsync(address(x_), address(kept_x_), static_cast<std::size_t>(y_bytes_), stream_),
          "copying x");
  }
  void poison_gradients() const {
    poison(dx_, y_bytes_);
    poison(dprobs_, dprobs_bytes_);
    poison(dw1_, 2 * dw2_bytes_);
    poison(dw2_, dw2_bytes_);
  }
  // Of y, behind the stream's work; waits for nothing else.
  uint64_t checksum(int64_t tokens) const { return checksum(y_, tokens * shape_.hidden * kElement, kNothing); }
  // Of dx, dprobs, dw1 and dw2.
  uint64_t gradient_checksum(int64_t tokens) const {
    uint64_t hash = checksum(dx_, tokens * shape_.hidden * kElement, kNothing);
    hash = checksum(dprobs_, tokens * shape_.topk * static_cast<int64_t>(sizeof(float)), hash);
    return checksum(dw2_, dw2_bytes_, checksum(dw1_, 2 * dw2_bytes_, hash));
  }
  // Of bytes on its GPU.
  uint64_t checksum(const DeviceArray& array, int64_t bytes) const { return checksum(array, bytes, kNothing); }

 private:
  static constexpr auto kElement = static_cast<int64_t>(sizeof(BFloat16));
  static constexpr uint64_t kNothing = 14695981039346656037u;  // the hash of no bytes

  WeightGradients gradients() const {
    WeightGradients gradients;
    gradients.dw1 = dw1_.data();
    gradients.dw2 = dw2_.data();
    return gradients;
  }
  void poison(const DeviceArray& array, int64_t bytes) const {
    const ScopedDevice scope(device_);
    check(driver().cuMemsetD8Async(address(array), 0xff, static_cast<std::size_t>(bytes), stream_), "poisoning");
  }
  uint64_t checksum(const DeviceArray& array, int64_t count, uint64_t hash) const {
    std::vector<unsigned char> bytes(static_cast<std::size_t>(count));
    const ScopedDevice scope(device_);
    check(driver().cuMemcpyDtoHAsync(bytes.data(), address(array), bytes.size(), stream_), "reading results");
    check(driver().cuStreamSynchronize(stream_), "reading results");
    for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211u;
    return hash;
  }

  static std::vector<BFloat16> values(int64_t count, std::mt19937_64& random) {
    std::vector<BFloat16> numbers(static_cast<std::size_t>(count));
    for (BFloat16& number : numbers) {
      number = to_bfloat16(static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 8000.0f);
    }
    return numbers;
  }
  template <typename T>
  DeviceArray on_device(const std::vector<T>& host) const {
    return {device_, host.data(), static_cast<int64_t>(host.size() * sizeof(T))};
  }
  static CUdeviceptr address(const DeviceArray& array) { return reinterpret_cast<CUdeviceptr>(array.data()); }

  LayerShape shape_;
  int ranks_, device_;
  CUstream stream_;
  int64_t y_bytes_, dprobs_bytes_ = 0, dw2_bytes_ = 0;
  DeviceArray ids_, probs_, x_, kept_x_, w1_, w2_, y_, dy_, dx_, dprobs_, dw1_, dw2_;
};

}  // namespace uniep::cuda::test
