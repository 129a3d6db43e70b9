// `uniep bench --op layer`: the forward pass of an expert-parallel layer, beside its sequential execution and its GEMMs
// alone.
#include <algorithm>
#include <memory>

#include "cli/bench_operation.h"
#include "cli/bench_ranks.h"
#include "cli/gathered.h"
#include "cli/run_report.h"
#include "uniep/error.h"
#include "uniep/grouped_gemm.h"

namespace uniep::cli {
namespace {

// Of a GPU and direction: what a probe's stores by all SMs reached on 8 H200.
constexpr double kLinkBytesPerMillisecond = 347e6;
constexpr int kLayersOfAModel = 20;

// One rank's tensors on its GPU.
struct RankTensors {
  ExpertRows rows;  // for the GEMMs alone, as all that follows
  Weights weights;
  void *xg = nullptr, *z = nullptr, *a = nullptr, *out = nullptr;
  float* row_probs = nullptr;
};

class LayerBench {
 public:
  explicit LayerBench(const BenchRequest& request)
      : request_(request), shape_(request.layer.shape), ranks_(request), group_(ranks_.group()), gpus_(ranks_.gpus()) {
    schedule_ = request.layer.resolved(Direction::kForward, group_.machine());
    capacity_ = {.rows = ranks_.most_padded_rows(), .tokens = ranks_.most_tokens()};
    for (int rank = ranks_.first_local(); rank < ranks_.end_local(); ++rank) add_rank(rank);
    placement_ = placed();
  }

  BenchReport run() {
    BenchReport report;
    report.device = gpus_.name();
    report.rows_per_rank = ranks_.rows_per_rank();
    const double products =
        6.0 * static_cast<double>(*std::max_element(report.rows_per_rank.begin(), report.rows_per_rank.end())) *
        static_cast<double>(shape_.hidden * shape_.intermediate);
    const double bytes = busiest_link_bytes();
    measure_calls(report, products, bytes);
    measure_models(report, products, bytes);
    add_ratios(report, bytes);
    if (!request_.traced) return report;
    forward(schedule_, placement_, {&report.timeline});
    if (!ranks_.all_local()) report.timeline = gathered_events(group_, report.timeline);
    return report;
  }

 private:
  // Each call by its GPUs' clocks.
  void measure_calls(BenchReport& report, double products, double bytes) {
    Schedule sequential = schedule_;
    sequential.fusion = Fusion::kNone;
    sequential.order.interleave = Interleave::kPhased;
    sequential.combine.column_chunks = 1;
    // Warm GPUs are to stay so: no idle time between calls, as between the layers of a model.
    constexpr BenchGpus::Start kAtOnce = BenchGpus::Start::kAtOnce;
    const BenchGpus::Start queued =
        request_.warm_up_seconds > 0 ? BenchGpus::Start::kBackToBack : BenchGpus::Start::kTogether;
    std::vector<BenchGpus::Work> works;
    const std::size_t first = report.results.size();
    const auto measure = [&](const char* name, double flops, double link_bytes, BenchGpus::Start start,
                             const std::function<void()>& work) {
      if (!request_.wants(name)) return;
      report.results.push_back({.name = name, .milliseconds = {}, .flops = flops, .bytes = link_bytes});
      works.push_back({work, start});
    };
    measure("layer", products, bytes, queued, [&] { forward(schedule_, placement_); });
    measure("gemms", products, 0.0, queued, [&] { multiply(); });
    measure("sequential", products, bytes, queued, [&] { forward(sequential, placement_); });
    // A placement by need waits for the GPUs, so these can't be held back until everything is queued.
    measure("layer and placement", products, bytes, kAtOnce, [&] { forward(schedule_, placed()); });
    measure("placement", 0.0, 0.0, kAtOnce, [&] { placed(); });
    measure("placement in a capacity", 0.0, 0.0, queued, [&] { placed(capacity_); });
    measure("layer and placement in a capacity", products, bytes, queued,
            [&] { forward(schedule_, placed(capacity_)); });
    if (works.empty()) return;
    std::vector<std::vector<double>> times = gpus_.time_cold_in_turn(works, request_.repeat);
    for (std::size_t i = 0; i < times.size(); ++i) report.results[first + i].milliseconds = std::move(times[i]);
  }

  // Layers back to back as in a model, by the host's clock until all are done; the share of one.
  void measure_models(BenchReport& report, double products, double bytes) {
    std::vector<std::function<void()>> works;
    const std::size_t first = report.results.size();
    const auto measure = [&](const char* name, const std::function<void()>& layer) {
      if (!request_.wants(name)) return;
      report.results.push_back({.name = name, .milliseconds = {}, .flops = products, .bytes = bytes});
      works.emplace_back([this, layer] {
        for (int i = 0; i < kLayersOfAModel; ++i) layer();
        group_.synchronize();
      });
    };
    measure("20 layers", [&] { forward(schedule_, placement_); });
    measure("20 layers and placements", [&] { forward(schedule_, placed()); });
    measure("20 layers and placements in a capacity", [&] { forward(schedule_, placed(capacity_)); });
    if (works.empty()) return;
    const std::vector<std::vector<double>> times = gpus_.time_on_host_in_turn(works, request_.repeat);
    for (std::size_t i = 0; i < times.size(); ++i) {
      for (const double time : times[i]) report.results[first + i].milliseconds.push_back(time / kLayersOfAModel);
    }
  }

