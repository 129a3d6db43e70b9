#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cli/layer_options.h"
#include "cli/trace_file.h"

namespace uniep::cli {

// What `uniep bench` is asked to measure.
struct BenchRequest {
  LayerOptions layer;
  Launch launch = Launch::kThreads;
  std::vector<int> devices;  // with a process a rank they may be left to the environment
  int repeat = 20;
  double warm_up_seconds = 0.0;    // of the same work before it counts, layers without pauses; 0: a few calls
  double sustained_seconds = 0.0;  // 0: no sustained sequence
  std::vector<std::string> only;   // names of results; empty: all
  bool traced = false;             // after all that is measured, once more for the timeline

  bool wants(const std::string& result) const {
    return only.empty() || std::find(only.begin(), only.end(), result) != only.end();
  }
};

// One thing that was measured: of each repetition the slowest GPU's time.
struct BenchResult {
  std::string name;
  std::vector<double> milliseconds;
  double flops = 0.0;  // of one GPU
  double bytes = 0.0;  // that one GPU sends or receives, the larger; 0: nothing
  double sent = 0.0;   // of these both, where they are told apart
  double received = 0.0;
  double first_call_ms = 0.0;  // on the host: compiling or loading kernels, and running once; 0: not measured
};

struct BenchReport {
  std::string device;                                 // the GPU's name
  std::vector<int64_t> rows_per_rank;                 // routed rows
  std::vector<std::vector<int32_t>> rows_per_expert;  // the same of each GPU's experts, if it matters
  std::vector<BenchResult> results;
  std::vector<std::pair<std::string, double>> ratios;      // of results, by name
  std::vector<std::pair<std::string, MemoryNeed>> memory;  // by direction: the most that a local rank needs
  std::vector<TracedCall> timeline;
};

// An operation of `uniep bench --op`. Each is one file.
struct BenchOperation {
  const char* name;
  const char* description;
  std::vector<std::string> results;  // the names that --only takes
  BenchReport (*run)(const BenchRequest& request);
  bool has_timeline = false;  // BenchRequest::traced is heeded
  bool has_group = true;      // its ranks belong to a Group, and may be processes
};

BenchOperation gemm_operation();
BenchOperation layer_operation();
BenchOperation backward_operation();
BenchOperation step_operation();
BenchOperation dispatch_operation();
BenchOperation combine_operation();

}  // namespace uniep::cli
