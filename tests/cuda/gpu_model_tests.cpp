// The layer of models at their full size: y and z, dx, dprobs and the weight gradients are the same bytes under every
// Schedule tried, and call after call beside other traffic. (What bytes: gpu_layer_tests, on small layers; here for the
// models that --oracle names.)
// Usage: gpu_model_tests [--devices D] [--tokens T] [--models NAME,...] [--schedules key=value,...;key=value,...]
//                        [--schedules-backward ...|none] [--wgrad bf16|fp32|main_grad] [--oracle NAME,...|none]
//                        [--op forward|backward|both] [--repeat N] [--verbose]
// A rank a GPU; T tokens a rank, uniform routing. --repeat: calls of each Schedule, compared. --oracle (default
// qwen3-30b): models compared with the naive kernels, which have memory for the whole batch on one GPU. Without kernels
// for backward the program says so and leaves it out. A model may be sizes, as 256x128x8x2 (hidden, intermediate,
// experts, top-k). --op backward: nothing but one forward and two backward calls, of the default Schedules unless
// others are given, as for a sanitizer: --op backward --models 256x128x8x2 --tokens 64 --oracle 256x128x8x2. Exit
// status 77 without a Hopper GPU.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cli/bench_gpus.h"
#include "cli/shapes.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/runtime/device_array.h"
#include "model/elementwise.h"
#include "support/random_layer.h"
#include "tests/cuda/gpu_support.h"
#include "tests/cuda/layer_oracle.h"
#include "tests/cuda/naive_arguments.h"
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
  std::vector<std::string> backward = {"fusion=none,dispatch.transport=pull",
                                       "fusion=pairs,dispatch.transport=pull,backward.wgrad=after",
                                       "fusion=pairs,dispatch.transport=pull,backward.wgrad=fill",
                                       "fusion=pairs,dispatch.transport=pull,backward.wgrad=fill,save.xg=redispatch",
                                       "fusion=layer,backward.wgrad=after",
                                       "fusion=layer,backward.wgrad=fill",
                                       "backward.wgrad=mixed",
                                       "backward.wgrad=mixed,backward.wgrad_reserve=0",
                                       "fusion=layer,backward.wgrad=fill,save.xg=redispatch",
                                       "fusion=pairs,save.z=recompute",
                                       "fusion=pairs,save.xg=redispatch,save.z=recompute"};
  WeightGradient wgrad = WeightGradient::kBFloat16;
  std::vector<std::string> oracle = {"qwen3-30b"};
  int repeat = 1;
  bool forward = true;  // is compared
};

// What main_grad holds before: 0x01010101, a small number.
constexpr unsigned char kMainGradByte = 1;
float main_grad(uint64_t) {
  return float_from_bits(0x01010101u);
}

// The bytes of a call, rank by rank.
struct LayerBytes {
  std::vector<std::vector<BFloat16>> y, z;
};

// Checksums of a backward call's tensors: of each rank dx, dprobs, dw1 and dw2.
constexpr const char* kGradients[] = {"dx", "dprobs", "dw1", "dw2"};
using GradientSums = std::vector<std::array<uint64_t, std::size(kGradients)>>;

