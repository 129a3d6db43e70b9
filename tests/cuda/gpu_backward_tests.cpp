// Backward, its weight gradients now, later and never, byte by byte against the naive oracle. times: random cases of
// several outstanding works, with handles that go first, other streams and few SMs; sums: main_grad over eight
// micro-batches; addresses: more experts than a kernel has arguments for; aside: memory of a work whose gradients
// another stream still makes; release: the stream that memory goes back on; memory: what an allocator is asked for;
// silent: a rank that never comes; traffic: calls beside copies from and to the host. Usage: gpu_backward_tests [--only
// times,sums,addresses,aside,release,memory,silent,traffic] [--cases N] [--calls N]
//                           [--processes] [--branches] [--compile THREADS] [--verbose]
// On GPU 0 with 1 and 4 virtual ranks; where there are two GPUs on both in one process; with --processes a process a
// GPU, too (--part: one of those that this program starts). Without a GPU: --branches prints what the cases take,
// --compile puts most kernels into the cache. Exit status 77 without a Hopper GPU.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <thread>

#include "cli/rank_launcher.h"
#include "comm/bootstrap.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "tests/cuda/backward_batch.h"
#include "tests/cuda/backward_cases.h"
#include "tests/cuda/backward_memory.h"
#include "tests/cuda/layer_oracle.h"
#include "tests/cuda/traffic.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::BranchCounts;
using uniep::test::difference;
using uniep::test::Random;

constexpr uint64_t kFirstCase = 1;

struct Options {
  int cases = 60;
  int calls = 200;
  std::vector<std::string> only;
  int compile_threads = 0;
  bool processes = false;
  bool part = false;
  bool branches = false;
  bool verbose = false;

  bool wants(const std::string& name) const {
    return only.empty() || std::find(only.begin(), only.end(), name) != only.end();
  }
};

// ---- times

void make_as_planned(DeviceBackward& backward, const PendingWeightGradients& work, const GradientArrays& gradients,
                     const WorkPlan& plan, int workers) {
  const int sms = std::min(plan.sms, workers);
  const GradientCall both{true, true, sms, plan.aside}, first{true, false, sms, plan.aside},
      second{false, true, sms, plan.aside};
  switch (plan.parts) {
    case WorkPlan::Parts::kBoth:
      return backward.make(work, gradients, both);
    case WorkPlan::Parts::kFirstAlone:
      return backward.make(work, gradients, first);
    case WorkPlan::Parts::kFirstThenSecond:
      backward.make(work, gradients, first);
      return backward.make(work, gradients, second);
    case WorkPlan::Parts::kSecondThenFirst:
      backward.make(work, gradients, second);
      return backward.make(work, gradients, first);
  }
}

void run_case(DeviceLayer& layer, const BackwardCase& drawn, const std::string& name) {
  layer.use_schedule(PartialSchedule::parse(drawn.forward));
  DeviceBackward backward(layer, PartialSchedule::parse(drawn.schedule));
  std::vector<Batch> batches;
  std::vector<PendingWeightGradients> works;
  const GradientArrays gradients = backward.gradients(drawn.by_address);
  for (std::size_t i = 0; i < drawn.works.size(); ++i) {
    Batch& batch = batches.emplace_back(forward_batch(layer, backward, drawn.most_tokens, drawn.within));
    if (i == 0) {
      for (const char* const turn : {"now", "now again"}) {
        backward.upload(batch.back, batch.data);
        backward.start(gradients);
        backward.backward(batch.call, batch.back, batch.called.saved, &gradients);
        backward.expect(name + turn, batch.back, batch.call, batch.expected);
        backward.expect(name + turn, gradients, batch.expected);
      }
      backward.upload(batch.back, batch.data);
      backward.start(gradients);
      const PendingWeightGradients none = backward.backward(batch.call, batch.back, batch.called.saved,
                                                            drawn.none_gets_addresses ? &gradients : nullptr, {kNone});
      backward.expect(name + "none", batch.back, batch.call, batch.expected);
      backward.expect(name + "none leaves gradients alone", gradients, backward.started());
      layer.results().record(name + "none returns no work", none.empty());
      backward.upload(batch.back, batch.data);
    }
    works.push_back(backward.backward(batch.call, batch.back, batch.called.saved, nullptr, {kLater, drawn.last_use}));
    backward.expect(name + "later", batch.back, batch.call, batch.expected);
    if (drawn.drops_handles) batch.called = {};
  }
  // Another batch of this size, over all memory that was given back too early.
  const Batch other = forward_batch(layer, backward, drawn.most_tokens, drawn.within, false);
  const GradientArrays of_other = backward.gradients();
  backward.backward(other.call, other.back, other.called.saved, &of_other);
  for (const int which : drawn.order) {
    const auto i = static_cast<std::size_t>(which);
    backward.start(gradients);
    make_as_planned(backward, works[i], gradients, drawn.works[i], layer.group().workers());
    const bool alone = drawn.works[i].parts == WorkPlan::Parts::kFirstAlone;
    backward.expect(name + "work " + std::to_string(which), gradients, batches[i].expected, true, !alone);
    works[i] = {};
  }
}

