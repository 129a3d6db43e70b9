#pragma once

#include <cuda.h>

#include <span>
#include <vector>

#include "engine/cuda/layer/symmetric_region.h"
#include "uniep/layer.h"

namespace uniep::cuda {

// A rank's routing in host memory.
struct HostRouting {
  int64_t tokens = 0;
  IndexType index_type = IndexType::kInt32;
  std::vector<std::byte> ids;
  std::vector<float> probs;

  Routing view() const;
};

// Copies the routings of ranks first_rank, ... from their devices and waits for them; `devices` holds one for each.
// Throws Error(kInvalidArgument) where arrays are missing or too large to copy.
std::vector<HostRouting> read_routings(const LayerShape& shape, std::span<const Routing> routings,
                                       std::span<const int> devices, int first_rank);

// The routings of all ranks, of which this process has one. Collective, through symmetric memory.
std::vector<HostRouting> share_routings(SymmetricRegion& symmetric, const LayerShape& shape, const HostRouting& own);

}  // namespace uniep::cuda
