#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "program/build.h"
#include "sim/machine.h"
#include "sim/task_costs.h"
#include "uniep/layer.h"

// How long a Program takes on a machine: discrete events over the very walks, waits and signals that the engines run
// (walk.h, edges.h), with the machine's times for tiles, copies, sums and links. Nothing is computed.
namespace uniep::sim {

// The clocks at which calls run.
enum class State : int { kSustained = 0, kPaused };

struct SimulateOptions {
  State state = State::kSustained;
  // The clock that the power limit leaves a call under full load, where others take turns with this one; 0: calls like
  // this one follow each other.
  double limit_ghz = 0;
  // About where the clock will be, as a call that is nearly the same had it; 0: unknown. Within 1 % one run is enough,
  // of which times, clock and load are put right, but no stage's. Not with `record`.
  double near_ghz = 0;
  bool record = false;  // all tiles' begin and end
  // Rank 0 stands for all: its peers do at the same time what it does. For uniform routing and ranks with as many
  // tokens; as many times faster as there are ranks.
  bool one_rank = false;
};

struct StageTime {
  double begin_ms = 0, end_ms = 0;  // of its first and last tile on any rank
  double busy_ms = 0;               // of a worker, in the mean
};

// Lower bounds of the slowest rank's time, each by itself, at the clock of the call.
struct Limits {
  double gemm_ms = 0;        // the busiest rank's tiles on all its workers
  double links_ms = 0;       // the busiest way in or out of a rank
  double memory_ms = 0;      // bytes read and written
  double begin_end_ms = 0;   // begin and end, which nothing hides
  double bound_ms() const;   // the greatest of the first three, and begin and end
  const char* name() const;  // of the greatest
};

// One task that ran, in microseconds from the call on. A sum is of two tokens; its task names their 32.
struct TimedTask {
  int rank = 0, worker = 0;
  bool copy_agent = false;
  Task task{};
  int32_t token_begin = 0, token_end = 0;  // of a sum: positions of summed_token()
  double wait_begin = 0, begin = 0, end = 0;
};

struct Simulated {
  double ms = 0;  // of the slowest rank
  std::vector<double> ms_per_rank;
  double again_ms = 0;  // of `ms`: FC1 again, before backward's own stages (save.z=recompute). Nothing else tells of it
  double clock_ghz = 0;
  double load = 0;  // share of `ms` in which the busiest rank's tensor cores work, by which clocks fall
  Limits limits;
  std::map<std::string, StageTime> stages;  // by stage_name()
  int64_t tasks = 0;                        // that ran
  std::vector<TimedTask> timeline;          // where recorded
};

// Calls that take turns on warm GPUs. Their power is limited over a second; each one's clock follows its own load in
// part.
struct Turns {
  double us = 0, weighted_us = 0;  // of all; by what the others have of each one's load
  int calls = 0;
  void add(double call_us, double load, int as_many = 1);
  // SimulateOptions::limit_ghz of each.
  double limit_ghz(const Clock& clock) const;
};

// GHz of a call at its load, which is the share of its time in which all workers run tiles.
// `linked`: rows go between ranks.
double clock_of(const Clock& clock, const SimulateOptions& options, double load, double us, bool linked = false);

// How many times the clock of calls is a base's, about, on a machine that was made from it.
inline double clock_scale(const MachineDescription& machine, const MachineDescription& base, State state) {
  return state == State::kPaused ? machine.clock.pause / base.clock.pause : machine.clock.limit / base.clock.limit;
}

// Throws Error(kInvalidArgument) for more ranks than the machine links, and for one rank for all where tokens differ.
Simulated simulate(const Program& program, const MachineDescription& machine, const SimulateOptions& options = {});
// The same for who simulates a Program many times: a fifth faster.
Simulated simulate(const ProgramCosts& costs, const MachineDescription& machine, const SimulateOptions& options = {});

// A timeline as the engines record theirs.
std::vector<TileEvent> tile_events(const Program& program, const std::vector<TimedTask>& timeline);

// The Program that the GPU's engine runs, for a machine. `schedule` must be legal for schedule_machine().
ProgramRequest simulated_request(const LayerShape& shape, const Numerics& numerics, const Schedule& schedule,
                                 Direction direction, const MachineDescription& machine);

}  // namespace uniep::sim
