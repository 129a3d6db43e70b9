#include "program/wgrad_queues.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "program/checker.h"
#include "support/branch_counts.h"
#include "support/built_program.h"
#include "support/random_schedule_case.h"

// The three queues of dgrads and weight gradients: in the small every interleaving of a few walkers, up to the last
// one, whenever a weight gradient is said to be due; and faults that the checker must see.
namespace uniep::test {
namespace {

// A rank with a few blocks an expert, whose rows have all come.
class SmallBackwardRank {
 public:
  SmallBackwardRank(const std::vector<int32_t>& blocks, int32_t chunks, int32_t wave_experts, int32_t walkers,
                    int32_t cluster) {
    block_begin_ = odd_blocks_ = {0};
    for (const int32_t count : blocks) {
      block_begin_.push_back(block_begin_.back() + count);
      odd_blocks_.push_back(odd_blocks_.back() + count % 2);
    }
    rotation_.assign(blocks.size(), 0);
    p_.direction = Direction::kBackward;
    p_.dynamic = true;
    p_.launches = 1;
    p_.operands = 1;
    p_.stages[0].first_gemm = p_.stages[0].second_gemm = p_.stages[0].wgrad_fc2 = p_.stages[0].wgrad_fc1 = true;
    p_.local_experts = static_cast<int32_t>(blocks.size());
    p_.wave_experts = wave_experts;
    p_.waves = (p_.local_experts + wave_experts - 1) / wave_experts;
    p_.workers = walkers * cluster;
    p_.cluster = cluster;
    p_.raster = 1;
    p_.tile_m = 128;
    p_.first_tiles = 1;
    p_.chunks = chunks;
    for (int32_t chunk = 0; chunk <= chunks; ++chunk) {
      p_.chunk_tile[chunk] = chunk;
      p_.chunk_column[chunk] = 64 * chunk;
    }
    p_.wgrad_fc2 = {64 * chunks, 64, 64, 64};
    p_.wgrad_fc1 = {64, 64 * chunks, 64, 64};
    p_.block_begin = p_.blocks_before = block_begin_.data();
    p_.odd_blocks = odd_blocks_.data();
    p_.rotation = rotation_.data();
  }
  SmallBackwardRank(const SmallBackwardRank&) = delete;
  SmallBackwardRank& operator=(const SmallBackwardRank&) = delete;

  RankProgram& program() { return p_; }

 private:
  std::vector<int32_t> block_begin_, odd_blocks_, rotation_;
  RankProgram p_{};
};

constexpr int kMaxWalkers = 3;
enum class FirstsDue { kNow, kNever, kByTickets };

struct Walker {
  LayerQueue at = LayerQueue::kFirst;
  bool takes = false, ended = false;
  LayerQueue held_queue = LayerQueue::kNone;
  int held = 0;
  auto operator<=>(const Walker&) const = default;
};
struct State {
  int taken[3] = {0, 0, 0};
  Walker walkers[kMaxWalkers];
  auto operator<=>(const State&) const = default;
};

// Goes through all states that the walkers can reach, where looks at the counters may be of any time.
class AllBackwardInterleavings {
 public:
  AllBackwardInterleavings(const RankProgram& p, bool all_take) : p_(p), queues_(wgrad_queues(p, 0)) {
    State begin;
    for (int i = 0; i < queues_.dgrads.walkers; ++i) begin.walkers[i].takes = all_take || takes_beside(queues_, i);
    find_needs();
    visit(begin);
    while (!left_.empty()) {
      const State state = left_.back();
      left_.pop_back();
      expand(state);
    }
  }

  bool found_deadlock() const { return deadlocks_ > 0; }
  bool found_end_without_all() const { return incomplete_ > 0; }
  bool found_return_to_first() const { return returns_ > 0; }
  bool found_kept_ticket() const { return kept_ > 0; }
  bool found_wgrad_beside() const { return beside_ > 0; }
  std::size_t states() const { return seen_.size(); }

 private:
  struct Counters {
    State& state;
    FirstsDue due;
    int64_t firsts;
    int64_t taken(LayerQueue queue) const {
      if (queue == LayerQueue::kFirst && due != FirstsDue::kByTickets) return due == FirstsDue::kNow ? firsts : -1;
      return state.taken[static_cast<int>(queue)];
    }
    int64_t take(LayerQueue queue) { return state.taken[static_cast<int>(queue)]++; }
  };

