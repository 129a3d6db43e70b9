// The layer of the cuda engine: y and z, and dx, dprobs, dw1 and dw2, against the naive oracle, byte by byte, over
// random layers, routings, ranks and Schedules, in poisoned memory; oracle and layer against a float64 reference; a
// rank that stays silent, and recovery. Usage: gpu_layer_tests [--direction forward|backward|both] [--cases N] [--first
// SEED] [--repeat N] [--devices D]
//                        [--launch threads|random] [--tiles N:C[,N:C...] | --any-kernel] [--fixed key=value,...]
//                        [--fixed-backward key=value,...] [--compile THREADS] [--branches] [--verbose]
//                        [--only random|wide|activations|silent|reference|oracle] [--disturb SEED]
// --direction (default both): backward leaves y and z alone, forward the gradients.
// D: how many GPUs the ranks are dealt over (default 1: virtual ranks). --launch random: cases of up to D ranks run in
// one process or in a process a rank, as their seed says. --tiles: tile.n and tile.cluster that are drawn from.
// --any-kernel: the fields that are compiled into kernels are drawn, too, where there is a choice; then it is quicker
// to compile them before: --compile puts the cases' kernels into the cache, needs no GPU, and ends. --part P: this
// process is a rank of those that this program starts for part P of the cases in processes. --branches: prints how
// often the cases take each of the engine's branches, needs no GPU, and ends; with 60 cases and more a branch that none
// takes is a failure. --disturb: with delays in the kernels (disturbed_calls.h); SEED has others with ranks in one
// process. Exit status 77 without a Hopper GPU.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>

#include "cli/rank_launcher.h"
#include "comm/bootstrap.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "reference/check.h"
#include "support/disturb.h"
#include "tests/cuda/disturbed_calls.h"
#include "tests/cuda/layer_cases.h"
#include "tests/cuda/layer_oracle.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::difference;
using uniep::test::disturb;
using uniep::test::on_one_rank;
using uniep::test::random_layer;
using uniep::test::RandomLayer;
using uniep::test::RandomLayerLimits;

struct Options {
  uint64_t first = 1;
  int cases = 20;
  int repeat = 1;
  int compile_threads = 0;
  std::optional<int> part;
  CaseOptions of_cases;
  std::string only;
  bool branches = false;
  bool verbose = false;
  std::optional<uint64_t> disturb;
};

// Seeds with the limits of their layers.
struct Seeds {
  const char* name;
  uint64_t first;
  int count;
  RandomLayerLimits limits;
};

std::vector<Seeds> seeds_of(const Options& options) {
  std::vector<Seeds> seeds;
  const auto wanted = [&](const char* name) { return options.only.empty() || options.only == name; };
  RandomLayerLimits limits;
  limits.most_local_experts = 8;
  limits.most_tokens = 300;
  limits.most_columns = 640;
  if (wanted("random")) seeds.push_back({"random", options.first, options.cases, limits});
  constexpr uint64_t kActivationSeeds = 2'000'000'000;
  RandomLayerLimits activations = limits;
  activations.activations = kActivations;
  activations.most_local_experts = 4;
  activations.most_tokens = 200;
  if (wanted("activations")) {
    const int forms = uniep::test::kFormsOfActivation * static_cast<int>(kActivations.size());
    seeds.push_back({"activations", kActivationSeeds + options.first,
                     options.only == "activations" ? options.cases : std::max(forms, options.cases / 5), activations});
  }
  constexpr uint64_t kWideSeeds = 1'000'000'000;
  RandomLayerLimits wide;  // tails that models have: 2880, 1408 and 1856 columns
  wide.most_local_experts = 2;
  wide.most_tokens = 400;
  wide.columns = {{2880, 1408}, {1408, 2880}, {1856, 1408}, {2048, 768}, {1408, 1856}, {768, 2048}};
  if (wanted("wide")) seeds.push_back({"wide", kWideSeeds + options.first, std::max(1, options.cases / 10), wide});
  return seeds;
}

