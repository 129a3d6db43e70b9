// Where x may lie: y's bytes against the naive oracle for x in plain, symmetric, registered, mapped and pooled memory;
// what is refused; and what the copy of an x that peers can not reach costs.
// Usage: gpu_input_tests [--processes] [--only inputs,cost] [--verbose]
// In one process on GPU 0 (virtual ranks) and, where there are two, on both; with --processes a process a GPU, too.
// --part: this process is a rank of those that this program starts. Exit status 77 without a Hopper GPU.
#include <algorithm>
#include <cstdlib>
#include <memory>

#include "cli/rank_launcher.h"
#include "comm/bootstrap.h"
#include "engine/engine.h"
#include "tests/cuda/caller_memory.h"
#include "tests/cuda/device_layer.h"

namespace uniep::cuda::test {
namespace {

struct Options {
  std::vector<std::string> only;
  bool processes = false;
  bool part = false;
  bool verbose = false;

  bool wants(const std::string& name) const {
    return only.empty() || std::find(only.begin(), only.end(), name) != only.end();
  }
};

constexpr int64_t kTokens = 200;
constexpr std::size_t kAlignment = 16;  // of x
constexpr std::size_t kOffset = 4096 + kAlignment;

LayerConfig small_config() {
  LayerConfig config;
  config.shape = {.hidden = 256, .intermediate = 128, .experts = 8, .topk = 2};
  return config;
}

class InputTests {
 public:
  InputTests(const GroupOptions& options, Results& results)
      : results_(results),
        layer_(options, small_config(), results, kernel_folder()),
        arrays_(layer_.arrays(layer_.tokens(kTokens))),
        bytes_(static_cast<std::size_t>(arrays_.capacity.tokens * layer_.config().shape.hidden) * sizeof(BFloat16)) {}

  // First, since it makes room for copies on all ranks.
  void plain() { expect("x in memory of cudaMalloc"); }

  void symmetric() {
    const SymmetricBuffer buffer = layer_.group().allocate_symmetric(bytes_);
    give([&](int rank) { return buffer.data(rank); });
    expect("x in a symmetric buffer");
    const SymmetricBuffer larger = layer_.group().allocate_symmetric(bytes_ + kOffset);
    give([&](int rank) { return static_cast<std::byte*>(larger.data(rank)) + kOffset; });
    expect("x in a symmetric buffer, at an offset");

    std::vector<void*> part;
    for (std::size_t local = 0; local < arrays_.local.size(); ++local) {
      part.push_back(static_cast<std::byte*>(larger.data(rank_of(local))) + kOffset);
    }
    {
      const SymmetricBuffer registered = layer_.group().register_symmetric(part, bytes_);
      give([&](int rank) { return registered.data(rank); });
      expect("x in registered memory of another buffer");
    }
    expect("x there when it is not registered any more");
    take_back();
  }

  void registered() {
    std::vector<std::unique_ptr<MappedMemory>> memory;
    std::vector<void*> addresses;
    for (std::size_t local = 0; local < arrays_.local.size(); ++local) {
      memory.push_back(
          std::make_unique<MappedMemory>(layer_.device_of(local), static_cast<int64_t>(bytes_ + kOffset), true));
      addresses.push_back(static_cast<std::byte*>(memory.back()->data()) + kOffset);
    }
    {
      const SymmetricBuffer registered = layer_.group().register_symmetric(addresses, bytes_);
      give([&](int rank) { return registered.data(rank); });
      expect("x in registered memory of cuMemCreate");
    }
    expect("x in memory of cuMemCreate when it is not registered any more");
    take_back();
  }

  // In one process: what the other device's kernels would fault on.
  void unreachable() {
    std::vector<std::unique_ptr<MappedMemory>> mapped;
    for (std::size_t local = 0; local < arrays_.local.size(); ++local) {
      mapped.push_back(std::make_unique<MappedMemory>(layer_.device_of(local), static_cast<int64_t>(bytes_), false));
    }
    give([&](int rank) { return mapped[local_of(rank)]->data(); });
    expect("x in memory of cuMemCreate that its own device reaches");
    std::vector<std::unique_ptr<PoolMemory>> pooled;
    for (std::size_t local = 0; local < arrays_.local.size(); ++local) {
      pooled.push_back(
          std::make_unique<PoolMemory>(layer_.device_of(local), static_cast<int64_t>(bytes_), layer_.stream_of(local)));
    }
    give([&](int rank) { return pooled[local_of(rank)]->data(); });
    expect("x in memory of the default pool");
    take_back();
    arrays_.local.back().input = static_cast<const BFloat16*>(pooled.back()->data());
    expect("x of the last rank in memory of the default pool");
    take_back();
    layer_.synchronize();
  }

