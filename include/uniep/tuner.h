#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "uniep/direction.h"
#include "uniep/export.h"
#include "uniep/layer.h"
#include "uniep/preparation.h"
#include "uniep/schedule.h"

// Tuning inside a running job. No Schedule changes a bit of the result, so a job may try others while it trains:
//
//   Tuner tuner(options);                       // collective
//   for each step:
//     if (tuner.wants_round()) tuner.begin_round();   // collective; where the device is idle
//     for each call of a layer:
//       const TunerCall call = tuner.schedule(layer, Direction::kForward);
//       ... forward(group, config, call.schedule, ...) ...
//       tuner.measured(call, {milliseconds, busiest_rows, mean_rows});
//     tuner.step();                             // collective
//
// A plan gives candidates by the number of the call, so all ranks agree without talking. At step() n ranks decide on
// what was measured up to step n - 2 and has been exchanged meanwhile, and on nothing else: all take the same decision.
// A Tuner is not thread-safe: one call at a time.
namespace uniep {

// How the processes that call a layer together tell each other what they measured. The framework has one, or else the
// group: make_tuner_exchange(). Bytes that come back are equal on all ranks.
class UNIEP_API TunerExchange {
 public:
  virtual ~TunerExchange() = default;
  // Gives `own` to all ranks and does not wait. `number` counts 0, 1, 2, ... on all ranks alike; of one number ranks
  // may give different amounts, up to kMaxExchangedBytes.
  virtual void give(int64_t number, std::span<const std::byte> own) = 0;
  // What all ranks gave under that number, in rank order. Waits for those that have not yet, but not forever: throws
  // Error(kTimeout) that names them.
  virtual std::vector<std::vector<std::byte>> take(int64_t number) = 0;
};
inline constexpr std::size_t kMaxExchangedBytes = std::size_t{1} << 20;

// One over the group's own connection between its processes, for a job whose framework has none: TunerOptions::rank is
// Group::first_local_rank(), ranks is Group::ranks(). In a process that holds all ranks, which is one for the tuner, it
// gives back what was given. Several of one group may live side by side. The Group outlives it.
//
// give() sends nothing yet. take() is where hosts meet: all ranks take the same numbers in the same order among their
// other calls on the group, one of all of these at a time, from any thread. It neither waits for a GPU nor throws what
// calls have failed with, so calls and replays may be under way, and failed ones may still wait for recover().
//
// give() throws Error(kInvalidArgument) for a number out of turn and for more than kMaxExchangedBytes. take() throws
//   kInvalidArgument  for a number that was not given, or was taken; on all ranks where they take different ones
//   kTimeout          that names the ranks that did not come within GroupOptions::arrival_timeout_seconds; one that
//                     waits in recover() for this one; or says that the group was aborted here
//   kDevice           at once, that names a rank that failed, left or whose process is gone
// Behind a rank's recover() the group goes on once all ranks have called it; behind the other two it needs a new Group.
UNIEP_API std::shared_ptr<TunerExchange> make_tuner_exchange(Group& group);

// Layers that are alike: all calls of one are compared with each other.
struct TunerLayer {
  LayerConfig config;
  int64_t tokens = 0;                             // the largest T of any rank, about; up to 2^40
  Schedule forward, backward;                     // legal; what the job would run without a tuner
  PartialSchedule fixed_forward, fixed_backward;  // fields that stay as they are
};

// What a candidate's first call has shown, on inputs that are not the job's.
struct TunerCheck {
  bool equal = false;        // all bytes are those of the incumbent
  double milliseconds = 0;   // that the check took
  std::string refused = {};  // why it is not a candidate here: it needs more memory, say; empty: it is one
};

struct TunerOptions {
  // Processes that call the layers together, and which one this is. One where a process holds all ranks of a group.
  int rank = 0, ranks = 1;
  Machine machine;           // Group::machine()
  std::string machine_name;  // what entries of the folder are for: device, launch, library_label()
  std::vector<TunerLayer> layers;
  std::shared_ptr<TunerExchange> exchange;  // needed with several ranks

  // Runs a candidate and the incumbent once on the layer's own shapes, on inputs and into outputs of its own (an eighth
  // of the tokens will do), and compares all bytes. Collective, in begin_round(). May throw Error: the candidate is
  // out; with kOutOfMemory it is refused.
  std::function<TunerCheck(int layer, Direction direction, const Schedule& candidate, const Schedule& incumbent)> check;
  // Begins to compile a candidate's kernels in the background, and says how far that is; waits for nothing, loads
  // nothing. Asked again at each step() until all ranks are ready; only then is the candidate checked, in a later
  // begin_round(). prepare() of uniep/layer.h does it. May throw Error: the candidate is out. Null: checks compile, and
  // their time counts as lost to trying.
  std::function<Preparation(int layer, Direction direction, const Schedule& candidate)> prepare;
  // Candidates beside an incumbent, the most promising first; null: the library's own. Rank 0's count.
  std::function<std::vector<Schedule>(int layer, Direction direction, const Schedule& incumbent)> candidates;
  // Whether calls of the ranks do not wait for each other, as where a framework sends the rows: then the longest of
  // their times counts. Else the shortest, which is that of the rank that came last and waited for nobody.
  bool calls_alone = false;
  // How long a call takes in proportion to others of its layer, by the rows of the busiest rank and of the mean; null:
  // the closed form of docs/solver.md on cuda, the rows of all ranks on cpu.
  std::function<double(int layer, Direction direction, double busiest_rows, double mean_rows)> forecast;
  std::function<void(const std::string& line)> log;  // each decision, on rank 0; warnings, on the ranks that have them