// Calls back with every case of the seeds and its layer; of one part only, if it is given.
template <typename Call>
void each_case(const Seeds& seeds, const CaseOptions& options, std::optional<int> part, Call&& call) {
  for (uint64_t seed = seeds.first; seed < seeds.first + static_cast<uint64_t>(seeds.count); ++seed) {
    if (part && *part != part_of(seed)) continue;
    const LayerCases drawn = draw_cases(seed, seeds.limits, options);
    for (const LayerCase& layer_case : drawn.cases) call(drawn.layer, layer_case);
  }
}

GroupOptions group_options(const CaseOptions& options, int ranks) {
  GroupOptions group;
  group.engine = EngineKind::kCuda;
  group.ranks = ranks;
  for (int device = 0; device < options.devices; ++device) group.devices.push_back(device);
  return group;
}

// Of a process a rank, in the environment that launch_ranks gives.
GroupOptions process_options(int ranks) {
  GroupOptions group;
  group.engine = EngineKind::kCuda;
  group.ranks = ranks;
  group.launch = uniep::Launch::kProcesses;
  return group;
}

Group poisoned_group(GroupOptions options, int workers) {
  options.workers = workers;
  Group group(options);
  disturb(group, {.shuffle_seed = 1});  // poisons memory
  return group;
}

// A layer of two ranks that wait for each other.
RandomLayer layer_of_two() {
  RandomLayerLimits limits;
  limits.ranks = {2};
  for (uint64_t seed = 1;; ++seed) {
    RandomLayer layer = random_layer(seed, limits);
    if (layer.data.tokens[0] > 0 && layer.data.tokens[1] > 0 && layer.config.numerics.combine_groups <= kMaxGroups) {
      return layer;
    }
  }
}

class LayerTests {
 public:
  LayerTests(const Options& options, Results& results, std::string folder)
      : options_(options), results_(results), kernels_(0, std::move(folder)) {}

  // The cases in one process.
  void run_local(const Seeds& seeds) {
    each_case(seeds, options_.of_cases, {}, [&](const RandomLayer& layer, const LayerCase& layer_case) {
      if (layer_case.launch != uniep::Launch::kThreads) return;
      try {
        Group group = poisoned_group(group_options(options_.of_cases, layer_case.ranks), layer_case.workers);
        run_case(seeds.name, layer, layer_case, group);
      } catch (const std::exception& error) {
        record(seeds.name, layer, layer_case, error.what());
      }
    });
  }

