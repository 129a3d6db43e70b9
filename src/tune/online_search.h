#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tune/search.h"

// The search for a faster Schedule among the calls of a running job, for one layer and direction. It is a pure function
// of the calls' numbers and of times that are equal on all ranks.
namespace uniep::tune {

struct OnlineLimits {
  std::size_t slower_pairs = 8;  // after which a candidate is out that is at least `slower` behind
  double slower = 1.02;
  std::size_t faster_pairs = 32;  // after which one may take the incumbent's place that is surely `least_gain` faster
  double least_gain = 0.005;
  std::size_t most_pairs = 128;  // after which one that is not is out
  double sure = 3;               // standard deviations of "surely": it is asked again and again
  std::size_t gross_pairs = 2;   // after which one is out that was each time `gross` behind
  double gross = 1.25;
  double predicted = 0.05;  // that a candidate without a time is taken to lose
  double drift = 0.05;      // of the incumbent's time over its forecast, that begins a new round
};

struct PlannedCall {
  int incumbents = 0;         // that were left before the call
  int epoch = 0;              // of the candidates
  int candidate = -1;         // whose pair the call belongs to; -1: of none
  bool of_candidate = false;  // it runs the candidate, else the incumbent
  uint64_t pair = 0;          // of the candidate
};

// A call's time, from what all ranks say.
struct AgreedTime {
  int failed_on = -1, missing_on = -1;  // the first rank that says so; -1: none
  bool is_void = false;                 // no time, and nobody's fault
  double milliseconds = 0;              // the least over ranks: that of the one that came last, who waited for nobody
  double forecast = 1;
  double skew = 1;  // the busiest rank's rows over the mean; 0: unknown

  bool is_known() const { return failed_on < 0 && missing_on < 0 && !is_void; }
};

struct Candidate {
  Schedule schedule;
  std::string text;
  Verdict verdict = Verdict::kInTheRunning;
  std::string reason = {};
  std::vector<double> ratios = {};  // of pairs, to the incumbent
  std::vector<double> others = {};  // of other groups of the job
  uint64_t planned = 0, begun = 0;  // pairs
  uint64_t lost_pairs = 0;          // without a time
  double excess = 0;                // ms that its calls took more than the incumbent's beside them

  bool is_first_used() const { return verdict == Verdict::kInTheRunning && ratios.empty() && in_flight() > 0; }
  uint64_t in_flight() const { return planned - lost_pairs - ratios.size(); }
  std::vector<double> pooled() const;
};

// What changed at the end of a step.
struct OnlineEvent {
  enum class Kind { kFirstUse, kStaysIn, kOut, kTaken, kNewRound, kFellBack } kind;
  std::size_t candidate = 0;
  std::string reason = {};
  Schedule failed = {};  // kFellBack: what was the incumbent
};

class OnlineSearch {
 public:
  explicit OnlineSearch(const Schedule& incumbent, const OnlineLimits& limits = {});

  // Before the first call: another incumbent, from which it goes back to the first one where its call fails.
  void begin_with(const Schedule& incumbent);

  const Schedule& incumbent() const { return incumbent_; }
  const std::string& incumbent_text() const { return incumbent_text_; }
  // What is back where the incumbent fails; null: the incumbent stays.
  const Schedule* earlier() const { return can_fall_back() ? &earlier_.back() : nullptr; }
  const std::vector<Candidate>& candidates() const { return candidates_; }
  Candidate& candidate(std::size_t i) { return candidates_[i]; }
  int epoch() const { return epoch_; }

  // The next call in the order of calls, and what it runs under.
  PlannedCall next_call();
  const Schedule& schedule_of(const PlannedCall& call) const {
    return call.of_candidate ? candidates_[static_cast<std::size_t>(call.candidate)].schedule : incumbent_;
  }

  // In the order of calls; calls of no pair say how the incumbent does.
  void apply(const PlannedCall& call, const AgreedTime& time);
  // A call that ran under this Schedule as the incumbent failed. The one before it is back, where there is one; what
  // the search was made with stays.
  void incumbent_failed(const Schedule& schedule, int rank);
  // At the end of a step in which `calls` calls were made. Plans for the next ones what `allowed` ms may be lost for,
  // and takes it from there. One candidate at a time has its first use, so that it is known which one ends a program:
  // none, while `first_use` says so.
  std::vector<OnlineEvent> decide(double& allowed, uint64_t calls, bool& first_use);

  // Candidates that are checked. With `last` there are no others, until times drift.
  void begin_round(const std::vector<Schedule>& candidates, bool last);
  // One more beside them.
  void join(const Schedule& candidate) { candidates_.push_back({candidate, to_text(candidate)}); }
  // A candidate is out, for what is known of it from elsewhere.
  void drop(std::size_t i, Verdict verdict, const std::string& reason);
  bool wants_round() const { return !exhausted_ && !is_trying(); }
  void stop();  // what is being tried is dropped

  bool has_first_use() const;

  // Of the incumbent: median of its last calls; 0 before any.
  double milliseconds() const;
  // Lost to candidates so far, and what may yet be lost by pairs that are planned.
  double lost() const;
  double expected() const;

 private:
  struct Segment {
    std::size_t candidate;
    uint64_t pairs;
    int position = 0;  // in the pair
  };
  struct Half {
    PlannedCall call;
    AgreedTime time;
  };
  struct Sample {
    double milliseconds, ratio, skew;
  };

  bool is_trying() const;
  bool can_fall_back() const { return !earlier_.empty() && incumbent_ != earlier_.front(); }
  void note_incumbent(const AgreedTime& time);
  void end_pair(const Half& first, const PlannedCall& call, const AgreedTime& time);
  void judge(std::size_t i);
  bool is_faster(const Candidate& candidate) const;
  void take(std::size_t i);
  void fall_back(int rank);
  void set_incumbent(const Schedule& schedule);  // what was measured beside the old one says nothing of it
  void plan(double& allowed, uint64_t calls, bool& first_use);
  uint64_t target(const Candidate& candidate) const;
  double expected_loss(const Candidate& candidate) const;
  void watch();

  OnlineLimits limits_;
  Schedule incumbent_;
  std::string incumbent_text_;
  std::vector<Schedule> earlier_;  // incumbents, the first one in front
  std::vector<Candidate> candidates_;
  std::deque<Segment> plan_;
  std::optional<Half> half_;
  std::deque<Sample> samples_;  // of the incumbent, the last ones
  std::size_t samples_since_ = 0;
  std::optional<double> reference_, skew_reference_;
  double lost_before_ = 0;  // by candidates of earlier rounds
  int epoch_ = 0, incumbents_ = 0;
  bool exhausted_ = false;
  std::vector<OnlineEvent> events_;
};

}  // namespace uniep::tune
