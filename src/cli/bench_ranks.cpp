#include "cli/bench_ranks.h"

#include <algorithm>
#include <numeric>

#include "cli/run_report.h"

namespace uniep::cli {
namespace {

GroupOptions group_options(const BenchRequest& request) {
  BenchGpus::require(request.devices);
  GroupOptions options;
  options.engine = EngineKind::kCuda;
  options.ranks = request.layer.ranks;
  options.workers = request.layer.workers;
  options.devices = request.devices;
  options.launch = request.launch;
  return options;
}

// This process's.
std::vector<int> measured_devices(const BenchRequest& request, const Group& group) {
  if (request.launch == Launch::kThreads) return request.devices;
  return {group.device(group.first_local_rank())};
}

}  // namespace

BenchResult named(const char* name, double flops, const LinkBytes& bytes) {
  BenchResult result;
  result.name = name;
  result.flops = flops;
  result.bytes = bytes.most();
  result.sent = bytes.sent;
  result.received = bytes.received;
  return result;
}

Schedule sequential_schedule(const Schedule& schedule) {
  Schedule sequential = schedule;
  sequential.fusion = Fusion::kNone;
  sequential.order.interleave = Interleave::kPhased;
  sequential.combine.column_chunks = 1;
  sequential.wgrad = WgradOrder::kAfter;
  return sequential;
}

void add_ratios(BenchReport& report, const char* gemms, const LinkBytes& bytes) {
  // Of a GPU and direction: what a probe's stores by all SMs reached on 8 H200.
  constexpr double kLinkBytesPerMillisecond = 347e6;
  const auto find = [&](const char* name) {
    for (const BenchResult& result : report.results) {
      if (result.name == name) return median(result.milliseconds);
    }
    return 0.0;
  };
  const double layer = find("layer"), alone = find(gemms), sequential = find("sequential");
  if (layer == 0.0) return;
  if (alone > 0.0) {
    report.ratios.emplace_back(std::string("layer / ") + gemms, layer / alone);
    report.ratios.emplace_back(std::string("limit / layer (max of ") + gemms + ", bytes at 347 GB/s)",
                               std::max(alone, bytes.most() / kLinkBytesPerMillisecond) / layer);
  }
  if (sequential > 0.0) report.ratios.emplace_back("sequential / layer", sequential / layer);
}

BenchRanks::BenchRanks(const BenchRequest& request)
    : request_(request),
      group_(group_options(request)),
      gpus_(measured_devices(request, group_), request.warm_up_seconds) {
  gpus_.measure_group(group_);
  const std::vector<int32_t> ids = make_ids(request.layer);
  on_host_ = place_ids(request.layer, ids);
  const int64_t topk = request.layer.shape.topk;
  int64_t first_slot = 0;
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    const int64_t tokens = on_host_.tokens(rank), slots = tokens * topk;
    if (rank >= first_local() && rank < end_local()) {
      const std::vector<float> probs(static_cast<std::size_t>(slots), 1.0f / static_cast<float>(topk));
      Routing& own = routings_.emplace_back();
      own.tokens = tokens;
      own.topk_ids = gpus_.copy_of(gpu_of(rank), ids.data() + first_slot, slots * 4);
      own.probs = static_cast<float*>(gpus_.copy_of(gpu_of(rank), probs.data(), slots * 4));
    }
    first_slot += slots;
  }
}

int64_t BenchRanks::most_padded_rows() const {
  int64_t most = 0;
  for (int rank = 0; rank < group_.ranks(); ++rank) most = std::max(most, on_host_.padded_rows(rank));
  return most;
}

int64_t BenchRanks::most_tokens() const {
  int64_t most = 0;
  for (int rank = 0; rank < group_.ranks(); ++rank) most = std::max(most, on_host_.tokens(rank));
  return most;
}

std::vector<int64_t> BenchRanks::rows_per_rank() const {
  std::vector<int64_t> rows;
  for (int rank = 0; rank < group_.ranks(); ++rank) rows.push_back(on_host_.rows(rank));
  return rows;
}

double BenchRanks::forward_flops() const {
  const std::vector<int64_t> rows = rows_per_rank();
  const LayerShape& shape = request_.layer.shape;
  const double products = is_gated(request_.layer.numerics.activation) ? 3.0 : 2.0;
  return 2.0 * products * static_cast<double>(*std::max_element(rows.begin(), rows.end())) *
         static_cast<double>(shape.hidden * shape.intermediate);
}

LinkBytes BenchRanks::link_bytes(const Schedule& schedule, const Numerics& numerics, Direction direction) const {
  const BytesMoved moved = bytes_moved(on_host_, schedule, numerics);
  // In backward dy travels as x did, and x does again where it was not kept.
  const bool again = direction == Direction::kBackward && schedule.save_xg == SaveXg::kRedispatch;
  const double times = again ? 2.0 : 1.0;
  const std::vector<Traffic> there = traffic(moved.dispatch), back = traffic(moved.combine);
  LinkBytes busiest;
  for (std::size_t gpu = 0; gpu < there.size(); ++gpu) {
    const LinkBytes own{times * there[gpu].sent_to_others + back[gpu].sent_to_others,
                        times * there[gpu].from_others + back[gpu].from_others};
    if (own.most() > busiest.most()) busiest = own;
  }
  return busiest;
}

MemoryNeed BenchRanks::memory(const LayerConfig& config, const Schedule& schedule, Direction direction,
                              const Placement& placement) const {
  MemoryNeed most;
  for (const MemoryNeed& need : memory_need(group_, config, schedule, placement, {.direction = direction})) {
    most.saved_bytes = std::max(most.saved_bytes, need.saved_bytes);
    most.workspace_bytes = std::max(most.workspace_bytes, need.workspace_bytes);
    most.symmetric_bytes = std::max(most.symmetric_bytes, need.symmetric_bytes);
  }
  return most;
}

BenchReport BenchRanks::empty_report() const {
  BenchReport report;
  report.device = gpus_.name();
  report.rows_per_rank = rows_per_rank();
  return report;
}

std::vector<BenchRanks::Traffic> BenchRanks::traffic(const ByteMatrix& bytes) const {
  std::vector<Traffic> of_gpu(static_cast<std::size_t>(gpu_count()));
  for (std::size_t source = 0; source < bytes.size(); ++source) {
    for (std::size_t destination = 0; destination < bytes.size(); ++destination) {
      const auto moved = static_cast<double>(bytes[source][destination]);
      const auto from = static_cast<std::size_t>(gpu_of_any(static_cast<int>(source)));
      const auto to = static_cast<std::size_t>(gpu_of_any(static_cast<int>(destination)));
      of_gpu[to].received += moved;
      if (from == to) continue;
      of_gpu[to].from_others += moved;
      of_gpu[from].sent_to_others += moved;
    }
  }
  return of_gpu;
}

}  // namespace uniep::cli