  void add_rank(int rank) {
    const std::size_t gpu = ranks_.gpu_of(rank);
    const Placement& on_host = ranks_.on_host();
    const int64_t h = shape_.hidden, i = shape_.intermediate;
    const int64_t tokens = on_host.tokens(rank), padded = on_host.padded_rows(rank);
    const int64_t experts = shape_.experts / group_.ranks();
    RankTensors own;
    const std::vector<float> probs(static_cast<std::size_t>(padded), 1.0f / static_cast<float>(shape_.topk));
    own.row_probs = static_cast<float*>(gpus_.copy_of(gpu, probs.data(), padded * 4));
    own.weights.w1 = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, experts * 2 * i * h));
    own.weights.w2 = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, experts * i * h));
    own.xg = gpus_.random_bfloat16(gpu, padded * h);
    own.z = gpus_.zeros(gpu, padded * 2 * i * 2);
    own.a = gpus_.zeros(gpu, padded * i * 2);
    own.out = gpus_.zeros(gpu, padded * h * 2);
    std::vector<int32_t> starts, counts;
    for (int64_t expert = rank * experts; expert < (rank + 1) * experts; ++expert) {
      starts.push_back(static_cast<int32_t>(on_host.expert_segment(expert)));
      counts.push_back(static_cast<int32_t>(on_host.expert_rows(expert)));
    }
    own.rows = {static_cast<int>(experts), padded,
                static_cast<int32_t*>(gpus_.copy_of(gpu, starts.data(), experts * 4)),
                static_cast<int32_t*>(gpus_.copy_of(gpu, counts.data(), experts * 4))};
    tensors_.push_back(own);
    gemms_.push_back(std::make_unique<GroupedGemm>(group_.device(rank)));
    ForwardArguments& arguments = arguments_.emplace_back();
    arguments.x = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, tokens * h));
    arguments.y = static_cast<BFloat16*>(gpus_.zeros(gpu, tokens * h * 2));
    arguments.weights = own.weights;
  }

  Placement placed(Capacity capacity = {}) { return uniep::place(group_, shape_, ranks_.routings(), capacity); }
  void forward(const Schedule& schedule, const Placement& placement, const CallOptions& options = {}) {
    saved_ = Saved();  // gives its memory back for this call
    saved_ = uniep::forward(group_, request_.layer.config(), schedule, placement, arguments_, options);
  }

  // FC1 with SwiGLU, and FC2, on rows that are there already.
  void multiply() {
    const int h = static_cast<int>(shape_.hidden), i = static_cast<int>(shape_.intermediate);
    for (std::size_t local = 0; local < tensors_.size(); ++local) {
      const RankTensors& own = tensors_[local];
      GroupedGemm& gemm = *gemms_[local];
      gemm.forward_swiglu(own.rows, own.xg, {own.weights.w1, {}}, own.row_probs, own.z, own.a, i, h, nullptr);
      gemm.forward(own.rows, own.a, {own.weights.w2, {}}, own.out, h, i, nullptr);
    }
  }

  // Bytes over the busiest direction of a GPU's links. What virtual ranks of one GPU send each other stays there.
  double busiest_link_bytes() const {
    const BytesMoved moved = bytes_moved(ranks_.on_host(), schedule_, request_.layer.numerics);
    const std::vector<BenchRanks::Traffic> there = ranks_.traffic(moved.dispatch), back = ranks_.traffic(moved.combine);
    double most = 0.0;
    for (std::size_t gpu = 0; gpu < there.size(); ++gpu) {
      most = std::max(
          {most, there[gpu].sent_to_others + back[gpu].sent_to_others, there[gpu].from_others + back[gpu].from_others});
    }
    return most;
  }

  static void add_ratios(BenchReport& report, double bytes) {
    const auto find = [&](const char* name) {
      for (const BenchResult& result : report.results) {
        if (result.name == name) return median(result.milliseconds);
      }
      return 0.0;
    };
    const double layer = find("layer"), gemms = find("gemms"), sequential = find("sequential");
    if (layer == 0.0) return;
    if (gemms > 0.0) {
      report.ratios.emplace_back("layer / gemms", layer / gemms);
      report.ratios.emplace_back("limit / layer (max of gemms, bytes at 347 GB/s)",
                                 std::max(gemms, bytes / kLinkBytesPerMillisecond) / layer);
    }
    if (sequential > 0.0) report.ratios.emplace_back("sequential / layer", sequential / layer);
  }

  const BenchRequest& request_;
  const LayerShape shape_;
  BenchRanks ranks_;
  Group& group_;
  BenchGpus& gpus_;
  Schedule schedule_;
  Capacity capacity_;
  std::vector<RankTensors> tensors_;  // of local ranks, as the next two
  std::vector<std::unique_ptr<GroupedGemm>> gemms_;
  std::vector<ForwardArguments> arguments_;
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