  // The cases in processes of this process's ranks and part, one Group for all of them; how many. An exception ends the
  // process, for the others would wait.
  int run_rank(const std::vector<Seeds>& all, const RankEnvironment& environment) {
    std::optional<Group> group;
    int cases = 0;
    for (const Seeds& seeds : all) {
      each_case(seeds, options_.of_cases, options_.part, [&](const RandomLayer& layer, const LayerCase& layer_case) {
        if (layer_case.launch != uniep::Launch::kProcesses || layer_case.ranks != environment.ranks) return;
        ++cases;
        try {
          if (!group) group.emplace(poisoned_group(process_options(environment.ranks), layer_case.workers));
          run_case(seeds.name, layer, layer_case, *group);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "rank %d: %s | %s | %s\n", environment.rank, error.what(), layer.description.c_str(),
                       to_text(layer_case).c_str());
          throw;
        }
      });
    }
    return cases;
  }

  // The mathematics, not only the bits.
  void against_reference(uint64_t seed, const ActivationForm& form = {}) {
    const RandomLayer layer = layer_for_reference(seed, form);
    Group group(group_options(options_.of_cases, layer.ranks));
    cli::LayerRunner runner(group, layer.config, layer.data, {.main_grad = no_main_grad});
    runner.forward(whole({}, Direction::kForward, layer, group));
    if (options_.of_cases.backward) runner.backward(backward_schedule("pairs", layer, group));
    check_result("reference, " + to_text(form), layer, runner.result());
  }

  // The oracle's, with and without rows.
  void oracle_against_reference(uint64_t seed, const ActivationForm& form = {}) {
    for (int i = 0; i < 3; ++i) {
      RandomLayer layer = layer_for_reference(seed + static_cast<uint64_t>(i), form);
      layer.config.numerics.weight_gradient = static_cast<WeightGradient>(i);
      const ScopedDevice scope(0);
      check_result("oracle, " + to_text(form), layer, naive_layer(kernels_, layer.config, layer.data, no_main_grad));
    }
  }

  // A rank that never launches: the others' waits run out, the group recovers and gives the right bytes again.
  void silent_rank() {
    const RandomLayer layer = layer_of_two();
    const ScopedDevice scope(0);
    const cli::LayerResult expected = naive_layer(kernels_, layer.config, layer.data);
    GroupOptions given = group_options(options_.of_cases, 2);
    given.devices = {0};
    given.timeout_seconds = 0.05;
    given.arrival_timeout_seconds = 0.25;
    Group group(given);
    auto& engine = dynamic_cast<CudaEngine&>(group.implementation());
    cli::LayerRunner runner(group, layer.config, layer.data);
    const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                           .shape = layer.config.shape,
                                           .numerics = layer.config.numerics,
                                           .machine = group.machine()});
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

  // The same in backward, after a forward that all ranks ran.
  void silent_rank_in_backward(const char* fusion) {
    const RandomLayer layer = layer_of_two();
    cli::LayerResult expected;
    {
      const ScopedDevice scope(0);
      expected = naive_layer(kernels_, layer.config, layer.data, case_main_grad);
    }
    GroupOptions given = group_options(options_.of_cases, 2);
    given.devices = {0};
    given.timeout_seconds = 0.05;
    given.arrival_timeout_seconds = 0.25;
    Group group(given);
    auto& engine = dynamic_cast<CudaEngine&>(group.implementation());
    cli::LayerRunner runner(group, layer.config, layer.data, {.main_grad = case_main_grad});
    const Schedule forward = whole({}, Direction::kForward, layer, group);
    const Schedule backward = backward_schedule(fusion, layer, group);
    runner.forward(forward);
    runner.backward(backward);
    engine.leave_out(1);
    expect_timeout(
        "the rank silent in backward is reported", [&] { runner.backward(backward); }, "rank 1 to arrive");
    engine.leave_out(0);
    group.recover();
    runner.forward(forward);
    runner.backward(backward);
    const std::string text = difference(runner.result(), expected);
    results_.record(fmt::format("backward with fusion={} after recover()", fusion), text.empty(), text);
  }

  // One of two processes ends without a word: the other's wait runs out, and its group goes without waiting for it.
  void ended_rank(int rank) {
    const RandomLayer layer = layer_of_two();
    GroupOptions given = process_options(2);
    given.timeout_seconds = 1.0;
    given.arrival_timeout_seconds = 2.0;
    Group group(given);
    cli::LayerRunner runner(group, layer.config, layer.data);
    const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                           .shape = layer.config.shape,
                                           .numerics = layer.config.numerics,
                                           .machine = group.machine()});
    runner.forward(schedule);
    if (rank == 1) std::_Exit(0);
    expect_timeout(
        "the rank that ended is reported", [&] { runner.forward(schedule); }, "rank 1");
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

  static float no_main_grad(uint64_t) { return 0.0f; }

  static Schedule whole(const PartialSchedule& given, Direction direction, const RandomLayer& layer,
                        const Group& group) {
    return resolve(given, {.direction = direction,
                           .shape = layer.config.shape,
                           .numerics = layer.config.numerics,
                           .machine = group.machine()});
  }
  static Schedule backward_schedule(const std::string& fusion, const RandomLayer& layer, const Group& group) {
    return whole(PartialSchedule::parse("fusion=" + fusion), Direction::kBackward, layer, group);
  }

  void check_result(const std::string& name, const RandomLayer& layer, const cli::LayerResult& got) {
    reference::LayerInput input;
    input.shape = layer.data.shape;
    input.numerics = layer.config.numerics;
    input.tokens = layer.data.all_tokens();
    input.x = layer.data.x.data();
    input.ids = layer.data.ids.data();
    input.probs = layer.data.probs.data();
    input.w1 = layer.data.w1.data();
    input.w2 = layer.data.w2.data();
    input.b1 = layer.data.b1.data();
    input.b2 = layer.data.b2.data();
    reference::EngineOutput output;
    output.y = got.y.data();
    output.z = got.z.data();
    const bool bf16 = layer.config.numerics.weight_gradient == WeightGradient::kBFloat16;
    if (!got.dprobs.empty()) {
      input.dy = layer.data.dy.data();
      output.dx = got.dx.data();
      output.dprobs = got.dprobs.data();
      output.weight_gradient = layer.config.numerics.weight_gradient;
      output.dw1 = bf16 ? static_cast<const void*>(got.dw1_bf16.data()) : got.dw1_fp32.data();
      output.dw2 = bf16 ? static_cast<const void*>(got.dw2_bf16.data()) : got.dw2_fp32.data();
      if (layer.config.numerics.bias) {
        output.db1 = bf16 ? static_cast<const void*>(got.db1_bf16.data()) : got.db1_fp32.data();
        output.db2 = bf16 ? static_cast<const void*>(got.db2_bf16.data()) : got.db2_fp32.data();
      }
    }
    const reference::CheckReport report = reference::check(input, output);
    std::string detail = layer.description;
    for (const auto& [tensor, comparison] : report.tensors) {
      detail += fmt::format(" {} {:.2e} {}", tensor, comparison.error, comparison.message);
    }
    results_.record(name, report.passed(), detail);
  }

  // Of every tensor that differs.
  static std::string differences(cli::LayerResult got, const cli::LayerResult& expected) {
    std::string text;
    const auto next = [&](auto... members) {
      const std::string before = difference(got, expected);
      ((got.*members = expected.*members), ...);
      if (before == difference(got, expected)) return;
      text += (text.empty() ? "" : "; ") + before;
    };
    using Result = cli::LayerResult;
    next(&Result::y);
    next(&Result::z);
    next(&Result::dx);
    next(&Result::dprobs);
    next(&Result::dw1_bf16, &Result::dw1_fp32);
    next(&Result::dw2_bf16, &Result::dw2_fp32);
    next(&Result::db1_bf16, &Result::db1_fp32);
    next(&Result::db2_bf16, &Result::db2_fp32);
    return text;
  }

  void record(const char* name, const RandomLayer& layer, const LayerCase& layer_case, const std::string& text) {
    results_.record(fmt::format("{} on {} ranks", name, layer_case.ranks), text.empty(),
                    fmt::format("{} | {} | {}", text, layer.description, to_text(layer_case)));
  }

  void run_case(const char* name, const RandomLayer& layer, const LayerCase& layer_case, Group& group) {
    const cli::LayerData data = layer_case.ranks == layer.ranks ? layer.data : on_one_rank(layer.data);
    const bool has_result = group.first_local_rank() == 0;
    cli::LayerResult expected;
    if (has_result) {
      const ScopedDevice scope(0);
      expected = naive_layer(kernels_, layer.config, data, layer_case.backward ? case_main_grad : nullptr);
    }
    cli::LayerRunner runner(group, layer.config, data,
                            {.capacity = layer_case.capacity,
                             .by_address = layer_case.by_address,
                             .apart = layer_case.apart,
                             .later = layer_case.later,
                             .dense = layer_case.dense,
                             .main_grad = case_main_grad});
    if (options_.disturb && group.local_ranks() == group.ranks()) {
      runner.forward(layer_case.schedule);  // from then on there are epochs
      disturb_calls(group, *options_.disturb + static_cast<uint64_t>(results_.passed));
    }
    std::string text;
    for (int turn = 0; turn < options_.repeat; ++turn) {
      runner.forward(layer_case.schedule);
      if (layer_case.backward) runner.backward(*layer_case.backward);
      if (layer_case.backward && layer_case.backward_twice) runner.backward(*layer_case.backward);
      cli::LayerResult got = runner.result();
      if (!has_result || !text.empty()) continue;
      if (!options_.of_cases.forward) got.y = expected.y;
      if (!options_.of_cases.forward) got.z = expected.z;
      text = differences(std::move(got), expected);
    }
    if (has_result) record(name, layer, layer_case, text);
  }

  const Options& options_;
  Results& results_;
  Kernels kernels_;
};

