#pragma once

#include <span>
#include <vector>

#include "uniep/layer.h"

namespace uniep::internal {

// Events of ranks whose clocks differ, on one clock that begins with the first event. clock_of_rank[r] names rank r's
// clock. A call ends for all ranks together, so the clocks are brought together at the end of their last events; how
// long a rank had nothing to do then is lost, and that is some microseconds.
void bring_clocks_together(std::vector<TileEvent>& events, std::span<const int> clock_of_rank);

}  // namespace uniep::internal
