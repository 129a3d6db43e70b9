#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "program/build.h"
#include "support/random_layer.h"

namespace uniep::test {

// How often the cases of a property test took each of the branches that the test is there for. A branch that was never
// taken was never tested, and fails the test.
class BranchCounts {
 public:
  // Every case names all branches, in one order, so that one that none takes is in the table too.
  void count(const char* branch, bool taken);

  void print() const;
  std::vector<std::string> never_taken() const;
  // Prints the table and fails for every branch that no case took, in a program of GoogleTest's.
  void expect_all_taken() const;

 private:
  std::vector<std::pair<std::string, int64_t>> counts_;  // in the order in which they were first named
  std::size_t next_ = 0;                                 // the one that is likely to be named next
};

// What a layer is: ranks, routing and numerics.
void count_layer(BranchCounts& branches, const RandomLayer& layer);
// Every activation, with its parameters, at every place of the router's weight.
void count_activation(BranchCounts& branches, const Numerics& numerics);
// What a Program of the whole layer is made of: Schedule, cluster and parts of a pull.
void count_schedule(BranchCounts& branches, const Program& program);

}  // namespace uniep::test
