#pragma once

#include <cstdint>
#include <map>

namespace uniep::test {

// Counters of tickets for agents that one thread plays (walk.h).
struct PlainCounters {
  std::map<int64_t, int64_t>& counters;
  int64_t taken(int64_t counter) const { return counters[counter]; }
  int64_t take(int64_t counter) { return counters[counter]++; }
};

}  // namespace uniep::test
