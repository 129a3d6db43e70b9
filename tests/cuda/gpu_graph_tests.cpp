// Layers in CUDA graphs, byte by byte against the naive oracle: a small one that is replayed after a large call has
// taken more memory (a), many sizes side by side (b), a placement made before the capture (c), a capture that would
// need more memory (d), whole training steps (e), the same with dense routing (f), replays whose routing does not fit
// (g), and random layers. Usage: gpu_graph_tests [--only a,b,c,d,e,f,g,random] [--replays N] [--processes] [--verbose]
// On GPU 0 with 1 and 4 virtual ranks; where there are two GPUs on both in one process; with --processes a process a
// GPU, too. --part P: this process is a rank of those that this program starts. Exit status 77 without a Hopper GPU.
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <optional>

#include "cli/rank_launcher.h"
#include "comm/bootstrap.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/engine.h"
#include "tests/cuda/device_backward.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::Random;
using uniep::test::random_layer;
using uniep::test::RandomLayer;
using uniep::test::RandomLayerLimits;

constexpr int64_t kSmall = 128, kLarge = 4096;
constexpr int kNewInputsEvery = 50;
constexpr int64_t kMaxGroups = 32;  // that the engine sums

struct Options {
  int replays = 1000;
  std::vector<std::string> only;
  bool processes = false;
  bool part = false;
  bool verbose = false;

  bool wants(const std::string& name) const {
    return only.empty() || std::find(only.begin(), only.end(), name) != only.end();
  }
};

LayerConfig config_of(int64_t hidden, int64_t intermediate) {
  LayerConfig config;
  config.shape = {.hidden = hidden, .intermediate = intermediate, .experts = 8, .topk = 2};
  return config;
}

// (a) Two graphs of a small layer, one with x in a symmetric buffer. A large call in between makes symmetric memory,
// counters and workspaces grow.
void small_graph_after_large_call(DeviceLayer& layer, const Options& options) {
  struct Captured {
    CallArrays arrays;
    std::optional<CapturedCalls> calls;
    cli::LayerData data;
  };
  Captured graphs[2];
  std::vector<DeviceLayer::Called> kept;
  for (Captured& own : graphs) {
    own.arrays = layer.arrays(layer.tokens(kSmall), &own == &graphs[1]);
    own.data = layer.batch(own.arrays.tokens);
    layer.upload(own.arrays, own.data);
    layer.call(own.arrays, own.arrays.capacity);
    layer.expect("a: before the capture", own.arrays, own.data);
    own.calls.emplace(layer.capture([&] { kept.push_back(layer.call(own.arrays, own.arrays.capacity)); }));
  }
  const CallArrays large = layer.arrays(layer.tokens(kLarge));
  const cli::LayerData of_large = layer.batch(large.tokens);
  const auto call_large = [&](const std::string& name) {
    layer.upload(large, of_large);
    layer.call(large);
    layer.expect(name, large, of_large);
  };
  call_large("a: the large call");
  for (int i = 0; i < options.replays; ++i) {
    Captured& own = graphs[i / kNewInputsEvery % 2];
    const bool is_new = i % kNewInputsEvery == 0;
    const bool compared = is_new || i % kNewInputsEvery == kNewInputsEvery - 1 || i + 1 == options.replays;
    if (is_new) {
      own.data = layer.batch(own.arrays.tokens);
      layer.upload(own.arrays, own.data);
    } else if (compared) {
      layer.poison(own.arrays);
    }
    layer.replay(*own.calls);
    if (compared) layer.expect("a: replay " + std::to_string(i), own.arrays, own.data);
  }
  call_large("a: the large call after the replays");

  Captured& own = graphs[0];
  cli::LayerData illegal = own.data;
  illegal.ids.front() = static_cast<int32_t>(illegal.shape.experts);
  layer.upload(own.arrays, illegal);
  layer.replay(*own.calls);
  layer.synchronize();
  layer.expect_error("a: a replay with an illegal routing", Status::kInvalidArgument, {"token 0, slot 0 holds"},
                     [&] { layer.call(large); });
  constexpr int kUnderWay = 20;
  for (int i = 0; i < kUnderWay; ++i) layer.replay(*own.calls);
  layer.expect_error("a: such replays under way", Status::kInvalidArgument, {"token 0, slot 0 holds"},
                     [&] { layer.group().synchronize(); });
  own.data = layer.batch(own.arrays.tokens);
  layer.upload(own.arrays, own.data);
  layer.replay(*own.calls);
  layer.expect("a: a replay after it", own.arrays, own.data);
  call_large("a: the large call after it");
}

