// Dispatch and combine, then backward calls, on all SMs but a few, a GPU a rank, while NCCL all-reduces on other
// streams of the same GPUs without end: nothing may wait for ever, and every byte must be right. Exit status 77 without
// two GPUs or NCCL. Usage: gpu_coexistence_tests [--verbose] [--calls N] [--backward-calls N]
#include <cstdlib>
#include <memory>

#include "tests/cuda/all_reduces.h"
#include "tests/cuda/group_exchange.h"
#include "tests/cuda/small_layer.h"

namespace uniep::cuda::test {
namespace {

// That does not wait for the default one.
struct OwnStream {
  explicit OwnStream(int of_device) : device(of_device) {
    const ScopedDevice scope(device);
    check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~OwnStream() {
    const ScopedDevice scope(device);
    driver().cuStreamDestroy(stream);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  int device;
  CUstream stream = nullptr;
};

// Backward of one forward, over and over; every third call leaves its weight gradients for later. All gradients of each
// call are compared with those of a call that was alone on the GPUs.
class BackwardCalls {
 public:
  explicit BackwardCalls(const std::vector<int>& devices) : group_(group_options(devices)) {
    PartialSchedule given;
    given.set("comm.reserve_sms", kSmsForAllReduces);
    const Schedule schedule =
        resolve(given, {.direction = Direction::kForward, .shape = config_.shape, .machine = group_.machine()});
    backward_ =
        resolve(given, {.direction = Direction::kBackward, .shape = config_.shape, .machine = group_.machine()});
    std::vector<Routing> routings;
    std::vector<ForwardArguments> arguments;
    for (std::size_t rank = 0; rank < devices.size(); ++rank) {
      CUstream stream = streams_.emplace_back(std::make_unique<OwnStream>(devices[rank]))->stream;
      layers_.push_back(std::make_unique<SmallLayer>(config_.shape, static_cast<int>(devices.size()),
                                                     static_cast<int>(rank), devices[rank], kTokens, stream));
      routings.push_back(layers_.back()->routing(kTokens));
      arguments.push_back(layers_.back()->arguments());
    }
    const Placement placement = place(group_, config_.shape, routings, layers_.front()->capacity(kTokens));
    saved_ = forward(group_, config_, schedule, placement, arguments);
    call(false);  // loads the kernels
    expected_ = results();
  }
  // Before other kernels run, too: whether both kinds of calls give the same.
  bool is_ready() { return is_right(true) && is_right(false); }
  bool is_right(bool later) {
    call(later);
    return results() == expected_;
  }

 private:
  static constexpr int64_t kTokens = 512;

  static GroupOptions group_options(const std::vector<int>& devices) {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = static_cast<int>(devices.size());
    options.devices = devices;
    return options;
  }

  void call(bool later) {
    std::vector<BackwardArguments> arguments;
    std::vector<WeightGradientArguments> gradients;
    for (const auto& layer : layers_) {
      layer->poison_gradients();
      arguments.push_back(layer->backward_arguments(later ? WeightGradientTime::kLater : WeightGradientTime::kNow));
      gradients.push_back(layer->gradient_arguments());
      gradients.back().sms = group_.workers() - backward_.comm.reserve_sms;
    }
    const PendingWeightGradients work = backward(group_, config_, backward_, saved_, arguments);
    if (later) weight_gradients(group_, work, gradients);
  }
  std::vector<uint64_t> results() {
    group_.synchronize();
    std::vector<uint64_t> sums;
    for (const auto& layer : layers_) sums.push_back(layer->gradient_checksum(kTokens));
    return sums;
  }

  LayerConfig config_{{.hidden = 1024, .intermediate = 256, .experts = 16, .topk = 4}, {}};
  std::vector<std::unique_ptr<OwnStream>> streams_;
  std::vector<std::unique_ptr<SmallLayer>> layers_;  // outlive the group's calls
  Group group_;
  Schedule backward_;
  Saved saved_;
  std::vector<uint64_t> expected_;
};

int run(int argc, char** argv) {
  Results results;
  int calls = 300, backward_calls = 200;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--verbose") == 0) results.verbose = true;
    if (std::strcmp(argv[i], "--calls") == 0 && i + 1 < argc) calls = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--backward-calls") == 0 && i + 1 < argc) backward_calls = std::atoi(argv[++i]);
  }
  limit_all_reduces();
  std::vector<int> devices;
  for (int ranks = 2; ranks <= device_count(); ranks *= 2) {
    for (auto device = static_cast<int>(devices.size()); device < ranks; ++device) devices.push_back(device);
  }
  try {
    nccl_caller();
  } catch (const Error& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  if (devices.empty()) {
    std::printf("skipped: all-reduces need two GPUs\n");
    return 77;
  }
  GroupExchange::Options options;
  options.schedule.set("comm.reserve_sms", kSmsForAllReduces);
  const std::vector<int64_t> tokens(devices.size(), 1024);
  GroupExchange exchange(tokens, devices, {.hidden = 4096, .intermediate = 1536, .experts = 64, .topk = 8}, options);
  exchange.call();  // loads the kernels, which is not for when others' are running
  std::string wrong = exchange.difference();
  BackwardCalls backward(devices);
  results.record("backward calls before the all-reduces", backward.is_ready());
  AllReduces all_reduces(devices);
  for (int i = 0; i < calls && wrong.empty(); ++i) {
    const bool compared = i % 100 == 0 || i + 1 == calls;
    if (compared) exchange.poison_results();
    exchange.call();
    if (compared) wrong = exchange.difference();
  }
  results.record(std::to_string(calls) + " exchanges", wrong.empty(), wrong);
  int different = 0, later = 0;
  for (int i = 0; i < backward_calls; ++i) {
    const bool is_later = i % 3 == 2;
    later += is_later ? 1 : 0;
    different += backward.is_right(is_later) ? 0 : 1;
  }
  results.record(std::to_string(backward_calls) + " backward calls, " + std::to_string(later) + " of them later",
                 different == 0 && later > 0, std::to_string(different) + " of them differ");
  const int64_t done = all_reduces.stop();
  results.record(std::to_string(done) + " all-reduces beside them", done > 1);
  std::printf("coexistence tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