  std::vector<Task> tiles_of(const LayerTicket& ticket) const {
    std::vector<Task> tiles;
    for (int32_t i = 0; i < p_.cluster; ++i) {
      ListCursor cursor;
      const Task tile = task_of_ticket(p_, queues_, ticket, i, cursor);
      if (tile.has_tile()) tiles.push_back(tile);
    }
    return tiles;
  }

  // The tickets of dgrad FC2 that each of another queue waits for.
  void find_needs() {
    const auto add = [&](std::vector<std::vector<int>>& needs, const LayerTicket& ticket) {
      needs.emplace_back();
      for (const Task& reader : tiles_of(ticket)) {
        for (int first = 0; first < queues_.dgrads.first_tickets; ++first) {
          for (const Task& writer : tiles_of({LayerQueue::kFirst, 0, first})) {
            const bool same_block = ticket.queue == LayerQueue::kWgrads || writer.m == reader.m;
            if (writer.expert == reader.expert && same_block) needs.back().push_back(first);
          }
        }
      }
    };
    for (int32_t chunk = 0; chunk < p_.chunks; ++chunk) {
      const int64_t tickets = tickets_of(p_, of_all_experts(p_, Stage::kSecondGemm, chunk));
      for (int64_t i = 0; i < tickets; ++i) add(second_needs_, {LayerQueue::kSecond, chunk, i});
    }
    for (int64_t i = 0; i < queues_.wgrad_tickets; ++i) add(wgrad_needs_, {LayerQueue::kWgrads, 0, i});
  }

  void visit(const State& state) {
    if (seen_.insert(state).second) left_.push_back(state);
  }

  bool has_run(const State& state, int first) const {
    if (first >= state.taken[0]) return false;
    return std::none_of(state.walkers, state.walkers + kMaxWalkers, [first](const Walker& walker) {
      return walker.held_queue == LayerQueue::kFirst && walker.held == first;
    });
  }

  bool can_run(const State& state, const Walker& walker) const {
    if (walker.held_queue == LayerQueue::kFirst) return true;
    const auto& needs = walker.held_queue == LayerQueue::kSecond ? second_needs_ : wgrad_needs_;
    return std::all_of(needs[walker.held].begin(), needs[walker.held].end(),
                       [&](int first) { return has_run(state, first); });
  }

  void expand(const State& state) {
    bool moves = false, ended = true;
    for (int i = 0; i < queues_.dgrads.walkers; ++i) {
      const Walker& walker = state.walkers[i];
      ended &= walker.ended;
      if (walker.ended) continue;
      if (walker.held_queue != LayerQueue::kNone) {
        if (!can_run(state, walker)) {
          kept_ += walker.held_queue == LayerQueue::kWgrads;
          continue;
        }
        moves = true;
        State next = state;
        next.walkers[i].held_queue = LayerQueue::kNone;
        next.walkers[i].held = 0;
        visit(next);
        continue;
      }
      moves = true;
      for (const FirstsDue due : {FirstsDue::kNow, FirstsDue::kNever, FirstsDue::kByTickets}) take(state, i, due);
    }
    deadlocks_ += !moves && !ended;
    const bool all = state.taken[0] >= queues_.dgrads.first_tickets &&
                     state.taken[1] >= queues_.dgrads.second_tickets && state.taken[2] >= queues_.wgrad_tickets;
    incomplete_ += ended && !all;
  }

  void take(const State& state, int i, FirstsDue due) {
    State next = state;
    Walker& walker = next.walkers[i];
    WgradQueueWalk walk{walker.at, walker.takes, 0, 0, {}};
    const LayerTicket ticket =
        take_layer_ticket(p_, 0, queues_, walk, Counters{next, due, queues_.dgrads.first_tickets});
    returns_ += ticket.queue == LayerQueue::kFirst && walker.at != LayerQueue::kFirst;
    walker.at = walk.at;
    walker.takes = walk.takes_beside;
    walker.ended = ticket.queue == LayerQueue::kNone;
    walker.held_queue = ticket.queue;
    walker.held = walker.ended ? 0 : static_cast<int>(walk.chunk_begin + ticket.index);
    if (ticket.queue != LayerQueue::kSecond && !walker.ended) walker.held = static_cast<int>(ticket.index);
    beside_ += ticket.queue == LayerQueue::kWgrads && walker.at != LayerQueue::kNone;
    for (int& taken : next.taken) taken = std::min(taken, 63);  // asked for behind the end, again and again
    visit(next);
  }

