// `uniep bench --op backward` and `--op step`: the backward pass of an expert-parallel layer, and forward and backward
// together, beside their sequential execution and their GEMMs alone.
#include "cli/bench_operation.h"
#include "cli/bench_ranks.h"
#include "cli/bench_tensors.h"
#include "cli/bench_turns.h"
#include "cli/chosen_schedule.h"
#include "cli/gathered.h"
#include "cli/traced_run.h"

namespace uniep::cli {
namespace {

// Of one forward pass: two GEMMs of rows and two of weights, each as large as forward's.
constexpr double kBackwardShare = 2.0;

class BackwardBench {
 public:
  BackwardBench(const BenchRequest& request, bool is_step)
      : request_(request),
        is_step_(is_step),
        config_(request.layer.config()),
        ranks_(request),
        group_(ranks_.group()),
        forward_schedule_(chosen_schedule(request.layer, Direction::kForward, group_)),
        schedule_(chosen_schedule(request.layer, Direction::kBackward, group_)),
        tensors_(ranks_, config_, {.backward = true, .gemms = request.wants("gemms")}),
        placement_(placed()) {}

  BenchReport run() {
    BenchReport report = ranks_.empty_report();
    const Numerics& numerics = config_.numerics;
    LinkBytes bytes = ranks_.link_bytes(schedule_, numerics, Direction::kBackward);
    double flops = kBackwardShare * ranks_.forward_flops();
    if (is_step_) bytes += ranks_.link_bytes(forward_schedule_, numerics, Direction::kForward);
    if (is_step_) flops += ranks_.forward_flops();
    report.memory.emplace_back("forward", ranks_.memory(config_, forward_schedule_, Direction::kForward, placement_));
    report.memory.emplace_back("backward", ranks_.memory(config_, schedule_, Direction::kBackward, placement_));
    forward(forward_schedule_, placement_);
    measure(report, flops, bytes);
    add_ratios(report, "gemms", bytes);
    if (request_.traced) trace(report);
    return report;
  }

 private:
  void measure(BenchReport& report, double flops, const LinkBytes& bytes) {
    const Schedule sequential_forward = sequential_schedule(forward_schedule_);
    const Schedule sequential = sequential_schedule(schedule_);
    const Capacity capacity{.rows = ranks_.most_padded_rows(), .tokens = ranks_.most_tokens()};
    BenchTurns turns(request_, report, ranks_.gpus());
    const BenchGpus::Start queued = turns.queued();
    turns.add(named("layer", flops, bytes), queued, [&] {
      if (is_step_) forward(forward_schedule_, placement_);
      backward(schedule_);
    });
    turns.add(named("gemms", flops, {}), queued, [&] {
      if (is_step_) tensors_.multiply_forward();
      tensors_.multiply_backward();
    });
    turns.add(named("sequential", flops, bytes), queued, [&] {
      if (is_step_) forward(sequential_forward, placement_);
      backward(sequential);
    });
    if (!is_step_)
      turns.add(named("layer and weight gradients later", flops, bytes), queued, [&] { backward_later(); });
    if (is_step_) {
      turns.add(named("layer and placement in a capacity", flops, bytes), queued, [&] {
        forward(forward_schedule_, placed(capacity));
        backward(schedule_);
      });
    }
    turns.time_calls();
  }

  void trace(BenchReport& report) {
    const auto call = [&](const char* name, const Schedule& schedule, auto&& run) {
      std::vector<TileEvent> events;
      run(schedule, CallOptions{&events});
      if (!ranks_.all_local()) events = gathered_events(group_, events);
      report.timeline.push_back(
          {name, std::move(events), traced_layer(request_.layer, schedule, traced_machine(group_))});
    };
    if (is_step_) {
      call("forward", forward_schedule_,
           [&](const Schedule& schedule, const CallOptions& options) { forward(schedule, placement_, options); });
    }
    call("backward", schedule_,
         [&](const Schedule& schedule, const CallOptions& options) { backward(schedule, options); });
  }

  Placement placed(Capacity capacity = {}) {
    return uniep::place(group_, request_.layer.shape, ranks_.routings(), capacity);
  }
  void forward(const Schedule& schedule, const Placement& placement, const CallOptions& options = {}) {
    saved_ = Saved();  // gives its memory back for this call
    saved_ = uniep::forward(group_, config_, schedule, placement, tensors_.forward(), options);
  }
  void backward(const Schedule& schedule, const CallOptions& options = {}) {
    uniep::backward(group_, config_, schedule, saved_, tensors_.backward(), options);
  }
  // Weight gradients at once behind the backward, in its stream.
  void backward_later() {
    std::vector<BackwardArguments> arguments = tensors_.backward();
    std::vector<WeightGradientArguments> later;
    for (BackwardArguments& own : arguments) {
      later.push_back({.gradients = own.gradients, .stream = own.stream});
      own.weight_gradients = WeightGradientTime::kLater;
    }
    weight_gradients(group_, uniep::backward(group_, config_, schedule_, saved_, arguments), later);
  }

  const BenchRequest& request_;
  const bool is_step_;
  const LayerConfig config_;
  BenchRanks ranks_;
  Group& group_;
  Schedule forward_schedule_, schedule_;
  LayerTensors tensors_;
  Placement placement_;
  Saved saved_;
};

BenchReport run_backward(const BenchRequest& request) {
  return BackwardBench(request, false).run();
}
BenchReport run_step(const BenchRequest& request) {
  return BackwardBench(request, true).run();
}

}  // namespace

BenchOperation backward_operation() {
  return {"backward",
          "the backward layer, its sequential execution and its four GEMMs alone",
          {"layer", "gemms", "sequential", "layer and weight gradients later"},
          run_backward,
          true};
}

BenchOperation step_operation() {
  return {"step",
          "forward and backward, the same sequentially and the six GEMMs alone",
          {"layer", "gemms", "sequential", "layer and placement in a capacity"},
          run_step,
          true};
}

}  // namespace uniep::cli
