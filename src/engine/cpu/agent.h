#pragma once

#include <vector>

#include "engine/cpu/random.h"
#include "engine/cpu/tile_work.h"
#include "program/walk.h"

namespace uniep::cpu {

// One in-order queue of tiles: the copy agent or the compute agent of one worker of one rank. A thread runs many
// agents; each call of step() runs at most one tile, and none while the tile's waits do not hold. In clusters the
// compute agents of two workers are a pair, and go through the compute list together (worker_pair.h).
class Agent {
 public:
  Agent(Call& call, int rank, int worker, AgentRole role, uint64_t seed);

  enum class Progress { kRan, kBlocked, kFinished };
  Progress step(std::vector<TileEvent>& events);

  bool finished() const { return walk_.finished(); }
  bool waits_for_tile() const { return pending_ == Pending::kTile; }
  // Says what the agent waits for: rank, stage, tile, counter, expected and seen.
  std::string describe_wait() const;

 private:
  struct PendingWait {
    std::atomic<uint32_t>* word;
    uint32_t expected;
    bool is_flag;
    const char* name;
    int64_t index;
  };
  // What the waits are for.
  enum class Pending {
    kNothing,
    kTile,        // the tile may begin; in a pair's first worker its partner's too
    kHandedOver,  // the pair's first worker has handed over the next tile
    kNextLaunch,  // the rank's other agents have left the launch
  };

  // Finds the next task of the queue, or whom to ask for it, and what to wait for; false when the launch's lists are
  // walked.
  bool fetch();
  void wait_for_tiles();
  void collect_waits(const Task& task);
  bool waits_hold();
  bool delayed();
  bool leaves_early();
  void begin_tile(std::vector<TileEvent>& events);
  void take_handed_over(std::vector<TileEvent>& events);
  void run(std::vector<TileEvent>& events);
  void signal();
  void store_flags();
  void finish_launch();
  void pause_at_random();

  Call& call_;
  const RankProgram& program_;
  const int worker_;
  const AgentRole role_;
  Random random_;
  AgentScratch scratch_;

  AgentWalk walk_;
  WorkerPair* pair_ = nullptr;

  Pending pending_ = Pending::kNothing;
  Task task_{};
  std::vector<PendingWait> waits_;
  std::size_t satisfied_ = 0;  // waits_ before this one hold
  int64_t wait_begin_ns_ = 0;
  int64_t delayed_until_ns_ = 0;
  bool has_left_ = false;  // the launch, before its lists are walked
};

}  // namespace uniep::cpu
