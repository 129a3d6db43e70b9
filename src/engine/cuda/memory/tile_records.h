#pragma once

#include <vector>

#include "engine/cuda/device/arguments/rank_call.h"
#include "engine/cuda/memory/device_block.h"
#include "uniep/layer.h"

namespace uniep::cuda {

// The profiler's memory of one rank: a ring of records for each agent.
class TileRecords {
 public:
  // Makes room for a rank with so many workers.
  void reserve(int device, int workers);
  // Queues that no agent has written a record yet.
  void clear(void* stream) const;

  std::size_t bytes() const { return memory_.size(); }

  static constexpr uint32_t kCapacity = 1024;
  TileRecord* records() const { return reinterpret_cast<TileRecord*>(memory_.data() + counts_bytes()); }
  uint32_t* counts() const { return reinterpret_cast<uint32_t*>(memory_.data()); }

  // Waits for the device. Appends the last kCapacity tiles of every agent, times as the GPU's clock gives them.
  void append_to(std::vector<TileEvent>& events, int rank, int first_expert, Direction direction) const;

 private:
  std::size_t counts_bytes() const;

  int device_ = 0;
  int workers_ = 0;
  DeviceBlock memory_;
};

}  // namespace uniep::cuda
