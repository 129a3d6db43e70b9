#include "tests/cuda/layer_cases.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/cuda/layer/layer_tiles.h"
#include "engine/cuda/layer_kernels.h"
#include "program/build.h"
#include "program/schedule_space.h"
#include "uniep/error.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::Random;
using uniep::test::random_layer;
using uniep::test::RandomLayer;
using uniep::test::RandomLayerLimits;

int random_workers(const CaseOptions& options, int ranks, Random& random) {
  const int ranks_of_device = (ranks + options.devices - 1) / options.devices;
  const int most = options.processors / ranks_of_device / 2 * 2;
  return random.one_in(2) ? most : static_cast<int>(2 * random.between(1, most / 2));
}

// By need, or room for whatever the routing is, so that the host learns no counts.
Capacity random_capacity(const RandomLayer& layer, int ranks, Random& random) {
  if (random.one_in(2)) return {};
  const LayerShape& shape = layer.data.shape;
  const bool on_one_rank = ranks != layer.ranks;
  const int64_t most_tokens =
      on_one_rank ? layer.data.all_tokens() : *std::max_element(layer.data.tokens.begin(), layer.data.tokens.end());
  return {.rows = round_up(layer.data.all_tokens() * shape.topk, kRowAlignment) + shape.experts / ranks * kRowAlignment,
          .tokens = std::max<int64_t>(most_tokens, 1)};
}

PartialSchedule fixed_fields(const CaseOptions& options, Heap heap, Random& random) {
  PartialSchedule fixed = options.fixed.empty() ? PartialSchedule() : PartialSchedule::parse(options.fixed);
  const auto set = [&](const char* name, const std::string& value) {
    if (!fixed.given(name)) fixed.set(name, value);
  };
  if (heap == Heap::kNccl) set("dispatch.transport", "pull");
  if (options.any_kernel) return fixed;
  const std::string& tile = options.tiles[random.next() % options.tiles.size()];
  const std::size_t colon = tile.find(':');
  set("tile.n", tile.substr(0, colon));
  set("tile.stages", "4");
  set("tile.cluster", tile.substr(colon + 1));
  set("comm.chunk_bytes", "4096");
  set("comm.stages", "3");
  return fixed;
}

// A random legal Schedule: the engine has kernels for each.
Schedule random_schedule(const CaseOptions& options, const LayerConfig& config, const LayerCase& layer_case,
                         Random& random) {
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = layer_case.ranks;
  machine.workers = layer_case.workers;
  return sample_legal(random.next(), Direction::kForward, config.shape, config.numerics, machine,
                      fixed_fields(options, layer_case.heap, random));
}

LayerCase random_case(const CaseOptions& options, const RandomLayer& layer, int ranks, uint64_t seed) {
  Random random(Random(seed).next() + static_cast<uint64_t>(ranks));  // a stream of each seed and number of ranks
  LayerCase drawn;
  drawn.ranks = ranks;
  if (options.random_heap && ranks <= options.devices && random.one_in(2)) drawn.heap = Heap::kNccl;
  drawn.part = part_of(seed);
  Random of_group(static_cast<uint64_t>(drawn.part * 64 + ranks));
  drawn.workers = random_workers(options, ranks, drawn.heap == Heap::kNccl ? of_group : random);
  drawn.capacity = random_capacity(layer, ranks, random);
  drawn.schedule = random_schedule(options, layer.config, drawn, random);
  return drawn;
}

}  // namespace

LayerCases draw_cases(uint64_t seed, const RandomLayerLimits& limits, const CaseOptions& options) {
  LayerCases drawn{random_layer(seed, limits), {}};
  if (drawn.layer.config.numerics.combine_groups > kMostGroups) return drawn;
  drawn.cases.push_back(random_case(options, drawn.layer, drawn.layer.ranks, seed));
  if (drawn.layer.ranks > 1) drawn.cases.push_back(random_case(options, drawn.layer, 1, seed));
  return drawn;
}

std::string to_text(const LayerCase& layer_case) {
  return fmt::format("{} workers {} {}", layer_case.heap == Heap::kNccl ? "nccl" : "local", layer_case.workers,
                     uniep::to_text(layer_case.schedule));
}

std::vector<KernelRequest> kernels_of(const LayerCase& layer_case, const Numerics& numerics) {
  std::vector<KernelRequest> requests;
  for (const LaunchStages& stages : launch_stages(layer_case.schedule, Direction::kForward)) {
    requests.push_back(layer_request(launch_config(layer_case.schedule, numerics, stages)));
  }
  return requests;
}

}  // namespace uniep::cuda::test