// (b) Graphs of 1, 2, 4, ..., 256 tokens side by side, every second of them with x in a symmetric buffer. Of half of
// them nobody keeps the Placement and the Saved.
void many_graphs(DeviceLayer& layer, const Options&) {
  constexpr int64_t kMax = 256;
  constexpr int kRounds = 200;
  struct Captured {
    CallArrays arrays;
    CapturedCalls calls;
  };
  for (const bool in_buffer : {false, true}) {
    const CallArrays first = layer.arrays(layer.tokens(kMax), in_buffer);
    const cli::LayerData data = layer.batch(first.tokens);
    layer.upload(first, data);
    layer.call(first, first.capacity);
    layer.expect("b: before the captures", first, data);
  }
  std::vector<Captured> graphs;
  std::vector<DeviceLayer::Called> kept;
  for (int64_t tokens = 1; tokens <= kMax; tokens *= 2) {
    CallArrays arrays = layer.arrays(layer.tokens(tokens), graphs.size() % 2 == 1);
    layer.upload(arrays, layer.batch(arrays.tokens));
    CapturedCalls calls = layer.capture([&] { kept.push_back(layer.call(arrays, arrays.capacity)); });
    if (graphs.size() % 4 < 2) kept.pop_back();
    graphs.push_back({std::move(arrays), std::move(calls)});
  }
  Random random(17);
  std::deque<DeviceLayer::Called> recent;  // of eager calls
  for (int round = 0; round < kRounds; ++round) {
    const Captured& own = graphs[random.next() % graphs.size()];
    const cli::LayerData data = layer.batch(own.arrays.tokens);
    layer.upload(own.arrays, data);
    std::optional<CallArrays> eager;
    cli::LayerData of_eager;
    if (random.one_in(2)) {
      eager.emplace(layer.arrays(layer.tokens(random.between(1, random.one_in(8) ? 1000 : kMax))));
      of_eager = layer.batch(eager->tokens);
      layer.upload(*eager, of_eager);
      recent.push_back(layer.call(*eager, random.one_in(2) ? Capacity{} : eager->capacity));
      if (recent.size() > 3) recent.pop_front();
    }
    layer.replay(own.calls);
    const std::string name = "b: round " + std::to_string(round);
    if (eager) layer.expect(name + ", eager", *eager, of_eager);
    layer.expect(name + ", replay of " + std::to_string(own.arrays.capacity.tokens) + " tokens", own.arrays, data);
  }
}

