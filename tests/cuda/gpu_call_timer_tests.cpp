// CallTimer on GPUs: what the kernel adds up is what the events of the same call give; no call waits for it; a rank
// that is late is seen by the others; each replay of a graph is timed; and what it costs. On GPU 0 with two virtual
// ranks and, where there are two GPUs, on both. Exit status 77 without a Hopper GPU. Usage: gpu_call_timer_tests
// [--verbose] [--events]; --events: nothing that depends on how long calls take, as under compute-sanitizer.
#include <chrono>
#include <memory>

#include "engine/call_timer_state.h"
#include "tests/cuda/graph_functions.h"
#include "tests/cuda/host_delay.h"
#include "tests/cuda/small_layer.h"
#include "uniep/call_timer.h"

namespace uniep::cuda::test {
namespace {

constexpr int64_t kTokens = 2048;

class TimerTests {
 public:
  TimerTests(const std::vector<int>& devices, Results& results)
      : results_(results), group_(group_options(devices)), timer_(group_), name_(name_of(devices)) {
    for (std::size_t rank = 0; rank < devices.size(); ++rank) {
      const ScopedDevice scope(devices[rank]);
      check(driver().cuStreamCreate(&streams_.emplace_back(), CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      if (rank > 0 && devices[rank] == devices[0]) streams_.back() = streams_.front();
      layers_.push_back(std::make_unique<SmallLayer>(config_.shape, static_cast<int>(devices.size()),
                                                     static_cast<int>(rank), devices[rank], kTokens, streams_.back()));
      routings_.push_back(layers_.back()->routing(kTokens));
    }
    placement_ = place(group_, config_.shape, routings_);
  }

  void same_as_events() {
    for (const char* text : {"fusion=layer", "fusion=pairs", "fusion=none"}) {
      std::vector<TileEvent> events;
      const Saved saved = call_forward(text, {.events = &events, .timer = &timer_});
      compare(std::string("forward ") + text, events, true);
      call_backward(text, saved, {.events = &events, .timer = &timer_});
      compare(std::string("backward ") + text, events, false);
    }
  }

  // Times of calls that the host ran ahead of, each in its own timer, also where a later call has another stream's
  // turn.
  void waits_for_nothing() {
    CallTimer second(group_), third(group_);
    call_forward("fusion=layer", {});
    group_.synchronize();
    constexpr int kHeldMilliseconds = 60;
    hold_up_on_host(layers_[0]->stream(), kHeldMilliseconds);
    const auto begin = std::chrono::steady_clock::now();
    call_forward("fusion=layer", {.timer = &second});
    call_forward("fusion=layer", {});
    const Saved saved = call_forward("fusion=pairs", {.timer = &third});
    call_backward("fusion=layer", saved, {.timer = &timer_});
    const std::chrono::duration<double, std::milli> queueing = std::chrono::steady_clock::now() - begin;
    const bool early = second.is_over() || third.is_over() || timer_.is_over();
    results_.record(name_ + ": calls with a timer wait for nothing",
                    queueing.count() < kHeldMilliseconds / 2.0 && !early,
                    std::to_string(queueing.count()) + " ms to queue four of them");
    group_.synchronize();
    bool all = true;
    for (const CallTimer* timer : {&second, &third, &timer_}) all &= timer->is_over() && timer->times(0)->sum_ms > 0;
    results_.record(name_ + ": each timer has its call", all && second.times(0)->wait_ms != third.times(0)->wait_ms);
  }

  // A GPU a rank: rank 0 begins late.
  void late_rank() {
    constexpr int kHeldMilliseconds = 20;
    group_.synchronize();
    hold_up_on_host(layers_[0]->stream(), kHeldMilliseconds);
    call_forward("fusion=layer", {.timer = &timer_});
    group_.synchronize();
    const double own = timer_.times(0)->wait_ms, others = timer_.times(1)->exposed_dispatch_ms;
    results_.record(name_ + ": a late rank", own < kHeldMilliseconds / 4.0 && others > kHeldMilliseconds / 2.0,
                    std::to_string(own) + " ms on the late one, " + std::to_string(others) + " on the other");
  }

  // On one GPU, a forward and its backward in one graph. A call outside of it has the same records, and its own times.
  void replays() {
    CallTimer forwards(group_), backwards(group_);
    const GraphFunctions graphs;
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    CUstream stream = layers_[0]->stream();
    const ScopedDevice scope(0);
    check(graphs.begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
    call_backward("fusion=layer", call_forward("fusion=layer", {.timer = &forwards}), {.timer = &backwards});
    check(graphs.end_capture(stream, &graph), "cuStreamEndCapture");
    check(graphs.instantiate(&executable, graph, 0), "cuGraphInstantiate");
    bool right = !forwards.is_over() && !backwards.is_over();
    std::vector<double> waits;
    for (uint32_t replay = 1; replay <= 4; ++replay) {
      check(graphs.launch(executable, stream), "cuGraphLaunch");
      if (replay == 2) call_forward("fusion=pairs", {.timer = &timer_});
      group_.synchronize();
      right &= forwards.is_over() && backwards.is_over() && timer_.times(0)->runs == 1;
      for (int rank = 0; rank < group_.ranks(); ++rank) {
        const std::optional<CallTimes> forward = forwards.times(rank), backward = backwards.times(rank);
        right &= forward.has_value() && backward.has_value();
        if (!right) break;
        right &= forward->runs == replay && backward->runs == replay && forward->call_ms > 0 && backward->call_ms > 0 &&
                 forward->exposed_dispatch_ms > 0 && forward->sum_ms > 0;
        if (rank == 0) waits.push_back(forward->wait_ms);
      }
    }
    right &= waits.size() == 4 && waits[0] != waits[1] && waits[1] != waits[2] && waits[2] != waits[3];
    results_.record(name_ + ": each replay of a graph is timed", right,
                    waits.empty() ? "none" : std::to_string(waits.back()) + " ms waited in the last forward");
    graphs.destroy_executable(executable);
    graphs.destroy(graph);
  }

  void cost() {
    const auto milliseconds = [&](const CallOptions& options) {
      std::vector<double> all;
      for (int i = 0; i < 21; ++i) {
        group_.synchronize();
        const auto begin = std::chrono::steady_clock::now();
        call_forward("fusion=layer", options);
        group_.synchronize();
        all.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
      }
      std::nth_element(all.begin(), all.begin() + 10, all.end());
      return all[10];
    };
    const double without = milliseconds({}), with = milliseconds({.timer = &timer_});
    std::printf("%s: a forward takes %.3f ms, timed %.3f ms\n", name_.c_str(), without, with);
  }

 private:
  static GroupOptions group_options(const std::vector<int>& devices) {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = static_cast<int>(devices.size());
    options.devices = devices;
    return options;
  }
  static std::string name_of(const std::vector<int>& devices) {
    return devices.front() == devices.back() ? "virtual ranks" : std::to_string(devices.size()) + " GPUs";
  }
  Schedule schedule(Direction direction, const char* text) const {
    return resolve(PartialSchedule::parse(text),
                   {.direction = direction, .shape = config_.shape, .machine = group_.machine()});
  }

  Saved call_forward(const char* text, const CallOptions& options) {
    std::vector<ForwardArguments> arguments;
    for (const auto& layer : layers_) arguments.push_back(layer->arguments());
    return forward(group_, config_, schedule(Direction::kForward, text), placement_, arguments, options);
  }
  void call_backward(const char* text, const Saved& saved, const CallOptions& options) {
    std::vector<BackwardArguments> arguments;
    for (const auto& layer : layers_) arguments.push_back(layer->backward_arguments());
    backward(group_, config_, schedule(Direction::kBackward, text), saved, arguments, options);
  }

  // Weight gradients may hide all sums of a backward.
  void compare(const std::string& what, const std::vector<TileEvent>& events, bool sums_show) {
    bool equal = timer_.is_over(), full = true, sums = false;
    std::string values;
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      const internal::RankTimes expected = internal::rank_times(events, rank);
      const internal::RankTimes& got = timer_.state().ranks.get()[rank];
      equal &= got.first_waits_ns == expected.first_waits_ns && got.workers == expected.workers &&
               got.arrival_ns == expected.arrival_ns && got.sum_ns == expected.sum_ns &&
               got.call_ns == expected.call_ns && got.lost == 0 && got.runs == 1;
      full &= got.workers > 0 && got.first_waits_ns > 0 && got.call_ns > got.sum_ns;
      sums |= got.sum_ns > 0;
      const std::optional<CallTimes> times = timer_.times(rank);
      if (times.has_value()) {
        values += " rank " + std::to_string(rank) + ": dispatch " + std::to_string(times->exposed_dispatch_ms) +
                  ", wait " + std::to_string(times->wait_ms) + ", sums " + std::to_string(times->sum_ms);
      }
    }
    std::printf("%s, %s:%s\n", name_.c_str(), what.c_str(), values.c_str());
    results_.record(name_ + ": " + what + " as its events say", equal && full && (sums || !sums_show), values);
  }

  Results& results_;
  LayerConfig config_{{.hidden = 1024, .intermediate = 512, .experts = 16, .topk = 4}, {}};
  std::vector<CUstream> streams_;
  std::vector<std::unique_ptr<SmallLayer>> layers_;  // outlive the group's calls
  std::vector<Routing> routings_;
  Group group_;
  CallTimer timer_;
  Placement placement_;
  const std::string name_;
};

int run(int argc, char** argv) {
  Results results;
  bool events_alone = false;
  for (int i = 1; i < argc; ++i) {
    results.verbose |= std::strcmp(argv[i], "--verbose") == 0;
    events_alone |= std::strcmp(argv[i], "--events") == 0;
  }
  std::vector<std::vector<int>> machines{{0, 0}};
  if (device_count() > 1) machines.push_back({0, 1});
  for (const std::vector<int>& devices : machines) {
    TimerTests tests(devices, results);
    tests.same_as_events();
    if (devices[0] == devices[1]) tests.replays();
    if (events_alone) continue;
    tests.waits_for_nothing();
    if (devices[0] != devices[1]) tests.late_rank();
    tests.cost();
  }
  std::printf("call timer tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