void run_times(const Where& where, const Options& options, Results& results) {
  for (int i = 0; i < options.cases; ++i) {
    const BackwardCase drawn =
        draw_backward_case(kFirstCase + static_cast<uint64_t>(i), where.group.ranks, where.workers());
    DeviceLayer layer(where.group, drawn.config, results, kernel_folder());
    const std::string name = "times: case " + std::to_string(i) + " (" + to_text(drawn) + "): ";
    try {
      run_case(layer, drawn, name);
    } catch (const Error& error) {
      if (where.in_processes()) throw;
      results.record(name, false, error.what());
    }
    layer.synchronize();
    layer.group().implementation().meet();
  }
}

// ---- sums

// Eight works outstanding, made in four orders; the sums of each are those that the host makes of the oracle's fp32
// gradients in that order, and those of backward calls that add at once.
void run_sums(const Where& where, Results& results) {
  constexpr int kBatches = 8, kOrders = 4;
  LayerConfig config;
  config.shape = {.hidden = 256, .intermediate = 128, .experts = int64_t{4} * where.group.ranks, .topk = 2};
  config.numerics.weight_gradient = WeightGradient::kMainGrad;
  Numerics fp32 = config.numerics;
  fp32.weight_gradient = WeightGradient::kFloat32;
  DeviceLayer layer(where.group, config, results, kernel_folder());
  DeviceBackward backward(layer);
  std::vector<Batch> batches;
  for (int i = 0; i < kBatches; ++i) {
    batches.push_back(forward_batch(layer, backward, 100, false, false));
    batches.back().expected = backward.oracle(batches.back().data, fp32);
  }
  const GradientArrays now = backward.gradients(), later = backward.gradients(true);
  Random random(17);
  std::vector<cli::LayerResult> sums;
  for (int trial = 0; trial < kOrders; ++trial) {
    std::vector<std::size_t> order(kBatches);
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t i = order.size(); trial > 0 && i-- > 1;) std::swap(order[i], order[random.next() % (i + 1)]);
    std::vector<PendingWeightGradients> works;
    for (const Batch& batch : batches) {
      works.push_back(backward.backward(batch.call, batch.back, batch.called.saved, nullptr, {kLater}));
    }
    cli::LayerResult expected = backward.started();
    backward.start(now);
    backward.start(later);
    for (const std::size_t which : order) {
      const Batch& batch = batches[which];
      backward.backward(batch.call, batch.back, batch.called.saved, &now);
      backward.make(works[which], later, {.sms = trial % 2 == 0 ? 0 : 4, .aside = trial >= 2});
      const auto add_all = [](std::vector<float>& to, const std::vector<float>& from) {
        for (std::size_t i = 0; i < to.size(); ++i) to[i] = add(to[i], from[i]);
      };
      add_all(expected.dw1_fp32, batch.expected.dw1_fp32);
      add_all(expected.dw2_fp32, batch.expected.dw2_fp32);
    }
    const std::string name = "sums: order " + std::to_string(trial);
    backward.expect(name + " now", now, expected);
    backward.expect(name + " later", later, expected);
    sums.push_back(std::move(expected));
  }
  results.record("sums: the order shows in them", !difference(sums[0], sums[1]).empty());
  layer.group().implementation().meet();
}

