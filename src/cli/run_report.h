#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/bytes_moved.h"
#include "cli/layer_runner.h"
#include "cli/sequential_run.h"
#include "reference/check.h"

namespace uniep::cli {

// The same calls without any overlap.
struct SequentialReport {
  LayerSchedules schedules;
  CallTimes times;
  std::vector<std::string> differing;  // tensors whose bits are not the same
};

// What `uniep run` has to say, as JSON and as a table.
struct RunReport {
  EngineKind engine = EngineKind::kCpu;
  int ranks = 0;
  int workers = 0;
  LayerConfig config;
  std::vector<int64_t> tokens;
  LayerSchedules schedules;
  std::string given_fields;  // of --schedule
  CallTimes times;
  std::vector<int64_t> rows_per_rank;
  BytesMoved bytes;
  std::vector<std::pair<std::string, std::string>> checksums;
  std::optional<reference::CheckReport> check;
  std::optional<SequentialReport> sequential;
};

double median(std::vector<double> values);

// By tensor name, in the contract's order.
std::vector<std::pair<std::string, std::string>> checksums_of(const LayerResult& result, bool backward);

// The keys of the command line's contract; what was not asked for is null.
nlohmann::ordered_json to_json(const RunReport& report);
// `verbose`: with whole Schedules.
std::string to_table(const RunReport& report, bool verbose);

// Why the check failed, by tensor, or nothing.
std::string failed_checks(const reference::CheckReport& check);

}  // namespace uniep::cli
