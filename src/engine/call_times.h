#pragma once

#include <span>

#include "program/call_times.h"
#include "uniep/layer.h"

namespace uniep::internal {

using program::RankTimes;

// Of one rank's events among those of a call. `runs` and `call` of what it gives are 0.
RankTimes rank_times(std::span<const TileEvent> events, int rank);

}  // namespace uniep::internal
