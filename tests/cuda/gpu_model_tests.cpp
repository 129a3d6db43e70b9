// The forward layer of models at their full size: y and z are the same bytes under every Schedule tried, and call after
// call beside other traffic. (What bytes: gpu_layer_tests, on small layers.)
// Usage: gpu_model_tests [--devices D] [--tokens T] [--models NAME,...] [--schedules key=value,...;key=value,...]
//                        [--repeat N] [--verbose]
// A rank a GPU; T tokens a rank, uniform routing. --repeat: calls of each Schedule, compared in y. Exit status 77
// without a Hopper GPU.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "cli/bench_gpus.h"
#include "cli/shapes.h"
#include "engine/cuda/device_array.h"
#include "model/elementwise.h"
#include "support/random_layer.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/traffic.h"
#include "uniep/uniep.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::Random;

struct Options {
  int devices = 1;
  int64_t tokens = 8192;
  std::vector<std::string> models = {"dsv3", "qwen3-235b", "qwen3-30b", "mixtral"};
  std::vector<std::string> schedules = {"fusion=none", "fusion=pairs", "fusion=layer"};
  int repeat = 1;
};

// The bytes of a call, rank by rank.
struct LayerBytes {
  std::vector<std::vector<BFloat16>> y, z;
};

class ModelTest {
 public:
  ModelTest(const Options& options, const LayerShape& shape, const std::vector<int>& devices)
      : options_(options), devices_(devices), gpus_(devices), group_(group_options(options, devices)) {
    config_.shape = shape;
    Random random(7);
    for (int rank = 0; rank < options.devices; ++rank) add_rank(rank, random);
    placement_ = place(group_, shape, routings_);
  }

  LayerBytes run(const std::string& fields) {
    call(fields);
    LayerBytes bytes;
    bytes.y = read_y();
    for (int rank = 0; rank < options_.devices; ++rank) {
      const std::size_t values =
          static_cast<std::size_t>(placement_.padded_rows(rank) * 2 * config_.shape.intermediate);
      std::vector<BFloat16>& z = bytes.z.emplace_back(values);
      DeviceArray::read_device(devices_[static_cast<std::size_t>(rank)], saved_.z(rank), z.data(),
                               static_cast<int64_t>(values * sizeof(BFloat16)));
    }
    return bytes;
  }

  // How many of `repeat` calls beside other traffic gave another y.
  int different_calls(const std::string& fields, int repeat, const LayerBytes& expected) {
    Traffic traffic(options_.devices);
    int different = 0;
    for (int i = 0; i < repeat; ++i) {
      traffic.go_on();
      call(fields);
      if (!are_equal(read_y(), expected.y)) ++different;
    }
    return different;
  }

  // z of the routed rows alone: padding holds no meaning.
  bool has_equal_z(const LayerBytes& a, const LayerBytes& b) const {
    const int64_t experts = config_.shape.experts / options_.devices, columns = 2 * config_.shape.intermediate;
    for (int64_t expert = 0; expert < config_.shape.experts; ++expert) {
      const auto rank = static_cast<std::size_t>(expert / experts);
      const auto first = static_cast<std::size_t>(placement_.expert_segment(expert) * columns);
      const auto bytes = static_cast<std::size_t>(placement_.expert_rows(expert) * columns) * sizeof(BFloat16);
      if (std::memcmp(a.z[rank].data() + first, b.z[rank].data() + first, bytes) != 0) return false;
    }
    return true;
  }

  static bool are_equal(const std::vector<std::vector<BFloat16>>& a, const std::vector<std::vector<BFloat16>>& b) {
    for (std::size_t rank = 0; rank < a.size(); ++rank) {
      if (std::memcmp(a[rank].data(), b[rank].data(), a[rank].size() * sizeof(BFloat16)) != 0) return false;
    }
    return true;
  }

 private:
  static GroupOptions group_options(const Options& options, const std::vector<int>& devices) {
    GroupOptions group;
    group.engine = EngineKind::kCuda;
    group.ranks = options.devices;
    group.devices = devices;
    return group;
  }

