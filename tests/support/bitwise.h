#pragma once

#include <cstdint>
#include <string>

#include "support/branch_counts.h"
#include "support/random_layer.h"

namespace uniep::test {

// A random layer run under random legal Schedules with random workers and shuffle seed; empty when every byte equals
// the sequential run on one rank, else what was run and what differs. `branches` counts what was run.
std::string run_random_combination(uint64_t seed, BranchCounts& branches);

}  // namespace uniep::test
