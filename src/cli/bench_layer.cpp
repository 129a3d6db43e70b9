// `uniep bench --op layer`: the forward pass of an expert-parallel layer, beside its sequential execution and its GEMMs
// alone.
#include <algorithm>
#include <memory>

#include "cli/bench_gpus.h"
#include "cli/bench_operation.h"
#include "cli/bytes_moved.h"
#include "cli/run_report.h"
#include "uniep/error.h"
#include "uniep/grouped_gemm.h"

namespace uniep::cli {
namespace {

// Of a GPU and direction: what a probe's stores by all SMs reached on 8 H200.
constexpr double kLinkBytesPerMillisecond = 347e6;

// One rank's tensors on its GPU.
struct RankTensors {
  Routing routing;
  ForwardArguments arguments;
  ExpertRows rows;  // for the GEMMs alone
  void *xg = nullptr, *z = nullptr, *a = nullptr, *out = nullptr;
  float* row_probs = nullptr;
};

class LayerBench {
 public:
  explicit LayerBench(const BenchRequest& request)
      : request_(request),
        shape_(request.layer.shape),
        gpus_(request.devices, request.warm_up_seconds),
        group_(options(request)) {
    schedule_ = request.layer.resolved(Direction::kForward, group_.machine());
    ids_ = make_ids(request.layer);
    host_placement_ = place_ids(request.layer, ids_);
    for (int rank = 0; rank < group_.ranks(); ++rank) add_rank(rank);
    for (const int device : request.devices) gemms_.push_back(std::make_unique<GroupedGemm>(device));
    placement_ = placed();
  }

  BenchReport run() {
    BenchReport report;
    report.device = gpus_.name();
    for (int rank = 0; rank < group_.ranks(); ++rank) report.rows_per_rank.push_back(host_placement_.rows(rank));
    const double products =
        6.0 * static_cast<double>(*std::max_element(report.rows_per_rank.begin(), report.rows_per_rank.end())) *
        static_cast<double>(shape_.hidden * shape_.intermediate);
    const double bytes = busiest_link_bytes();
    Schedule sequential = schedule_;
    sequential.fusion = Fusion::kNone;
    sequential.order.interleave = Interleave::kPhased;
    sequential.combine.column_chunks = 1;
    const Capacity capacity{most_padded_rows()};
    // Warm GPUs are to stay so: no idle time between calls, as between the layers of a model.
    constexpr BenchGpus::Start kAtOnce = BenchGpus::Start::kAtOnce;
    const BenchGpus::Start queued =
        request_.warm_up_seconds > 0 ? BenchGpus::Start::kBackToBack : BenchGpus::Start::kTogether;

    std::vector<BenchGpus::Work> works;
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
    measure("placement in a capacity", 0.0, 0.0, queued, [&] { placed(capacity); });
    measure("layer and placement in a capacity", products, bytes, queued,
            [&] { forward(schedule_, placed(capacity)); });
    std::vector<std::vector<double>> times = gpus_.time_cold_in_turn(works, request_.repeat);
    for (std::size_t i = 0; i < times.size(); ++i) report.results[i].milliseconds = std::move(times[i]);
    add_ratios(report, bytes);
    if (request_.traced) forward(schedule_, placement_, {&report.timeline});
    return report;
  }

 private:
  static GroupOptions options(const BenchRequest& request) {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = request.layer.ranks;
    options.workers = request.layer.workers;
    options.devices = request.devices;
    return options;
  }

  int64_t most_padded_rows() const {
    int64_t most = 0;
    for (int rank = 0; rank < group_.ranks(); ++rank) most = std::max(most, host_placement_.padded_rows(rank));
    return most;
  }

  std::size_t gpu_of(int rank) const { return static_cast<std::size_t>(rank) % gpus_.count(); }

