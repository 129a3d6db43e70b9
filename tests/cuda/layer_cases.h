#pragma once

#include <optional>

#include "engine/cuda/runtime/run_time_compiler.h"
#include "support/branch_counts.h"
#include "support/random_layer.h"
#include "uniep/uniep.h"

namespace uniep::cuda::test {

constexpr int64_t kMaxGroups = 32;  // that the engine sums

// Ranks of a case in processes share their Group, and so their workers, with others of the same part.
constexpr int kParts = 3;
constexpr int part_of(uint64_t seed) {
  return static_cast<int>(seed % kParts);
}

struct CaseOptions {
  int devices = 1;                             // that ranks are dealt over; in processes: at most so many ranks
  int processors = 132;                        // of a device; as many as an H100 or H200 SXM has
  bool random_launch = false;                  // else in one process
  bool any_kernel = false;                     // whatever the engine has a kernel for; else few different
  std::vector<std::string> tiles = {"256:2"};  // few: tile.n and tile.cluster
  std::string fixed;                           // fields of every forward Schedule
  std::string fixed_backward;                  // and of every backward one
  bool forward = true;                         // y and z are looked at
  bool backward = true;                        // cases have a backward pass
};

// Of cases with any activation: with limits that values of z reach.
extern const std::vector<std::string> kActivations;

// What the experts of a layer compute.
struct ActivationForm {
  std::string activation = "swiglu";
  RouterWeight router_weight = RouterWeight::kActivation;
  bool bias = false;
};
// Each of kActivations as it is, with biases that the router's weight multiplies, and with that weight on the input.
std::vector<ActivationForm> activation_forms();
std::string to_text(const ActivationForm& form);
// Of a layer with SwiGLU and no biases.
void set_form(uniep::test::RandomLayer& layer, const ActivationForm& form);

// How one layer is run.
struct LayerCase {
  int ranks = 1;
  uniep::Launch launch = uniep::Launch::kThreads;
  int part = 0;
  int workers = 0;
  Capacity capacity;
  bool by_address = false;  // weights and gradients: a tensor an expert
  bool apart = false;       // gate and up: a tensor each
  bool dense = false;       // routing
  bool later = false;       // weight gradients by a call of their own
  Schedule schedule;
  std::optional<Schedule> backward;
  bool backward_twice = false;  // of one forward
};

// A random layer, and two ways to run it: on its own number of ranks, and on one. No ways where the engine refuses the
// layer. The same for the same arguments everywhere; needs no GPU.
struct LayerCases {
  uniep::test::RandomLayer layer;
  std::vector<LayerCase> cases;
};
LayerCases draw_cases(uint64_t seed, const uniep::test::RandomLayerLimits& limits, const CaseOptions& options);

// What of the engine's branches a case takes, a table a direction; those that the options leave out are in none.
struct Branches {
  uniep::test::BranchCounts forward, backward;
};
void count_branches(Branches& branches, const uniep::test::RandomLayer& layer, const LayerCase& layer_case,
                    const CaseOptions& options);
// Of those that this engine has.
std::vector<std::string> untaken_branches(const Branches& branches);

std::string to_text(const LayerCase& layer_case);

// What main_grad holds before a case's backward pass: values of all sizes, subnormals and -0.
float case_main_grad(uint64_t index);

// The kernels that the launches take.
std::vector<KernelRequest> kernels_of(const LayerCase& layer_case, const LayerConfig& config);

}  // namespace uniep::cuda::test
