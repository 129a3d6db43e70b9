#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tune/bytes.h"
#include "tune/forecast.h"
#include "tune/group_results.h"
#include "tune/journal.h"
#include "tune/online_search.h"
#include "tune/tuned.h"
#include "uniep/tuner.h"

namespace uniep::tune {

// A call whose time is asked for.
struct OpenCall {
  uint64_t number = 0;
  int64_t step = 0;  // in which it was made: 1, 2, ...
  PlannedCall planned;
  bool measured = false, failed = false, is_void = false;
  CallTime time = {};
};

// How far one rank, or the last of all, is with a candidate's kernels; from good to bad.
enum class Prepared : uint8_t { kReady = 0, kCompiling, kFailed };

// A candidate whose kernels are compiled in the background.
struct Waiting {
  uint32_t id = 0;  // equal on all ranks
  Schedule schedule;
  double since = 0;         // ms of the layers
  bool ready = false;       // on all ranks, as far as they have told each other
  std::string reason = {};  // why it fails on this rank
};

// What ran where no candidate did.
struct Incumbency {
  uint64_t first_call = 0;
  Schedule schedule;
};

// A layer and direction.
struct TunerSlot {
  int layer = 0;
  Direction direction = Direction::kForward;
  OnlineSearch search;
  Forecast forecast;
  Schedule given;      // what the job would run without a tuner
  Schedule base = {};  // the incumbent, as of the last log line
  std::string base_text = {};
  uint64_t calls = 0;                       // so far
  std::deque<uint64_t> calls_of_step = {};  // of steps that are not yet agreed on; the last is the one that runs
  int unplanned = 0;                        // calls of no pair in this step that are asked for
  std::deque<OpenCall> open = {};
  std::vector<Incumbency> incumbencies = {};
  // What this rank has not yet told the others: a call under an incumbent that failed, and whether one had no time by
  // no fault of its Schedule.
  std::optional<uint64_t> failed_call = {};
  bool had_void = false;
  std::set<std::string> failed_here = {};           // incumbents whose call has, as text
  std::set<std::string> tried = {};                 // Schedules as text that are not tried again until times drift
  std::set<std::string> out_for_good = {};          // failed or wrong
  std::vector<Result> ended = {};                   // of earlier rounds and incumbents
  std::map<int, std::vector<Result>> others = {};   // by group
  double milliseconds = 0, first_milliseconds = 0;  // of the incumbent, the last that is known; of the first one
  std::map<std::string, double> earlier_milliseconds = {};  // of incumbents whose place was taken, by text
  int checks = 0;                                           // so far, and what they took
  double checks_milliseconds = 0, first_check_milliseconds = 0;
  std::vector<Waiting> waiting = {};
  uint32_t next_waiting = 0;
  std::unique_ptr<Journal> journal = {};  // of rank 0
  bool said_kept = false;

  // Null: not asked for, or no more.
  OpenCall* find_open(uint64_t number);
  const Schedule& incumbent_of(uint64_t number) const;
};

}  // namespace uniep::tune

namespace uniep {

class Tuner::Implementation {
 public:
  explicit Implementation(TunerOptions options);
  ~Implementation();

  TunerCall schedule(int layer, Direction direction);
  const Schedule& schedule_to_keep(int layer, Direction direction);
  void measured(const TunerCall& call, const CallTime& time);
  void failed(const TunerCall& call, const std::string& reason);
  void not_measured(const TunerCall& call);
  void step();
  bool wants_round() const;
  void begin_round();
  void freeze(const std::string& why);
  std::vector<std::byte> results() const;
  void add_results(std::span<const std::byte> bytes);

  tune::TunerSlot& slot(int layer, Direction direction);
  TunerSpent spent() const;

  bool frozen = false;
  int64_t steps = 0;
  std::vector<TunerDecision> decisions;

 private:
  using Slot = tune::TunerSlot;
  // What a rank has said of one call.
  struct Report {
    float milliseconds = 0, busiest_rows = 0, mean_rows = 0;
  };
  struct StepMessage {
    int64_t covered = 0;  // the step whose calls it is about
    uint64_t state = 0, results = 0;
    struct OfSlot {
      uint64_t calls = 0;
      std::optional<uint64_t> failed_call;  // under an incumbent, up to the step after `covered`
      bool had_void = false;                // up to the same step
      std::vector<Report> reports;
      std::vector<std::pair<uint32_t, tune::Prepared>> waiting;  // by id
    };
    std::vector<OfSlot> slots;
    // Of the same calls, after the same decisions.
    bool is_like(const StepMessage& other) const;
  };
  struct Round {
    std::size_t slot = 0;
    std::vector<Schedule> schedules;  // to be checked
    bool joins = false;               // those that were waiting, beside what is being tried
    bool last = false;                // none was left
  };
  enum class CheckOutcome : uint8_t { kEqual = 0, kRefused, kWrong, kFailed };  // from good to bad
  // Of one candidate of a round, by this rank.
  struct OwnCheck {
    CheckOutcome outcome = CheckOutcome::kEqual;
    double milliseconds = 0;
    std::string reason;  // empty where it is equal, or wrong
    Status failed_by = Status::kOk;
  };
  // The same, by all ranks.
  struct AgreedCheck {
    CheckOutcome worst = CheckOutcome::kEqual;
    std::vector<int> ranks;   // that say so
    double milliseconds = 0;  // of the fastest; where it failed, of the slowest
  };