  void add_rank(int rank) {
    const std::size_t gpu = gpu_of(rank);
    const int64_t h = shape_.hidden, i = shape_.intermediate, k = shape_.topk;
    const int64_t tokens = host_placement_.tokens(rank), padded = host_placement_.padded_rows(rank);
    const int64_t experts = shape_.experts / group_.ranks();
    RankTensors own;
    own.routing.tokens = tokens;
    own.routing.topk_ids = gpus_.copy_of(gpu, ids_.data() + first_slot_, tokens * k * 4);
    const std::vector<float> probs(static_cast<std::size_t>(std::max(tokens * k, padded)),
                                   1.0f / static_cast<float>(k));
    own.routing.probs = static_cast<float*>(gpus_.copy_of(gpu, probs.data(), tokens * k * 4));
    own.row_probs = static_cast<float*>(gpus_.copy_of(gpu, probs.data(), padded * 4));
    own.arguments.x = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, tokens * h));
    own.arguments.y = static_cast<BFloat16*>(gpus_.zeros(gpu, tokens * h * 2));
    own.arguments.weights.w1 = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, experts * 2 * i * h));
    own.arguments.weights.w2 = static_cast<BFloat16*>(gpus_.random_bfloat16(gpu, experts * i * h));
    own.xg = gpus_.random_bfloat16(gpu, padded * h);
    own.z = gpus_.zeros(gpu, padded * 2 * i * 2);
    own.a = gpus_.zeros(gpu, padded * i * 2);
    own.out = gpus_.zeros(gpu, padded * h * 2);
    std::vector<int32_t> starts, counts;
    for (int64_t expert = rank * experts; expert < (rank + 1) * experts; ++expert) {
      starts.push_back(static_cast<int32_t>(host_placement_.expert_segment(expert)));
      counts.push_back(static_cast<int32_t>(host_placement_.expert_rows(expert)));
    }
    own.rows = {static_cast<int>(experts), padded,
                static_cast<int32_t*>(gpus_.copy_of(gpu, starts.data(), experts * 4)),
                static_cast<int32_t*>(gpus_.copy_of(gpu, counts.data(), experts * 4))};
    first_slot_ += tokens * k;
    ranks_.push_back(own);
    arguments_.push_back(own.arguments);
    routings_.push_back(own.routing);
  }

  Placement placed(Capacity capacity = {}) { return uniep::place(group_, shape_, routings_, capacity); }
  void forward(const Schedule& schedule, const Placement& placement, const CallOptions& options = {}) {
    saved_ = Saved();  // gives its memory back for this call
    saved_ = uniep::forward(group_, request_.layer.config(), schedule, placement, arguments_, options);
  }

  // FC1 with SwiGLU, and FC2, on rows that are there already.
  void multiply() {
    const int h = static_cast<int>(shape_.hidden), i = static_cast<int>(shape_.intermediate);
    for (int rank = 0; rank < group_.ranks(); ++rank) {
      const RankTensors& own = ranks_[static_cast<std::size_t>(rank)];
      GroupedGemm& gemm = *gemms_[gpu_of(rank)];
      const Weights& w = own.arguments.weights;
      gemm.forward_swiglu(own.rows, own.xg, {w.w1, {}}, own.row_probs, own.z, own.a, i, h, nullptr);
      gemm.forward(own.rows, own.a, {w.w2, {}}, own.out, h, i, nullptr);
    }
  }

  // Bytes over the busiest direction of a GPU's links. What virtual ranks of one GPU send each other stays there.
  double busiest_link_bytes() const {
    const BytesMoved moved = bytes_moved(host_placement_, schedule_, request_.layer.numerics);
    std::vector<double> sent(gpus_.count()), received(gpus_.count());
    for (const ByteMatrix& matrix : {moved.dispatch, moved.combine}) {
      for (int source = 0; source < group_.ranks(); ++source) {
        for (int destination = 0; destination < group_.ranks(); ++destination) {
          if (gpu_of(source) == gpu_of(destination)) continue;
          const auto bytes =
              static_cast<double>(matrix[static_cast<std::size_t>(source)][static_cast<std::size_t>(destination)]);
          sent[gpu_of(source)] += bytes;
          received[gpu_of(destination)] += bytes;
        }
      }
    }
    return std::max(*std::max_element(sent.begin(), sent.end()), *std::max_element(received.begin(), received.end()));
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
  BenchGpus gpus_;
  Group group_;
  Schedule schedule_;
  std::vector<int32_t> ids_;
  Placement host_placement_;
  int64_t first_slot_ = 0;
  std::vector<RankTensors> ranks_;
  std::vector<ForwardArguments> arguments_;
  std::vector<Routing> routings_;
  std::vector<std::unique_ptr<GroupedGemm>> gemms_;
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
           "sequential", "gemms"},
          run_layer,
          true};
}

}  // namespace uniep::cli
