#include "tests/cuda/layer_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "api/place.h"
#include "engine/cuda/layer/layer_tiles.h"
#include "engine/cuda/layer_kernels.h"
#include "program/build.h"
#include "program/gemm_queues.h"
#include "program/schedule_space.h"
#include "uniep/error.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::Random;
using uniep::test::random_layer;
using uniep::test::RandomLayer;
using uniep::test::RandomLayerLimits;

// What a random Schedule seldom has: mixed GEMMs, and few workers. Half of all cases have it.
constexpr int kFewWorkers = 12;
struct Seldom {
  const char* fields;
  int fewest_workers, most_workers;  // 0: any number
};
constexpr Seldom kSeldom[] = {
    {"fusion=layer,order.interleave=mixed,queue=dynamic", 4, 0},
    {"fusion=layer,order.interleave=mixed,queue=dynamic,comm.reserve_sms=0,comm.where=warps", 2, kFewWorkers},
    {"fusion=layer,order.interleave=mixed,queue=static,comm.reserve_sms=0", 4, 0},
    {"comm.where=sms,comm.dispatch_sms=2,comm.reserve_sms=0", 8, 0}};

const Seldom* seldom_of(uint64_t seed, const CaseOptions& options) {
  if (seed % 2 != 0 || !options.fixed.empty()) return nullptr;
  return &kSeldom[seed / 2 % std::size(kSeldom)];
}

// Even, so that they come in pairs; of few workers often one pair.
int random_workers(const CaseOptions& options, int ranks, const Seldom* seldom, Random& random) {
  const int ranks_of_device = (ranks + options.devices - 1) / options.devices;
  const int all = options.processors / ranks_of_device / 2 * 2;
  const int fewest = seldom != nullptr ? seldom->fewest_workers : 2;
  if (seldom != nullptr && seldom->most_workers > 0) {
    return random.one_in(2) ? fewest : static_cast<int>(2 * random.between(fewest / 2, seldom->most_workers / 2));
  }
  return random.one_in(2) ? all : static_cast<int>(2 * random.between(fewest / 2, all / 2));
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

PartialSchedule fixed_fields(const CaseOptions& options, uniep::Launch launch, const Seldom* seldom, Random& random) {
  const std::string given = seldom != nullptr ? seldom->fields : options.fixed;
  PartialSchedule fixed = given.empty() ? PartialSchedule() : PartialSchedule::parse(given);
  const auto set = [&](const char* name, const std::string& value) {
    if (!fixed.given(name)) fixed.set(name, value);
  };
  if (launch == uniep::Launch::kProcesses) set("dispatch.transport", "pull");
  if (options.any_kernel && seldom != nullptr && random.one_in(2)) set("tile.cluster", "2");
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
                         const Seldom* seldom, Random& random) {
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = layer_case.ranks;
  machine.workers = layer_case.workers;
  return sample_legal(random.next(), Direction::kForward, config.shape, config.numerics, machine,
                      fixed_fields(options, layer_case.launch, seldom, random));
}

// Any Schedule's.
int workers_of_part(const CaseOptions& options, int part, int ranks) {
  constexpr int kFewest = 8;
  Random random(static_cast<uint64_t>(part * 64 + ranks));
  return std::max(kFewest, random_workers(options, ranks, nullptr, random));
}

LayerCase random_case(const CaseOptions& options, const RandomLayer& layer, int ranks, uint64_t seed) {
  Random random(Random(seed).next() + static_cast<uint64_t>(ranks));  // a stream of each seed and number of ranks
  LayerCase drawn;
  drawn.ranks = ranks;
  if (options.random_launch && ranks <= options.devices && random.one_in(2)) drawn.launch = uniep::Launch::kProcesses;
  drawn.part = part_of(seed);
  const Seldom* const seldom = seldom_of(seed, options);
  if (drawn.launch == uniep::Launch::kProcesses) {
    drawn.workers = workers_of_part(options, drawn.part, ranks);
  } else {
    drawn.workers = random_workers(options, ranks, seldom, random);
  }
  drawn.capacity = random_capacity(layer, ranks, random);
  drawn.schedule = random_schedule(options, layer.config, drawn, seldom, random);
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

void count_branches(uniep::test::BranchCounts& branches, const RandomLayer& layer, const LayerCase& layer_case,
                    const CaseOptions& options) {
  const cli::LayerData data = layer_case.ranks == layer.ranks ? layer.data : uniep::test::on_one_rank(layer.data);
  std::vector<Routing> routings;
  for (int rank = 0; rank < layer_case.ranks; ++rank) {
    const int64_t slot = data.first_token(rank) * data.shape.topk;
    routings.push_back({data.tokens[static_cast<std::size_t>(rank)],
                        data.ids.data() + slot,
                        IndexType::kInt32,
                        data.probs.data() + slot,
                        {}});
  }
  ProgramRequest request;
  request.shape = data.shape;
  request.numerics = layer.config.numerics;
  request.schedule = layer_case.schedule;
  request.workers = layer_case.workers;
  request.cluster = cluster_of(layer_case.schedule, Direction::kForward);
  request.pull_parts = pull_parts(data.shape);
  const Program program(request, place_on_host(data.shape, layer_case.ranks, routings, {}));
  uniep::test::count_schedule(branches, program);
  uniep::test::count_layer(branches, layer);
  const bool one = layer_case.launch == uniep::Launch::kThreads;
  const bool within = layer_case.capacity.rows > 0;
  const bool several = std::min(layer_case.ranks, options.devices) > 1;
  branches.count("placed by need", !within);
  branches.count("placed within a capacity", within);
  branches.count("one process, virtual ranks", one && layer_case.ranks > options.devices);
  if (options.devices > 1) branches.count("one process, several GPUs", one && several);
  if (options.random_launch) branches.count("processes", !one);
  if (options.random_launch) branches.count("processes, within a capacity", !one && within);
  if (options.random_launch && options.devices > 1) branches.count("several processes", !one && several);
  const bool clusters = request.cluster == 2;
  const bool chooses = options.any_kernel || options.tiles.size() > 1;
  if (chooses) branches.count("no clusters", !clusters);
  if (chooses) branches.count("no clusters, dynamic queues", !clusters && program.rank(0).dynamic);
  if (!chooses) return;
  branches.count("mixed GEMMs, dynamic queues, no clusters", !clusters && has_gemm_queues(program.rank(0), 0));
}

std::vector<std::string> untaken_branches(const uniep::test::BranchCounts& branches) {
  // The engine has no backward pass, and no layer asks it for gradients.
  const auto of_backward = [](const std::string& branch) {
    for (const char* const word : {"backward", "redispatch", "wgrad"}) {
      if (branch.find(word) != std::string::npos) return true;
    }
    return false;
  };
  std::vector<std::string> untaken = branches.never_taken();
  std::erase_if(untaken, of_backward);
  return untaken;
}

std::string to_text(const LayerCase& layer_case) {
  return fmt::format("{} workers {} {}", layer_case.launch == uniep::Launch::kProcesses ? "processes" : "threads",
                     layer_case.workers, uniep::to_text(layer_case.schedule));
}

std::vector<KernelRequest> kernels_of(const LayerCase& layer_case, const Numerics& numerics) {
  std::vector<KernelRequest> requests;
  for (const LaunchStages& stages : launch_stages(layer_case.schedule, Direction::kForward)) {
    requests.push_back(layer_request(launch_config(layer_case.schedule, numerics, Direction::kForward, stages)));
  }
  return requests;
}

}  // namespace uniep::cuda::test