// (c) Two placements by need that were made before the capture. Their Programs' tables are made beside it, the second
// one's when the first call has given its memory back.
void placements_before_capture(DeviceLayer& layer, const Options&) {
  constexpr int kCalls = 50, kReplays = 20;
  constexpr int64_t kTokens[] = {1, 64};
  const CallArrays largest = layer.arrays(layer.tokens(kLarge / 8));
  const cli::LayerData of_largest = layer.batch(largest.tokens);
  layer.upload(largest, of_largest);
  layer.call(largest);
  layer.expect("c: before the capture", largest, of_largest);

  std::vector<CallArrays> arrays;
  std::vector<cli::LayerData> data;
  std::vector<Placement> placements;
  for (const int64_t tokens : kTokens) {
    arrays.push_back(layer.arrays(layer.tokens(tokens)));
    data.push_back(layer.batch(arrays.back().tokens));
    layer.upload(arrays.back(), data.back());
    placements.push_back(layer.place(arrays.back()));
  }
  layer.synchronize();
  const CapturedCalls calls = layer.capture([&] {
    for (std::size_t i = 0; i < arrays.size(); ++i) layer.forward(arrays[i], placements[i]);
  });
  Random random(23);
  std::deque<DeviceLayer::Called> recent;
  for (int i = 0; i < kCalls; ++i) {
    const CallArrays eager = layer.arrays(layer.tokens(random.between(1, kTokens[1])));
    const cli::LayerData of_eager = layer.batch(eager.tokens);
    layer.upload(eager, of_eager);
    recent.push_back(layer.call(eager));
    if (recent.size() > 3) recent.pop_front();
    layer.expect("c: call " + std::to_string(i), eager, of_eager);
  }
  for (int i = 0; i < kReplays; ++i) {
    for (std::size_t of = 0; of < arrays.size(); ++of) {
      data[of] = layer.with_other_x(data[of]);
      layer.upload(arrays[of], data[of]);
    }
    layer.replay(calls);
    for (std::size_t of = 0; of < arrays.size(); ++of) {
      layer.expect("c: replay " + std::to_string(i) + ", call " + std::to_string(of), arrays[of], data[of]);
    }
  }
}

// (d) Symmetric memory can not grow in a capture.
void growth_in_capture(DeviceLayer& layer, const Options&) {
  const CallArrays small = layer.arrays(layer.tokens(8)), large = layer.arrays(layer.tokens(kLarge));
  const cli::LayerData of_small = layer.batch(small.tokens), of_large = layer.batch(large.tokens);
  const auto call = [&](const std::string& name, const CallArrays& arrays, const cli::LayerData& data) {
    layer.upload(arrays, data);
    layer.call(arrays, arrays.capacity);
    layer.expect(name, arrays, data);
  };
  call("d: a small call", small, of_small);
  layer.begin_capture();
  layer.expect_error("d: growth in a capture", Status::kInvalidArgument, {"make one call of this size first"},
                     [&] { layer.call(large, large.capacity); });
  GraphFunctions().destroy(layer.end_capture());
  call("d: a small call after it", small, of_small);
  call("d: the large call", large, of_large);
  const CapturedCalls captured = layer.capture([&] { layer.call(large, large.capacity); });
  const cli::LayerData other = layer.batch(large.tokens);
  layer.upload(large, other);
  layer.replay(captured);
  layer.expect("d: a replay of the large call", large, other);
}