// ---- addresses

// Gate and up in one, and apart: also where a K block, a tile of dW1 and a step of 16 rows hold rows of both.
void run_addresses_of(const Where& where, Results& results, const LayerConfig& config, bool apart) {
  DeviceLayer layer(where.group, config, results, kernel_folder());
  DeviceBackward backward(layer);
  backward.give_weights_by_address(apart);
  const Batch batch = forward_batch(layer, backward, 200, false);
  const GradientArrays addresses = backward.gradients(true, apart), tensor = backward.gradients(false, apart);
  for (const std::string& schedule : kBackwardSchedules) {
    if (schedule.find("redispatch") != std::string::npos) continue;
    backward.use_schedule(PartialSchedule::parse(schedule));
    const bool fills = backward.schedule().wgrad != WgradOrder::kAfter;
    for (const WeightGradientTime time : {kNow, kLater}) {
      const GradientArrays& gradients = apart && time == kLater ? tensor : addresses;
      const std::string name = "addresses: " + schedule + (time == kLater ? ", later" : ", now") +
                               (apart ? ", apart, I " + std::to_string(config.shape.intermediate) : "");
      backward.upload(batch.back, batch.data);
      backward.start(gradients);
      const auto run = [&] {
        return backward.backward(batch.call, batch.back, batch.called.saved, &gradients, {time});
      };
      if (apart && fills && time == kNow && config.shape.intermediate % 16 != 0) {
        layer.expect_error(name + " is refused", Status::kUnsupported, {"dw1_up", "backward.wgrad=after"}, run);
        continue;
      }
      const PendingWeightGradients work = run();
      if (time == kLater) backward.make(work, gradients, {.sms = 8, .aside = true});
      backward.expect(name, batch.back, batch.call, batch.expected);
      backward.expect(name, gradients, batch.expected);
    }
  }
  layer.group().implementation().meet();
}

void run_addresses(const Where& where, Results& results) {
  constexpr int64_t kLocalExperts = 256;  // a kernel has room for 224 addresses
  LayerConfig config;
  config.shape = {.hidden = 64, .intermediate = 64, .experts = kLocalExperts * where.group.ranks, .topk = 4};
  for (const WeightGradient mode : {WeightGradient::kBFloat16, WeightGradient::kMainGrad}) {
    config.numerics.weight_gradient = mode;
    config.shape.intermediate = 64;
    run_addresses_of(where, results, config, false);
    for (const int64_t intermediate : {64, 80, 24}) {
      config.shape.intermediate = intermediate;
      run_addresses_of(where, results, config, true);
    }
  }
}

// ---- silent

