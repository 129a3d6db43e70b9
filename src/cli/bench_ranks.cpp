#include "cli/bench_ranks.h"

#include <algorithm>
#include <numeric>

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
