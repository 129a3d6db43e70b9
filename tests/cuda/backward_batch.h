#pragma once

#include <string>

#include "tests/cuda/device_backward.h"

// What the tests of backward share.
namespace uniep::cuda::test {

constexpr WeightGradientTime kNow = WeightGradientTime::kNow, kLater = WeightGradientTime::kLater,
                             kNone = WeightGradientTime::kNone;
constexpr const char* kTimeNames[] = {", now", ", later", ", none"};
constexpr int kProcessors = 132;

// How the ranks run.
struct Where {
  std::string name;
  GroupOptions group;
  bool in_processes() const { return group.launch == uniep::Launch::kProcesses; }
  int devices() const { return in_processes() ? group.ranks : static_cast<int>(group.devices.size()); }
  // Of a GPU like an H100 SXM.
  int workers() const { return kProcessors / (group.ranks / devices()); }
};

// One batch: a forward, and what its backward reads and writes.
struct Batch {
  cli::LayerData data;
  CallArrays call;
  BackwardArrays back;
  DeviceLayer::Called called;
  cli::LayerResult expected;
};

inline Batch forward_batch(DeviceLayer& layer, DeviceBackward& backward, int64_t most_tokens, bool within,
                           bool with_oracle = true) {
  Batch batch;
  batch.call = layer.arrays(layer.tokens(most_tokens));
  batch.data = layer.with_dy(layer.batch(batch.call.tokens));
  batch.back = backward.arrays(batch.call.tokens);
  layer.upload(batch.call, batch.data);
  backward.upload(batch.back, batch.data);
  batch.called = layer.call(batch.call, within ? batch.call.capacity : Capacity{});
  if (with_oracle) batch.expected = backward.oracle(batch.data);
  return batch;
}

}  // namespace uniep::cuda::test
