// `uniep bench --op layer`: the forward pass of an expert-parallel layer, beside its sequential execution and its GEMMs
// alone.
#include "cli/bench_operation.h"
#include "cli/bench_ranks.h"
#include "cli/bench_tensors.h"
#include "cli/bench_turns.h"
#include "cli/chosen_schedule.h"
#include "cli/gathered.h"
#include "cli/traced_run.h"

namespace uniep::cli {
namespace {

constexpr int kLayersOfAModel = 20;

class LayerBench {
 public:
  explicit LayerBench(const BenchRequest& request)
      : request_(request),
        ranks_(request),
        group_(ranks_.group()),
        schedule_(chosen_schedule(request.layer, Direction::kForward, group_)),
        capacity_{.rows = ranks_.most_padded_rows(), .tokens = ranks_.most_tokens()},
        tensors_(ranks_, request.layer.config(), {}),
        placement_(placed()) {}

  BenchReport run() {
    BenchReport report = ranks_.empty_report();
    const LinkBytes bytes = ranks_.link_bytes(schedule_, request_.layer.numerics, Direction::kForward);
    const double gemms = ranks_.forward_flops();
    report.memory.emplace_back("forward",
                               ranks_.memory(request_.layer.config(), schedule_, Direction::kForward, placement_));
    measure_calls(report, gemms, bytes);
    measure_models(report, gemms, bytes);
    add_ratios(report, "gemms", bytes);
    if (!request_.traced) return report;
    const TracedLayer layer = traced_layer(request_.layer, schedule_, traced_machine(group_));
    std::vector<TileEvent>& events = report.timeline.emplace_back(TracedCall{"forward", {}, layer}).events;
    forward(schedule_, placement_, {&events});
    if (!ranks_.all_local()) events = gathered_events(group_, events);
    return report;
  }

 private:
  void measure_calls(BenchReport& report, double gemms, const LinkBytes& bytes) {
    const Schedule sequential = sequential_schedule(schedule_);
    constexpr BenchGpus::Start kAtOnce = BenchGpus::Start::kAtOnce;
    BenchTurns turns(request_, report, ranks_.gpus());
    const BenchGpus::Start queued = turns.queued();
    turns.add(named("layer", gemms, bytes), queued, [&] { forward(schedule_, placement_); });
    turns.add(named("gemms", gemms, {}), queued, [&] { tensors_.multiply_forward(); });
    turns.add(named("sequential", gemms, bytes), queued, [&] { forward(sequential, placement_); });
    // A placement by need waits for the GPUs, so these can't be held back until everything is queued.
    turns.add(named("layer and placement", gemms, bytes), kAtOnce, [&] { forward(schedule_, placed()); });
    turns.add(named("placement", 0.0, {}), kAtOnce, [&] { placed(); });
    turns.add(named("placement in a capacity", 0.0, {}), queued, [&] { placed(capacity_); });
    turns.add(named("layer and placement in a capacity", gemms, bytes), queued,
              [&] { forward(schedule_, placed(capacity_)); });
    turns.time_calls();
  }

  // Layers back to back as in a model, by the host's clock until all are done; the share of one.
  void measure_models(BenchReport& report, double gemms, const LinkBytes& bytes) {
    BenchTurns turns(request_, report, ranks_.gpus());
    const auto measure = [&](const char* name, const std::function<void()>& layer) {
      turns.add(named(name, gemms, bytes), BenchGpus::Start::kAtOnce, [this, layer] {
        for (int i = 0; i < kLayersOfAModel; ++i) layer();
        group_.synchronize();
      });
    };
    measure("20 layers", [&] { forward(schedule_, placement_); });
    measure("20 layers and placements", [&] { forward(schedule_, placed()); });
    measure("20 layers and placements in a capacity", [&] { forward(schedule_, placed(capacity_)); });
    turns.time_on_host(kLayersOfAModel);
  }

  Placement placed(Capacity capacity = {}) {
    return uniep::place(group_, request_.layer.shape, ranks_.routings(), capacity);
  }
  void forward(const Schedule& schedule, const Placement& placement, const CallOptions& options = {}) {
    saved_ = Saved();  // gives its memory back for this call
    saved_ = uniep::forward(group_, request_.layer.config(), schedule, placement, tensors_.forward(), options);
  }

  const BenchRequest& request_;
  BenchRanks ranks_;
  Group& group_;
  Schedule schedule_;
  Capacity capacity_;
  LayerTensors tensors_;
  Placement placement_;
  Saved saved_;
};

BenchReport run_layer(const BenchRequest& request) {
  return LayerBench(request).run();
}

}  // namespace

BenchOperation layer_operation() {
  return {"layer",
          "the forward layer, its sequential execution and its GEMMs alone",
          {"layer", "layer and placement", "placement", "placement in a capacity", "layer and placement in a capacity",
           "sequential", "gemms", "20 layers", "20 layers and placements", "20 layers and placements in a capacity"},
          run_layer,
          true};
}

}  // namespace uniep::cli
