#include <gtest/gtest.h>

#include <algorithm>

#include "api/place.h"
#include "program/checker.h"
#include "program/schedule_space.h"
#include "support/random_layer.h"

// The checker over the legal space: a small layer in full, the large models sampled, up to 64 ranks.
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
Batch make_batch(const LayerShape& shape, int ranks, int64_t tokens, uint64_t seed) {
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
        if (std::find(ids.begin() + begin, ids.end(), expert) == ids.end()) ids.push_back(expert);
      }
    }
    batch.probs[rank].assign(ids.size(), 0.5f);
    routings.push_back({own, ids.data(), IndexType::kInt32, batch.probs[rank].data(), {}});
  }
  batch.placement = place_on_host(shape, ranks, routings, {});
  return batch;
}

CheckReport check_schedule(const Batch& batch, const Numerics& numerics, const Schedule& schedule, Direction direction,
                           const Machine& machine) {
  const Program program(
      {batch.shape, numerics, schedule, direction, schedule.save_xg == SaveXg::kRedispatch, machine.workers},
      batch.placement);
  return check_program(program);
}

// Every legal value of every field that shapes a Program, together.
TEST(CheckerSpace, SmallLayerInFull) {
  const Batch batch = make_batch({64, 64, 6, 2}, 2, 40, 1);
  Machine machine;
  machine.ranks = 2;
  machine.workers = 4;
  SpaceLimits limits;
  limits.fixed = PartialSchedule::parse(
      "comm.chunk_bytes=4096,comm.stages=2,tile.k=64,tile.stages=4,tile.cluster=1,tile.pipeline=cooperative,"
      "order.raster=2,tile.n=128");
  limits.vary = {"fusion",
                 "dispatch.transport",
                 "dispatch.dedup",
                 "comm.where",
                 "comm.dispatch_sms",
                 "comm.combine_sms",
                 "comm.reduce_sms",
                 "order.experts_per_wave",
                 "order.interleave",
                 "order.source_rotation",
                 "queue",
                 "tile.m",
                 "combine.transport",
                 "combine.column_chunks"};
  int64_t checked = 0;
  for (const int64_t groups : {0, 2}) {
    Numerics numerics;
    numerics.combine_groups = groups;
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      for_each_legal(
          direction, batch.shape, numerics, machine,
          [&](const Schedule& schedule) {
            const CheckReport report = check_schedule(batch, numerics, schedule, direction, machine);
            EXPECT_TRUE(report.ok) << to_text(schedule) << "\n" << report.problems.front();
            ++checked;
            return report.ok;
          },
          limits);
    }
  }
  std::printf("%lld schedules checked\n", static_cast<long long>(checked));
}

struct Model {
  const char* name;
  LayerShape shape;
};

TEST(CheckerSpace, LargeModelsSampled) {
  const Model models[] = {{"dsv3", {7168, 2048, 256, 8}},
                          {"qwen3-235b", {4096, 1536, 128, 8}},
                          {"qwen3-30b", {2048, 768, 128, 8}},
                          {"mixtral", {4096, 14336, 8, 2}}};
  Random random(2);
  int64_t tasks = 0;
  for (const Model& model : models) {
    for (const int ranks : {8, 64}) {
      if (model.shape.experts % ranks != 0) continue;
      const Batch batch = make_batch(model.shape, ranks, ranks == 64 ? 192 : 1024, random.next());
      Machine machine;
      machine.engine = EngineKind::kCuda;
      machine.ranks = ranks;
      machine.workers = 132;
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        for (int sample = 0; sample < 3; ++sample) {
          const Schedule schedule = sample_legal(random.next(), direction, model.shape, {}, machine);
          const CheckReport report = check_schedule(batch, {}, schedule, direction, machine);
          EXPECT_TRUE(report.ok) << model.name << " " << to_text(schedule) << "\n" << report.problems.front();
          tasks += report.tasks;
        }
      }
    }
  }
  std::printf("%lld tasks checked\n", static_cast<long long>(tasks));
}

}  // namespace
}  // namespace uniep::test
