// The forward layer of the cuda engine: y and z against the naive oracle, byte by byte, over random layers, routings,
// ranks and Schedules, in poisoned memory; against a float64 reference; a rank that stays silent, and recovery.
// Usage: gpu_layer_tests [--cases N] [--first SEED] [--repeat N] [--devices D] [--tiles N:C[,N:C...]]
//                        [--fixed key=value,...] [--only random|wide|silent|reference] [--verbose]
// D: how many GPUs the ranks are dealt over (default 1: virtual ranks). --tiles: tile.n and tile.cluster that are drawn
// from. Exit status 77 without a Hopper GPU.
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>

#include "engine/cuda/layer/cuda_engine.h"
#include "program/schedule_space.h"
#include "reference/check.h"
#include "support/random_layer.h"
#include "tests/cuda/layer_oracle.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::difference;
using uniep::test::on_one_rank;
using uniep::test::Random;
using uniep::test::random_layer;
using uniep::test::RandomLayer;
using uniep::test::RandomLayerLimits;

constexpr int64_t kMostGroups = 32;  // that the engine sums

struct Options {
  uint64_t first = 1;
  int cases = 20;
  int repeat = 1;
  int devices = 1;
  std::vector<std::string> tiles = {"256:2"};  // each one more kernel to compile for every kind of combine and copy
  std::string fixed;
  std::string only;
};

GroupOptions group_options(const Options& options, int ranks) {
  GroupOptions group;
  group.engine = EngineKind::kCuda;
  group.ranks = ranks;
  for (int device = 0; device < options.devices; ++device) group.devices.push_back(device);
  return group;
}

// What every Schedule of these tests has: the kernels that are built, and few different ones.
PartialSchedule fixed_fields(const Options& options, Random& random) {
  PartialSchedule fixed = options.fixed.empty() ? PartialSchedule() : PartialSchedule::parse(options.fixed);
  const std::string& tile = options.tiles[random.next() % options.tiles.size()];
  const std::size_t colon = tile.find(':');
  const auto set = [&](const char* name, const std::string& value) {
    if (!fixed.given(name)) fixed.set(name, value);
  };
  set("tile.m", "128");
  set("tile.n", tile.substr(0, colon));
  set("tile.k", "64");
  set("tile.stages", "4");
  set("tile.cluster", tile.substr(colon + 1));
  set("tile.pipeline", "cooperative");
  set("comm.chunk_bytes", "4096");
  set("comm.stages", "4");
  return fixed;
}

// A random legal Schedule that the engine has kernels for.
Schedule random_schedule(const Options& options, const LayerConfig& config, const Group& group,
                         const Placement& placement, Random& random) {
  for (int attempt = 0;; ++attempt) {
    const Schedule schedule = sample_legal(random.next(), Direction::kForward, config.shape, config.numerics,
                                           group.machine(), fixed_fields(options, random));
    try {
      memory_need(group, config, schedule, Direction::kForward, placement);
      return schedule;
    } catch (const Error& error) {
      if (error.status() != Status::kUnsupported || attempt == 1000) throw;
    }
  }
}

class LayerTests {
 public:
  LayerTests(const Options& options, Results& results, std::string folder)
      : options_(options), results_(results), kernels_(0, std::move(folder)) {}

  // One random layer: on its own number of ranks and on one, each under a Schedule of its own.
  void random_case(uint64_t seed, const RandomLayerLimits& limits, const char* name) {
    const RandomLayer layer = random_layer(seed, limits);
    if (layer.config.numerics.combine_groups > kMostGroups) return;
    Random random(~seed);
    cli::LayerResult expected;
    {
      const ScopedDevice scope(0);
      expected = naive_layer(kernels_, layer.config, layer.data);
    }
    run_case(name, layer, layer.data, layer.ranks, expected, random);
    if (layer.ranks > 1) run_case(name, layer, on_one_rank(layer.data), 1, expected, random);
  }

  // The mathematics, not only the bits.
  void against_reference(uint64_t seed) {
    RandomLayerLimits limits;
    limits.most_tokens = 200;
    limits.most_columns = 520;
    RandomLayer layer = random_layer(seed, limits);
    while (layer.config.numerics.combine_groups > kMostGroups) layer = random_layer(++seed, limits);
    Group group(group_options(options_, layer.ranks));
    cli::LayerRunner runner(group, layer.config, layer.data);
    runner.forward(resolve({}, Direction::kForward, layer.config.shape, layer.config.numerics, group.machine()));
    const cli::LayerResult got = runner.result();
    reference::LayerInput input;
    input.shape = layer.data.shape;
    input.tokens = layer.data.all_tokens();
    input.x = layer.data.x.data();
    input.ids = layer.data.ids.data();
    input.probs = layer.data.probs.data();
    input.w1 = layer.data.w1.data();
    input.w2 = layer.data.w2.data();
    reference::EngineOutput output;
    output.y = got.y.data();
    output.z = got.z.data();
    const reference::CheckReport report = reference::check(input, output);
    std::string detail = layer.description;
    for (const auto& [name, comparison] : report.tensors) detail += fmt::format(" {} {:.2e}", name, comparison.error);
    results_.record("reference", report.passed(), detail);
  }