class ModelTest {
 public:
  ModelTest(const Options& options, const LayerShape& shape, const std::vector<int>& devices)
      : options_(options), devices_(devices), gpus_(devices), group_(group_options(options, devices)) {
    config_.shape = shape;
    config_.numerics.weight_gradient = options.wgrad;
    for (const int device : devices) kernels_.push_back(std::make_unique<Kernels>(device, kernel_folder()));
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

  // After a forward that kept xg.
  GradientSums run_backward(const std::string& fields) {
    call_backward(fields);
    GradientSums sums;
    for (std::size_t rank = 0; rank < gradients_.size(); ++rank) {
      auto& own = sums.emplace_back();
      for (std::size_t i = 0; i < own.size(); ++i) own[i] = checksum(rank, tensors_of(rank)[i]);
    }
    return sums;
  }

  int different_backward_calls(const std::string& fields, int repeat, const GradientSums& expected) {
    Traffic traffic(options_.devices);
    int different = 0;
    for (int i = 0; i < repeat; ++i) {
      traffic.go_on();
      if (run_backward(fields) != expected) ++different;
    }
    return different;
  }

  // The last calls' tensors and the oracle's: names of those that differ.
  std::string different_from_oracle(bool backward) {
    const cli::LayerData data = batch();
    const ScopedDevice scope(devices_.front());
    const cli::LayerResult expected = naive_layer(*kernels_.front(), config_, data, backward ? main_grad : nullptr);
    std::string text;
    const auto compare = [&](const char* name, const auto& whole, auto&& address_of) {
      const std::size_t part = whole.size() / devices_.size();
      auto got = whole;
      for (std::size_t rank = 0; rank < devices_.size(); ++rank) {
        DeviceArray::read_device(devices_[rank], address_of(rank), got.data() + rank * part,
                                 static_cast<int64_t>(part * sizeof(got[0])));
      }
      if (std::memcmp(got.data(), whole.data(), got.size() * sizeof(got[0])) != 0) text += std::string(" ") + name;
    };
    compare("y", expected.y, [&](std::size_t rank) { return arguments_[rank].y; });
    if (!backward) return text;
    compare("dx", expected.dx, [&](std::size_t rank) { return gradients_[rank].dx; });
    compare("dprobs", expected.dprobs, [&](std::size_t rank) { return gradients_[rank].dprobs; });
    const auto dw1 = [&](std::size_t rank) { return gradients_[rank].gradients.dw1; };
    const auto dw2 = [&](std::size_t rank) { return gradients_[rank].gradients.dw2; };
    if (options_.wgrad == WeightGradient::kBFloat16) {
      compare("dw1", expected.dw1_bf16, dw1);
      compare("dw2", expected.dw2_bf16, dw2);
    } else {
      compare("dw1", expected.dw1_fp32, dw1);
      compare("dw2", expected.dw2_fp32, dw2);
    }
    return text;
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
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    const int64_t h = config_.shape.hidden, i = config_.shape.intermediate, local = experts / options_.devices;
    ForwardArguments arguments;
    arguments.x = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, tokens * h));
    arguments.y = static_cast<BFloat16*>(gpus_.zeros(gpu, tokens * h * 2));
    arguments.weights.w1 = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, local * 2 * i * h));
    arguments.weights.w2 = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, local * i * h));
    arguments_.push_back(arguments);
  }

  int64_t gradient_bytes() const {
    return options_.wgrad == WeightGradient::kBFloat16 ? sizeof(BFloat16) : sizeof(float);
  }
  int64_t local_weights() const {  // of w2; w1: twice
    return config_.shape.experts / options_.devices * config_.shape.intermediate * config_.shape.hidden;
  }

  struct Tensor {
    void* address;
    int64_t bytes;
    unsigned char before;
  };
  std::array<Tensor, std::size(kGradients)> tensors_of(std::size_t rank) const {
    const BackwardArguments& own = gradients_[rank];
    const unsigned char before = options_.wgrad == WeightGradient::kMainGrad ? kMainGradByte : 0xff;
    return {{{own.dx, options_.tokens * config_.shape.hidden * 2, 0xff},
             {own.dprobs, options_.tokens * config_.shape.topk * 4, 0xff},
             {own.gradients.dw1, 2 * local_weights() * gradient_bytes(), before},
             {own.gradients.dw2, local_weights() * gradient_bytes(), before}}};
  }

  uint64_t checksum(std::size_t rank, const Tensor& tensor) {
    const ScopedDevice scope(devices_[rank]);
    const Buffer sum(8);
    sum.set_bytes(0);
    constexpr int kBlocks = 1024, kThreads = 256;
    kernels_[rank]->run("test_kernels.cu", "test_checksum", {.grid_x = kBlocks, .threads = kThreads},
                        ChecksumArguments{static_cast<const uint16_t*>(tensor.address), tensor.bytes / 2,
                                          sum.as<unsigned long long>()});
    return sum.download<unsigned long long>(1).front();
  }

  // When the first backward call comes: memory that the forward tests have no need of.
  void add_gradients() {
    for (std::size_t rank = 0; rank < devices_.size(); ++rank) {
      BackwardArguments& own = gradients_.emplace_back();
      own.dy = static_cast<BFloat16*>(gpus_.random_bfloat16(rank, options_.tokens * config_.shape.hidden));
      own.x = arguments_[rank].x;
      own.weights = arguments_[rank].weights;
      own.dx = static_cast<BFloat16*>(gpus_.zeros(rank, options_.tokens * config_.shape.hidden * 2));
      own.dprobs = static_cast<float*>(gpus_.zeros(rank, options_.tokens * config_.shape.topk * 4));
      own.gradients.dw1 = gpus_.zeros(rank, 2 * local_weights() * gradient_bytes());
      own.gradients.dw2 = gpus_.zeros(rank, local_weights() * gradient_bytes());
    }
  }

  void call_backward(const std::string& fields) {
    if (gradients_.empty()) add_gradients();
    for (std::size_t rank = 0; rank < gradients_.size(); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      for (const Tensor& tensor : tensors_of(rank)) {
        check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(tensor.address), tensor.before,
                                       static_cast<size_t>(tensor.bytes), nullptr),
              "poisoning gradients");
      }
    }
    const Schedule schedule = resolve(PartialSchedule::parse(fields), {.direction = Direction::kBackward,
                                                                       .shape = config_.shape,
                                                                       .numerics = config_.numerics,
                                                                       .machine = group_.machine()});
    backward(group_, config_, schedule, saved_, gradients_);
    group_.synchronize();
  }

  // All of it on the host.
  cli::LayerData batch() const {
    cli::LayerData data;
    data.shape = config_.shape;
    data.ids = ids_;
    data.probs.assign(ids_.size(), 1.0f / static_cast<float>(config_.shape.topk));
    const auto add = [](std::vector<BFloat16>& values, int device, const BFloat16* address, int64_t count) {
      values.resize(values.size() + static_cast<std::size_t>(count));
      DeviceArray::read_device(device, address, values.data() + values.size() - count, count * 2);
    };
    for (std::size_t rank = 0; rank < devices_.size(); ++rank) {
      const int64_t values = options_.tokens * config_.shape.hidden;
      data.tokens.push_back(options_.tokens);
      add(data.x, devices_[rank], arguments_[rank].x, values);
      if (!gradients_.empty()) add(data.dy, devices_[rank], gradients_[rank].dy, values);
      add(data.w1, devices_[rank], arguments_[rank].weights.w1, 2 * local_weights());
      add(data.w2, devices_[rank], arguments_[rank].weights.w2, local_weights());
    }
    return data;
  }

  void call(const std::string& fields) {
    for (std::size_t rank = 0; rank < arguments_.size(); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(arguments_[rank].y), 0xff,
                                     static_cast<size_t>(options_.tokens * config_.shape.hidden) * 2, nullptr),
            "poisoning y");
    }
    const Schedule schedule = resolve(PartialSchedule::parse(fields), {.direction = Direction::kForward,
                                                                       .shape = config_.shape,
                                                                       .numerics = config_.numerics,
                                                                       .machine = group_.machine()});
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
  std::vector<std::unique_ptr<Kernels>> kernels_;  // of each device
  std::vector<int32_t> ids_;
  std::vector<ForwardArguments> arguments_;
  std::vector<BackwardArguments> gradients_;
  Placement placement_;
  Saved saved_;
};

