#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench_gpus.h"
#include "cli/bench_operation.h"

namespace uniep::cli {

// Those of several kinds of work that are wanted, timed in turn.
class BenchTurns {
 public:
  BenchTurns(const BenchRequest& request, BenchReport& report, BenchGpus& gpus)
      : request_(request), report_(report), gpus_(gpus) {}

  // Warm GPUs are to stay so: no idle time between calls, as between the layers of a model.
  BenchGpus::Start queued() const {
    return request_.warm_up_seconds > 0 ? BenchGpus::Start::kBackToBack : BenchGpus::Start::kTogether;
  }
  void add(BenchResult result, BenchGpus::Start start, std::function<void()> work) {
    if (!request_.wants(result.name)) return;
    results_.push_back(std::move(result));
    works_.push_back({std::move(work), start});
  }

  // Each call by its GPUs' clocks.
  void time_calls() {
    if (!works_.empty()) report(gpus_.time_cold_in_turn(works_, request_.repeat), 1);
  }
  // By the host's clock; each time is that of so many calls.
  void time_on_host(int calls) {
    std::vector<std::function<void()>> works;
    for (const BenchGpus::Work& work : works_) works.push_back(work.run);
    if (!works.empty()) report(gpus_.time_on_host_in_turn(works, request_.repeat), calls);
  }

 private:
  void report(std::vector<std::vector<double>> times, int calls) {
    for (std::size_t i = 0; i < times.size(); ++i) {
      for (double& time : times[i]) time /= calls;
      results_[i].milliseconds = std::move(times[i]);
      report_.results.push_back(std::move(results_[i]));
    }
    results_.clear();
    works_.clear();
  }

  const BenchRequest& request_;
  BenchReport& report_;
  BenchGpus& gpus_;
  std::vector<BenchResult> results_;
  std::vector<BenchGpus::Work> works_;
};

}  // namespace uniep::cli