  // A rank that never launches: the others' waits run out, the group recovers and gives the right bytes again.
  void silent_rank() {
    RandomLayerLimits limits;
    limits.ranks = {2};
    uint64_t seed = 1;
    RandomLayer layer = random_layer(seed, limits);
    while (layer.data.tokens[0] == 0 || layer.data.tokens[1] == 0 ||
           layer.config.numerics.combine_groups > kMostGroups) {
      layer = random_layer(++seed, limits);
    }
    const ScopedDevice scope(0);
    const cli::LayerResult expected = naive_layer(kernels_, layer.config, layer.data);
    GroupOptions given = group_options(options_, 2);
    given.devices = {0};
    given.timeout_seconds = 0.05;
    Group group(given);
    auto& engine = dynamic_cast<CudaEngine&>(group.implementation());
    cli::LayerRunner runner(group, layer.config, layer.data);
    const Schedule schedule =
        resolve({}, Direction::kForward, layer.config.shape, layer.config.numerics, group.machine());
    runner.forward(schedule);
    engine.leave_out(1);
    expect_timeout(
        "the silent rank is reported", [&] { runner.forward(schedule); }, "rank 1 to arrive");
    expect_timeout(
        "further calls are refused", [&] { runner.forward(schedule); }, "recover()");
    engine.leave_out(0);
    group.recover();
    runner.forward(schedule);
    const std::string text = difference(runner.result(), expected);
    results_.record("after recover()", text.empty(), text);
  }

 private:
  template <typename Call>
  void expect_timeout(const char* name, Call&& call, const std::string& part) {
    std::string text = "nothing was thrown";
    bool good = false;
    try {
      call();
    } catch (const Error& error) {
      text = error.what();
      good = error.status() == Status::kTimeout && text.find(part) != std::string::npos;
    }
    results_.record(name, good, text);
  }

  // By need, or room for whatever the routing is, so that the host learns no counts.
  static Capacity random_capacity(const cli::LayerData& data, int ranks, Random& random) {
    if (random.one_in(2)) return {};
    return {round_up(data.all_tokens() * data.shape.topk, kRowAlignment) + data.shape.experts / ranks * kRowAlignment};
  }

  void run_case(const char* name, const RandomLayer& layer, const cli::LayerData& data, int ranks,
                const cli::LayerResult& expected, Random& random) {
    std::string text, schedule_text;
    GroupOptions given = group_options(options_, ranks);
    try {
      const int most = Group(given).workers();
      given.workers = random.one_in(2) ? most : static_cast<int>(2 * random.between(1, most / 2));
      given.disturbance.shuffle_seed = 1;  // poisons memory
      Group group(given);
      cli::LayerRunner runner(group, layer.config, data, random_capacity(data, ranks, random));
      const Schedule schedule = random_schedule(options_, layer.config, group, runner.placement(), random);
      schedule_text = fmt::format("workers {} {}", given.workers, to_text(schedule));
      for (int turn = 0; turn < options_.repeat && text.empty(); ++turn) {
        runner.forward(schedule);
        cli::LayerResult got = runner.result();
        text = difference(got, expected);
        got.y = expected.y;
        if (!text.empty()) text += "; " + difference(got, expected);
      }
    } catch (const std::exception& error) {
      text = error.what();
    }
    results_.record(fmt::format("{} on {} ranks", name, ranks), text.empty(),
                    fmt::format("{} | {} | {}", text, layer.description, schedule_text));
  }

  const Options& options_;
  Results& results_;
  Kernels kernels_;
};

// Tails that models have: 2880, 1408 and 1856 columns.
void wide_cases(LayerTests& tests, uint64_t first, int cases) {
  RandomLayerLimits limits;
  limits.most_local_experts = 2;
  limits.most_tokens = 400;
  limits.columns = {{2880, 1408}, {1408, 2880}, {1856, 1408}, {2048, 768}};
  for (int i = 0; i < cases; ++i) tests.random_case(first + static_cast<uint64_t>(i), limits, "wide");
}

int run(int argc, char** argv) {
  Results results;
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--verbose") results.verbose = true;
    if (name == "--cases") options.cases = std::atoi(value().c_str());
    if (name == "--first") options.first = std::strtoull(value().c_str(), nullptr, 10);
    if (name == "--repeat") options.repeat = std::atoi(value().c_str());
    if (name == "--devices") options.devices = std::atoi(value().c_str());
    if (name == "--tiles") options.tiles = split(value(), ',');
    if (name == "--fixed") options.fixed = value();
    if (name == "--only") options.only = value();
  }
  const std::string path = __FILE__;
  const char* const folder = std::getenv("UNIEP_TEST_KERNELS");
  LayerTests tests(options, results, folder != nullptr ? folder : path.substr(0, path.rfind('/')));
  const auto wanted = [&](const char* name) { return options.only.empty() || options.only == name; };
  RandomLayerLimits limits;
  limits.most_local_experts = 8;
  limits.most_tokens = 300;
  limits.most_columns = 640;
  if (wanted("random")) {
    for (int i = 0; i < options.cases; ++i) {
      tests.random_case(options.first + static_cast<uint64_t>(i), limits, "random");
    }
  }
  if (wanted("wide")) wide_cases(tests, options.first, std::max(1, options.cases / 10));
  if (wanted("reference")) tests.against_reference(options.first);
  if (wanted("silent")) tests.silent_rank();
  std::printf("layer tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