  // A process a GPU: not all ranks have x at the same place.
  void mismatches() {
    const SymmetricBuffer buffer = layer_.group().allocate_symmetric(bytes_ + kAlignment);
    const bool first = layer_.group().first_local_rank() == 0;
    if (first) give([&](int rank) { return buffer.data(rank); });
    mismatch("x in a buffer on rank 0 only", "x copied");
    give([&](int rank) { return static_cast<std::byte*>(buffer.data(rank)) + (first ? 0 : kAlignment); });
    mismatch("x at another offset on rank 1", "x in a symmetric buffer");
  }

  void mismatch(const std::string& name, const std::string& word) {
    const cli::LayerData data = layer_.batch(arrays_.tokens);
    layer_.upload(arrays_, data);
    layer_.expect_error(name, Status::kTimeout, {"rank 0 makes", "rank 1 makes", "x in a symmetric buffer", word}, [&] {
      layer_.call(arrays_);
      layer_.group().synchronize();
    });
    take_back();
    layer_.group().recover();
    expect("x in memory of cudaMalloc after recover()");
  }

  // A process a GPU: cudaMalloc's memory can not be shared, wherever it comes from.
  void refused() {
    const MappedMemory good(layer_.device_of(0), static_cast<int64_t>(bytes_), true);
    void* const plain = arrays_.local.front().x.data();
    for (const bool on_all : {true, false}) {
      const bool bad = on_all || layer_.group().first_local_rank() == 1;
      void* const given = bad ? plain : good.data();
      layer_.expect_error(on_all ? "registering memory of cudaMalloc" : "registering memory of cudaMalloc on rank 1",
                          Status::kInvalidArgument, {"can not be shared"},
                          [&] { layer_.group().register_symmetric(std::span(&given, 1), bytes_); });
      expect("a call after it");
    }
  }

  void end() {
    layer_.synchronize();
    layer_.group().implementation().meet();
  }

 private:
  int rank_of(std::size_t local) { return layer_.group().first_local_rank() + static_cast<int>(local); }
  std::size_t local_of(int rank) { return static_cast<std::size_t>(rank - layer_.group().first_local_rank()); }

  template <typename Address>
  void give(Address&& address) {
    for (std::size_t local = 0; local < arrays_.local.size(); ++local) {
      arrays_.local[local].input = static_cast<const BFloat16*>(static_cast<const void*>(address(rank_of(local))));
    }
  }
  void take_back() {
    give([&](int rank) { return arrays_.local[local_of(rank)].x.data(); });
  }

  // Twice, with other tokens, by need and within a capacity.
  void expect(const std::string& name) {
    for (const Capacity capacity : {Capacity{}, arrays_.capacity}) {
      const cli::LayerData data = layer_.batch(arrays_.tokens);
      layer_.upload(arrays_, data);
      layer_.call(arrays_, capacity);
      layer_.expect(name, arrays_, data);
    }
  }

  Results& results_;
  DeviceLayer layer_;
  CallArrays arrays_;
  std::size_t bytes_;
};

void run_inputs(const GroupOptions& options, const std::string& where, Results& results) {
  const int passed = results.passed, failed = results.failed;
  const bool in_processes = options.launch == uniep::Launch::kProcesses;
  {
    InputTests tests(options, results);
    tests.plain();
    tests.symmetric();
    tests.registered();
    if (!in_processes) tests.unreachable();
    if (in_processes && options.ranks == 2) tests.mismatches();
    if (in_processes) tests.refused();
    tests.end();
  }
  std::printf("inputs, %s: %d passed, %d failed\n", where.c_str(), results.passed - passed, results.failed - failed);
  std::fflush(stdout);
}

// ---- What the copy costs

// A layer of Qwen3-235B's sizes, of which only the time matters.
class CostTest {
 public:
  explicit CostTest(const GroupOptions& options)
      : group_(options), device_(group_.device(group_.first_local_rank())), timer_({device_}) {
    config_.shape = {.hidden = 4096, .intermediate = 1536, .experts = 128, .topk = 8};
    const LayerShape& shape = config_.shape;
    uniep::test::Random random(static_cast<uint64_t>(group_.first_local_rank()) + 1);
    std::vector<int32_t> ids;
    for (int64_t token = 0; token < kLayerTokens; ++token) {
      const int64_t first = random.between(0, shape.experts - 1);
      for (int64_t slot = 0; slot < shape.topk; ++slot) {
        ids.push_back(static_cast<int32_t>((first + 13 * slot) % shape.experts));  // 13 and 128 share no divisor
      }
    }
    const std::vector<float> probs(ids.size(), 0.125f);
    ids_ = {device_, ids.data(), static_cast<int64_t>(ids.size()) * 4};
    probs_ = {device_, probs.data(), static_cast<int64_t>(probs.size()) * 4};
    const int64_t row_bytes = shape.hidden * 2, of_rank = shape.experts / group_.ranks() * shape.intermediate;
    x_ = {device_, kLayerTokens * row_bytes};
    y_ = {device_, kLayerTokens * row_bytes};
    w1_ = {device_, 2 * of_rank * row_bytes};
    w2_ = {device_, of_rank * row_bytes};
    buffer_ = group_.allocate_symmetric(static_cast<std::size_t>(kLayerTokens * row_bytes));
    constexpr unsigned char kSmallValue = 0x3c;  // 0.0115 as bf16
    for (const DeviceArray* const array : {&x_, &w1_, &w2_}) array->fill(kSmallValue);
    const ScopedDevice scope(device_);
    check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(buffer_.data(group_.first_local_rank())), kSmallValue,
                                   static_cast<std::size_t>(kLayerTokens * row_bytes), nullptr),
          "filling x");
    check(driver().cuCtxSynchronize(), "filling x");
  }