  const RankProgram& p_;
  const WgradQueues queues_;
  std::vector<std::vector<int>> second_needs_, wgrad_needs_;
  std::set<State> seen_;
  std::vector<State> left_;
  int64_t deadlocks_ = 0, incomplete_ = 0, returns_ = 0, kept_ = 0, beside_ = 0;
};

TEST(WgradQueuesInTheSmall, NobodyWaitsForEverInAnyInterleaving) {
  BranchCounts branches;
  std::size_t states = 0;
  for (const std::vector<int32_t>& blocks : {std::vector<int32_t>{1, 1}, {2, 1}, {1, 0, 2}}) {
    for (const int32_t chunks : {1, 2}) {
      for (const int32_t wave_experts : {1, 3}) {
        for (const int32_t cluster : {1, 2}) {
          for (const int32_t walkers : {1, 2, 3}) {
            for (const int32_t reserve : {0, 5, 16}) {
              SmallBackwardRank rank(blocks, chunks, wave_experts, walkers, cluster);
              rank.program().wgrad_reserve = static_cast<int8_t>(reserve);
              const AllBackwardInterleavings some(rank.program(), false);
              states += some.states();
              ASSERT_FALSE(some.found_deadlock());
              ASSERT_FALSE(some.found_end_without_all());
              ASSERT_FALSE(some.found_return_to_first());
              const bool takes = wgrad_queues(rank.program(), 0).takers > 0;
              EXPECT_EQ(takes, walkers > 1 && reserve < 16);
              EXPECT_EQ(some.found_wgrad_beside(), takes);
              branches.count("one walker", walkers == 1);
              branches.count("weight gradients beside, clusters of one", takes && cluster == 1);
              branches.count("weight gradients beside, clusters of two", takes && cluster == 2);
              branches.count("a weight gradient that is kept", some.found_kept_ticket());
              if (reserve != 0) continue;
              // If all took them, tiles of dgrad FC2 might be left that nobody comes back to.
              const AllBackwardInterleavings all(rank.program(), true);
              EXPECT_TRUE(all.found_deadlock() || all.found_end_without_all());
            }
          }
        }
      }
    }
  }
  std::printf("%zu states\n", states);
  branches.expect_all_taken();
}

BuiltProgram build_mixed(uint64_t seed) {
  return build(seed, Direction::kBackward, {.ranks = {1, 2}, .most_local_experts = 6},
               PartialSchedule::parse("backward.wgrad=mixed,comm.reserve_sms=0"), 4);
}

// Calls fault(program, tampering), which says whether the program has the place for the fault.
template <typename Fault>
void expect_noticed(const char* what, const Fault& fault) {
  int noticed = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const BuiltProgram built = build_mixed(seed);
    ASSERT_TRUE(check_program(*built.program).ok) << built.text;
    CheckTampering tampering;
    bool touched = false;
    if (!fault(built.program->rank(0), tampering, touched)) continue;
    const CheckReport report = check_program(*built.program, tampering);
    ASSERT_EQ(report.ok, !touched) << what << "\n" << built.text;
    noticed += touched;
  }
  EXPECT_GT(noticed, 10) << what;
}

// A kernel comes to dgrad FC2 once, whatever the waves are.
TEST(WgradQueues, WithoutWeightGradientsDgradFc1FollowsAllOfDgradFc2) {
  int waves = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const BuiltProgram built = build_mixed(seed);
    ProgramRequest request = built.program->request();
    waves += built.program->rank(0).waves > 1;
    request.weight_gradients = false;
    const Program later(request, built.placement);
    const RankProgram& p = later.rank(0);
    ASSERT_FALSE(has_wgrad_queues(p, 0));
    ASSERT_TRUE(check_program(later).ok) << built.text;
    bool seconds = false;
    for (int64_t i = 0; i < list_length(p, 0, ListKind::kCompute); ++i) {
      const Task task = list_task(p, 0, ListKind::kCompute, i);
      seconds |= task.stage == Stage::kSecondGemm;
      ASSERT_FALSE(seconds && task.stage == Stage::kFirstGemm) << built.text;
    }
  }
  EXPECT_GT(waves, 3);
}

bool is_wgrad(const Task& task) {
  return task.stage == Stage::kWgradFc2 || task.stage == Stage::kWgradFc1;
}