// (e) place, forward, backward and weight gradients in one graph; in all of them new routings at every replay, and the
// same calls uncaptured. Of half of the graphs nobody keeps the Placement, the Saved and the work.
void whole_steps(DeviceLayer& layer, const Options&) {
  constexpr int kReplays = 20, kGrowth = 10;
  constexpr WeightGradientTime kNow = WeightGradientTime::kNow, kLater = WeightGradientTime::kLater,
                               kNone = WeightGradientTime::kNone;
  const struct {
    const char *name, *schedule;
    MemoryOptions use;
    GradientCall call;
    bool in_buffer;
  } steps[] = {
      {"one launch a stage", "fusion=none", {kNow, false}, {}, false},
      {"now, after", "fusion=pairs,backward.wgrad=after", {kNow, false}, {}, true},
      {"now, fill", "fusion=pairs,backward.wgrad=fill", {kNow, true}, {}, false},
      {"now, mixed", "backward.wgrad=mixed", {kNow, true}, {}, false},
      {"now, redispatch", "fusion=pairs,backward.wgrad=fill,save.xg=redispatch", {kNow, false}, {}, true},
      {"now, FC1 again", "save.z=recompute", {kNow, false}, {}, false},
      {"now, its dispatch and FC1 again", "save.xg=redispatch,save.z=recompute", {kNow, true}, {}, true},
      {"later", "auto", {kLater, false}, {}, false},
      {"later, last use, on another stream", "auto", {kLater, true}, {.sms = 8, .aside = true}, false},
      {"later, redispatch, on another stream", "save.xg=redispatch", {kLater, false}, {.aside = true}, true},
      {"none", "auto", {kNone, true}, {}, false},
  };
  struct Captured {
    CallArrays arrays;
    BackwardArrays back;
    std::optional<CapturedCalls> calls;
  };
  DeviceBackward backward(layer);
  const GradientArrays gradients = backward.gradients();
  std::vector<DeviceLayer::Called> kept;
  std::vector<PendingWeightGradients> works;
  const auto call = [&](const auto& step, const CallArrays& arrays, const BackwardArrays& back) {
    kept.push_back(layer.call(arrays, arrays.capacity));
    works.push_back(backward.backward(arrays, back, kept.back().saved,
                                      step.use.weight_gradients == kNow ? &gradients : nullptr, step.use));
    if (step.use.weight_gradients == kLater) backward.make(works.back(), gradients, step.call);
    if (step.call.aside) backward.join_aside();
  };
  const auto drop = [&] {
    kept.pop_back();
    works.pop_back();
  };
  const auto with_new_batch = [&](const auto& step, const std::string& name, const CallArrays& arrays,
                                  const BackwardArrays& back, const std::function<void()>& run) {
    const cli::LayerData data = layer.with_dy(layer.batch(arrays.tokens));
    layer.upload(arrays, data);
    backward.upload(back, data);
    backward.start(gradients);
    run();
    const cli::LayerResult expected = backward.oracle(data);
    backward.expect(name, back, arrays, expected);
    backward.expect(name, gradients, step.use.weight_gradients == kNone ? backward.started() : expected);
  };
  std::vector<Captured> graphs;
  for (const auto& step : steps) {
    backward.use_schedule(PartialSchedule::parse(step.schedule));
    Captured& own = graphs.emplace_back();
    own.arrays = layer.arrays(layer.tokens(kSmall), step.in_buffer);
    own.back = backward.arrays(own.arrays.tokens);
    with_new_batch(step, std::string("e: before the capture, ") + step.name, own.arrays, own.back, [&] {
      call(step, own.arrays, own.back);
      drop();
    });
    own.calls.emplace(layer.capture([&] { call(step, own.arrays, own.back); }));
    if (graphs.size() % 2 == 0) drop();
  }
  const CallArrays large = layer.arrays(layer.tokens(kLarge / 4));
  const BackwardArrays back_of_large = backward.arrays(large.tokens);
  int replays = 0, eager = 0;
  for (int i = 0; i < kReplays; ++i) {
    for (std::size_t of = 0; of < graphs.size(); ++of) {
      const auto& step = steps[of];
      const Captured& own = graphs[of];
      backward.use_schedule(PartialSchedule::parse(step.schedule));
      const std::string name = ", round " + std::to_string(i) + ", " + step.name;
      const bool grows = i == kGrowth && of == 0;
      if (i % 4 == 0 || grows) {
        const CallArrays& arrays = grows ? large : own.arrays;
        const BackwardArrays& back = grows ? back_of_large : own.back;
        with_new_batch(step, "e: uncaptured" + name, arrays, back, [&] {
          call(step, arrays, back);
          drop();
        });
        ++eager;
      }
      with_new_batch(step, "e: replay" + name, own.arrays, own.back, [&] { layer.replay(*own.calls); });
      ++replays;
    }
  }
  std::printf("e: %zu graphs, %d replays and %d uncaptured steps between them\n", graphs.size(), replays, eager);
}

