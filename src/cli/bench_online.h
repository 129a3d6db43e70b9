#pragma once

#include <cstdint>
#include <string>

#include "cli/bench_operation.h"
#include "uniep/schedule.h"

// `uniep bench --op layer --tune online`: a job of forward layers that tunes itself.
namespace uniep::cli {

struct OnlineBench {
  bool wanted = false;
  int64_t steps = 300;
  int calls = 20;         // of a step, each with a routing of its own
  double budget = 0.005;  // time lost to trying, as a share of the time in layers
  PartialSchedule begin;  // what the first call runs under, where nothing better is kept
};

struct OnlineReport {
  std::string json, table;
  int64_t differing = 0;  // calls whose y is not that of sequential execution
};

// On either engine; with a process a rank, which the cpu engine does not have, each has a tuner, and rank 0's report
// counts all ranks. Every call runs again sequentially, and both results are compared byte by byte. A run that was
// killed goes on from what it had found, which is kept where `uniep tune` keeps it.
OnlineReport bench_online(const BenchRequest& request, const OnlineBench& online);

}  // namespace uniep::cli
