#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>

#include "model/place.h"
#include "program/checker.h"
#include "program/recompute.h"
#include "program/schedule_fields.h"
#include "program/schedule_space.h"
#include "support/branch_counts.h"
#include "support/random_layer.h"

// The checker over the legal space: a small layer with every pair of values, backward on cuda, the large models
// sampled, up to 64 ranks. (program_test.cpp has the fields that are fixed here.)
namespace uniep::test {
namespace {

struct Batch {
  LayerShape shape;
  int ranks;
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> probs;
  std::shared_ptr<const internal::PlacementState> placement;
};

// Skewed: half of all slots go to the first quarter of the experts; one rank has no tokens when there are several.
Batch make_batch(const LayerShape& shape, int ranks, int64_t tokens, uint64_t seed, int32_t unused_expert = -1) {
  Batch batch{shape, ranks, {}, {}, nullptr};
  Random random(seed);
  std::vector<Routing> routings;
  batch.ids.resize(ranks);
  batch.probs.resize(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const int64_t own = rank == 1 ? 0 : tokens - random.between(0, tokens / 4);
    std::vector<int32_t>& ids = batch.ids[rank];
    for (int64_t token = 0; token < own; ++token) {
      const std::size_t begin = ids.size();
      while (static_cast<int64_t>(ids.size() - begin) < shape.topk) {
        const int64_t reach = random.one_in(2) ? std::max<int64_t>(shape.experts / 4, 1) : shape.experts;
        const int32_t expert = static_cast<int32_t>(random.between(0, reach - 1));
        if (expert == unused_expert) continue;
        if (std::find(ids.begin() + begin, ids.end(), expert) == ids.end()) ids.push_back(expert);
      }
    }
    batch.probs[rank].assign(ids.size(), 0.5f);
    routings.push_back({own, ids.data(), IndexType::kInt32, batch.probs[rank].data(), {}});
  }
  batch.placement = place_on_host(shape, ranks, routings, {});
  return batch;
}

// What the engine chooses beside the Schedule.
struct Variant {
  int cluster = 1;
  int pull_parts = 1;
};

CheckReport check_schedule(const Batch& batch, const Numerics& numerics, const Schedule& schedule, Direction direction,
                           const Machine& machine, Variant variant, BranchCounts* branches = nullptr) {
  ProgramRequest request{batch.shape, numerics, schedule, direction, false, machine.workers};
  request.redispatch = direction == Direction::kBackward && dispatches_x_again(schedule, true);
  request.cluster = variant.cluster;
  request.pull_parts = variant.pull_parts;
  const Program program(request, batch.placement);
  if (branches != nullptr) count_schedule(*branches, program);
  return check_program(program);
}

// Which values of two fields have been together in a case.
class ValuePairs {
 public:
  // A case's values, one a field. True when two of them have not been together yet.
  bool add(const std::vector<int>& values) {
    std::vector<std::size_t> ids;
    for (std::size_t field = 0; field < values.size(); ++field)
      ids.push_back(id_of(static_cast<int>(field), values[field]));
    bool is_new = false;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      for (std::size_t j = 0; j <= i; ++j) {
        char& seen = together_[ids[i] * kMaxValues + ids[j]];
        is_new |= seen == 0;
        pairs_ += seen == 0 && i != j;
        seen = 1;
      }
    }
    return is_new;
  }

  std::size_t pairs() const { return pairs_; }
  std::size_t values() const { return ids_.size(); }
  std::size_t values_of(int field) const {
    return std::count_if(ids_.begin(), ids_.end(), [field](const auto& entry) { return entry.first == field; });
  }

 private:
  static constexpr std::size_t kMaxValues = 128;

  std::size_t id_of(int field, int value) {
    const std::pair<int, int> key{field, value};
    const auto found = std::find(ids_.begin(), ids_.end(), key);
    if (found != ids_.end()) return found - ids_.begin();
    if (ids_.size() == kMaxValues) throw std::length_error("more values than ValuePairs has room for");
    ids_.push_back(key);
    return ids_.size() - 1;
  }

