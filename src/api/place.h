#pragma once

#include <span>

#include "model/placement_state.h"

namespace uniep {

// Checks the routings of all ranks and places them (host memory). Throws Error that names rank, token, slot and value.
std::shared_ptr<const internal::PlacementState> place_on_host(const LayerShape& shape, int ranks,
                                                              std::span<const Routing> routings, Capacity capacity);

// Throws Error(kInvalidArgument) when a layer of this shape can not be spread over so many ranks.
void check_shape(const LayerShape& shape, int ranks);

}  // namespace uniep