// Starts this program once for each rank, as part `part`. Whether all ended well.
bool launch(const std::string& name, int ranks, int part, std::vector<std::string> arguments, Results& results) {
  arguments.insert(arguments.end(), {"--part", std::to_string(part)});
  std::string text;
  try {
    cli::launch_ranks({"/proc/self/exe", std::move(arguments)}, "gpu_layer_tests", ranks);
  } catch (const Error& error) {
    text = error.what();
  }
  results.record(name, text.empty(), text);
  return text.empty();
}

// The cases in processes that passed.
int launch_all_ranks(const Options& options, const std::vector<Seeds>& all, const std::vector<std::string>& arguments,
                     Results& results) {
  if (!options.of_cases.random_launch) return 0;
  std::map<std::pair<int, int>, int> cases;  // by ranks and part
  for (const Seeds& seeds : all) {
    each_case(seeds, options.of_cases, {}, [&](const RandomLayer&, const LayerCase& layer_case) {
      if (layer_case.launch == uniep::Launch::kProcesses) ++cases[{layer_case.ranks, layer_case.part}];
    });
  }
  int passed = 0;
  for (const auto& [which, count] : cases) {
    const auto [ranks, part] = which;
    const std::string name = fmt::format("{} cases in processes, {} ranks, part {}", count, ranks, part);
    if (launch(name, ranks, part, arguments, results)) passed += count;
  }
  return passed;
}