  std::vector<std::pair<int, int>> ids_;  // (field, value)
  std::vector<char> together_ = std::vector<char>(kMaxValues * kMaxValues, 0);
  std::size_t pairs_ = 0;
};

const std::vector<std::string> kVaried = {"fusion",
                                          "dispatch.transport",
                                          "dispatch.dedup",
                                          "comm.where",
                                          "comm.dispatch_sms",
                                          "comm.combine_sms",
                                          "comm.reduce_sms",
                                          "comm.reserve_sms",
                                          "comm.lend_sms",
                                          "order.experts_per_wave",
                                          "order.interleave",
                                          "order.source_rotation",
                                          "queue",
                                          "tile.m",
                                          "combine.transport",
                                          "combine.column_chunks"};

// The legal values of every field that shapes a Program, with clusters of one and two and pulls in one part and four:
// every two values that are legal together, and of all cases every so many.
class SmallLayer {
 public:
  SmallLayer()
      : batch_(make_batch({64, 64, 6, 2}, 2, 40, 1)),
        blocks_(make_batch({64, 64, 6, 2}, 2, 400, 2, /*unused_expert=*/1)) {
    machine_.ranks = 2;
    machine_.workers = 4;
  }

  void check(Direction direction, int64_t groups) {
    Numerics numerics;
    numerics.combine_groups = groups;
    numerics.weight_gradient = groups > 0 ? WeightGradient::kFloat32 : WeightGradient::kBFloat16;
    SpaceLimits limits;
    limits.vary = kVaried;
    const char* const fixed =
        "comm.chunk_bytes=4096,comm.stages=2,tile.k=64,tile.stages=4,tile.cluster=1,"
        "tile.pipeline=cooperative,order.raster=2,tile.n=128";
    if (direction == Direction::kBackward) limits.vary.insert(limits.vary.end(), {"backward.wgrad", "save.xg"});
    limits.fixed = PartialSchedule::parse(fixed);
    for_each_legal(
        {.direction = direction, .shape = batch_.shape, .numerics = numerics, .machine = machine_},
        [&](const Schedule& schedule) {
          for (const int cluster : {1, 2}) {
            if (!comes_in_clusters(schedule, machine_.workers, cluster)) continue;
            for (const int parts : {1, 4}) {
              const bool pulls = schedule.dispatch.transport == DispatchTransport::kPull;
              if (!pulls && parts > 1) continue;
              if (!check(direction, numerics, schedule, {cluster, parts})) return false;
            }
          }
          return true;
        },
        limits);
  }

  // Experts of several row blocks, in either order and in waves inside them, and workers that relay.
  void check_orders(Direction direction, const std::vector<std::string>& varied, const char* fixed) {
    SpaceLimits limits;
    limits.fixed = PartialSchedule::parse(fixed);
    limits.vary = varied;
    for_each_legal(
        {.direction = direction, .shape = blocks_.shape, .machine = machine_},
        [&](const Schedule& s) {
          if (s.order.second_share % 5 != 0 || s.order.blocks_per_wave > 4 || s.combine.column_chunks > 2) return true;
          for (const int cluster : {1, 2}) {
            if (!comes_in_clusters(s, machine_.workers, cluster)) continue;
            const CheckReport report = check_schedule(blocks_, {}, s, direction, machine_, {cluster, 1}, &branches_);
            EXPECT_TRUE(report.ok) << to_text(s) << "\ncluster " << cluster << "\n" << report.problems.front();
            ++checked_;
            if (!report.ok) return false;
          }
          return true;
        },
        limits);
  }

  void expect_covered() {
    std::printf("%lld legal cases, %lld checked: all %zu pairs of %zu values\n", static_cast<long long>(legal_),
                static_cast<long long>(checked_), pairs_.pairs(), pairs_.values());
    for (int field = 0; field < fields_; ++field) {
      EXPECT_GE(pairs_.values_of(field), 2u) << "field " << field << " does not vary";
    }
    branches_.expect_all_taken();
  }

