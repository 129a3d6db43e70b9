#include "cli/run_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "cli/layer_options.h"
#include "train/parallel_checksum.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

// Times H I.
double forward_flops_per_row(const LayerConfig& config) {
  return is_gated(config.numerics.activation) ? 6 : 4;
}
double backward_flops_per_row(const LayerConfig& config) {
  return 2 * forward_flops_per_row(config);
}

template <typename T>
std::string checksum_text(const std::vector<T>& values) {
  return io::to_hex16(train::parallel_checksum(values.data(), static_cast<int64_t>(values.size())));
}

// TFLOP/s of each rank.
std::vector<double> tflops(const RunReport& report, double flops_per_row, const std::vector<double>& milliseconds) {
  const double row = flops_per_row * static_cast<double>(report.config.shape.hidden) *
                     static_cast<double>(report.config.shape.intermediate);
  const double picoseconds = median(milliseconds) * 1e9;
  std::vector<double> result;
  for (const int64_t rows : report.rows_per_rank) result.push_back(row * static_cast<double>(rows) / picoseconds);
  return result;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

Json times(const std::vector<double>& milliseconds) {
  if (milliseconds.empty()) return nullptr;
  return {{"median", median(milliseconds)}, {"all", milliseconds}};
}

Json numerics_json(const Numerics& numerics) {
  return {{"activation", activation_text(numerics)},
          {"router_weight", router_weight_text(numerics.router_weight)},
          {"bias", numerics.bias},
          {"weight_gradient", weight_gradient_name(numerics.weight_gradient)},
          {"combine_groups", numerics.combine_groups}};
}

void add_calls(Json& json, const LayerSchedules& schedules, const CallTimes& calls) {
  json["schedule"] = Json::parse(uniep::to_json(schedules.forward));
  json["schedule_backward"] = schedules.backward ? Json::parse(uniep::to_json(*schedules.backward)) : Json(nullptr);
  json["forward_ms"] = times(calls.forward_ms);
  json["backward_ms"] = times(calls.backward_ms);
}

void add_check(Json& json, const std::optional<reference::CheckReport>& check) {
  if (!check) {
    json["check"] = nullptr;
    return;
  }
  Json tensors = Json::object();
  for (const auto& [name, comparison] : check->tensors) {
    Json& tensor = tensors[name];
    tensor = {{"error", comparison.error},
              {"worst_row", comparison.worst_row},
              {"limit", comparison.limit},
              {"worst_row_limit", comparison.worst_row_limit},
              {"passed", comparison.passed}};
    if (!comparison.passed) tensor["message"] = comparison.message;
  }
  json["check"] = tensors;
  json["check_sampled"] = check->sampled;
  if (!check->sampled) return;
  json["check_sampled_tokens"] = check->sampled_tokens;
  json["check_sampled_weight_columns"] = check->sampled_weight_columns;
}

std::string time_line(const RunReport& report, const std::vector<double>& milliseconds, double flops_per_row) {
  return fmt::format("{:.3f} ms (median of {}), {:.4f} TFLOP/s a rank", median(milliseconds), milliseconds.size(),
                     mean(tflops(report, flops_per_row, milliseconds)));
}

std::string range(const std::vector<int64_t>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return *least == *most ? fmt::format("{}", *least) : fmt::format("{} to {}", *least, *most);
}

// The rank with the most rows ends last: by how much it is above the mean is lost on the others.
std::string rows_line(const std::vector<int64_t>& rows) {
  const int64_t most = *std::max_element(rows.begin(), rows.end());
  const double mean_rows =
      static_cast<double>(std::accumulate(rows.begin(), rows.end(), int64_t{0})) / static_cast<double>(rows.size());
  if (most == 0) return "none";
  return fmt::format("{:.0f} a rank on average, {} at most: max / mean {:.3f}", mean_rows, most,
                     static_cast<double>(most) / mean_rows);
}

std::string comparison_line(const RunReport& report) {
  const SequentialReport& sequential = *report.sequential;
  std::string text = sequential.differing.empty()
                         ? std::string("same bits")
                         : fmt::format("DIFFERENT bits in {}", fmt::join(sequential.differing, ", "));
  const auto add = [&text](const char* direction, const std::vector<double>& own, const std::vector<double>& other) {
    if (!own.empty()) text += fmt::format("; {} {:.2f} times as fast", direction, median(other) / median(own));
  };
  add("forward", report.times.forward_ms, sequential.times.forward_ms);
  add("backward", report.times.backward_ms, sequential.times.backward_ms);
  return text;
}

int64_t between_ranks(const ByteMatrix& bytes) {
  int64_t sum = 0;
  for (std::size_t source = 0; source < bytes.size(); ++source) {
    for (std::size_t target = 0; target < bytes.size(); ++target) sum += source == target ? 0 : bytes[source][target];
  }
  return sum;
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::vector<std::pair<std::string, std::string>> checksums_of(const LayerResult& result, bool backward) {
  std::vector<std::pair<std::string, std::string>> sums = {{"y", checksum_text(result.y)}};
  if (result.has_z) sums.emplace_back("z", checksum_text(result.z));
  if (!backward) return sums;
  sums.emplace_back("dx", checksum_text(result.dx));
  sums.emplace_back("dprobs", checksum_text(result.dprobs));
  const bool fp32 = result.dw1_bf16.empty();
  sums.emplace_back("dw1", fp32 ? checksum_text(result.dw1_fp32) : checksum_text(result.dw1_bf16));
  sums.emplace_back("dw2", fp32 ? checksum_text(result.dw2_fp32) : checksum_text(result.dw2_bf16));
  if (result.db1_bf16.empty() && result.db1_fp32.empty()) return sums;
  sums.emplace_back("db1", fp32 ? checksum_text(result.db1_fp32) : checksum_text(result.db1_bf16));
  sums.emplace_back("db2", fp32 ? checksum_text(result.db2_fp32) : checksum_text(result.db2_bf16));
  return sums;
}

Json to_json(const RunReport& report) {
  const LayerShape& shape = report.config.shape;
  Json json;
  json["engine"] = engine_name(report.engine);
  json["ranks"] = report.ranks;
  json["shape"] = {
      {"hidden", shape.hidden}, {"intermediate", shape.intermediate}, {"experts", shape.experts}, {"topk", shape.topk}};
  json["tokens"] = report.tokens;
  json["numerics"] = numerics_json(report.config.numerics);
  add_calls(json, report.schedules, report.times);
  Json& speed = json["tflops"];
  speed["forward"] = tflops(report, forward_flops_per_row(report.config), report.times.forward_ms);
  speed["backward"] = nullptr;
  const std::vector<double>& backward_ms = report.times.backward_ms;
  if (!backward_ms.empty()) speed["backward"] = tflops(report, backward_flops_per_row(report.config), backward_ms);
  json["rows_per_rank"] = report.rows_per_rank;
  json["bytes_moved"] = {{"dispatch", report.bytes.dispatch}, {"combine", report.bytes.combine}};
  for (const auto& [name, sum] : report.checksums) json["checksum"][name] = sum;
  add_check(json, report.check);
  if (!report.sequential) return json;
  add_calls(json["sequential"], report.sequential->schedules, report.sequential->times);
  json["sequential"]["same_bits"] = report.sequential->differing.empty();
  return json;
}

std::string to_table(const RunReport& report, bool verbose) {
  const LayerShape& shape = report.config.shape;
  std::string text;
  const auto line = [&text](const char* name, const std::string& value) {
    text += fmt::format("{:<20}{}\n", name, value);
  };
  line("engine", fmt::format("{}, {} ranks x {} workers", engine_name(report.engine), report.ranks, report.workers));
  line("shape", fmt::format("H {}, I {}, E {}, K {}", shape.hidden, shape.intermediate, shape.experts, shape.topk));
  line("tokens", fmt::format("{} a rank", range(report.tokens)));
  line("expert rows", rows_line(report.rows_per_rank));
  if (verbose) {
    line("schedule", to_text(report.schedules.forward));
    if (report.schedules.backward) line("schedule backward", to_text(*report.schedules.backward));
  } else {
    const std::string& given = report.given_fields;
    line("schedule", (given.empty() ? "auto" : given) + "; --verbose prints every field");
  }
  const auto calls = [&](const std::string& prefix, const CallTimes& times) {
    line((prefix + "forward").c_str(), time_line(report, times.forward_ms, forward_flops_per_row(report.config)));
    if (times.backward_ms.empty()) return;
    line((prefix + "backward").c_str(), time_line(report, times.backward_ms, backward_flops_per_row(report.config)));
  };
  calls("", report.times);
  if (report.sequential) {
    calls("sequential ", report.sequential->times);
    line("compared", comparison_line(report));
  }
  line("between ranks", fmt::format("dispatch {} bytes, combine {} bytes", between_ranks(report.bytes.dispatch),
                                    between_ranks(report.bytes.combine)));
  for (const auto& [name, sum] : report.checksums) line("checksum", fmt::format("{:<7}{}", name, sum));
  if (!report.check) return text;
  for (const auto& [name, comparison] : report.check->tensors) {
    line("check", fmt::format("{:<7}{}  error {:.2e} (limit {:.0e}), worst row {:.2e} (limit {:.0e})", name,
                              comparison.passed ? "passed" : "FAILED", comparison.error, comparison.limit,
                              comparison.worst_row, comparison.worst_row_limit));
  }
  if (report.check->sampled) {
    line("check", fmt::format("on a sample: {} tokens, {} weight columns", report.check->sampled_tokens,
                              report.check->sampled_weight_columns));
  }
  return text;
}

std::string failed_checks(const reference::CheckReport& check) {
  std::string text;
  for (const auto& [name, comparison] : check.tensors) {
    if (!comparison.passed) text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", name, comparison.message);
  }
  return text;
}

}  // namespace uniep::cli
