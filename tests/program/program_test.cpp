#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "program/checker.h"
#include "program/gemm_queues.h"
#include "support/branch_counts.h"
#include "support/built_program.h"

// The checker over random Programs, and faults that it must notice.
namespace uniep::test {
namespace {

const char* const kParted = "fusion=layer,order.experts_per_wave=1,order.blocks_per_wave=1,tile.m=64";
const char* const kRelays = "comm.where=sms,dispatch.transport=push,comm.relay_sms=2,comm.dispatch_sms=2";
const char* const kGemmQueues = "fusion=layer,order.interleave=mixed,queue=dynamic";

TEST(Checker, PassesRandomLegalPrograms) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    const Direction direction = seed % 2 == 0 ? Direction::kForward : Direction::kBackward;
    // What a random schedule seldom has: queues of mixed GEMMs, or of weight gradients beside dgrads, waves inside
    // experts, and relays.
    const char* const kSeldom[] = {"auto", kGemmQueues, kParted, "backward.wgrad=mixed", kRelays};
    const char* const fixed = kSeldom[seed / 2 % std::size(kSeldom)];
    RandomLayerLimits limits;
    if (fixed == kParted) limits.most_tokens = 500;
    const BuiltProgram built = build(seed, direction, limits, PartialSchedule::parse(fixed), fixed == kRelays ? 6 : 0);
    const CheckReport report = check_program(*built.program);
    ASSERT_TRUE(report.ok) << built.text << "\n" << report.problems.front();
    count_layer(branches, built.layer);
    count_schedule(branches, *built.program);
  }
  branches.expect_all_taken();
}

TEST(Checker, NoticesASwappedThreshold) {
  expect_noticed(Direction::kForward, "", [](bool& touched) {
    CheckTampering tampering;
    tampering.wait = [&touched](int, const Task& task, CounterWait& wait) {
      if (task.stage == Stage::kSecondGemm && !touched) {
        ++wait.threshold;
        touched = true;
      }
      return true;
    };
    return tampering;
  });
}

TEST(Checker, NoticesASignalThatIsMissing) {
  expect_noticed(Direction::kBackward, "", [](bool& touched) {
    CheckTampering tampering;
    tampering.signal = [&touched](int, const Task& task, CounterSignal&) {
      const bool drop = task.stage == Stage::kFirstGemm && !touched;
      touched |= drop;
      return !drop;
    };
    return tampering;
  });
}

TEST(Checker, NoticesAMissingWait) {
  for (const Stage stage : {Stage::kFirstGemm, Stage::kSecondGemm, Stage::kWgradFc2, Stage::kWgradFc1}) {
    expect_noticed(Direction::kBackward, "", [stage](bool& touched) {
      CheckTampering tampering;
      tampering.wait = [&touched, stage](int, const Task& task, CounterWait&) {
        if (task.stage == stage) touched = true;
        return task.stage != stage;
      };
      return tampering;
    });
  }
}

TEST(Checker, NoticesAMissingWaitForAPeersFlag) {
  expect_noticed(Direction::kForward, "", [](bool& touched) {
    CheckTampering tampering;
    tampering.flag_wait = [&touched](int, const Task&, const FlagWait& wait) {
      const bool drop = wait.space == FlagSpace::kCombined || wait.space == FlagSpace::kPushed;
      touched |= drop;
      return !drop;
    };
    return tampering;
  });
}

// With groups a rank also flags token blocks that none of its rows belong to, and nobody waits for those.
TEST(Checker, NoticesAFlagThatNobodyStores) {
  expect_noticed(
      Direction::kForward, "",
      [](bool& touched) {
        CheckTampering tampering;
        tampering.flag = [&touched](int, const Task&, FlagSignal& flag) {
          const bool drop = flag.space == FlagSpace::kCombined && !touched;
          touched |= drop;
          return !drop;
        };
        return tampering;
      },
      /*flat_only=*/true);
}

TEST(Checker, NoticesATileThatIsListedTwiceOrNever) {
  for (const bool twice : {true, false}) {
    expect_noticed(Direction::kForward, "", [twice](bool& touched) {
      CheckTampering tampering;
      tampering.list = [&touched, twice](int, std::vector<Task>& list) {
        if (touched || list.size() < 2 || !list.front().has_tile() || !list.back().has_tile()) return;
        if (twice) {
          list.push_back(list.front());
        } else {
          list.pop_back();
        }
        touched = true;
      };
      return tampering;
    });
  }
}

