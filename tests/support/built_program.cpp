#include "support/built_program.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "model/place.h"
#include "program/recompute.h"
#include "program/schedule_space.h"

namespace uniep::test {

BuiltProgram build(uint64_t seed, Direction direction, const RandomLayerLimits& limits, const PartialSchedule& fixed,
                   int workers) {
  BuiltProgram built;
  built.layer = random_layer(seed, limits);
  Random random(seed ^ 0x5555);
  std::vector<Routing> routings;
  const cli::LayerData& data = built.layer.data;
  for (int rank = 0; rank < built.layer.ranks; ++rank) {
    const int64_t first = data.first_token(rank) * data.shape.topk;
    routings.push_back({data.tokens[rank], data.ids.data() + first, IndexType::kInt32, data.probs.data() + first, {}});
  }
  Machine machine;
  machine.ranks = built.layer.ranks;
  machine.workers = workers > 0 ? workers : static_cast<int>(random.between(1, 6));
  const Numerics& numerics = built.layer.config.numerics;
  const Schedule schedule = sample_legal(
      random.next(), {.direction = direction, .shape = data.shape, .numerics = numerics, .machine = machine}, fixed);
  built.text = built.layer.description + "\n" + to_text(schedule);
  ProgramRequest request{data.shape,     numerics, schedule, direction, dispatches_x_again(schedule, true),
                         machine.workers};
  request.cluster = random.one_in(2) && comes_in_clusters(schedule, machine.workers, 2) ? 2 : 1;
  request.pull_parts = static_cast<int>(random.between(1, 20));
  built.text += fmt::format("\ncluster {}, pulled in {} parts", request.cluster, request.pull_parts);
  built.placement = place_on_host(data.shape, built.layer.ranks, routings, {});
  built.program = std::make_unique<Program>(request, built.placement);
  return built;
}

void expect_noticed(Direction direction, const std::string& fixed,
                    const std::function<CheckTampering(bool& touched)>& tampering, bool flat_only, int workers) {
  int tried = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const BuiltProgram built =
        build(seed, direction, {.ranks = {2, 4}, .most_local_experts = 6}, PartialSchedule::parse(fixed), workers);
    if (flat_only && built.layer.config.numerics.combine_groups > 0) continue;
    bool touched = false;
    const CheckReport report = check_program(*built.program, tampering(touched));
    if (!touched) continue;
    ++tried;
    EXPECT_FALSE(report.ok) << built.text;
  }
  EXPECT_GE(tried, 20);
}

}  // namespace uniep::test