// What a process does that was started for one part. Rank 0 has the results.
int run_part(const Options& options, const std::vector<Seeds>& all, LayerTests& tests, const Results& results) {
  const std::optional<RankEnvironment> environment = rank_environment();
  if (!environment) throw Error(Status::kInvalidArgument, "--part: this process is no rank (RANK is not set)");
  if (options.only == "silent") {
    tests.ended_rank(environment->rank);
  } else if (tests.run_rank(all, *environment) == 0) {
    throw Error(Status::kInternal, "no case of this part and number of ranks");
  }
  if (environment->rank == 0) {
    std::printf("layer tests in processes, %d ranks, part %d: %d passed, %d failed\n", environment->ranks,
                *options.part, results.passed, results.failed);
  }
  return results.failed == 0 ? 0 : 1;
}

// The forms of activations whose layers are compared with the float64 reference.
std::vector<ActivationForm> forms_of(const Options& options) {
  if (!options.only.empty() && options.only != "activations") return {};
  return activation_forms();
}

// The kernels of all cases, of the layers for the float64 reference, and the oracle's, into the cache.
void compile(const Options& options, const std::vector<Seeds>& all, const std::string& folder) {
  std::map<std::string, KernelRequest> requests;
  for (const KernelRequest& request : oracle_kernels(folder)) requests.emplace(request.description(), request);
  int cases = 0;
  for (const Seeds& seeds : all) {
    each_case(seeds, options.of_cases, {}, [&](const RandomLayer& layer, const LayerCase& layer_case) {
      ++cases;
      for (const KernelRequest& request : kernels_of(layer_case, layer.config)) {
        requests.emplace(request.description(), request);
      }
    });
  }
  for (const ActivationForm& form : forms_of(options)) {
    const RandomLayer layer = layer_for_reference(reference_seed(form, options.first), form);
    for (const KernelRequest& request : kernels_of(reference_case(layer, options.of_cases), layer.config)) {
      requests.emplace(request.description(), request);
    }
  }
  std::vector<KernelRequest> kernels;
  for (const auto& [description, request] : requests) kernels.push_back(request);
  std::printf("layer tests: %zu kernels of %d cases and of layers for the reference\n", kernels.size(), cases);
  std::fflush(stdout);
  compile_kernels(kernels, options.compile_threads);
}

