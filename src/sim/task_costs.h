#pragma once

#include <vector>

#include "program/build.h"
#include "program/edges.h"
#include "sim/machine.h"

// What each task of a rank takes and moves, worked out once for any number of simulated calls.
namespace uniep::sim {

struct PeerRows {
  int32_t peer;
  int32_t rows;
};

// A kPull, kPush or kReceive task.
struct CopyWork {
  int32_t rows_in = 0, rows_out = 0;           // taken, and put (a row may be put several times; padding too)
  int32_t peers_begin = 0, peers_end = 0;      // rows by source (push: the destination alone), in TaskCosts::peers
  int32_t signals_begin = 0, signals_end = 0;  // counters, in TaskCosts::signals
};

struct RankSignal {
  int64_t counter;  // in the rank's bank
  uint32_t amount;
};

// The dispatch of one rank.
class RankCosts {
 public:
  RankCosts(const RankProgram& program, const SignalLayout& layout);

  // Of a task of Stage::kPull (by its part) or kReceive.
  const CopyWork& copy(const Task& task) const { return copies_[copy_index(task)]; }
  const PeerRows* peers() const { return peers_.data(); }
  const RankSignal* signals() const { return signals_.data(); }

  // Rows of mine that a kPush task carries: with deduplication the first of a token's on its destination.
  int32_t pushed_rows(const Task& task) const { return pushed_rows_[pushed_begin_[task.expert] + task.m]; }

  // Rows that are fetched for my experts, by the rank that has them: with deduplication one of each token's.
  const std::vector<int64_t>& fetched() const { return fetched_; }

  // Rows of a row block by the rank that they came from.
  struct Sources {
    const PeerRows* begin;
    const PeerRows* end;
  };
  Sources sources(int32_t block) const {
    return {block_peers_.data() + block_begin_[block], block_peers_.data() + block_begin_[block + 1]};
  }

 private:
  std::size_t copy_index(const Task& task) const {
    const int32_t block = program_.block_begin[task.expert] + task.m;
    if (task.stage == Stage::kReceive) return static_cast<std::size_t>(task.n) * blocks_ + block;
    return (static_cast<std::size_t>(task.n / program_.pull_parts) * blocks_ + block) * program_.pull_parts +
           task.n % program_.pull_parts;
  }
  void add_copy(const Task& task, const SignalLayout& layout);
  void add_block(int32_t expert, int32_t block);
  void count_pushed_rows();
  void count_fetched_rows();

  const RankProgram& program_;
  std::size_t blocks_ = 0;
  std::vector<CopyWork> copies_;
  std::vector<PeerRows> peers_;
  std::vector<int64_t> fetched_;
  std::vector<RankSignal> signals_;
  std::vector<int32_t> block_begin_;
  std::vector<PeerRows> block_peers_;
  std::vector<int32_t> pushed_begin_,
      pushed_rows_;  // [E] first block of all experts' blocks; rows of mine that go there
};

// All ranks of a Program, which must outlive this; or rank 0 alone, which stands for all.
struct ProgramCosts {
  explicit ProgramCosts(const Program& of, bool one_rank = false);

  const Program& program;
  std::vector<RankCosts> ranks;
};

// Of the rows that cross to other nodes those that are left where each does so once a node, and is handed on inside it;
// 1 without deduplication.
double relayed_share(const Program& program, int ranks_of_node);

}  // namespace uniep::sim