// One worker walks its compute list in order: a list that is turned round makes FC2 wait for an FC1 behind it.
TEST(Checker, NoticesADeadlock) {
  expect_noticed(
      Direction::kForward, "fusion=layer",
      [](bool& touched) {
        CheckTampering tampering;
        tampering.list = [&touched](int, std::vector<Task>& list) {
          if (list.size() < 2 || list.front().stage != Stage::kFirstGemm || list.back().stage != Stage::kSecondGemm)
            return;
          std::reverse(list.begin(), list.end());
          touched = true;
        };
        return tampering;
      },
      /*flat_only=*/false, /*workers=*/1);
}

// A layer with mixed GEMMs in two queues, on workers of which none is reserved.
BuiltProgram build_with_gemm_queues(uint64_t seed, int workers) {
  return build(seed, seed % 4 < 2 ? Direction::kForward : Direction::kBackward,
               {.ranks = {1, 2}, .most_local_experts = 6},
               PartialSchedule::parse(std::string(kGemmQueues) + ",comm.reserve_sms=0"), workers);
}

// Several walkers that all prefer the second GEMM: each may wait in it for a tile that nobody has taken.
TEST(Checker, NoticesThatNobodyIsSureToTakeTheFirstGemm) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const BuiltProgram built = build_with_gemm_queues(seed, 4);
    const RankProgram& p = built.program->rank(0);
    if (gemm_queues(p, 0).walkers < 2 || gemm_queues(p, 0).first_tickets == 0) continue;
    const auto report_if_preferring = [&](bool (*prefers)(int walker)) {
      CheckTampering tampering;
      tampering.prefers_second = prefers;
      return check_program(*built.program, tampering);
    };
    const CheckReport all = report_if_preferring([](int) { return true; });
    ASSERT_FALSE(all.ok) << built.text;
    EXPECT_NE(all.problems.back().find("deadlock"), std::string::npos) << all.problems.back();
    EXPECT_TRUE(report_if_preferring([](int walker) { return walker != 0; }).ok) << built.text;
    EXPECT_TRUE(report_if_preferring([](int) { return false; }).ok) << built.text;
    branches.count("clusters of one", p.cluster == 1);
    branches.count("clusters of two", p.cluster == 2);
    branches.count("pull in several parts", !p.push && p.pull_parts > 1);
  }
  branches.expect_all_taken();
}

// Lent workers may be away, so none of them is the one that is sure to take the first GEMM.
TEST(Checker, NoticesThatOnlyLentWorkersAreSureToTakeTheFirstGemm) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    for (const bool lends : {false, true}) {
      const std::string given =
          std::string(kGemmQueues) + ",comm.where=warps,dispatch.transport=pull,comm.reserve_sms=";
      const BuiltProgram built = build(seed, seed % 4 < 2 ? Direction::kForward : Direction::kBackward,
                                       {.ranks = {1, 2}, .most_local_experts = 6},
                                       PartialSchedule::parse(given + (lends ? "2,comm.lend_sms=on" : "0")), 6);
      const RankProgram& p = built.program->rank(0);
      if (gemm_queues(p, 0).first_tickets == 0) continue;
      EXPECT_TRUE(check_program(*built.program).ok) << built.text;
      CheckTampering tampering;
      const int kept = 4 / p.cluster;
      tampering.prefers_second = [kept](int walker) { return walker < kept; };
      EXPECT_EQ(check_program(*built.program, tampering).ok, !lends) << built.text;
      branches.count("lent, clusters of one", lends && p.cluster == 1);
      branches.count("lent, clusters of two", lends && p.cluster == 2);
      branches.count("not lent", !lends);
    }
  }
  branches.expect_all_taken();
}

