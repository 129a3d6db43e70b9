#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/cuda/layer/symmetric_region.h"

// What the hosts of ranks in several processes tell each other, through the mesh of the group's memory. Collective.
namespace uniep::cuda {

// How many bytes each rank has to tell, in rank order.
std::vector<int64_t> share_sizes(SymmetricRegion& symmetric, int64_t own_bytes);

// Copies what all ranks have to tell, one after the other, to `all`; null where it is not wanted.
void share_bytes(SymmetricRegion& symmetric, std::span<const std::byte> own, const std::vector<int64_t>& sizes,
                 std::byte* all);

}  // namespace uniep::cuda