// (f) Whole steps with maps of experts; and a map with too many, which the devices notice.
void dense_steps(DeviceLayer& layer, const Options& options) {
  layer.give_maps();
  const CallArrays arrays = layer.arrays(layer.tokens(kSmall));
  layer.upload(arrays, layer.batch(arrays.tokens));
  if (layer.rank_of(0) == 0) {
    const ScopedDevice scope(layer.device_of(0));
    check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(arrays.local[0].ids.data()), 1,
                                   static_cast<std::size_t>(layer.config().shape.experts), layer.stream_of(0)),
          "filling a map");
  }
  layer.expect_error("f: a map with too many experts is named", Status::kInvalidArgument,
                     {"routing_map: rank 0, token 0 has 8 experts", "topk, 2"}, [&] { layer.place(arrays); });
  whole_steps(layer, options);
}

void random_graph(DeviceLayer& layer, int64_t tokens, const std::string& description) {
  const CallArrays arrays = layer.arrays(layer.tokens(tokens));
  cli::LayerData data = layer.batch(arrays.tokens);
  layer.upload(arrays, data);
  layer.call(arrays, arrays.capacity);
  layer.expect("random: before the capture: " + description, arrays, data);
  const CapturedCalls captured = layer.capture([&] { layer.call(arrays, arrays.capacity); });
  for (int i = 0; i < 20; ++i) {
    data = layer.batch(arrays.tokens);
    layer.upload(arrays, data);
    layer.replay(captured);
    layer.expect("random: replay " + std::to_string(i) + ": " + description, arrays, data);
  }
}

// (g) Replays whose routing does not fit the capacity, or is not legal, among others: y is NaN, check() tells without a
// wait, and the next replays are right.
void replays_that_do_not_fit(DeviceLayer& layer, const Options& options) {
  const CallArrays arrays = layer.arrays(layer.tokens(3 * kSmall));
  const LayerShape& shape = layer.config().shape;
  // All tokens' experts are the first two, or all experts; which of them takes more rows follows from the ranks.
  cli::LayerData few = layer.batch(arrays.tokens), all = layer.batch(arrays.tokens);
  for (std::size_t i = 0; i < few.ids.size(); ++i) few.ids[i] = static_cast<int32_t>(i % 2);
  for (std::size_t i = 0; i < all.ids.size(); ++i)
    all.ids[i] = static_cast<int32_t>(i % static_cast<std::size_t>(shape.experts));
  const auto rows_of = [&](const cli::LayerData& data) {
    layer.upload(arrays, data);
    const Placement placement = layer.place(arrays);
    int64_t most = 0;
    for (int rank = 0; rank < layer.group().ranks(); ++rank) most = std::max(most, placement.padded_rows(rank));
    return most;
  };
  const int64_t of_few = rows_of(few), of_all = rows_of(all);
  layer.results().record("g: one routing needs more rows", of_few != of_all);
  const cli::LayerData& fits = of_few < of_all ? few : all;
  const cli::LayerData& overflows = of_few < of_all ? all : few;
  cli::LayerData illegal = fits;
  illegal.ids.front() = static_cast<int32_t>(shape.experts);
  const Capacity capacity{std::min(of_few, of_all), arrays.capacity.tokens};
  std::vector<DeviceLayer::Called> kept;
  layer.upload(arrays, fits);
  kept.push_back(layer.call(arrays, capacity));
  layer.expect("g: before the capture", arrays, fits);
  const CapturedCalls captured = layer.capture([&] { kept.push_back(layer.call(arrays, capacity)); });
  const auto replay = [&](const cli::LayerData& data) {
    layer.upload(arrays, data);
    layer.replay(captured);
  };
  for (int i = 0; i < std::min(options.replays, 50); ++i) {
    replay(fits);
    layer.expect("g: a replay that fits", arrays, fits);
    layer.group().check();
    const bool is_illegal = i % 2 == 1;
    replay(is_illegal ? illegal : overflows);
    layer.synchronize();
    layer.expect_nan(is_illegal ? "g: a replay of an illegal routing" : "g: a replay that does not fit", arrays);
    layer.expect_error("g: check() tells", is_illegal ? Status::kInvalidArgument : Status::kOverflow, {},
                       [&] { layer.group().check(); });
  }
  replay(fits);
  layer.expect("g: a replay after them", arrays, fits);
}