  void check_options() const;
  void make_slots();
  void find_kept();                                          // what the folder has, as incumbents
  void build_forecasts(const std::vector<int64_t>& tokens);  // of layers, rank 0's
  void agree_on_start();
  tune::TunedKey key_of(const Slot& slot) const;
  // Fields, with those that are fixed in place of theirs, as a whole Schedule; none where that is not legal.
  std::optional<Schedule> legal(const Slot& slot, PartialSchedule fields) const;
  std::vector<std::vector<std::byte>> exchanged(std::span<const std::byte> own);
  std::vector<std::vector<std::byte>> take(int64_t number);

  std::vector<std::byte> step_bytes(int64_t covered);
  StepMessage parse_step(std::span<const std::byte> bytes) const;
  void apply_step(int64_t covered, const std::vector<std::vector<std::byte>>& agreed);
  void apply_calls(std::size_t slot, int64_t covered, const std::vector<StepMessage>& messages);
  void decide();
  void handle(Slot& slot, const tune::OnlineEvent& event);
  void record(Slot& slot, const std::string& verdict, const tune::Candidate& candidate, const std::string& reason);
  void taken(Slot& slot, const tune::Candidate& candidate);
  // Into the journal. A disk that is full ends the folder's use, not the tuner's.
  void note(Slot& slot, const Schedule& schedule, tune::Verdict verdict, const std::string& reason = {});
  void write_or_go_on(const std::function<void()>& write);
  void forget_slower(Slot& slot);
  uint64_t state_hash() const;

  // Calls that failed (tuner_failures.cpp).
  void incumbent_failed_here(Slot& slot, uint64_t number, const std::string& reason);
  void apply_failures(std::size_t slot, const std::vector<StepMessage>& messages);
  void fell_back(Slot& slot, const tune::OnlineEvent& event);  // an incumbent failed
  void keep_instead(Slot& slot, const Schedule& failed, const Schedule& back);
  void note_running(Slot& slot);
  void end_trials(Slot& slot);

  // Candidates of a round (tuner_round.cpp).
  bool wants_round(const Slot& slot) const;
  bool wants_candidates(const Slot& slot) const;
  bool affordable(const Slot& slot, std::size_t checks) const;
  sim::MachineDescription described_machine();
  std::vector<Schedule> own_candidates(Slot& slot);
  std::vector<Round> first_ranks_round();
  OwnCheck check_candidate(const Slot& slot, const Schedule& schedule);
  std::vector<OwnCheck> check_round(const std::vector<Round>& rounds);          // candidate by candidate
  std::vector<AgreedCheck> agreed_checks(const std::vector<OwnCheck>& checks);  // in their order; collective
  bool enters(Slot& slot, const Schedule& schedule, const OwnCheck& own, const AgreedCheck& agreed);
  void begin_search(const Round& round, const std::vector<Schedule>& kept);
  void check_and_begin(const std::vector<Round>& rounds);
  void end_checked(Slot& slot, const Schedule& schedule, tune::Verdict verdict, const std::string& reason);

  // Candidates whose kernels are compiled in the background (tuner_waiting.cpp).
  struct OwnPreparation {
    tune::Prepared state = tune::Prepared::kReady;
    int kernels = 0;
    std::string reason;
  };
  OwnPreparation prepare(const Slot& slot, const Schedule& schedule) const;
  // Keeps of the rounds what is ready on all ranks; collective.
  void prepare_rounds(std::vector<Round>& rounds);
  std::vector<Round> ready_rounds();
  static std::size_t ready(const Slot& slot);
  std::vector<std::pair<uint32_t, tune::Prepared>> poll(Slot& slot);
  void apply_waiting(std::size_t slot, const std::vector<StepMessage>& messages);
  void end_waiting(Slot& slot);

  // Results of other groups (tuner_results.cpp).
  void keep_result(Slot& slot, const tune::Candidate& candidate);
  void forget_results(Slot& slot);  // of an earlier round, but for what is out for good
  void pool_results(int64_t step, bool all_have_them);
  void use_results(Slot& slot);
  std::vector<Schedule> suggestions(const Slot& slot) const;

  void say(const std::string& line) const;
  std::string place(const Slot& slot) const;

  TunerOptions options_;
  uint64_t identity_ = 0;  // of library, layers and machine
  tune::TunedFolder folder_;
  std::vector<Slot> slots_;
  int64_t next_number_ = 0;            // of the exchange
  std::optional<int64_t> last_given_;  // the step message that is on its way
  std::vector<std::byte> own_last_;    // the same, of a rank that is alone
  bool ended_by_error_ = false;
  int64_t tried_calls_ = 0;
  double layers_milliseconds_ = 0;
  struct Pending {
    std::vector<std::byte> bytes;
    int64_t step = 0;  // whose message names it first
  };
  std::deque<Pending> pending_;  // results that were given and not yet agreed on
};

}  // namespace uniep