  void add_rank(int rank, Random& random) {
    const auto gpu = static_cast<std::size_t>(rank);
    const int64_t tokens = options_.tokens, k = config_.shape.topk, experts = config_.shape.experts;
    std::vector<int32_t> ids(static_cast<std::size_t>(tokens * k));
    for (std::size_t slot = 0; slot < ids.size(); ++slot) {
      const auto token = ids.begin() + static_cast<std::ptrdiff_t>(slot - slot % static_cast<std::size_t>(k));
      const auto here = ids.begin() + static_cast<std::ptrdiff_t>(slot);
      do {
        *here = static_cast<int32_t>(random.next() % static_cast<uint64_t>(experts));
      } while (std::find(token, here, *here) != here);
    }
    const std::vector<float> probs(ids.size(), 1.0f / static_cast<float>(k));
    Routing routing;
    routing.tokens = tokens;
    routing.topk_ids = gpus_.copy_of(gpu, ids.data(), tokens * k * 4);
    routing.probs = static_cast<float*>(gpus_.copy_of(gpu, probs.data(), tokens * k * 4));
    routings_.push_back(routing);
    const int64_t h = config_.shape.hidden, i = config_.shape.intermediate, local = experts / options_.devices;
    ForwardArguments arguments;
    arguments.x = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, tokens * h));
    arguments.y = static_cast<BFloat16*>(gpus_.zeros(gpu, tokens * h * 2));
    arguments.weights.w1 = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, local * 2 * i * h));
    arguments.weights.w2 = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, local * i * h));
    arguments_.push_back(arguments);
  }

  void call(const std::string& fields) {
    for (std::size_t rank = 0; rank < arguments_.size(); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(arguments_[rank].y), 0xff,
                                     static_cast<size_t>(options_.tokens * config_.shape.hidden) * 2, nullptr),
            "poisoning y");
    }
    const Schedule schedule =
        resolve(PartialSchedule::parse(fields), Direction::kForward, config_.shape, config_.numerics, group_.machine());
    saved_ = Saved();
    saved_ = forward(group_, config_, schedule, placement_, arguments_);
    group_.synchronize();
  }

  std::vector<std::vector<BFloat16>> read_y() const {
    std::vector<std::vector<BFloat16>> all;
    for (std::size_t rank = 0; rank < arguments_.size(); ++rank) {
      std::vector<BFloat16>& y = all.emplace_back(static_cast<std::size_t>(options_.tokens * config_.shape.hidden));
      DeviceArray::read_device(devices_[rank], arguments_[rank].y, y.data(),
                               static_cast<int64_t>(y.size() * sizeof(BFloat16)));
    }
    return all;
  }

  const Options& options_;
  std::vector<int> devices_;
  cli::BenchGpus gpus_;
  Group group_;
  LayerConfig config_;
  std::vector<Routing> routings_;
  std::vector<ForwardArguments> arguments_;
  Placement placement_;
  Saved saved_;
};

// That the bytes are a result at all.
bool are_numbers(const LayerBytes& bytes) {
  std::size_t zeros = 0;
  for (const std::vector<BFloat16>& y : bytes.y) {
    for (const BFloat16 value : y) {
      if (!std::isfinite(to_float(value))) return false;
      zeros += to_float(value) == 0.0f;
    }
  }
  return zeros < bytes.y.front().size() / 100;
}

void test_model(const std::string& name, const Options& options, Results& results) {
  std::vector<int> devices;
  for (int device = 0; device < options.devices; ++device) devices.push_back(device);
  ModelTest test(options, cli::parse_shape("--models", name), devices);
  const LayerBytes expected = test.run(options.schedules.front());
  results.record(name + " gives numbers", are_numbers(expected));
  for (const std::string& schedule : options.schedules) {
    const LayerBytes got = test.run(schedule);
    results.record(fmt::format("{} {}: y", name, schedule), ModelTest::are_equal(got.y, expected.y));
    results.record(fmt::format("{} {}: z", name, schedule), test.has_equal_z(got, expected));
    if (options.repeat <= 1) continue;
    const int different = test.different_calls(schedule, options.repeat, expected);
    results.record(fmt::format("{} {}: {} calls", name, schedule, options.repeat), different == 0,
                   fmt::format("{} of them differ", different));
  }
}

int run(int argc, char** argv) {
  Results results;
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--verbose") results.verbose = true;
    if (name == "--devices") options.devices = std::atoi(value().c_str());
    if (name == "--tokens") options.tokens = std::atoll(value().c_str());
    if (name == "--models") options.models = split(value(), ',');
    if (name == "--schedules") options.schedules = split(value(), ';');
    if (name == "--repeat") options.repeat = std::atoi(value().c_str());
  }
  for (const std::string& model : options.models) test_model(model, options, results);
  std::printf("model tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