void run_cases(const GroupOptions& group, const std::string& where, const Options& options, Results& results) {
  using Case = void (*)(DeviceLayer&, const Options&);
  const struct {
    const char* name;
    Case run;
    int64_t hidden, intermediate;
    WeightGradient weight_gradient = WeightGradient::kBFloat16;
  } cases[] = {{"a", small_graph_after_large_call, 256, 128},
               {"b", many_graphs, 256, 128},
               {"c", placements_before_capture, 128, 64},
               {"d", growth_in_capture, 256, 128},
               {"e", whole_steps, 256, 128},
               {"e", whole_steps, 256, 128, WeightGradient::kMainGrad},
               {"f", dense_steps, 256, 128},
               {"g", replays_that_do_not_fit, 256, 128}};
  for (const auto& own : cases) {
    if (!options.wants(own.name)) continue;
    const int passed = results.passed, failed = results.failed;
    LayerConfig config = config_of(own.hidden, own.intermediate);
    config.numerics.weight_gradient = own.weight_gradient;
    GroupOptions given = group;
    given.nan_on_overflow = own.run == replays_that_do_not_fit;
    DeviceLayer layer(given, config, results, kernel_folder());
    own.run(layer, options);
    // Where others have ranks: until none of them needs this one's memory.
    layer.synchronize();
    layer.group().implementation().meet();
    std::printf("%s, %s: %d passed, %d failed\n", own.name, where.c_str(), results.passed - passed,
                results.failed - failed);
    std::fflush(stdout);
  }
}

void run_random(Results& results) {
  for (const int ranks : {1, 4, 8}) {
    RandomLayerLimits limits;
    limits.ranks = {ranks};
    limits.most_columns = 640;
    limits.most_local_experts = 8;
    for (uint64_t seed = 1; seed <= 2; ++seed) {
      const RandomLayer drawn = random_layer(static_cast<uint64_t>(ranks) * 100 + seed, limits);
      if (drawn.config.numerics.combine_groups > kMaxGroups) continue;
      DeviceLayer layer(group_options(ranks, {0}), drawn.config, results, kernel_folder());
      random_graph(layer, 200, drawn.description);
    }
  }
}

// Each of two processes does all cases on its own GPU.
void launch(const std::vector<std::string>& given, Results& results) {
  std::vector<std::string> arguments = given;
  arguments.emplace_back("--part");
  std::string text;
  try {
    cli::launch_ranks({"/proc/self/exe", arguments}, "gpu_graph_tests", 2);
  } catch (const Error& error) {
    text = error.what();
  }
  results.record("a process a GPU", text.empty(), text);
}

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--verbose") options.verbose = true;
    if (name == "--processes") options.processes = true;
    if (name == "--part") options.part = true;
    if (name == "--replays") options.replays = std::atoi(value().c_str());
    if (name == "--only") options.only = split(value(), ',');
  }
  return options;
}

int run(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  Results results;
  results.verbose = options.verbose;
  if (options.part) {
    const RankEnvironment environment = required_rank_environment();
    run_cases(process_options(environment.ranks), "rank " + std::to_string(environment.rank), options, results);
    return results.failed == 0 ? 0 : 1;
  }
  const bool two_gpus = device_count() >= 2;
  // First: the processes' kernels find the whole GPUs free.
  if (options.processes && two_gpus) launch(std::vector<std::string>(argv + 1, argv + argc), results);
  if (options.processes && !two_gpus) std::printf("a process a GPU: skipped, there is one GPU\n");
  for (const int ranks : {1, 4}) {
    run_cases(group_options(ranks, {0}), std::to_string(ranks) + " ranks on one GPU", options, results);
  }
  if (two_gpus) run_cases(group_options(2, {0, 1}), "two GPUs in one process", options, results);
  if (options.wants("random")) run_random(results);
  std::printf("graph tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 && results.passed > 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
