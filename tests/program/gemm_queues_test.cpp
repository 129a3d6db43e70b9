#include "program/gemm_queues.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "program/program_tables.h"
#include "support/branch_counts.h"

// The two queues of mixed GEMMs in the small: every interleaving of a few walkers, up to the last one. This is what the
// checker's model (checker.h) says of them.
namespace uniep::test {
namespace {

// A rank with a few blocks an expert, whose rows have all come.
class SmallRank {
 public:
  SmallRank(const std::vector<int32_t>& blocks, int32_t tiles, int32_t chunks, int32_t wave_experts, int32_t walkers,
            int32_t cluster, int32_t wave_blocks = 0) {
    p_.wave_blocks = wave_blocks;
    block_begin_ = odd_blocks_ = spans_before_ = {0};
    for (const int32_t count : blocks) {
      spans_before_.push_back(spans_before_.back() + spans_of_blocks(p_, count));
      block_begin_.push_back(block_begin_.back() + count);
      odd_blocks_.push_back(odd_blocks_.back() + count % 2);
    }
    rotation_.assign(blocks.size(), 0);
    p_.mixed = p_.dynamic = true;
    p_.launches = 1;
    p_.stages[0].first_gemm = p_.stages[0].second_gemm = true;
    p_.local_experts = static_cast<int32_t>(blocks.size());
    p_.wave_experts = wave_experts;
    p_.waves = (p_.local_experts + wave_experts - 1) / wave_experts;
    p_.workers = walkers * cluster;
    p_.cluster = cluster;
    p_.raster = 1;
    p_.first_tiles = tiles;
    p_.chunks = chunks;
    for (int32_t chunk = 0; chunk <= chunks; ++chunk) {
      p_.chunk_tile[chunk] = chunk;
      p_.chunk_column[chunk] = 64 * chunk;
    }
    p_.wgrad_fc2 = {64 * chunks, 64, 64, 64};
    p_.block_begin = p_.blocks_before = block_begin_.data();
    p_.odd_blocks = odd_blocks_.data();
    p_.rotation = rotation_.data();
    p_.spans_before = spans_before_.data();
  }
  SmallRank(const SmallRank&) = delete;
  SmallRank& operator=(const SmallRank&) = delete;

  const RankProgram& program() const { return p_; }

 private:
  std::vector<int32_t> block_begin_, odd_blocks_, rotation_, spans_before_;
  RankProgram p_{};
};

enum class Preference { kOfTheQueues, kAll };
enum class Due { kOfTheQueues, kAlways };

// Goes through all states that the walkers can reach.
class AllInterleavings {
 public:
  AllInterleavings(const RankProgram& p, Preference preference, Due due)
      : p_(p), queues_(gemm_queues(p, 0)), due_(due), firsts_(static_cast<int>(queues_.first_tickets)) {
    for (int walker = 0; walker < queues_.walkers; ++walker) {
      prefers_.push_back(preference == Preference::kAll || prefers_second(p, walker, queues_.walkers));
    }
    find_needs();
    visit(State{});
    while (!left_.empty()) {
      const State state = left_.back();
      left_.pop_back();
      expand(state);
    }
  }

  bool found_deadlock() const { return deadlocks_ > 0; }
  bool found_early_ticket() const { return early_ > 0; }  // taken while tiles that it waits for were not
  std::size_t states() const { return seen_.size(); }

 private:
  static constexpr int kMaxWalkers = 3;
  enum class Step : uint8_t { kLook, kTakeFirst, kTakeSecond, kHold, kEnd };
  struct Walker {
    Step step = Step::kLook;
    bool firsts_over = false;
    int held = 0;  // a ticket of the first GEMM, or firsts_ + one of the second
  };
  struct State {
    int taken[2] = {0, 0};  // tickets that there are
    Walker walkers[kMaxWalkers];
  };
  struct Counters {
    const State& state;
    bool always_due;
    int64_t firsts;
    int64_t taken(GemmQueue queue) const {
      return queue == GemmQueue::kFirst && always_due ? firsts : state.taken[static_cast<int>(queue)];
    }
  };

  // The tickets of the first GEMM that each of the second waits for.
  void find_needs() {
    const auto tiles_of = [&](Stage stage, int32_t chunk, int64_t index) {
      std::vector<Task> tiles;
      for (int32_t i = 0; i < p_.cluster; ++i) {
        const Task tile = segment_task(p_, of_all_experts(p_, stage, chunk), index * p_.cluster + i);
        if (tile.has_tile()) tiles.push_back(tile);
      }
      return tiles;
    };
    for (int32_t chunk = 0; chunk < p_.chunks; ++chunk) {
      const int64_t tickets = tickets_of(p_, of_all_experts(p_, Stage::kSecondGemm, chunk));
      for (int64_t second = 0; second < tickets; ++second) {
        needs_.emplace_back();
        for (const Task& reader : tiles_of(Stage::kSecondGemm, chunk, second)) {
          for (int first = 0; first < firsts_; ++first) {
            for (const Task& writer : tiles_of(Stage::kFirstGemm, 0, first)) {
              if (writer.expert == reader.expert && writer.m == reader.m) needs_.back().push_back(first);
            }
          }
        }
      }
    }
  }