TEST(WgradQueues, TheCheckerSeesPlantedFaults) {
  expect_noticed("a weight gradient that begins early",
                 [](const RankProgram&, CheckTampering& tampering, bool& touched) {
                   tampering.wait = [&touched](int rank, const Task& task, CounterWait& wait) {
                     const bool drops = rank == 0 && is_wgrad(task) && wait.space == CounterSpace::kExpertFirstTiles;
                     touched |= drops;
                     return !drops;
                   };
                   return true;
                 });
  expect_noticed("a dropped expert counter", [](const RankProgram&, CheckTampering& tampering, bool& touched) {
    tampering.signal = [&touched](int rank, const Task& task, CounterSignal& signal) {
      const bool drops = rank == 0 && !touched && signal.space == CounterSpace::kExpertFirstTiles && task.n == 0;
      touched |= drops;
      return !drops;
    };
    return true;
  });
  expect_noticed("a lost ticket", [](const RankProgram&, CheckTampering& tampering, bool& touched) {
    tampering.list = [&touched](int rank, std::vector<Task>& list) {
      const auto lost = std::find_if(list.begin(), list.end(), is_wgrad);
      if (rank != 0 || touched || lost == list.end()) return;
      lost->m = kNoTile;
      touched = true;
    };
    return true;
  });
  expect_noticed("all leave dgrad FC2", [](const RankProgram& p, CheckTampering& tampering, bool& touched) {
    tampering.takes_beside = [&touched](int) { return touched = true; };
    const WgradQueues queues = wgrad_queues(p, 0);
    return queues.dgrads.first_tickets > 0 && queues.beside > 0;
  });
}

TEST(WgradQueues, TheirSchedulesBringAlongWhatTheyNeed) {
  const auto legal = [](EngineKind engine, Direction direction, const char* given) {
    ScheduleCase c;
    c.direction = direction;
    c.machine = {engine, 2, 8};
    const Schedule schedule = c.filled(PartialSchedule::parse(given));
    return c.violations(schedule).empty() ? to_text(schedule) : c.violations(schedule).front();
  };
  const auto expect = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text << "\n" << part;
  };
  for (const EngineKind engine : {EngineKind::kCpu, EngineKind::kCuda}) {
    const std::string filled = legal(engine, Direction::kBackward, "backward.wgrad=mixed");
    expect(filled, "fusion=layer");
    expect(filled, "order.interleave=phased");
    expect(filled, "queue=dynamic");
    expect(filled, "backward.wgrad=mixed,backward.wgrad_reserve=5");
    expect(legal(engine, Direction::kBackward, "backward.wgrad_reserve=3"), "backward.wgrad=mixed");
    expect(legal(engine, Direction::kBackward, "backward.wgrad=fill,backward.wgrad_reserve=3"),
           "backward.wgrad_reserve=3: needs backward.wgrad=mixed");
    const char* const why = "backward.wgrad=mixed: needs fusion=layer, order.interleave=phased and queue=dynamic";
    for (const char* const other : {"fusion=none", "fusion=pairs", "order.interleave=mixed", "queue=static"}) {
      const std::string given = std::string(other) + ",backward.wgrad=mixed";
      const bool also_not_built = engine == EngineKind::kCuda && given.find("interleave") != std::string::npos;
      if (!also_not_built) expect(legal(engine, Direction::kBackward, given.c_str()), why);
    }
    expect(legal(engine, Direction::kForward, "fusion=none,backward.wgrad=mixed"), "fusion=none");
  }
  expect(
      legal(EngineKind::kCuda, Direction::kBackward, "backward.wgrad=mixed,tile.dgrad_fc1.n=256,tile.wgrad_fc1.n=128"),
      "backward.wgrad=mixed runs dgrad_fc1 and wgrad_fc1 in one kernel");
}

// Of the time that dgrads and the weight gradients beside them take, the latter take their share.
TEST(WgradQueues, AsManyTakeThemAsTheyTakeOfTheTime) {
  SmallBackwardRank rank({40, 40}, 1, 2, 66, 2);
  RankProgram& p = rank.program();
  p.wgrad_fc2 = {2048, 768, 128, 256};
  p.wgrad_fc1 = {1536, 2048, 128, 256};
  int32_t before = p.workers;
  for (int reserve = 0; reserve <= 16; ++reserve) {
    p.wgrad_reserve = static_cast<int8_t>(reserve);
    const WgradQueues queues = wgrad_queues(p, 0);
    int32_t takers = 0;
    for (int32_t walker = 0; walker < queues.dgrads.walkers; ++walker) takers += takes_beside(queues, walker);
    EXPECT_EQ(takers, queues.takers);
    EXPECT_LE(takers, before);
    EXPECT_EQ(takers == 0, reserve == 16);
    before = takers;
    if (reserve == 0) {
      EXPECT_NEAR(takers, 47, 2);
    }
  }
}

}  // namespace
}  // namespace uniep::test