// Empty, or the branches of the engine that no case took where there are cases enough for all of them.
std::string count_branches(const Options& options, const std::vector<Seeds>& all) {
  constexpr int kEnough = 60;
  Branches branches, of_activations;
  bool has_all_forms = false;
  for (const Seeds& seeds : all) {
    const std::size_t forms = uniep::test::kFormsOfActivation * seeds.limits.activations.size();
    has_all_forms |= forms > 0 && static_cast<std::size_t>(seeds.count) >= forms;
    each_case(seeds, options.of_cases, {}, [&](const RandomLayer& layer, const LayerCase& layer_case) {
      count_branches(branches, layer, layer_case, options.of_cases);
      if (forms == 0) return;
      uniep::test::count_activation(of_activations.forward, layer.config.numerics);
      if (layer_case.backward) uniep::test::count_activation(of_activations.backward, layer.config.numerics);
    });
  }
  of_activations.forward.print();
  for (const auto& [name, table] : {std::pair("forward", &branches.forward), {"backward", &branches.backward}}) {
    std::printf("%s\n", name);
    table->print();
  }
  const bool complete = options.cases >= kEnough && options.of_cases.fixed.empty() &&
                        options.of_cases.fixed_backward.empty() && (options.only.empty() || options.only == "random");
  std::vector<std::string> untaken;
  if (complete) untaken = untaken_branches(branches);
  if (has_all_forms) {
    for (std::string& branch : untaken_branches(of_activations)) untaken.push_back(std::move(branch));
  }
  return fmt::format("{}", fmt::join(untaken, "; "));
}

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--verbose") options.verbose = true;
    if (name == "--branches") options.branches = true;
    if (name == "--any-kernel") options.of_cases.any_kernel = true;
    if (name == "--cases") options.cases = std::atoi(value().c_str());
    if (name == "--first") options.first = std::strtoull(value().c_str(), nullptr, 10);
    if (name == "--repeat") options.repeat = std::atoi(value().c_str());
    if (name == "--devices") options.of_cases.devices = std::atoi(value().c_str());
    if (name == "--launch") options.of_cases.random_launch = value() == "random";
    if (name == "--tiles") options.of_cases.tiles = split(value(), ',');
    if (name == "--fixed") options.of_cases.fixed = value();
    if (name == "--fixed-backward") options.of_cases.fixed_backward = value();
    if (name == "--direction") {
      const std::string direction = value();
      options.of_cases.forward = direction != "backward";
      options.of_cases.backward = direction != "forward";
    }
    if (name == "--compile") options.compile_threads = std::max(1, std::atoi(value().c_str()));
    if (name == "--part") options.part = std::atoi(value().c_str());
    if (name == "--only") options.only = value();
    if (name == "--disturb") options.disturb = std::strtoull(value().c_str(), nullptr, 10);
  }
  return options;
}

int run(int argc, char** argv) {
  Options options = read_options(argc, argv);
  options.of_cases.processors = device_attribute(0, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  const std::vector<Seeds> all = seeds_of(options);
  Results results;
  results.verbose = options.verbose;
  LayerTests tests(options, results, kernel_folder());
  if (options.part) return run_part(options, all, tests, results);
  const auto wanted = [&](const char* name) { return options.only.empty() || options.only == name; };
  const int in_processes = launch_all_ranks(options, all, std::vector<std::string>(argv + 1, argv + argc), results);
  for (const Seeds& seeds : all) tests.run_local(seeds);
  if (wanted("reference")) tests.against_reference(options.first);
  if (wanted("oracle")) tests.oracle_against_reference(options.first);
  for (const ActivationForm& form : forms_of(options)) {
    const uint64_t seed = reference_seed(form, options.first);
    tests.against_reference(seed, form);
    tests.oracle_against_reference(seed, form);
  }
  if (wanted("silent")) tests.silent_rank();
  for (const char* const fusion : {"pairs", "layer"}) {
    if (wanted("silent") && options.of_cases.backward) tests.silent_rank_in_backward(fusion);
  }
  if (wanted("silent") && options.of_cases.random_launch && options.of_cases.devices > 1) {
    launch("a rank ends", 2, 0, {"--only", "silent"}, results);
  }
  const std::string untaken = count_branches(options, all);
  results.record("every branch of the engine was taken", untaken.empty(), untaken);
  std::printf("layer tests: %d passed, %d failed; %d cases in processes passed\n", results.passed, results.failed,
              in_processes);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  using namespace uniep::cuda::test;
  Options options = read_options(argc, argv);
  if (options.disturb) uniep::cuda::set_kernel_variant(disturbed_kernels());
  if (options.compile_threads == 0 && !options.branches) return run_on_hopper(run, argc, argv);
  try {
    if (options.branches) {
      const std::string untaken = count_branches(options, seeds_of(options));
      if (!untaken.empty()) std::printf("FAIL no case takes: %s\n", untaken.c_str());
      return untaken.empty() ? 0 : 1;
    }
    compile(options, seeds_of(options), kernel_folder());
    return 0;
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}