  void run() {
    constexpr int kWarmUps = 5, kRepeats = 20;
    const Routing routing{kLayerTokens, ids_.data(), IndexType::kInt32, static_cast<const float*>(probs_.data()), {}};
    const Placement placement = place(group_, config_.shape, std::span(&routing, 1));
    const Schedule schedule = resolve({}, {.direction = Direction::kForward,
                                           .shape = config_.shape,
                                           .numerics = config_.numerics,
                                           .machine = group_.machine()});
    const void* const inputs[] = {x_.data(), buffer_.data(group_.first_local_rank())};
    std::vector<double> times[2];
    for (int repeat = -kWarmUps; repeat < kRepeats; ++repeat) {
      for (int where = 0; where < 2; ++where) {
        const double time = milliseconds(placement, schedule, inputs[where]);
        if (repeat >= 0) times[where].push_back(time);
      }
    }
    const double copied = median(times[0]), read = median(times[1]);
    if (group_.first_local_rank() == 0) {
      std::printf("cost: T 8192, H 4096, %d ranks: x copied %.3f ms, x in a symmetric buffer %.3f ms, copy %.3f ms\n",
                  group_.ranks(), copied, read, copied - read);
      std::fflush(stdout);
    }
    group_.implementation().meet();
  }

 private:
  static constexpr int64_t kLayerTokens = 8192;

  static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return (values[values.size() / 2 - 1] + values[values.size() / 2]) / 2;
  }

  // Of one forward, on the slowest rank. The ranks begin together.
  double milliseconds(const Placement& placement, const Schedule& schedule, const void* x) {
    ForwardArguments arguments;
    arguments.x = static_cast<const BFloat16*>(x);
    arguments.weights.w1 = static_cast<const BFloat16*>(w1_.data());
    arguments.weights.w2 = static_cast<const BFloat16*>(w2_.data());
    arguments.y = static_cast<BFloat16*>(y_.data());
    group_.implementation().meet();
    timer_.start();
    const Saved saved = forward(group_, config_, schedule, placement, std::span(&arguments, 1));
    timer_.stop();
    const auto own = static_cast<int64_t>(timer_.milliseconds() * 1e6);
    const std::vector<int64_t> all = group_.implementation().all_gather(own);
    return static_cast<double>(*std::max_element(all.begin(), all.end())) / 1e6;
  }

  LayerConfig config_;
  Group group_;
  int device_;
  DeviceTimer timer_;
  DeviceArray ids_, probs_, x_, y_, w1_, w2_;
  SymmetricBuffer buffer_;
};

void launch(const std::vector<std::string>& given, Results& results) {
  std::vector<std::string> arguments = given;
  arguments.emplace_back("--part");
  std::string text;
  try {
    cli::launch_ranks({"/proc/self/exe", arguments}, "gpu_input_tests", 2);
  } catch (const Error& error) {
    text = error.what();
  }
  results.record("a process a GPU", text.empty(), text);
}

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--verbose") options.verbose = true;
    if (name == "--processes") options.processes = true;
    if (name == "--part") options.part = true;
    if (name == "--only" && i + 1 < argc) options.only = split(argv[++i], ',');
  }
  return options;
}

int run(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  Results results;
  results.verbose = options.verbose;
  if (options.part) {
    const RankEnvironment environment = required_rank_environment();
    const std::string where = "rank " + std::to_string(environment.rank);
    if (options.wants("inputs")) run_inputs(process_options(environment.ranks), where, results);
    if (options.wants("cost")) CostTest(process_options(environment.ranks)).run();
    return results.failed == 0 ? 0 : 1;
  }
  const bool two_gpus = device_count() >= 2;
  if (options.processes && two_gpus) launch(std::vector<std::string>(argv + 1, argv + argc), results);
  if (options.processes && !two_gpus) std::printf("a process a GPU: skipped, there is one GPU\n");
  if (options.wants("inputs")) {
    run_inputs(group_options(2, {0}), "2 ranks on one GPU", results);
    if (two_gpus) run_inputs(group_options(2, {0, 1}), "two GPUs in one process", results);
  }
  std::printf("input tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 && results.passed > 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