// A tile of the first GEMM that waits for one of the second before it in the compute list, but in another queue.
TEST(Checker, NoticesAFirstGemmThatWaitsForTheSecond) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const BuiltProgram built = build_with_gemm_queues(seed, 4);
    const RankProgram& p = built.program->rank(0);
    if (gemm_queues(p, 0).walkers < 2 || p.wave_experts == p.local_experts || p.block_begin[p.wave_experts] == 0 ||
        p.block_begin[p.local_experts] == p.block_begin[p.wave_experts]) {
      continue;
    }
    CheckTampering tampering;
    tampering.wait = [&p](int rank, const Task& task, CounterWait& wait) {
      if (rank == 0 && task.stage == Stage::kFirstGemm && task.expert >= p.wave_experts) {
        wait = {CounterSpace::kSecondTiles, second_counter(0, 0), static_cast<uint32_t>(tiles_in_chunk(p, 0))};
      }
      return true;
    };
    const CheckReport report = check_program(*built.program, tampering);
    ASSERT_FALSE(report.ok) << built.text;
    EXPECT_NE(report.problems.back().find("deadlock"), std::string::npos) << report.problems.back();
    branches.count("clusters of one", p.cluster == 1);
    branches.count("clusters of two", p.cluster == 2);
  }
  branches.expect_all_taken();
}

// A walker alone waits for ever for a tile that it takes itself, later.
TEST(Checker, NoticesALoneWalkerThatTakesTheSecondGemmTooEarly) {
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const BuiltProgram built = build_with_gemm_queues(seed, 1 + static_cast<int>(seed / 4 % 2));
    const RankProgram& p = built.program->rank(0);
    if (gemm_queues(p, 0).walkers != 1 || gemm_queues(p, 0).first_tickets == 0) continue;
    CheckTampering tampering;
    tampering.gemm_queues = [](GemmQueues& queues) { queues.walkers = -1; };  // due with the last tile still missing
    const CheckReport report = check_program(*built.program, tampering);
    ASSERT_FALSE(report.ok) << built.text;
    EXPECT_NE(report.problems.back().find("deadlock"), std::string::npos) << report.problems.back();
    branches.count("one worker", p.cluster == 1);
    branches.count("one pair", p.cluster == 2);
  }
  branches.expect_all_taken();
}

TEST(Checker, NoticesATicketThatTheQueuesDoNotGive) {
  int tried = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const BuiltProgram built =
        build(seed, Direction::kForward, {.ranks = {2}, .most_local_experts = 6}, PartialSchedule::parse(kGemmQueues));
    bool touched = false;
    CheckTampering tampering;
    tampering.gemm_queues = [&touched](GemmQueues& queues) {
      if (queues.second_tickets == 0) return;
      --queues.second_tickets;
      touched = true;
    };
    const CheckReport report = check_program(*built.program, tampering);
    tried += touched;
    EXPECT_EQ(report.ok, !touched) << built.text;
  }
  EXPECT_GE(tried, 20);
}

// Kinds of workers that do not come in clusters, which the rules refuse.
TEST(Checker, NoticesPairsThatPart) {
  const BuiltProgram built =
      build(3, Direction::kForward, {.ranks = {2}},
            PartialSchedule::parse("fusion=layer,queue=static,comm.where=sms,comm.dispatch_sms=1,comm.combine_sms=0,"
                                   "comm.reduce_sms=1,comm.reserve_sms=0,order.interleave=phased,"
                                   "dispatch.transport=pull"),
            4);
  ProgramRequest request = built.program->request();
  request.cluster = 2;
  const Program program(request, built.placement);
  const CheckReport report = check_program(program);
  ASSERT_FALSE(report.ok);
  EXPECT_NE(report.problems.front().find("without its neighbour"), std::string::npos) << report.problems.front();
}

TEST(Order, MixedInterleavesInProportion) {
  const PartialSchedule fixed = PartialSchedule::parse("fusion=layer,order.interleave=mixed,queue=static");
  int merged_steps = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const BuiltProgram built = build(seed, Direction::kForward, {.ranks = {2}, .most_local_experts = 8}, fixed);
    const RankProgram& p = built.program->rank(0);
    int64_t position = 0;
    for (int32_t step = 0; step < gemm_step_count(p, p.stages[0]); ++step) {
      const MergedSegments merged = gemm_step(p, p.stages[0], step);
      const int64_t first = segment_length(p, merged.first), second = segment_length(p, merged.second);
      merged_steps += first > 0 && second > 0;
      int64_t firsts = 0;
      for (int64_t i = 0; i < first + second; ++i) {
        firsts += list_task(p, 0, ListKind::kCompute, position + i).stage == merged.first.stage;
        if (second == 0) continue;
        const double share = static_cast<double>(first) / static_cast<double>(first + second);
        EXPECT_NEAR(static_cast<double>(firsts), static_cast<double>(i + 1) * share, p.cluster) << built.text;
      }
      EXPECT_EQ(firsts, first) << built.text;
      position += first + second;
    }
    EXPECT_EQ(position, list_length(p, 0, ListKind::kCompute)) << built.text;
  }
  EXPECT_GT(merged_steps, 20);
}

