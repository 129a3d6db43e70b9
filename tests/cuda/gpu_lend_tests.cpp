// comm.lend_sms on GPU 0, one rank: the bytes are those of a call on all SMs, whatever lent workers do; a call does not
// wait for a kernel that is on the reserved SMs when it begins; and a kernel in a stream of high priority that comes in
// the middle of a call does not wait for the call's end; and replays of graphs. Exit status 77 without a Hopper GPU.
// Usage: gpu_lend_tests [--verbose] [--calls N] [--only NAME,...] [--bytes]; NAME: bytes, graph, behind, inside, in the
// order in which they run; --bytes: nothing that depends on how long calls take.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <sstream>
#include <thread>

#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/runtime/dynamic_library.h"
#include "tests/cuda/graph_functions.h"
#include "tests/cuda/hold_arguments.h"
#include "tests/cuda/small_layer.h"

namespace uniep::cuda::test {
namespace {

constexpr int kReserved = 16;
constexpr int64_t kTokens = 8192;
constexpr int64_t kShortNs = 20'000;
const std::string kLent = "comm.reserve_sms=16,comm.lend_sms=on";

CUstream make_stream(bool first) {
  static const DynamicLibrary library("the CUDA driver", "UNIEP_LIBCUDA", {"libcuda.so.1"});
  static const auto create = [] {
    decltype(&::cuStreamCreateWithPriority) function = nullptr;
    library.bind(function, "cuStreamCreateWithPriority");
    return function;
  }();
  const ScopedDevice scope(0);
  CUstream stream = nullptr;
  check(create(&stream, CU_STREAM_NON_BLOCKING, first ? -5 : 0), "cuStreamCreateWithPriority");
  return stream;
}

// CTAs that keep an SM each for a while. It has a stream of its own unless one is given.
class Holder {
 public:
  Holder(int ctas, int cluster, bool first, CUstream stream = nullptr)
      : ctas_(ctas),
        cluster_(cluster),
        stream_(stream != nullptr ? stream : make_stream(first)),
        kernels_(0, kernel_folder()),
        begun_(0, ctas * static_cast<int64_t>(sizeof(uint64_t))) {
    run(0);  // loads the kernel
  }

  void run(double milliseconds) {
    const ScopedDevice scope(0);
    Launch launch;
    launch.grid_x = ctas_;
    launch.threads = 512;
    launch.cluster = cluster_;
    launch.shared_bytes = 128 << 10;
    launch.stream = stream_;
    kernels_.run("hold_kernels.cu", "test_hold", launch,
                 HoldArguments{static_cast<uint64_t*>(begun_.data()), static_cast<uint64_t>(milliseconds * 1e6)});
  }
  // When the last of its CTAs began. Behind its work.
  uint64_t begun() const {
    std::vector<uint64_t> begun(static_cast<std::size_t>(ctas_));
    begun_.read(begun.data(), begun_.bytes());
    return *std::max_element(begun.begin(), begun.end());
  }

