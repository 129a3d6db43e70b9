#pragma once

#include <string>
#include <vector>

#include "uniep/schedule.h"

namespace uniep {

// What the cuda engine runs at most.
inline constexpr int kMaxBuiltRanks = 8;
inline constexpr int kMaxBuiltSlots = 32;      // of a token, or combine groups
inline constexpr int kMaxBuiltExperts = 2048;  // of all ranks

// Why an engine has no kernel for a legal Schedule, in words as validate() has them; empty when it has. Needs no GPU.
// On the cpu engine everything legal runs.
// What depends on a call's routing or memory is refused by the call: rows of a rank, and gradients that are given
// apart.
std::vector<std::string> buildable(const Schedule& schedule, const ScheduleRequest& request);

// With those values that are the only ones that `machine` can run, where they are not given.
PartialSchedule with_only_buildable(PartialSchedule given, const Machine& machine);

// The part of it that no field of a Schedule changes.
std::vector<std::string> engine_limits(const ScheduleRequest& request);

// Tiles that the CUDA engine pulls a block of rows in: a part moves a few dozen KiB, so that many copy agents bring a
// block.
int pull_parts(const LayerShape& shape);

}  // namespace uniep