 private:
  static constexpr int kOneIn = 16, kOneInOfGemmQueues = 4;

  bool check(Direction direction, const Numerics& numerics, const Schedule& schedule, Variant variant) {
    std::vector<int> values{static_cast<int>(direction), numerics.combine_groups > 0, variant.cluster,
                            variant.pull_parts};
    for (const std::string& name : kVaried) values.push_back(descriptor_of(*find_field(name)).get(schedule).value());
    const bool backward = direction == Direction::kBackward;
    values.push_back(backward ? static_cast<int>(schedule.wgrad) : -1);
    values.push_back(backward ? static_cast<int>(schedule.save_xg) : -1);
    fields_ = static_cast<int>(values.size());
    const bool queues = schedule.queue == QueueKind::kDynamic && schedule.order.interleave == Interleave::kMixed;
    const bool sampled = Random(++legal_).one_in(queues ? kOneInOfGemmQueues : kOneIn);
    if (!pairs_.add(values) && !sampled) return true;
    const CheckReport report = check_schedule(batch_, numerics, schedule, direction, machine_, variant, &branches_);
    EXPECT_TRUE(report.ok) << to_text(schedule) << "\ncluster " << variant.cluster << ", " << variant.pull_parts
                           << " parts\n"
                           << report.problems.front();
    ++checked_;
    return report.ok;
  }

  const Batch batch_, blocks_;
  Machine machine_;
  ValuePairs pairs_;
  BranchCounts branches_;
  int fields_ = 0;
  int64_t legal_ = 0, checked_ = 0;
};

TEST(CheckerSpace, SmallLayer) {
  SmallLayer layer;
  for (const int64_t groups : {0, 2}) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) layer.check(direction, groups);
  }
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    layer.check_orders(direction,
                       {"order.experts", "order.blocks_per_wave", "order.interleave", "queue", "order.second_share",
                        "combine.transport", "combine.column_chunks", "backward.wgrad"},
                       "fusion=layer,order.experts_per_wave=1,tile.m=64");
    layer.check_orders(direction,
                       {"comm.dispatch_sms", "comm.relay_sms", "order.experts", "order.experts_per_wave",
                        "dispatch.dedup", "queue", "fusion", "save.xg"},
                       "comm.where=sms,dispatch.transport=push,tile.m=64,combine.column_chunks=1");
  }
  layer.expect_covered();
}

// Whether a case is one of those that stand for the others: up to two workers of a kind, one band or several, an expert
// a wave or all.
bool is_representative(const Schedule& s) {
  const CommSchedule& comm = s.comm;
  for (const int count : {comm.dispatch_sms, comm.combine_sms, comm.reduce_sms, comm.reserve_sms}) {
    if (count > 2) return false;
  }
  const bool usual = s.wgrad_reserve == Schedule{}.wgrad_reserve;
  if (!usual && s.wgrad_reserve % 16 != 0) return false;
  const bool waves = s.order.experts_per_wave == 1 || s.order.experts_per_wave == 4;
  return waves && (s.combine.column_chunks == 1 || s.combine.column_chunks == 3);
}