// The flags that the tiles of kReduce wait for, by hand: tokens in the order of their last experts, 32 a tile; with
// groups, tokens as they are. (Random layers have up to 32 experts a rank, so each has a class of its own.)
TEST(Order, SumsTakeTokensInTheOrderOfTheirLastExperts) {
  int reordered = 0, grouped = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const BuiltProgram built = build(seed, seed % 2 == 0 ? Direction::kForward : Direction::kBackward);
    const bool groups = built.layer.config.numerics.combine_groups > 0;
    for (int rank = 0; rank < built.layer.ranks; ++rank) {
      const RankProgram& p = built.program->rank(rank);
      const auto last_expert = [&](int32_t token) {
        int32_t last = 0;
        for (int32_t slot = 0; slot < p.topk; ++slot) {
          const int32_t expert = p.expert_of_slot[token * p.topk + slot];
          if (expert >= 0) last = std::max(last, expert % p.local_experts);
        }
        return last;
      };
      std::vector<int32_t> tokens(p.tokens);
      std::iota(tokens.begin(), tokens.end(), 0);
      if (!groups) {
        std::stable_sort(tokens.begin(), tokens.end(),
                         [&](int32_t a, int32_t b) { return last_expert(a) < last_expert(b); });
        reordered += p.tokens > kTokenBlock && !std::is_sorted(tokens.begin(), tokens.end());
      }
      grouped += groups && p.tokens > kTokenBlock;
      for (int32_t block = 0; block < token_blocks(p); ++block) {
        std::set<int64_t> expected, seen;
        for (int32_t i = block * kTokenBlock; i < std::min((block + 1) * kTokenBlock, p.tokens); ++i) {
          for (int32_t slot = 0; slot < p.topk; ++slot) {
            const int64_t entry = int64_t{tokens[i]} * p.topk + slot;
            const int32_t expert = p.expert_of_slot[entry];
            if (expert < 0) continue;
            const int32_t unit = groups ? tokens[i] / kTokenBlock : block_of_row(p, expert, p.row_of_slot[entry]);
            expected.insert(combined_flag(p, p.rank_of_expert[expert], unit, 0));
          }
        }
        for_each_wait(p, Task{Stage::kReduce, -1, block, 0}, [&](const auto& wait) {
          if constexpr (std::is_same_v<std::decay_t<decltype(wait)>, FlagWait>) seen.insert(wait.index);
        });
        ASSERT_EQ(seen, expected) << built.text;
      }
    }
  }
  EXPECT_GE(reordered, 20);
  EXPECT_GE(grouped, 5);
}

// Walkers that run the tiles of a rank's GEMM queues as the engines do: each takes a ticket, waits for what its tiles
// read, puts it behind the tickets that it has, and only then takes the next one. They take turns at random, and
// between a look at the counters and the taking of a ticket others may come.
class QueueWalkers {
 public:
  using Tile = std::tuple<Stage, int32_t, int32_t, int32_t>;

  QueueWalkers(const RankProgram& p, uint64_t seed)
      : p_(p), queues_(gemm_queues(p, 0)), random_(seed), walkers_(queues_.walkers) {
    for (int walker = 0; walker < queues_.walkers; ++walker) {
      walkers_[walker].walk = begin_walk(p, 0, walker * p.cluster, queues_);
      walkers_[walker].is_slow = !walkers_[walker].walk.prefers_second && seed / 24 % 2 == 0;
    }
  }

