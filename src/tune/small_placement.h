#pragma once

#include <memory>

#include "model/placement_state.h"

namespace uniep::tune {

// A few tokens a rank, placed on all ranks: slots go to all experts in turn.
std::shared_ptr<const internal::PlacementState> small_placement(const LayerShape& shape, int ranks, int64_t tokens);

}  // namespace uniep::tune