void count_backward(BranchCounts& branches, const Schedule& s, const Program& program) {
  const RankProgram& p = program.rank(0);
  const bool pairs = s.fusion == Fusion::kPairs, fill = s.wgrad != WgradOrder::kAfter, two = p.cluster == 2;
  const bool again = s.save_xg == SaveXg::kRedispatch, dynamic = s.queue == QueueKind::kDynamic;
  for (const bool of_two : {false, true}) {
    for (const bool of_dynamic : {false, true}) {
      const bool is = two == of_two && dynamic == of_dynamic;
      const std::string suffix =
          std::string(of_two ? ", clusters of two" : ", clusters of one") + (of_dynamic ? ", dynamic" : ", static");
      branches.count(("none" + suffix).c_str(), is && s.fusion == Fusion::kNone);
      branches.count(("layer, after" + suffix).c_str(), is && s.fusion == Fusion::kLayer && !fill);
      branches.count(("layer, fill" + suffix).c_str(), is && s.fusion == Fusion::kLayer && fill);
      const bool mixed = s.wgrad == WgradOrder::kMixed;
      if (of_dynamic) branches.count(("layer, mixed" + suffix).c_str(), is && mixed);
      if (of_dynamic) branches.count(("layer, mixed, x again" + suffix).c_str(), is && mixed && again);
      if (of_dynamic) branches.count(("layer, mixed, copy sms" + suffix).c_str(), is && mixed && p.on_sms);
      branches.count(("pairs, after" + suffix).c_str(), is && pairs && !fill);
      branches.count(("pairs, fill" + suffix).c_str(), is && pairs && fill);
      branches.count(("x kept" + suffix).c_str(), is && !again);
      branches.count(("x again, fill" + suffix).c_str(), is && again && fill);
      branches.count(("x again, deduplicated, after" + suffix).c_str(), is && again && p.dedup && !fill);
    }
  }
  branches.count("combine by the epilogue", p.epilogue_combine);
  branches.count("combine staged", !p.epilogue_combine && p.combine_groups == 0);
  branches.count("combine by groups", p.combine_groups > 0);
  branches.count("copy warps", !p.on_sms);
  branches.count("copy sms", p.on_sms);
  branches.count("combine sms and reduce sms", p.combine_workers > 0 && p.reduce_workers > 0);
  branches.count("reserved sms", s.comm.reserve_sms > 0);
  branches.count("lent sms", p.lent_workers > 0);
  branches.count("lent sms in pairs", p.lent_workers > 0 && two);
  branches.count("lent sms, weight gradients beside dgrads", p.lent_workers > 0 && s.wgrad == WgradOrder::kMixed);
  branches.count("several waves", p.waves > 1);
  branches.count("column chunks", p.chunks > 1);
  branches.count("pull in several parts", p.pull_parts > 1);
  branches.count("no rotation of sources", !p.source_rotation);
  branches.count("an expert with several row blocks", p.expert_rows[p.first_expert] > 2 * p.tile_m);
  branches.count("an expert without rows", p.expert_rows[p.first_expert + 2] == 0);
  branches.count("positions without a tile", two && p.first_tiles % 2 != 0 && p.odd_blocks[p.local_experts] > 0);
  branches.count("three column tiles of dgrad FC2", p.first_tiles == 3);
  branches.count("two column tiles of dgrad FC2", p.first_tiles == 2);
}

// Every legal backward Schedule of a small layer on cuda, but for numbers that stand for others. Two shapes of tiles
// and of pulls take turns.
TEST(CheckerSpace, BackwardOnCuda) {
  const Batch batch = make_batch({256, 384, 8, 2}, 2, 600, 3, /*unused_expert=*/2);
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = 2;
  machine.workers = 8;
  BranchCounts branches;
  int64_t checked = 0;
  for (const int64_t groups : {0, 2}) {
    Numerics numerics;
    numerics.combine_groups = groups;
    SpaceLimits limits;
    limits.vary = {"fusion",
                   "dispatch.dedup",
                   "comm.where",
                   "comm.dispatch_sms",
                   "comm.combine_sms",
                   "comm.reduce_sms",
                   "comm.reserve_sms",
                   "comm.lend_sms",
                   "order.experts_per_wave",
                   "queue",
                   "order.source_rotation",
                   "tile.cluster",
                   "combine.transport",
                   "backward.wgrad",
                   "backward.wgrad_reserve",
                   "combine.column_chunks",
                   "save.xg"};
    limits.fixed = PartialSchedule::parse("tile.n=128,tile.dgrad_fc2.n=192,tile.stages=3");
    for_each_legal(
        {.direction = Direction::kBackward, .shape = batch.shape, .numerics = numerics, .machine = machine},
        [&](const Schedule& legal) {
          if (!is_representative(legal)) return true;
          Schedule schedule = legal;
          ++checked;
          if (Random(checked).one_in(2)) {
            schedule.tile.n = 256;
            schedule.stage_tile[static_cast<int>(GemmStage::kDgradFc2)].n = 128;
          }
          EXPECT_TRUE(
              validate(
                  schedule,
                  {.direction = Direction::kBackward, .shape = batch.shape, .numerics = numerics, .machine = machine})
                  .empty());
          ProgramRequest request{batch.shape, numerics, schedule, Direction::kBackward};
          request.redispatch = dispatches_x_again(schedule, true);
          request.workers = machine.workers;
          request.cluster = schedule.tile_of(GemmStage::kDgradFc1).cluster;
          request.pull_parts = Random(~checked).one_in(2) ? 1 : 4;
          const Program program(request, batch.placement);
          count_backward(branches, schedule, program);
          const CheckReport report = check_program(program);
          EXPECT_TRUE(report.ok) << to_text(schedule) << "\n" << report.problems.front();
          return report.ok;
        },
        limits);
  }
  std::printf("%lld schedules proved\n", static_cast<long long>(checked));
  branches.expect_all_taken();
}

