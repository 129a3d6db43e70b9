// `uniep bench --op dispatch` and `--op combine`: rows to their experts and back without the GEMMs, by so many SMs.
#include <algorithm>

#include "api/place.h"
#include "cli/bench_gpus.h"
#include "cli/bench_operation.h"
#include "cli/bytes_moved.h"
#include "cli/run_report.h"
#include "engine/cuda/driver.h"
#include "engine/cuda/exchange/exchange_session.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

constexpr int kPullParts = 4;
constexpr int kMostStages = 32;  // unless given: as many as fit

struct SmCount {
  const char* name;
  int count;  // 0: all
};
constexpr SmCount kSmCounts[] = {{"4 SMs", 4},   {"8 SMs", 8},   {"16 SMs", 16}, {"24 SMs", 24},
                                 {"32 SMs", 32}, {"64 SMs", 64}, {"all SMs", 0}};

enum class Exchange { kDispatch, kCombine };

// What the ranks of one GPU receive in an exchange.
struct Received {
  double all = 0.0;     // rows of its own GPU too
  double remote = 0.0;  // over its links
};

class ExchangeBench {
 public:
  ExchangeBench(const BenchRequest& request, Exchange exchange)
      : request_(request), exchange_(exchange), gpus_(request.devices, request.warm_up_seconds) {
    Machine machine;
    machine.engine = EngineKind::kCuda;
    machine.ranks = request.layer.ranks;
    machine.workers = sm_count();
    PartialSchedule given = request.layer.given(Direction::kForward);
    given.set("fusion", "none");
    given.set("combine.transport", "staged");
    // What measured best (docs/exchange_performance.md).
    if (!given.given("queue")) given.set("queue", "dynamic");
    if (exchange == Exchange::kCombine) {
      const bool flat = request.layer.numerics.combine_groups == 0;
      if (!given.given("comm.chunk_bytes")) given.set("comm.chunk_bytes", "8192");
      if (!given.given("combine.column_chunks")) given.set("combine.column_chunks", flat ? "8" : "2");
    }
    schedule_ = resolve(given, Direction::kForward, request.layer.shape, request.layer.numerics, machine);
    placement_ = place_ids(request.layer, make_ids(request.layer));
    for (int rank = 0; rank < request.layer.ranks; ++rank) {
      devices_.push_back(request.devices[gpu_of(rank)]);
      const int64_t rows = std::max(placement_.padded_rows(rank), placement_.tokens(rank));
      values_.push_back(gpus_.random_bfloat16(gpu_of(rank), rows * request.layer.shape.hidden));
    }
  }

  BenchReport run() {
    BenchReport report;
    report.device = gpus_.name();
    for (int rank = 0; rank < request_.layer.ranks; ++rank) report.rows_per_rank.push_back(placement_.rows(rank));
    const Received received = busiest();
    for (const SmCount& sms : kSmCounts) {
      const int workers = sms.count == 0 ? sm_count() / ranks_a_gpu() : sms.count;
      if (!request_.wants(sms.name) || workers * ranks_a_gpu() > sm_count()) continue;
      BenchResult result;
      result.name = sms.name;
      result.bytes = received.remote;
      result.milliseconds = measure(workers);
      report.ratios.emplace_back(result.name + ": GB/s of all received rows",
                                 received.all / (median(result.milliseconds) * 1e6));
      report.results.push_back(std::move(result));
    }
    return report;
  }

 private:
  int sm_count() const { return cuda::device_attribute(request_.devices[0], CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT); }
  // Ranks of one GPU stand side by side.
  std::size_t gpu_of(int rank) const {
    return static_cast<std::size_t>(rank) * gpus_.count() / static_cast<std::size_t>(request_.layer.ranks);
  }
  int ranks_a_gpu() const {
    return static_cast<int>(divide_up(request_.layer.ranks, static_cast<int64_t>(gpus_.count())));
  }

  std::vector<double> measure(int workers) {
    const int chunk_bytes = schedule_.comm.chunk_bytes;
    const int stages =
        request_.layer.given(Direction::kForward).given("comm.stages") ? schedule_.comm.stages : kMostStages;
    cuda::ExchangeRequest request;
    request.program = {.shape = request_.layer.shape,
                       .numerics = request_.layer.numerics,
                       .schedule = schedule_,
                       .workers = workers,
                       .pull_parts = kPullParts};
    request.program.schedule.comm.reserve_sms = 0;
    request.placement = placement_.state();
    request.devices = devices_;
    request.dispatch = cuda::dispatch_config(chunk_bytes, stages);
    request.combine = cuda::combine_config(chunk_bytes, stages);
    cuda::ExchangeSession session(request);
    for (int rank = 0; rank < request_.layer.ranks; ++rank) {
      const cuda::ScopedDevice scope(devices_[static_cast<std::size_t>(rank)]);
      fill(session.arrays(rank).input, rank, placement_.tokens(rank));
      fill(session.arrays(rank).output_rows, rank, placement_.padded_rows(rank));
    }
    session.synchronize();
    std::vector<double> times = gpus_.time_cold(
        [&] {
          if (exchange_ == Exchange::kDispatch) {
            session.dispatch();
          } else {
            session.combine();
          }
        },
        request_.repeat, BenchGpus::Start::kTogether);
    session.check();
    return times;
  }

  void fill(BFloat16* target, int rank, int64_t rows) {
    if (rows == 0) return;
    const std::size_t bytes = static_cast<std::size_t>(rows * request_.layer.shape.hidden) * sizeof(BFloat16);
    cuda::check(cuda::driver().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(target),
                                                 reinterpret_cast<CUdeviceptr>(values_[static_cast<std::size_t>(rank)]),
                                                 bytes, nullptr),
                "filling rows");
  }

  Received busiest() const {
    const BytesMoved moved = bytes_moved(placement_, schedule_, request_.layer.numerics);
    const ByteMatrix& matrix = exchange_ == Exchange::kDispatch ? moved.dispatch : moved.combine;
    std::vector<Received> received(gpus_.count());
    for (int source = 0; source < request_.layer.ranks; ++source) {
      for (int destination = 0; destination < request_.layer.ranks; ++destination) {
        const auto bytes =
            static_cast<double>(matrix[static_cast<std::size_t>(source)][static_cast<std::size_t>(destination)]);
        received[gpu_of(destination)].all += bytes;
        if (gpu_of(source) != gpu_of(destination)) received[gpu_of(destination)].remote += bytes;
      }
    }
    return *std::max_element(received.begin(), received.end(),
                             [](const Received& a, const Received& b) { return a.all < b.all; });
  }

  const BenchRequest& request_;
  const Exchange exchange_;
  BenchGpus gpus_;
  Schedule schedule_;
  Placement placement_;
  std::vector<int> devices_;   // of each rank
  std::vector<void*> values_;  // of each rank, on its GPU
};

std::vector<std::string> result_names() {
  std::vector<std::string> names;
  for (const SmCount& sms : kSmCounts) names.emplace_back(sms.name);
  return names;
}

}  // namespace

BenchOperation dispatch_operation() {
  return {"dispatch", "rows to their experts, permutation and padding included, by so many SMs", result_names(),
          [](const BenchRequest& request) { return ExchangeBench(request, Exchange::kDispatch).run(); }};
}

BenchOperation combine_operation() {
  return {"combine", "expert rows back to their tokens and their sums, by so many SMs", result_names(),
          [](const BenchRequest& request) { return ExchangeBench(request, Exchange::kCombine).run(); }};
}

}  // namespace uniep::cli
