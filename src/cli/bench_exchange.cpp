// `uniep bench --op dispatch` and `--op combine`: rows to their experts and back without the GEMMs, by so many SMs.
#include <algorithm>

#include "cli/bench_operation.h"
#include "cli/bench_ranks.h"
#include "cli/options.h"
#include "cli/run_report.h"
#include "uniep/error.h"
#include "uniep/exchange.h"

namespace uniep::cli {
namespace {

struct SmCount {
  const char* name;
  int count;  // 0: all
};
constexpr SmCount kSmCounts[] = {{"4 SMs", 4},   {"8 SMs", 8},   {"16 SMs", 16}, {"24 SMs", 24},
                                 {"32 SMs", 32}, {"64 SMs", 64}, {"all SMs", 0}};

class ExchangeBench {
 public:
  ExchangeBench(const BenchRequest& request, Operation operation)
      : request_(request), operation_(operation), ranks_(request) {
    const int64_t hidden = request.layer.shape.hidden;
    for (int rank = ranks_.first_local(); rank < ranks_.end_local(); ++rank) {
      const std::size_t gpu = ranks_.gpu_of(rank);
      const int64_t tokens = ranks_.on_host().tokens(rank) * hidden, rows = ranks_.on_host().padded_rows(rank) * hidden;
      BenchGpus& gpus = ranks_.gpus();
      if (operation == Operation::kDispatch) {
        there_.push_back({.x = static_cast<BFloat16*>(gpus.random_bfloat16(gpu, tokens)),
                          .rows = static_cast<BFloat16*>(gpus.zeros(gpu, rows * 2)),
                          .stream = {}});
      } else {
        back_.push_back({.rows = static_cast<BFloat16*>(gpus.random_bfloat16(gpu, rows)),
                         .y = static_cast<BFloat16*>(gpus.zeros(gpu, tokens * 2)),
                         .stream = {}});
      }
    }
    placement_ = place(ranks_.group(), request.layer.shape, ranks_.routings());
  }

  BenchReport run() {
    BenchReport report;
    report.device = ranks_.gpus().name();
    report.rows_per_rank = ranks_.rows_per_rank();
    for (const SmCount& sms : kSmCounts) {
      if (!request_.wants(sms.name) || sms.count > ranks_.group().workers()) continue;
      const Schedule schedule = schedule_for(sms.count);
      const BenchRanks::Traffic busiest = busiest_gpu(schedule);
      BenchResult result;
      result.name = sms.name;
      result.bytes = busiest.from_others;
      result.milliseconds =
          ranks_.gpus().time_cold([&] { call(schedule); }, request_.repeat, BenchGpus::Start::kTogether);
      ranks_.group().synchronize();
      report.ratios.emplace_back(result.name + ": GB/s of all received rows",
                                 busiest.received / (median(result.milliseconds) * 1e6));
      report.results.push_back(std::move(result));
    }
    return report;
  }

 private:
  Schedule schedule_for(int sms) {
    PartialSchedule given = request_.layer.given(Direction::kForward);
    const char* const field = operation_ == Operation::kDispatch ? "comm.dispatch_sms" : "comm.combine_sms";
    if (given.given(field)) {
      throw Error(Status::kInvalidArgument,
                  std::string("--schedule: ") + field + ": must be left out; each result has its own, see --only");
    }
    if (sms > 0) given.set(field, std::to_string(sms));
    return naming_option("--schedule", [&] {
      return resolve(given, {.direction = Direction::kForward,
                             .shape = request_.layer.shape,
                             .numerics = request_.layer.numerics,
                             .machine = ranks_.group().machine(),
                             .operation = operation_});
    });
  }

  void call(const Schedule& schedule) {
    if (operation_ == Operation::kDispatch) {
      dispatch(ranks_.group(), request_.layer.config(), schedule, placement_, there_);
    } else {
      combine(ranks_.group(), request_.layer.config(), schedule, placement_, back_);
    }
  }

  BenchRanks::Traffic busiest_gpu(const Schedule& schedule) const {
    const BytesMoved moved = bytes_moved(ranks_.on_host(), schedule, request_.layer.numerics);
    const std::vector<BenchRanks::Traffic> of_gpu =
        ranks_.traffic(operation_ == Operation::kDispatch ? moved.dispatch : moved.combine);
    return *std::max_element(of_gpu.begin(), of_gpu.end(),
                             [](const auto& a, const auto& b) { return a.received < b.received; });
  }

  const BenchRequest& request_;
  const Operation operation_;
  BenchRanks ranks_;
  Placement placement_;
  std::vector<DispatchArguments> there_;
  std::vector<CombineArguments> back_;
};

std::vector<std::string> result_names() {
  std::vector<std::string> names;
  for (const SmCount& sms : kSmCounts) names.emplace_back(sms.name);
  return names;
}

}  // namespace

BenchOperation dispatch_operation() {
  return {"dispatch", "rows to their experts, permutation and padding included, by so many SMs", result_names(),
          [](const BenchRequest& request) { return ExchangeBench(request, Operation::kDispatch).run(); }};
}

BenchOperation combine_operation() {
  return {"combine", "expert rows back to their tokens and their sums, by so many SMs", result_names(),
          [](const BenchRequest& request) { return ExchangeBench(request, Operation::kCombine).run(); }};
}

}  // namespace uniep::cli