  // One walker takes a ticket, or looks whether its last one need not wait any more, or runs the oldest of the others.
  void step() {
    Walker& walker = walkers_[random_.between(0, queues_.walkers - 1)];
    if (walker.is_taking || (walker.is_slow && (others_come_ || !random_.one_in(30)))) return;
    if (walker.ready.size() == kMaxReady || (!walker.ready.empty() && random_.one_in(2))) {
      run(walker.ready.front());
      walker.ready.pop_front();
    } else if (walker.waits) {
      if (!can_run(walker.waiting)) return;
      walker.ready.push_back(walker.waiting);
      walker.waits = false;
    } else if (!walker.at_the_end) {
      walker.is_taking = true;
      walker.waiting = take_gemm_ticket(p_, queues_, walker.walk, *this);
      walker.is_taking = false;
      walker.waits = walker.waiting.found;
      walker.at_the_end = !walker.waiting.found;
      taken_early_ += walker.waits && !is_due(walker.waiting);
    }
  }

  bool are_done() const {
    return std::all_of(walkers_.begin(), walkers_.end(),
                       [](const Walker& walker) { return walker.at_the_end && !walker.waits && walker.ready.empty(); });
  }
  const std::multiset<Tile>& tiles_run() const { return tiles_run_; }
  int32_t count() const { return queues_.walkers; }
  int64_t positions() const { return gemm_positions(p_, queues_); }
  bool were_mixed() const { return seconds_before_the_last_first_ > 0; }
  int64_t taken_early() const { return taken_early_; }  // tickets for tiles that read others that nobody had taken

  // The counters.
  int64_t taken(GemmQueue queue) const { return taken_[static_cast<int>(queue)]; }
  int64_t take(GemmQueue queue) {
    if (!others_come_) {
      others_come_ = true;
      for (auto steps = random_.between(0, 40); steps > 0; --steps) step();
      others_come_ = false;
    }
    return taken_[static_cast<int>(queue)]++;
  }

 private:
  static constexpr std::size_t kMaxReady = 3;
  struct Walker {
    GemmQueueWalk walk{};
    std::deque<GemmTicket> ready;
    GemmTicket waiting{};
    bool is_slow = false;  // so that the second GEMM comes up with the first one
    bool waits = false, is_taking = false, at_the_end = false;
  };

  std::vector<Task> tiles_of(const GemmTicket& ticket) const {
    std::vector<Task> tiles;
    for (int i = 0; i < p_.cluster; ++i) {
      tiles.push_back(segment_task(p_, ticket.segment, ticket.index * p_.cluster + i));
    }
    return tiles;
  }

  bool can_run(const GemmTicket& ticket) {
    const std::vector<Task> tiles = tiles_of(ticket);
    return std::all_of(tiles.begin(), tiles.end(), [&](const Task& tile) {
      return tile.stage != Stage::kSecondGemm || !tile.has_tile() ||
             first_tiles_[{tile.expert, tile.m}] == p_.first_tiles;
    });
  }

  // Whether all tickets of the first GEMM up to the last expert of this one are taken.
  bool is_due(const GemmTicket& ticket) const {
    if (ticket.segment.stage != Stage::kSecondGemm) return true;
    const int32_t expert = segment_task(p_, ticket.segment, ticket.index * p_.cluster).expert;
    return taken(GemmQueue::kFirst) >= tickets_of(p_, {Stage::kFirstGemm, {0, expert + 1}, 0});
  }

  void run(const GemmTicket& ticket) {
    for (const Task& tile : tiles_of(ticket)) {
      tiles_run_.insert({tile.stage, tile.expert, tile.m, tile.n});
      if (tile.stage == Stage::kFirstGemm) {
        seconds_before_the_last_first_ = seconds_run_;
        if (tile.has_tile()) ++first_tiles_[{tile.expert, tile.m}];
      } else {
        ++seconds_run_;
      }
    }
  }

  const RankProgram& p_;
  const GemmQueues queues_;
  Random random_;
  std::vector<Walker> walkers_;
  int64_t taken_[2] = {0, 0};
  bool others_come_ = false;
  std::map<std::pair<int32_t, int32_t>, int32_t> first_tiles_;  // (expert, m) -> tiles of the first GEMM that have run
  std::multiset<Tile> tiles_run_;
  int64_t seconds_run_ = 0, seconds_before_the_last_first_ = 0, taken_early_ = 0;
};

