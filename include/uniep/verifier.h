#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "uniep/export.h"
#include "uniep/layer.h"

// Finds a GPU that computes wrongly without a message. No Schedule and no placement of experts changes a bit of a
// layer's results, so a call is checked by another call: on the same inputs, under another Schedule, with experts moved
// to other ranks. docs/verifier.md says what is found and what it costs.
namespace uniep {

enum class FindingKind : int {
  kWrongRank = 0,      // `rank` computed wrongly: two other runs agree against it
  kUndecided = 1,      // one of `suspects` did, and the runs do not say which
  kChangedMemory = 2,  // a few tiles of one weight, or of another input, changed in the memory of `rank` after the call
  kChangedInputs = 3,  // inputs were written after the call, such as weights by an optimizer: no verdict
  kReplayed = 4,       // inputs and results were: a graph was replayed, or their memory was used again. No verdict
  kNotFinite = 5,      // a result holds NaN or infinities, the same ones in all runs: no rank is wrong
  kOwnBug = 6,         // the runs disagree on all ranks, or by Schedule: a fault of the library
};
UNIEP_API const char* finding_name(FindingKind kind);

struct Finding {
  FindingKind kind = FindingKind::kWrongRank;
  std::string layer;
  Direction direction = Direction::kForward;
  std::string tensor;         // "y", "z", "o" (an expert's rows on their way back), "dx", "dprobs", "dw1", "dw2", ...
  int64_t expert = -1;        // global; -1: none, as of the sum over a token's slots
  int rank = -1;              // kWrongRank, kChangedMemory
  std::vector<int> suspects;  // kUndecided
  int64_t row = 0,
          column = 0;   // the first wrong tile: one row of the tensor, kVerifiedColumns columns from `column` on
  int64_t tiles = 0;    // that differ
  std::string file;     // the inputs, for `uniep run --tensors`; its ids beside it with .npy; or empty
  std::string message;  // one line that says all of this
};
constexpr int64_t kVerifiedColumns = 128;  // of a tile whose checksum is compared

struct VerifierOptions {
  int64_t every = 100;    // steps from one check to the next, at least; 1 or more
  double budget = 0.001;  // of the time of all steps that checks may take, above 0; the first is made anyway; 1 or
                          // more: no bound
  std::vector<std::string> layers{};      // names of those that are checked; empty: all
  std::string folder{};                   // where a finding's inputs are written; empty: nowhere
  std::vector<std::string> rank_names{};  // what messages call a rank, one each; empty: serial number or id, and host
  uint64_t seed = 1;                      // of the order of layers, experts and Schedules
};

struct VerifierCounts {
  int64_t steps = 0;
  int64_t forward_checks = 0, backward_checks = 0;
  int64_t calls = 0;                           // of the layer, that the checks made
  int64_t findings = 0;                        // those that repeat an earlier one included
  int64_t without_kernel = 0;                  // Schedules that the engine has no kernel for; another one was taken
  int64_t skipped = 0;                         // checks that had no memory
  double check_seconds = 0, step_seconds = 0;  // of all end_step(), and of all steps
};

// What a check asks for on a rank, beside a call's own memory_need().
struct VerifierMemory {
  std::size_t expert_bytes = 0;  // one expert's weights, and in backward its gradients
  std::size_t result_bytes = 0;  // y; in backward dx and dprobs, too
  std::size_t host_bytes = 0;    // checksums of the call and of two runs
};

// A call of a layer, as forward() or backward() was given it. `schedule` is that direction's.
struct VerifiedCall {
  std::string layer;  // a name, which findings have
  LayerConfig config{};
  Schedule schedule{};
  std::span<const Routing> routings{};  // of all ranks
};

namespace internal {
class VerifierState;
}

// Checks one call of one layer, forward and backward in turn, each `every` steps. It sees all calls:
//
//   Saved saved = forward(group, config, schedule, placement, arguments);
//   verifier.after_forward({"layer 3", config, schedule, routings}, arguments, saved);
//   ...
//   for (const Finding& finding : verifier.end_step()) log(finding.message);
//
// Nothing of a job's results changes. Needs a Group that has all ranks in this process: else Error(kUnsupported); with
// one process per rank use the Python package. Not thread-safe; belongs to the same thread of calls as the Group.
class UNIEP_API Verifier {
 public:
  // Throws Error(kInvalidArgument) for illegal options. `group` must outlive it.
  Verifier(Group& group, const VerifierOptions& options);
  ~Verifier();
  Verifier(const Verifier&) = delete;
  Verifier& operator=(const Verifier&) = delete;

  // Directly after a forward(), with what it was given and returned (an empty Saved is legal). Where due() said so
  // before, checksums are noted and the arrays must stay as they are until end_step(); otherwise it costs next to
  // nothing.
  void after_forward(const VerifiedCall& given, std::span<const ForwardArguments> arguments, const Saved& saved);
  // Before a backward() whose gradients are added (WeightGradient::kMainGrad): keeps what one expert's hold. Without
  // it, and where weight gradients are not made by the call itself, they are not compared.
  void before_backward(const std::string& layer, const LayerConfig& config,
                       std::span<const BackwardArguments> arguments);
  // Directly after a backward(); `x` must be there whatever save.xg is.
  void after_backward(const VerifiedCall& given, std::span<const BackwardArguments> arguments);
  // Whether the next such call is the one that is checked.
  bool due(const std::string& layer, Direction direction) const;

  // The end of a step, while arrays and weights are still those of the step: makes the check that is due. What is found
  // is reported once: the same kind in the same layer, direction and rank is not reported again. Throws what the calls
  // of the layer throw, but for kOutOfMemory, which skips the check.
  std::vector<Finding> end_step();

  VerifierCounts counts() const;
  // Of each rank, for a check of a layer with so many tokens of a rank.
  VerifierMemory memory_need(const LayerConfig& config, Direction direction, int64_t tokens) const;

 private:
  std::unique_ptr<internal::VerifierState> state_;
};

}  // namespace uniep
