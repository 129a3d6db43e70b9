#include "support/bitwise.h"

#include <fmt/format.h>

#include "program/schedule_space.h"

namespace uniep::test {

std::string run_random_combination(uint64_t seed, const RandomLayerLimits& limits, bool disturb) {
  const RandomLayer layer = random_layer(seed, limits);
  Random random(~seed);
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = layer.ranks;
  options.workers = static_cast<int>(random.between(1, 4));
  if (disturb) options.disturbance.shuffle_seed = random.next() | 1;
  Group group(options);

  const LayerConfig& config = layer.config;
  const Schedule forward =
      sample_legal(random.next(), Direction::kForward, config.shape, config.numerics, group.machine());
  PartialSchedule fixed;
  fixed.set("save.xg", forward.save_xg == SaveXg::kKeep && !random.one_in(4) ? "keep" : "redispatch");
  const Schedule backward =
      sample_legal(random.next(), Direction::kBackward, config.shape, config.numerics, group.machine(), fixed);
  std::string problem;
  try {
    problem = difference(run_layer(group, config, layer.data, forward, backward), run_sequential(layer));
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (problem.empty()) return "";
  return fmt::format("{}\n  {} workers {} shuffle {}\n  forward  {}\n  backward {}", problem, layer.description,
                     options.workers, options.disturbance.shuffle_seed, to_text(forward), to_text(backward));
}

}  // namespace uniep::test