TEST(GemmQueues, EveryTileRunsOnceAndNobodyWaitsForEver) {
  int mixed = 0;
  int64_t taken_early = 0;
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    const Direction direction = seed % 2 == 0 ? Direction::kForward : Direction::kBackward;
    const std::string waves = seed % 3 == 0 ? "" : ",order.experts_per_wave=1,tile.m=64,combine.column_chunks=1";
    const PartialSchedule fixed = PartialSchedule::parse("fusion=layer,order.interleave=mixed,queue=dynamic" + waves);
    const int workers = 1 + static_cast<int>(seed / 2 % 12);
    const BuiltProgram built =
        build(seed, direction, {.ranks = {1, 2}, .most_local_experts = 5, .most_tokens = 2000, .most_columns = 500},
              fixed, workers);
    for (int rank = 0; rank < built.layer.ranks; ++rank) {
      const RankProgram& p = built.program->rank(rank);
      ASSERT_TRUE(has_gemm_queues(p, 0)) << built.text;
      QueueWalkers walkers(p, seed);
      const int64_t most_steps = 1000 * (walkers.positions() + p.workers);
      for (int64_t step = 0; step < most_steps && !walkers.are_done(); ++step) walkers.step();
      ASSERT_TRUE(walkers.are_done()) << built.text;
      std::multiset<QueueWalkers::Tile> listed;
      for (int64_t i = 0; i < walkers.positions(); ++i) {
        const Task tile = list_task(p, 0, ListKind::kCompute, i);
        listed.insert({tile.stage, tile.expert, tile.m, tile.n});
      }
      ASSERT_EQ(walkers.tiles_run(), listed) << built.text;
      mixed += walkers.were_mixed();
      taken_early += walkers.taken_early();
      const bool pairs = p.cluster == 2, forward = direction == Direction::kForward;
      branches.count("several walkers, clusters of one", !pairs && walkers.count() > 1);
      branches.count("several walkers, clusters of two", pairs && walkers.count() > 1);
      branches.count("one pair", pairs && walkers.count() == 1);
      branches.count("clusters of two, forward", pairs && forward);
      branches.count("clusters of two, backward", pairs && !forward);
      branches.count("clusters of two, taken early", pairs && walkers.taken_early() > 0);
      branches.count("taken early, forward", forward && walkers.taken_early() > 0);
      branches.count("taken early, backward", !forward && walkers.taken_early() > 0);
    }
  }
  branches.expect_all_taken();
  EXPECT_GT(mixed, 100);
  EXPECT_GT(taken_early, 5);
}

TEST(GemmQueues, AsManyPreferTheSecondGemmAsItsFirstChunkTakes) {
  RankProgram p{};
  const auto count = [&p](Direction direction, int32_t hidden, int32_t intermediate, int32_t chunks, int32_t walkers) {
    p.direction = direction;
    p.wgrad_fc2 = {hidden, intermediate, 128, 256};
    p.chunks = chunks;
    for (int32_t chunk = 0; chunk <= chunks; ++chunk) p.chunk_column[chunk] = hidden * chunk / chunks;
    int64_t prefer = 0;
    for (int32_t walker = 0; walker < walkers; ++walker) prefer += prefers_second(p, walker, walkers);
    return prefer;
  };
  EXPECT_EQ(count(Direction::kForward, 4096, 1536, 1, 66), 24);  // the operations alone: 22
  EXPECT_EQ(count(Direction::kForward, 4096, 1536, 2, 66), 15);
  EXPECT_EQ(count(Direction::kForward, 2048, 768, 1, 66), 26);
  EXPECT_EQ(count(Direction::kBackward, 4096, 1536, 1, 66), 44);
  EXPECT_EQ(count(Direction::kForward, 4096, 1536, 8, 2), 1);
  EXPECT_EQ(count(Direction::kBackward, 4096, 1536, 1, 2), 1);
  EXPECT_EQ(count(Direction::kForward, 4096, 1536, 1, 1), 1);
}

TEST(Order, ColumnChunksAreMultiplesOfEightAndSkipEmptyOnes) {
  EXPECT_EQ(column_chunk_bounds(64, 3), (std::vector<int32_t>{0, 16, 40, 64}));
  EXPECT_EQ(column_chunk_bounds(16, 8), (std::vector<int32_t>{0, 8, 16}));
  EXPECT_EQ(column_chunk_bounds(8, 5), (std::vector<int32_t>{0, 8}));
}

}  // namespace
}  // namespace uniep::test
