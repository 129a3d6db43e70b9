#pragma once

#include "program/edges.h"

// How messages call counters and flags.
namespace uniep::program {

inline const char* counter_name(CounterSpace space) {
  const char* const names[kCounterSpaces] = {"full rows",
                                             "first GEMM tiles",
                                             "second GEMM tiles",
                                             "agents finished",
                                             "tickets",
                                             "first GEMM tiles of the expert",
                                             "full rows of the expert"};
  return names[static_cast<int>(space)];
}

inline const char* flag_name(FlagSpace space) {
  const char* const names[kFlagSpaces] = {"arrive", "done", "pushed", "combined"};
  return names[static_cast<int>(space)];
}

}  // namespace uniep::program