  uint64_t key_of(const State& state) const {
    uint64_t key = static_cast<uint64_t>(state.taken[0]) << 6 | static_cast<uint64_t>(state.taken[1]);
    for (const Walker& walker : state.walkers) {
      key = key << 10 | static_cast<uint64_t>(walker.step) << 7 | static_cast<uint64_t>(walker.firsts_over) << 6 |
            static_cast<uint64_t>(walker.held);
    }
    return key;
  }

  void visit(const State& state) {
    if (seen_.insert(key_of(state)).second) left_.push_back(state);
  }

  bool has_run(const State& state, int first) const {
    if (first >= state.taken[0]) return false;
    return std::none_of(state.walkers, state.walkers + queues_.walkers,
                        [first](const Walker& walker) { return walker.step == Step::kHold && walker.held == first; });
  }

  bool can_run(const State& state, int ticket) const {
    if (ticket < firsts_) return true;
    const std::vector<int>& needs = needs_[ticket - firsts_];
    return std::all_of(needs.begin(), needs.end(), [&](int first) { return has_run(state, first); });
  }

  // A look at the counters and the taking of a ticket are two steps.
  void expand(const State& state) {
    bool moves = false, ended = true;
    for (int i = 0; i < queues_.walkers; ++i) {
      ended &= state.walkers[i].step == Step::kEnd;
      State next = state;
      if (!move(state, next, next.walkers[i], prefers_[i])) continue;
      moves = true;
      visit(next);
    }
    deadlocks_ += !moves && !ended;
  }

  bool move(const State& state, State& next, Walker& walker, bool prefers) {
    switch (walker.step) {
      case Step::kLook: {
        GemmQueueWalk walk = begin_walk(p_, 0, 0, queues_);
        const Counters counters{state, due_ == Due::kAlways, queues_.first_tickets};
        const bool second = walker.firsts_over || (prefers && is_second_due(p_, queues_, walk, counters));
        walker.step = second ? Step::kTakeSecond : Step::kTakeFirst;
        return true;
      }
      case Step::kTakeFirst:
        if (state.taken[0] == firsts_) {
          walker.firsts_over = true;
          walker.step = Step::kTakeSecond;
          return true;
        }
        walker.held = next.taken[0]++;
        walker.step = Step::kHold;
        return true;
      case Step::kTakeSecond:
        walker.step = state.taken[1] == queues_.second_tickets ? Step::kEnd : Step::kHold;
        if (walker.step == Step::kHold) {
          walker.held = firsts_ + next.taken[1]++;
          const std::vector<int>& needs = needs_[walker.held - firsts_];
          early_ += std::any_of(needs.begin(), needs.end(), [&](int first) { return first >= state.taken[0]; });
        }
        return true;
      case Step::kHold:
        if (!can_run(state, walker.held)) return false;
        walker.step = Step::kLook;
        walker.held = 0;
        return true;
      case Step::kEnd:
        return false;
    }
    return false;
  }

  const RankProgram& p_;
  const GemmQueues queues_;
  const Due due_;
  const int firsts_;
  std::vector<bool> prefers_;
  std::vector<std::vector<int>> needs_;
  std::unordered_set<uint64_t> seen_;
  std::vector<State> left_;
  int64_t deadlocks_ = 0, early_ = 0;
};

TEST(GemmQueuesInTheSmall, NobodyWaitsForEverInAnyInterleaving) {
  BranchCounts branches;
  std::size_t states = 0;
  for (const std::vector<int32_t>& blocks : {std::vector<int32_t>{1, 1, 1}, {2, 1}, {1, 0, 2}, {3, 1, 2, 1}}) {
    for (const int32_t tiles : {1, 2}) {
      for (const int32_t chunks : {1, 2}) {
        for (const int32_t wave_experts : {0, 1, 2}) {
          for (const int32_t cluster : {1, 2}) {
            for (const int32_t walkers : {1, 2, 3}) {
              // Waves of two experts, of one, or of a cluster of row blocks of one.
              const SmallRank rank(blocks, tiles, chunks, std::max(wave_experts, 1), walkers, cluster,
                                   wave_experts == 0 ? cluster : 0);
              const RankProgram& p = rank.program();
              const AllInterleavings all(p, Preference::kOfTheQueues, Due::kOfTheQueues);
              const AllInterleavings any_time(p, Preference::kOfTheQueues, Due::kAlways);
              const AllInterleavings all_prefer(p, Preference::kAll, Due::kOfTheQueues);
              const AllInterleavings all_prefer_any_time(p, Preference::kAll, Due::kAlways);
              states += all.states() + any_time.states() + all_prefer.states() + all_prefer_any_time.states();
              EXPECT_FALSE(all.found_deadlock());
              // One that does not prefer the second GEMM is enough, whenever its tickets are due.
              EXPECT_EQ(any_time.found_deadlock(), walkers == 1);
              // What is due would be enough too, but the checker does not count on it.
              EXPECT_FALSE(all_prefer.found_deadlock());
              EXPECT_TRUE(all_prefer_any_time.found_deadlock());
              branches.count("one walker", walkers == 1);
              branches.count("waves inside an expert", gemm_waves(p) > p.local_experts);
              branches.count("several walkers, clusters of one", walkers > 1 && cluster == 1);
              branches.count("several walkers, clusters of two", walkers > 1 && cluster == 2);
              branches.count("a ticket taken early, one that does not prefer", any_time.found_early_ticket());
              branches.count("a ticket taken early, though due when looked at", all_prefer.found_early_ticket());
            }
          }
        }
      }
    }
  }
  std::printf("%zu states\n", states);
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep::test