  std::string folder;     // where rank 0 keeps what was found and what failed; empty: nowhere
  double budget = 0.005;  // time lost to trying, as a share of the time in layers
  int64_t until = 0;      // the step after which nothing changes; 0: no such step
  int batch = 4;          // candidates of a round
  // Groups of one job that call layers of the same kind, to try different candidates at the same time.
  int group = 0, groups = 1;
};

// One call: what it runs under, and its number.
struct TunerCall {
  int layer = 0;
  Direction direction = Direction::kForward;
  uint64_t number = 0;
  Schedule schedule = {};
  bool timed = false;         // measured() is waited for; of other calls it takes nothing
  bool of_candidate = false;  // else of what the job runs meanwhile
};

struct CallTime {
  double milliseconds = 0;  // of the call, on this process's ranks
  // Routed rows of the busiest rank and in the mean over ranks; 0 where the host does not know them.
  double busiest_rows = 0, mean_rows = 0;
};

// A line of the tuner's log.
struct TunerDecision {
  int64_t step = 0;
  int layer = 0;
  Direction direction = Direction::kForward;
  std::string verdict;  // "taken", "slower", "failed", "wrong", "refused"
  Schedule schedule;
  double ratio = 0;  // its time over the incumbent's, the median of pairs; 0: none was measured
  int pairs = 0;
  std::string reason;
};

struct TunerSpent {
  double layers_milliseconds = 0;  // of all calls
  double lost_milliseconds = 0;    // by candidates that were slower, and by their checks
  int64_t tried_calls = 0;         // that ran under a candidate
};

class UNIEP_API Tuner {
 public:
  // Collective. Begins with what the folder has, else with what `options` gives; rank 0's count, and so do its budget
  // and its other settings. Throws Error(kInvalidArgument) that names the option, or the ranks whose layers, machine or
  // library differ from rank 0's; and what the exchange throws.
  explicit Tuner(TunerOptions options);
  ~Tuner();
  Tuner(Tuner&&) noexcept;
  Tuner& operator=(Tuner&&) noexcept;

  // What the next call of a layer runs under. All ranks make the same calls in the same order.
  TunerCall schedule(int layer, Direction direction);
  // For a call that is captured into a graph and keeps its Schedule: the incumbent's. Not counted; the log says so
  // once.
  const Schedule& schedule_to_keep(int layer, Direction direction);

  // The time of a call, up to the end of the step after its own. A call that nobody reports counts as hung: its
  // candidate is out.
  void measured(const TunerCall& call, const CallTime& time);
  // It ended in an Error, whether its time was asked for or not. The candidate is out on all ranks, two steps later;
  // an incumbent is out for good, and the one before it is back, unless it is what `options` gave.
  void failed(const TunerCall& call, const std::string& reason);
  // It has no time, by no fault of its Schedule: it raised an earlier call's Error, say, or was not made. Its pair is
  // lost, whatever other ranks say of the call, and nothing else. Nor does an incumbent go out for what failed on other
  // ranks in the same step, who may have waited for this one.
  void not_measured(const TunerCall& call);

  // Collective: a step ends. Never loads or compiles anything. Throws what the exchange throws, and
  // Error(kInvalidArgument) that names the ranks that made other calls than rank 0; the tuner is then frozen.
  void step();

  // Whether there are candidates to be checked, equal on all ranks.
  bool wants_round() const;
  // Collective: picks the next candidates, checks those whose kernels are compiled on all ranks and has the others'
  // compiled in the background; these join in a later one. Loads kernels, by way of the check.
  void begin_round();

  // From here on the incumbents stay. Collective.
  void freeze();
  bool frozen() const;

  const Schedule& incumbent(int layer, Direction direction) const;
  const std::vector<TunerDecision>& decisions() const;
  TunerSpent spent() const;
  int64_t steps() const;  // that have ended

  // What this group has measured, for the job's other groups: bytes that the framework gathers now and then.
  std::vector<std::byte> results() const;
  // What another group has measured. Counts once all ranks of this group are known to have been given the same, two
  // steps later; where they differ, it is left out with a line. Throws Error(kInvalidArgument) for what is no result.
  void add_results(std::span<const std::byte> bytes);

 private:
  class [[gnu::visibility("hidden")]] Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace uniep
