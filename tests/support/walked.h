#pragma once

#include <random>
#include <vector>

#include "program/build.h"
#include "program/stage.h"

namespace uniep::test {

// What every agent of a rank runs, from the first launch to the last.
struct Walked {
  std::vector<std::vector<Task>> of_agent;  // [worker * 2 + role]
  std::vector<Task> all;
  int64_t pairs = 0;
};

// Plays all agents of a rank, which take turns at random, without waits. A pair's second worker is played by its first;
// it must come to the list, and be let go.
Walked walk_rank(const RankProgram& p, std::mt19937_64& random);

}  // namespace uniep::test
