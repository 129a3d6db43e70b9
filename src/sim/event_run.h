#pragma once

#include <array>
#include <deque>
#include <queue>
#include <vector>

#include "program/walk.h"
#include "sim/links.h"
#include "sim/simulate.h"
#include "sim/task_costs.h"
#include "sim/tile_times.h"

namespace uniep::sim {

// One simulated call at one clock. Agents, queues, waits and signals are those of the engines; on the GPU a worker's
// math warps join the sums once they have no more tiles, and a pair of workers runs two tiles as one.
class EventRun {
 public:
  struct Load {
    const std::vector<RankCosts>& costs;
    double relayed_share;
    double clock_ghz;
  };
  EventRun(const Program& program, const MachineDescription& machine, const SimulateOptions& options, const Load& load);

  struct Totals {
    double begin_us = -1, end_us = 0, busy_us = 0;
  };
  struct Result {
    std::vector<double> end_us;                            // by rank
    std::vector<double> gemm_us_of_rank, load_us_of_rank;  // tiles; that share of it which loads the GPU
    std::vector<double> memory_bytes;                      // by rank
    std::array<Totals, kStageCount> stage{};
    int64_t tasks = 0;
    std::vector<TimedTask> timeline;
  };
  // Throws Error(kInternal) when something waits for ever, which the checker rules out.
  Result run();

 private:
  struct Wait {
    int64_t signal;
    uint32_t threshold;
  };
  struct Agent {
    int32_t rank = 0, worker = 0;
    AgentRole role = AgentRole::kCompute;
    int8_t list = 0;  // the one that is walked, or to be entered
    bool in_list = false, leads_pair = false, follows = false, done = false, counted = false;
    ListWalk walk;
    Task task{}, partner{};
    TokenRange tokens{};
    std::vector<Wait> waits;
    std::size_t satisfied = 0;
    int32_t summands = 0;  // rows that a sum adds up
    double wait_begin = 0, begin = 0;
    double sent = 0;    // until when the results of its last tile take the links
    double copied = 0;  // until when copies of all its warps are under way
    std::deque<double> under_way;
    int32_t next_waiting = -1;
  };
  enum class Kind : int32_t { kBegin, kEnd, kStored, kLaunch, kNext };
  struct Event {
    double time;
    int64_t number;  // events of one time go in the order in which they were made
    Kind kind;
    int32_t who;  // an agent, a rank, or a place in stored_
    bool operator>(const Event& other) const { return time != other.time ? time > other.time : number > other.number; }
  };
  struct Stored {
    int32_t rank;
    Task task, partner;
  };
  struct RankState {
    std::vector<uint32_t> signals;  // counters, then flags
    std::vector<int32_t> waiting;   // first agent that waits for each
    std::vector<ListWalk> sums;     // by worker: shared by its warps
    std::vector<char> computes, pair_came;
    std::vector<double> taken;  // by worker: us that copies have yet to take from its tiles
    int32_t launch = 0, live = 0;
    int64_t copies_left = 0;  // dispatch tasks that nobody has begun
    int32_t summing = 0;      // copying warps
    bool started = false;     // a tile has begun
    double memory_free = 0, activation_free = 0, last = 0;
    double gemm_us = 0, load_us = 0, memory_bytes = 0;
  };
  struct Counters {
    EventRun& run;
    int32_t rank;
    int64_t base;
    int64_t taken(int64_t counter) const { return run.ranks_[rank].signals[base + counter]; }
    int64_t take(int64_t counter) { return run.ranks_[rank].signals[base + counter]++; }
  };

  void prepare_rank(int32_t rank);
  void begin_launch(int32_t rank, double now);
  void push_event(double time, Kind kind, int32_t who) { events_.push({time, ++numbers_, kind, who}); }

  // Walking.
  void advance(int32_t agent, double now);
  bool walks(const Agent& agent, ListKind kind) const;
  bool enter_list(int32_t agent, double now);
  void leave_list(int32_t agent, double now);
  void end_launch(int32_t agent, double now);
  void collect_waits(Agent& agent);
  void try_begin(int32_t agent, double now);

  // Tasks.
  void begin(int32_t agent, double now);
  int32_t remote_rows(const Agent& agent, const CopyWork& work) const;
  double copy_end(Agent& agent, double now);
  void take_from_tiles(const Agent& agent, int32_t rows);
  double taken_from(const Agent& agent, double most);
  double next_copy(Agent& agent, double taken, double there);
  double send_end(Agent& agent, double now);
  double reduce_end(Agent& agent, double now);
  double gemm_end(Agent& agent, double now);
  double operand_bytes(const RankProgram& p, const Task& task) const;
  double results_sent(const Agent& agent, const Task& task, double now);
  double take_memory(RankState& state, double now, double bytes);
  void end(int32_t agent, double now);
  void end_gemm(int32_t agent, double now);
  int32_t place_of(const Stored& stored);
  static double stored_columns(const RankProgram& p);
  double stored_bytes(const RankProgram& p, Stage stage) const;
  void account(const Agent& agent, double now);

  // Signals.
  void signal_task(int32_t rank, const Task& task, double now);
  void add(int32_t rank, int64_t signal, uint32_t amount, double now, double latency);
  void store_flags(int32_t rank, const Task& task, double now);
  void mirror_flags(const Task& task, double now);
  void set_flag(int32_t rank, int64_t flag, double now, double latency);
  void mirror_what_nobody_makes();

  const RankProgram& program(int32_t rank) const { return program_.rank(rank); }

  const Program& program_;
  const MachineDescription& machine_;
  const SimulateOptions& options_;
  const std::vector<RankCosts>& costs_;
  const double relayed_share_;
  const TileTimes times_;
  const SignalLayout layout_;
  const int32_t simulated_;  // ranks
  const bool helpers_;       // math warps join the sums
  Links links_;
  std::vector<RankState> ranks_;
  std::vector<Agent> agents_;
  int32_t agents_of_rank_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  int64_t numbers_ = 0;
  std::vector<Stored> stored_;
  std::vector<int32_t> free_stored_;
  Result result_;
};

}  // namespace uniep::sim