// A model's name, or sizes.
LayerShape shape_of(std::string model) {
  if (std::isdigit(static_cast<unsigned char>(model.front())) != 0) std::replace(model.begin(), model.end(), 'x', ',');
  return cli::parse_shape("--models", model);
}

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

void test_backward(ModelTest& test, const std::string& name, const Options& options, Results& results) {
  const GradientSums expected = test.run_backward(options.backward.front());
  for (const std::string& schedule : options.backward) {
    const GradientSums got = test.run_backward(schedule);
    for (std::size_t i = 0; i < std::size(kGradients); ++i) {
      bool equal = true;
      for (std::size_t rank = 0; rank < got.size(); ++rank) equal = equal && got[rank][i] == expected[rank][i];
      results.record(fmt::format("{} backward {}: {}", name, schedule, kGradients[i]), equal);
    }
    if (options.repeat <= 1) continue;
    const int different = test.different_backward_calls(schedule, options.repeat, expected);
    results.record(fmt::format("{} backward {}: {} calls", name, schedule, options.repeat), different == 0,
                   fmt::format("{} of them differ", different));
  }
}

void test_model(const std::string& name, const Options& options, Results& results) {
  std::vector<int> devices;
  for (int device = 0; device < options.devices; ++device) devices.push_back(device);
  ModelTest test(options, shape_of(name), devices);
  const LayerBytes expected = test.run(options.schedules.front());
  results.record(name + " gives numbers", are_numbers(expected));
  for (const std::string& schedule : options.schedules) {
    if (!options.forward) break;
    const LayerBytes got = test.run(schedule);
    results.record(fmt::format("{} {}: y", name, schedule), ModelTest::are_equal(got.y, expected.y));
    results.record(fmt::format("{} {}: z", name, schedule), test.has_equal_z(got, expected));
    if (options.repeat <= 1) continue;
    const int different = test.different_calls(schedule, options.repeat, expected);
    results.record(fmt::format("{} {}: {} calls", name, schedule, options.repeat), different == 0,
                   fmt::format("{} of them differ", different));
  }
  if (!options.backward.empty()) test_backward(test, name, options, results);
  if (std::find(options.oracle.begin(), options.oracle.end(), name) == options.oracle.end()) return;
  const std::string different = test.different_from_oracle(!options.backward.empty());
  results.record(name + " and the oracle", different.empty(), "they differ in" + different);
}

int run(int argc, char** argv) {
  Results results;
  Options options;
  std::string op = "both";
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--verbose") results.verbose = true;
    if (name == "--devices") options.devices = std::atoi(value().c_str());
    if (name == "--tokens") options.tokens = std::atoll(value().c_str());
    if (name == "--models") options.models = split(value(), ',');
    if (name == "--schedules") options.schedules = split(value(), ';');
    if (name == "--schedules-backward") options.backward = split(value(), ';');
    if (name == "--oracle") options.oracle = split(value(), ',');
    if (name == "--op") op = value();
    if (name == "--repeat") options.repeat = std::atoi(value().c_str());
    if (name == "--wgrad") {
      const std::string mode = value();
      options.wgrad = mode == "bf16"   ? WeightGradient::kBFloat16
                      : mode == "fp32" ? WeightGradient::kFloat32
                                       : WeightGradient::kMainGrad;
    }
  }
  options.forward = op != "backward";
  if (op == "backward" && options.schedules == Options().schedules) options.schedules = {"auto"};
  if (op == "backward" && options.backward == Options().backward) options.backward = {"auto"};
  if (op == "forward" || options.backward.front() == "none") options.backward.clear();
  for (const std::string& model : options.models) test_model(model, options, results);
  std::printf("model tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
