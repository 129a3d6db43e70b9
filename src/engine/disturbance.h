#pragma once

#include <cstdint>

namespace uniep::internal {

// Disturbances for tests. They change no bit of any result.
struct Disturbance {
  uint64_t shuffle_seed = 0;  // not 0: a random ready agent runs next, and tiles are delayed at random
  int delayed_rank = -1;      // every tile of this rank takes delay_microseconds longer
  int delay_microseconds = 0;
};

}  // namespace uniep::internal
