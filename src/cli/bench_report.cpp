#include "cli/bench_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/run_report.h"

namespace uniep::cli {
namespace {

using Json = nlohmann::ordered_json;

double tflops(const BenchResult& result) {
  return result.flops / (median(result.milliseconds) * 1e9);
}

double gigabytes_per_second(const BenchResult& result, double bytes) {
  return bytes / (median(result.milliseconds) * 1e6);
}

double megabytes(std::size_t bytes) {
  return static_cast<double>(bytes) / 1e6;
}

// What does not apply is left blank.
std::string cell(double value, int digits) {
  return value == 0.0 ? std::string() : fmt::format("{:.{}f}", value, digits);
}

const char* launch_name(const BenchRequest& request) {
  return request.launch == Launch::kProcesses ? "processes" : "threads";
}

// Left to the environment: each rank's own.
std::vector<int> devices_of(const BenchRequest& request) {
  std::vector<int> devices = request.devices;
  for (int rank = 0; request.devices.empty() && rank < request.layer.ranks; ++rank) devices.push_back(rank);
  return devices;
}

}  // namespace

Json to_json(const BenchRequest& request, const std::string& operation, const BenchReport& report) {
  const LayerShape& shape = request.layer.shape;
  Json json;
  json["op"] = operation;
  json["device"] = report.device;
  json["devices"] = devices_of(request);
  json["launch"] = launch_name(request);
  json["ranks"] = request.layer.ranks;
  json["shape"] = {
      {"hidden", shape.hidden}, {"intermediate", shape.intermediate}, {"experts", shape.experts}, {"topk", shape.topk}};
  json["tokens"] = request.layer.tokens();
  json["rows_per_rank"] = report.rows_per_rank;
  if (!report.rows_per_expert.empty()) json["rows_per_expert"] = report.rows_per_expert;
  json["results"] = Json::array();
  for (const BenchResult& result : report.results) {
    Json entry;
    entry["name"] = result.name;
    entry["ms"] = {{"median", median(result.milliseconds)}, {"all", result.milliseconds}};
    if (result.flops > 0.0) entry["tflops"] = tflops(result);
    if (result.bytes > 0.0) entry["gb_per_s"] = gigabytes_per_second(result, result.bytes);
    if (result.sent + result.received > 0.0) {
      entry["gb_per_s_each_way"] = {{"sent", gigabytes_per_second(result, result.sent)},
                                    {"received", gigabytes_per_second(result, result.received)}};
    }
    if (result.first_call_ms > 0.0) entry["first_call_ms"] = result.first_call_ms;
    json["results"].push_back(entry);
  }
  for (const auto& [name, value] : report.ratios) json["ratios"][name] = value;
  for (const auto& [direction, need] : report.memory) {
    json["memory"][direction] = {{"saved_bytes", need.saved_bytes},
                                 {"workspace_bytes", need.workspace_bytes},
                                 {"symmetric_bytes", need.symmetric_bytes}};
  }
  return json;
}

std::string to_table(const BenchRequest& request, const std::string& operation, const BenchReport& report) {
  const LayerShape& shape = request.layer.shape;
  std::string text =
      fmt::format("{}: H {}, I {}, E {}, K {}; tokens {} on {} ranks ({}); {} (GPU {})\n", operation, shape.hidden,
                  shape.intermediate, shape.experts, shape.topk, fmt::join(request.layer.tokens_given, ","),
                  request.layer.ranks, launch_name(request), report.device, fmt::join(devices_of(request), ","));
  text += fmt::format("{:<40}{:>11}{:>11}{:>11}{:>9}{:>8}{:>15}\n", "", "median ms", "min", "max", "TFLOP/s", "GB/s",
                      "first call ms");
  for (const BenchResult& result : report.results) {
    const auto [least, most] = std::minmax_element(result.milliseconds.begin(), result.milliseconds.end());
    text += fmt::format("{:<40}{:>11.4f}{:>11.4f}{:>11.4f}{:>9}{:>8}{:>15}\n", result.name, median(result.milliseconds),
                        *least, *most, cell(tflops(result), 0), cell(gigabytes_per_second(result, result.bytes), 1),
                        cell(result.first_call_ms, 1));
  }
  for (const auto& [name, value] : report.ratios) text += fmt::format("{:<48}{:>8.3f}\n", name, value);
  for (const auto& [direction, need] : report.memory) {
    text += fmt::format("{} of a rank, MB: saved {:.0f}, workspace {:.0f}, symmetric {:.0f}\n", direction,
                        megabytes(need.saved_bytes), megabytes(need.workspace_bytes), megabytes(need.symmetric_bytes));
  }
  return text;
}

}  // namespace uniep::cli
