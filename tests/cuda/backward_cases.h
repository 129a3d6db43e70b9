#pragma once

#include <string>
#include <vector>

#include "engine/cuda/runtime/run_time_compiler.h"
#include "support/branch_counts.h"
#include "support/random_layer.h"
#include "uniep/uniep.h"

// What gpu_backward_tests draws: everything that a case does is decided before it runs, and needs no GPU.
namespace uniep::cuda::test {

// How one work is made.
struct WorkPlan {
  enum class Parts { kBoth = 0, kFirstThenSecond, kSecondThenFirst, kFirstAlone };
  Parts parts = Parts::kBoth;
  int sms = 0;  // 0: all
  bool aside = false;
};

// Several micro-batches of a layer, their works outstanding at once.
struct BackwardCase {
  LayerConfig config;
  std::string schedule;          // of backward
  std::string forward = "auto";  // its Schedule
  int64_t most_tokens = 0;       // of a rank
  bool within = false;           // a capacity
  bool by_address = false;       // gradients
  bool none_gets_addresses = false;
  bool last_use = false;       // of each later backward
  bool drops_handles = false;  // Saved and Placement go before the works are made
  std::vector<WorkPlan> works;
  std::vector<int> order;  // of the works; what is not in it is dropped
};

extern const std::vector<std::string> kBackwardSchedules;

// `workers`: of a rank.
BackwardCase draw_backward_case(uint64_t seed, int ranks, int workers);
void count_branches(uniep::test::BranchCounts& branches, const BackwardCase& drawn, int workers);
// What the launches of both directions take, with weight gradients and without.
std::vector<KernelRequest> kernels_of(const BackwardCase& drawn, int ranks, int workers);
std::string to_text(const BackwardCase& drawn);

}  // namespace uniep::cuda::test