struct SampledModel {
  const char* name;
  LayerShape shape;
};

TEST(CheckerSpace, LargeModelsSampled) {
  const SampledModel models[] = {{"dsv3", {7168, 2048, 256, 8}},
                                 {"qwen3-235b", {4096, 1536, 128, 8}},
                                 {"qwen3-30b", {2048, 768, 128, 8}},
                                 {"mixtral", {4096, 14336, 8, 2}}};
  Random random(2);
  int64_t tasks = 0;
  BranchCounts branches;
  for (const SampledModel& model : models) {
    for (const int ranks : {8, 64}) {
      if (model.shape.experts % ranks != 0) continue;
      const Batch batch = make_batch(model.shape, ranks, ranks == 64 ? 192 : 1024, random.next());
      Machine machine;
      machine.ranks = ranks;
      machine.workers = 132;
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        for (int sample = 0; sample < 2; ++sample) {
          const bool queues = sample == 0, pairs = random.one_in(2), backward = direction == Direction::kBackward;
          // Mixed GEMMs of backward are not built on cuda yet, but their Program is checked.
          const bool on_cpu = queues && backward;
          machine.engine = on_cpu ? EngineKind::kCpu : EngineKind::kCuda;
          PartialSchedule fixed =
              PartialSchedule::parse(queues ? "fusion=layer,order.interleave=mixed,queue=dynamic" : "auto");
          if (pairs) fixed.set("tile.cluster", "2");  // then on cuda all kinds of workers come in pairs
          if (on_cpu) {
            for (const char* field : {"tile.m", "tile.n"}) fixed.set(field, "128");
            fixed.set("comm.where", "warps");
            fixed.set("comm.reserve_sms", "0");
          }
          const Schedule schedule =
              sample_legal(random.next(), {.direction = direction, .shape = model.shape, .machine = machine}, fixed);
          const Variant variant{pairs ? 2 : 1, random.one_in(2) ? 1 : 4};
          const CheckReport report = check_schedule(batch, {}, schedule, direction, machine, variant);
          EXPECT_TRUE(report.ok) << model.name << " " << to_text(schedule) << "\n" << report.problems.front();
          tasks += report.tasks;
          branches.count("clusters of one", !pairs);
          branches.count("clusters of two", pairs);
          branches.count("mixed GEMMs, dynamic queues, clusters of one", queues && !pairs);
          branches.count("mixed GEMMs, dynamic queues, clusters of two", queues && pairs);
          branches.count("backward on cuda, clusters of one", backward && !queues && !pairs);
          branches.count("backward on cuda, clusters of two", backward && !queues && pairs);
          branches.count("pull in four parts",
                         variant.pull_parts == 4 && schedule.dispatch.transport == DispatchTransport::kPull);
        }
      }
    }
  }
  std::printf("%lld tasks checked\n", static_cast<long long>(tasks));
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep::test
