#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "uniep/tuner.h"

// A job whose calls take times that are made up, so that it is known what its tuner has to find.
namespace uniep::test {

struct MadeUpJob {
  static constexpr int kNever = 1 << 30;
  int ranks = 1;
  int steps = 120;
  int calls = 20;         // of the layer, a step and direction
  bool backward = false;  // too
  uint64_t seed = 1;
  double noise = 0.01;  // of a call's time, common to all ranks
  // Schedule i takes factors[i] of the time of 0, which is the incumbent.
  std::vector<double> factors = {1};
  // Candidates with a fault.
  std::set<int> wrong, fails_in_check, refused;
  std::map<int, int> fails, hangs;  // in the job's calls, on a rank
  // Candidates whose kernels are compiled in the background: the step from which they are there, or kNever.
  std::map<int, int> compiled_at;
  std::set<int> never_compiles;  // ends in an error, once it is compiled_at
  double budget = 0.05;
  int batch = 4;
  int64_t until = 0;
  int group = 0, groups = 1;
  double slower_from = 1;  // all calls take so many times as long from the step `changes_at` on
  double skew_from = 1;    // and the busiest rank has so many times the mean's rows
  int changes_at = 0;
  std::string folder = {};
};

// The Schedule that stands for a number, and the number of a Schedule.
Schedule job_schedule(int i);
int job_number(const Schedule& schedule);
TunerOptions job_options(const MadeUpJob& job, int rank, std::shared_ptr<TunerExchange> exchange);

struct JobOutcome {
  int incumbent = 0;                   // at the end, of forward
  uint64_t calls_hash = 0;             // of what each call ran under
  std::vector<int> used;               // calls of each Schedule, forward
  std::vector<std::string> decisions;  // "taken 3"
  std::vector<int64_t> decided_at;     // steps
  std::vector<int> pairs;
  double lost = 0, layers = 0, most_over = 0;  // ms; the most by which `lost` was ever above the budget
  std::vector<std::string> log;
  std::string error = {};
  int rounds = 0;
  int early = 0;  // checks and calls of candidates whose kernels are not there on this rank

  std::string text() const;  // as JSON
  static JobOutcome parse(const std::string& text);
  bool has(const std::string& decision) const;
  bool mentions(const std::string& part) const;  // in its log
};

class MadeUpRank {
 public:
  MadeUpRank(const MadeUpJob& job, int rank, std::shared_ptr<TunerExchange> exchange);
  void step();
  Tuner& tuner() { return *tuner_; }
  JobOutcome outcome() const;

 private:
  void call(Direction direction, int k);
  bool is_compiled(int candidate) const;

  const MadeUpJob job_;
  int rank_;
  JobOutcome outcome_;
  std::unique_ptr<Tuner> tuner_;
};

// All steps of one rank. An Error ends them, and is in the outcome.
JobOutcome run_made_up_rank(const MadeUpJob& job, int rank, std::shared_ptr<TunerExchange> exchange);

}  // namespace uniep::test
