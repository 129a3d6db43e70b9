#pragma once

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "uniep/verifier.h"
#include "verify/evidence.h"
#include "verify/rerun.h"

namespace uniep::verify {

// The call that is checked at the end of this step.
struct NotedCall {
  std::string layer;
  Inputs inputs;
  Schedule schedule;
  Sums read, made;                       // of its inputs and of its results, as they were behind the call
  std::vector<const BFloat16*> results;  // y or dx of each rank
  int64_t expert = 0;                    // local: which one of each rank is moved
  bool gradients = false;                // dw1 and dw2 of that expert are in `made`
  GradientStart start;
};

}  // namespace uniep::verify

namespace uniep::internal {

class VerifierState {
 public:
  VerifierState(Group& group, const VerifierOptions& options);

  void see(const std::string& layer);
  bool due(const std::string& layer, Direction direction) const;
  verify::NotedCall begin_note(const VerifiedCall& given, Direction direction, std::size_t arguments) const;
  void note(verify::NotedCall call);
  std::vector<Finding> end_step();
  int64_t expert_in_turn(const LayerConfig& config) const;

  // Counts what passes as a check's.
  template <typename Work>
  auto timed(Work&& work) {
    struct Timer {
      VerifierCounts& counts;
      std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
      ~Timer() {
        counts.check_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      }
    };
    const Timer timer{counts};
    return work();
  }

  Group& group;
  const VerifierOptions options;
  VerifierCounts counts;
  verify::GradientStart start;  // kept before a backward

 private:
  struct Turn {
    std::string layer;
    Direction direction = Direction::kForward;
  };
  void choose_turn();
  void choose_next_step(double check_seconds);
  std::vector<Finding> check(const verify::NotedCall& call);
  std::optional<Finding> inputs_finding(const verify::NotedCall& call) const;
  std::optional<Finding> runs_finding(const verify::NotedCall& call);
  // Of three runs, under the Schedules `used`.
  std::optional<Finding> judge(const verify::NotedCall& call, const std::vector<verify::Sums>& runs,
                               const std::vector<std::string>& used, const std::vector<std::string>& schedules);
  struct Run {
    verify::Sums sums;
    std::string schedule;
  };
  // Runs the call again; a Schedule without a kernel makes room for the next one. Nothing: there is none left.
  std::optional<Run> run_one(const verify::NotedCall& call, std::vector<std::string>& schedules, std::size_t which,
                             verify::Moved moved);
  bool repeats_by_schedule(const verify::NotedCall& call, const std::string& used, const verify::Evidence& evidence,
                           int wrong_rank);
  // Where two earlier findings or more and this one have a single candidate in common: that one, and their steps.
  std::pair<std::vector<int>, std::string> narrowed(const std::vector<int>& candidates) const;
  Finding finding_of(const verify::NotedCall& call, FindingKind kind, const verify::Place* place) const;
  void describe(Finding& finding, const verify::Place* place, const std::string& what) const;

  std::vector<std::string> layers_;  // seen so far, of those that are checked
  std::optional<Turn> turn_;         // nothing: the first layer that comes
  int64_t turns_ = 0, waited_ = 0;
  int64_t next_step_;
  std::optional<verify::NotedCall> noted_;
  struct Undecided {
    int64_t step;
    std::vector<int> candidates;
  };
  std::vector<Undecided> undecided_;  // earlier findings
  std::set<std::string> told_;
  std::vector<std::string> names_;
  std::chrono::steady_clock::time_point step_begin_ = std::chrono::steady_clock::now();
};

}  // namespace uniep::internal