// The last rank does not come to a backward call. The others' waits run out and name it; after recover() Saved states
// and works of before are good.
void run_silent(const Where& where, Results& results) {
  if (where.group.ranks < 2 || (!where.in_processes() && where.devices() > 1)) return;
  LayerConfig config;
  config.shape = {.hidden = 256, .intermediate = 128, .experts = int64_t{4} * where.group.ranks, .topk = 2};
  const auto passes = [&](DeviceLayer& layer, DeviceBackward& backward, const Batch& batch,
                          const GradientArrays& gradients, const std::string& name) {
    backward.upload(batch.back, batch.data);
    backward.start(gradients);
    backward.backward(batch.call, batch.back, batch.called.saved, &gradients);
    layer.group().synchronize();
    backward.expect(name, batch.back, batch.call, batch.expected);
    backward.expect(name, gradients, batch.expected);
  };
  {
    // With long limits: kernels may have to be compiled.
    DeviceLayer layer(where.group, config, results, kernel_folder());
    DeviceBackward backward(layer);
    const Batch batch = forward_batch(layer, backward, 100, false);
    passes(layer, backward, batch, backward.gradients(), "silent: before");
    layer.group().implementation().meet();
  }
  GroupOptions impatient = where.group;
  impatient.timeout_seconds = 2;
  impatient.arrival_timeout_seconds = 4;
  DeviceLayer layer(impatient, config, results, kernel_folder());
  DeviceBackward backward(layer);
  const Batch batch = forward_batch(layer, backward, 100, false);
  const GradientArrays gradients = backward.gradients();
  passes(layer, backward, batch, gradients, "silent: with short limits");
  PendingWeightGradients work = backward.backward(batch.call, batch.back, batch.called.saved, nullptr, {kLater});
  layer.group().synchronize();
  layer.group().implementation().meet();
  auto& engine = dynamic_cast<CudaEngine&>(layer.group().implementation());
  const int silent = where.group.ranks - 1;
  if (where.in_processes() && layer.rank_of(0) == silent) {
    std::this_thread::sleep_for(std::chrono::seconds(5));  // the others' limit, and more
  } else {
    if (!where.in_processes()) engine.leave_out(1);
    layer.expect_error("silent: the rank is named", Status::kTimeout, {"rank " + std::to_string(silent)}, [&] {
      backward.backward(batch.call, batch.back, batch.called.saved, &gradients);
      layer.group().synchronize();
    });
    layer.expect_error("silent: further calls are refused", Status::kTimeout, {"recover()"},
                       [&] { backward.make(work, gradients); });
    if (!where.in_processes()) engine.leave_out(0);
  }
  layer.group().recover();
  backward.start(gradients);
  backward.make(work, gradients);
  backward.expect("silent: a work of before", gradients, batch.expected);
  passes(layer, backward, batch, gradients, "silent: after recover()");
  layer.group().implementation().meet();
}

// ---- traffic

// Every third call leaves its gradients for another stream.
void run_traffic(const Where& where, const Options& options, Results& results) {
  LayerConfig config;
  config.shape = {.hidden = 512, .intermediate = 256, .experts = int64_t{2} * where.group.ranks, .topk = 2};
  DeviceLayer layer(where.group, config, results, kernel_folder());
  DeviceBackward backward(layer);
  const GradientArrays gradients = backward.gradients();
  const Batch batch = forward_batch(layer, backward, 512, true);
  Traffic traffic(device_count());
  int different = 0, later = 0;
  std::string first;
  for (int call = 0; call < options.calls; ++call) {
    const auto turn = static_cast<std::size_t>(call / 3) % kBackwardSchedules.size();
    backward.use_schedule(PartialSchedule::parse(kBackwardSchedules[turn]));
    traffic.go_on();
    backward.upload(batch.back, batch.data);
    backward.start(gradients);
    const WeightGradientTime time = call % 3 == 2 ? kLater : kNow;
    const PendingWeightGradients work =
        backward.backward(batch.call, batch.back, batch.called.saved, &gradients, {time});
    if (time == kLater) backward.make(work, gradients, {.sms = 16, .aside = true});
    later += time == kLater ? 1 : 0;
    cli::LayerResult got = backward.read(gradients);
    const cli::LayerResult rows = backward.read(batch.back, batch.call);
    got.y = rows.y;
    got.dx = rows.dx;
    got.dprobs = rows.dprobs;
    const std::string text = difference(got, batch.expected);
    if (text.empty()) continue;
    if (different++ == 0) first = ", call " + std::to_string(call) + ": " + text;
  }
  results.record("traffic: " + std::to_string(options.calls) + " calls", different == 0,
                 std::to_string(different) + " of them differ" + first);
  std::printf("traffic, %s: %d calls in %zu ways, %d of them later\n", where.name.c_str(), options.calls,
              kBackwardSchedules.size(), later);
  layer.group().implementation().meet();
}

