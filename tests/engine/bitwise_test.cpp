#include "support/bitwise.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "support/environment.h"

// Every configuration gives the bits of sequential execution: y, z, dx, dprobs, dw1 and dw2, compared by bytes.
namespace uniep::test {
namespace {

TEST(Bitwise, RandomCombinationsEqualTheSequentialRun) {
  const uint64_t combinations = from_environment("UNIEP_TEST_COMBINATIONS", 500);
  const uint64_t first = from_environment("UNIEP_TEST_SEED", 1);
  BranchCounts branches;
  for (uint64_t seed = first; seed < first + combinations; ++seed) {
    const std::string problem = run_random_combination(seed, branches);
    ASSERT_EQ(problem, "") << "combination " << seed;
  }
  constexpr uint64_t kEnoughForAll = 200;  // fewer are there to see some of them again
  if (combinations >= kEnoughForAll) {
    branches.expect_all_taken();
  } else {
    branches.print();
  }
  std::printf("%llu combinations, all bits equal\n", static_cast<unsigned long long>(combinations));
}

}  // namespace
}  // namespace uniep::test