 private:
  int ctas_, cluster_;
  CUstream stream_;
  Kernels kernels_;
  DeviceArray begun_;
};

void wait_for_device() {
  const ScopedDevice scope(0);
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

class LendTests {
 public:
  explicit LendTests(Results& results)
      : results_(results),
        stream_(make_stream(false)),
        layer_(config_.shape, 1, 0, 0, kTokens, stream_),
        group_(group_options()),
        placement_(place(group_, config_.shape, std::vector<Routing>{layer_.routing(kTokens)})) {}

  void same_bytes(int calls, bool bytes_alone) {
    struct Form {
      const char *forward, *backward;
    };
    const Form forms[] = {{"fusion=layer", "fusion=layer"},
                          {"fusion=layer,combine.transport=staged", "backward.wgrad=mixed"},
                          {"fusion=pairs", "fusion=pairs"},
                          {"tile.cluster=1", "tile.cluster=1"},
                          {"order.interleave=phased,dispatch.dedup=off", "backward.wgrad=after"}};
    for (const Form& form : forms) {  // compiles all kernels at once
      prepare(group_, config_, schedule(Direction::kForward, form.forward));
      prepare(group_, config_, schedule(Direction::kBackward, form.backward), {.direction = Direction::kBackward});
    }
    Holder holder(kReserved, 2, true);
    std::map<std::string, int> tiles;
    for (const Form& form : forms) {
      const std::vector<uint64_t> expected = run(form.forward, form.backward);
      bool same = true;
      for (int call = 0; call < calls; ++call) {
        engine().set_shortest_slice_ns(call % 2 == 0 ? kShortNs : 0);
        if (call % 4 >= 2) holder.run(0.3);
        std::vector<TileEvent> events;
        same &= run(form.forward + ("," + kLent), form.backward + ("," + kLent), &events) == expected;
        for (const TileEvent& event : events) tiles[event.stage] += event.worker >= group_.workers() - kReserved;
      }
      results_.record(std::string("the bytes of ") + form.forward + " and " + form.backward, same);
    }
    engine().set_shortest_slice_ns(0);
    for (const auto& [stage, count] : tiles) {
      const bool sums = stage == "combine" || stage == "reduce";
      results_.record("lent workers run " + std::to_string(count) + " tiles of " + stage,
                      sums ? count == 0 : count > 0 || bytes_alone);
    }
  }

  void behind_a_kernel(int cluster) {
    constexpr double kHeldMs = 200;
    Holder holder(kReserved, cluster, false);
    const std::vector<uint64_t> expected = run(kLent, kLent);
    wait_for_device();
    const auto begin = std::chrono::steady_clock::now();
    holder.run(kHeldMs);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const auto since = [&] {
      const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - begin;
      return taken.count();
    };
    call_backward(kLent, call_forward(kLent));
    const double queued_ms = since();
    check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
    const double taken_ms = since();
    results_.record("behind a kernel in clusters of " + std::to_string(cluster), taken_ms < kHeldMs / 2,
                    std::to_string(taken_ms) + " ms, queued after " + std::to_string(queued_ms));
    wait_for_device();
    results_.record("its bytes", results() == expected);
  }

  // Microseconds from when the kernel that came to the end of the call.
  void inside_a_call(int cluster, bool first) {
    Holder holder(kReserved, cluster, first), end(1, 1, false, stream_);
    const std::vector<uint64_t> expected = run(kLent, kLent);
    const Saved saved = call_forward(kLent);
    engine().set_shortest_slice_ns(kShortNs);
    bool same = true;
    std::vector<double> left_us;
    for (int i = 0; i < 10; ++i) {
      wait_for_device();
      call_backward(kLent, saved);
      end.run(0);
      const auto begin = std::chrono::steady_clock::now();
      while (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(100 + 20 * i)) continue;
      holder.run(0.05);
      wait_for_device();
      left_us.push_back((static_cast<double>(end.begun()) - static_cast<double>(holder.begun())) / 1e3);
      same &= results() == expected;
    }
    engine().set_shortest_slice_ns(0);
    std::sort(left_us.begin(), left_us.end());
    const std::string text = std::to_string(left_us.front()) + " to " + std::to_string(left_us.back()) +
                             " us before the call's end, clusters of " + std::to_string(cluster);
    if (first) {
      results_.record("inside a call, of high priority", same && left_us[5] > 100, text);
    } else {
      std::printf("inside a call, of no priority: %s\n", text.c_str());
      results_.record("inside a call, of no priority", same);
    }
  }

  void in_a_graph() {
    const GraphFunctions graphs;
    const std::vector<uint64_t> expected = run(kLent, kLent);
    Holder holder(kReserved, 2, true);
    engine().set_shortest_slice_ns(kShortNs);
    const ScopedDevice scope(0);
    check(graphs.begin_capture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
    call_backward(kLent, call_forward(kLent));
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    check(graphs.end_capture(stream_, &graph), "cuStreamEndCapture");
    check(graphs.instantiate(&executable, graph, 0), "cuGraphInstantiate");
    bool same = true;
    for (int i = 0; i < 4; ++i) {
      if (i % 2 == 1) holder.run(0.3);
      check(graphs.launch(executable, stream_), "cuGraphLaunch");
      same &= results() == expected;
    }
    results_.record("replays", same);
    graphs.destroy_executable(executable);
    graphs.destroy(graph);
    engine().set_shortest_slice_ns(0);
  }

 private:
  static GroupOptions group_options() {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = 1;
    options.devices = {0};
    return options;
  }
  CudaEngine& engine() { return dynamic_cast<CudaEngine&>(group_.implementation()); }
  Schedule schedule(Direction direction, const std::string& text) const {
    return resolve(PartialSchedule::parse(text),
                   {.direction = direction, .shape = config_.shape, .machine = group_.machine()});
  }

  Saved call_forward(const std::string& text, std::vector<TileEvent>* events = nullptr) {
    layer_.poison();
    const std::vector<ForwardArguments> arguments = {layer_.arguments()};
    return forward(group_, config_, schedule(Direction::kForward, text), placement_, arguments, {.events = events});
  }
  void call_backward(const std::string& text, const Saved& saved, std::vector<TileEvent>* events = nullptr) {
    layer_.poison_gradients();
    const std::vector<BackwardArguments> arguments = {layer_.backward_arguments()};
    backward(group_, config_, schedule(Direction::kBackward, text), saved, arguments, {.events = events});
  }
  std::vector<uint64_t> results() const { return {layer_.checksum(kTokens), layer_.gradient_checksum(kTokens)}; }
  std::vector<uint64_t> run(const std::string& forward_text, const std::string& backward_text,
                            std::vector<TileEvent>* events = nullptr) {
    std::vector<TileEvent> of_backward;
    const Saved saved = call_forward(forward_text, events);
    call_backward(backward_text, saved, events != nullptr ? &of_backward : nullptr);
    if (events != nullptr) events->insert(events->end(), of_backward.begin(), of_backward.end());
    return results();
  }

  Results& results_;
  LayerConfig config_{{.hidden = 2048, .intermediate = 512, .experts = 16, .topk = 4}, {}};
  CUstream stream_;
  SmallLayer layer_;  // outlives the group's calls
  Group group_;
  Placement placement_;
};

int run(int argc, char** argv) {
  Results results;
  int calls = 4;
  bool bytes_alone = false;
  std::string only = "bytes,graph,behind,inside";
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--verbose") == 0) results.verbose = true;
    bytes_alone |= std::strcmp(argv[i], "--bytes") == 0;
    if (std::strcmp(argv[i], "--calls") == 0 && i + 1 < argc) calls = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
  }
  LendTests tests(results);
  std::istringstream names(only);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "bytes") {
      tests.same_bytes(calls, bytes_alone);
    } else if (name == "graph") {
      tests.in_a_graph();
    } else if (name == "behind" || name == "inside") {
      for (const int cluster : {1, 2, 4}) {
        if (bytes_alone) break;
        if (name == "behind") tests.behind_a_kernel(cluster);
        if (name == "inside") tests.inside_a_call(cluster, true);
        if (name == "inside") tests.inside_a_call(cluster, false);
      }
    } else {
      std::fprintf(stderr, "--only: %s; legal are bytes, graph, behind, inside\n", name.c_str());
      return 2;
    }
  }
  std::printf("lend tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