void run_tests(const Where& where, const Options& options, Results& results) {
  using Test = std::function<void(const Where&, Results&)>;
  const auto with_options = [&](void (*test)(const Where&, const Options&, Results&)) {
    return [&options, test](const Where& of, Results& to) { test(of, options, to); };
  };
  const std::pair<const char*, Test> tests[] = {{"times", with_options(run_times)},
                                                {"sums", run_sums},
                                                {"addresses", run_addresses},
                                                {"aside", run_aside},
                                                {"release", run_release},
                                                {"memory", run_memory},
                                                {"own memory", run_own_memory},
                                                {"silent", run_silent},
                                                {"traffic", with_options(run_traffic)}};
  for (const auto& [name, test] : tests) {
    if (!options.wants(name)) continue;
    const int passed = results.passed, failed = results.failed;
    try {
      test(where, results);
    } catch (const Error& error) {
      if (where.in_processes()) throw;  // the others would wait
      results.record(std::string(name) + ", " + where.name, false, error.what());
    }
    std::printf("%s, %s: %d passed, %d failed\n", name, where.name.c_str(), results.passed - passed,
                results.failed - failed);
    std::fflush(stdout);
  }
}

// Of the numbers of ranks that there may be. True: every branch was taken.
bool print_branches(const Options& options) {
  bool complete = true;
  for (const int ranks : {1, 2, 4}) {
    BranchCounts branches;
    const int workers = kProcessors / (ranks == 4 ? 4 : 1);
    for (int i = 0; i < options.cases; ++i) {
      count_branches(branches, draw_backward_case(kFirstCase + static_cast<uint64_t>(i), ranks, workers), workers);
    }
    std::printf("%d cases on %d ranks\n", options.cases, ranks);
    branches.print();
    for (const std::string& branch : branches.never_taken()) {
      std::printf("FAIL no case on %d ranks takes: %s\n", ranks, branch.c_str());
      complete = false;
    }
  }
  return complete;
}

// The kernels of all cases, and the oracle's, into the cache.
void compile(const Options& options) {
  std::map<std::string, KernelRequest> requests;
  const auto add = [&](const KernelRequest& request) { requests.emplace(request.description(), request); };
  for (const KernelRequest& request : oracle_kernels(kernel_folder())) add(request);
  for (const int ranks : {1, 2, 4}) {
    const int workers = kProcessors / (ranks == 4 ? 4 : 1);
    for (int i = 0; i < options.cases; ++i) {
      const BackwardCase drawn = draw_backward_case(kFirstCase + static_cast<uint64_t>(i), ranks, workers);
      for (const KernelRequest& request : kernels_of(drawn, ranks, workers)) add(request);
    }
  }
  std::vector<KernelRequest> kernels;
  for (const auto& [description, request] : requests) kernels.push_back(request);
  std::printf("backward tests: %zu kernels\n", kernels.size());
  std::fflush(stdout);
  compile_kernels(kernels, options.compile_threads);
}

// Two processes on a GPU each.
void launch(std::vector<std::string> arguments, Results& results) {
  arguments.emplace_back("--part");
  std::string text;
  try {
    cli::launch_ranks({"/proc/self/exe", std::move(arguments)}, "gpu_backward_tests", 2);
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
    if (name == "--branches") options.branches = true;
    if (name == "--cases") options.cases = std::atoi(value().c_str());
    if (name == "--calls") options.calls = std::atoi(value().c_str());
    if (name == "--compile") options.compile_threads = std::max(1, std::atoi(value().c_str()));
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
    run_tests({"rank " + std::to_string(environment.rank), process_options(environment.ranks)}, options, results);
    return results.failed == 0 ? 0 : 1;
  }
  const bool two_gpus = device_count() >= 2;
  if (options.processes && two_gpus) launch(std::vector<std::string>(argv + 1, argv + argc), results);
  if (options.processes && !two_gpus) std::printf("a process a GPU: skipped, there is one GPU\n");
  for (const int ranks : {1, 4}) {
    run_tests({std::to_string(ranks) + " ranks on one GPU", group_options(ranks, {0})}, options, results);
  }
  if (two_gpus) run_tests({"two GPUs in one process", group_options(2, {0, 1})}, options, results);
  constexpr int kEnough = 60;
  if (options.wants("times") && options.cases >= kEnough) {
    results.record("every branch was taken", print_branches(options));
  }
  std::printf("backward tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 && results.passed > 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  using namespace uniep::cuda::test;
  const Options options = read_options(argc, argv);
  if (options.compile_threads == 0 && !options.branches) return run_on_hopper(run, argc, argv);
  try {
    if (options.branches) return print_branches(options) ? 0 : 1;
    compile(options);
    return 0;
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
}
