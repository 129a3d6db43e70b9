#include "cli/layer_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "cli/simulated_layer.h"
#include "cli/trace_svg.h"
#include "cli/what_if.h"
#include "uniep/version.h"

namespace uniep::cli {
namespace {

constexpr int kMaxLanes = 48;  // of a timeline's picture, about

std::string ms_or_none(const std::optional<double>& value) {
  return value ? ms_text(*value) : "-";
}

std::string tokens_text(const LayerOptions& layer) {
  const std::vector<int64_t> tokens = layer.tokens();
  const auto [least, most] = std::minmax_element(tokens.begin(), tokens.end());
  return *least == *most ? fmt::format("{}", *least) : fmt::format("{} to {}", *least, *most);
}

struct WhatIfTable {
  std::string title, head;
  std::vector<WhatIf> rows;
  bool with_machine = false;
};

void add_what_if_table(HtmlPage& page, const WhatIfTable& table, const std::string& column) {
  page.subheading(table.title);
  std::vector<std::vector<std::string>> cells;
  for (const WhatIf& row : table.rows) {
    std::vector<std::string> line = {row.what};
    if (table.with_machine) line.push_back(row.machine);
    if (row.refused.empty()) {
      const double least = std::min(
          {row.default_ms.value_or(HUGE_VAL), row.found_ms.value_or(HUGE_VAL), row.solved_ms.value_or(HUGE_VAL)});
      line.insert(
          line.end(),
          {ms_or_none(row.default_ms), ms_or_none(row.found_ms), ms_or_none(row.solved_ms), ms_or_none(row.bound_ms),
           fmt::format("{:.1f} %", 100 * (least / row.bound_ms.value_or(HUGE_VAL) - 1)), row.limits, row.predicted_by});
    } else {
      line.insert(line.end(), {"-", "-", "-", "-", "-", row.refused, ""});
    }
    cells.push_back(line);
  }
  std::vector<std::string> names = {table.head};
  if (table.with_machine) names.emplace_back("machine");
  names.insert(names.end(), {"default, ms", column + ", ms", "solver's, ms", "bound, ms", "best above it",
                             "what limits", "predicted by"});
  page.table(names, cells);
}

}  // namespace

std::string ms_text(double milliseconds) {
  return fmt::format("{:.3f}", milliseconds);
}

Trace recorded(const std::string& title, const TracedCall& call) {
  return parse_trace(trace_json(title, std::span(&call, 1)), title);
}

std::string timeline_picture(const std::string& title, const TracedCall& call, int ranks) {
  return trace_svg(with_fewer_workers(recorded(title, call), std::max(1, kMaxLanes / (2 * ranks))));
}

void add_layer_table(HtmlPage& page, const LayerOptions& layer,
                     const std::vector<std::pair<std::string, std::string>>& further) {
  const LayerShape& shape = layer.shape;
  std::vector<std::vector<std::string>> rows = {
      {"layer", fmt::format("H {}, I {}, E {}, K {}, {}", shape.hidden, shape.intermediate, shape.experts, shape.topk,
                            activation_text(layer.numerics))},
      {"ranks", fmt::format("EP {}", layer.ranks)},
      {"tokens of a rank", "T " + tokens_text(layer)},
      {"routing", layer.routing}};
  for (const auto& [name, value] : further) rows.push_back({name, value});
  rows.push_back({"library", "UniEP " UNIEP_VERSION_STRING});
  page.table({"", ""}, rows);
}

void add_limits(HtmlPage& page, const sim::MachineDescription& description, const sim::Limits& limits) {
  page.table({"what no order of tiles beats, on " + description.title, "ms"},
             {{"GEMMs of the busiest rank, all workers busy", ms_text(limits.gemm_ms)},
              {"links, the busiest way in or out of a rank", ms_text(limits.links_ms)},
              {"memory", ms_text(limits.memory_ms)},
              {"begin and end", ms_text(limits.begin_end_ms)},
              {fmt::format("the bound, by {}", limits.name()), ms_text(limits.bound_ms())}},
             4);
}

void add_what_ifs(HtmlPage& page, const WhatIfRequest& request, const std::string& column) {
  const auto& [layer, direction, found, description] = request;
  page.heading(std::string("What if: ") + (direction == Direction::kForward ? "forward" : "backward"));
  page.note(fmt::format(
      "Predicted, not measured. '{}' is what differs from the default above, where that is legal and has a kernel. "
      "Routing is uniform but in the last table, and T is the largest of any rank. Where it is uniform, one rank "
      "stands "
      "for all, so that times differ a little from those above.{} The bound is what no schedule beats; the one above "
      "is "
      "of its schedule alone. Above EP 8 no engine is built; these rows are for one as it would be.",
      column, layer.ranks > kSimulatedRanks ? " All but ranks are for EP 8." : ""));
  add_what_if_table(page, {"Other machines", "machine", what_if_machines(layer, direction, found, description), false},
                    column);
  add_what_if_table(
      page, {"Other numbers of ranks", "ranks", what_if_ranks(layer, direction, found, description), true}, column);
  add_what_if_table(page,
                    {"Other numbers of tokens, on " + description.title, "tokens of a rank",
                     what_if_tokens(layer, direction, found, description), false},
                    column);
  add_what_if_table(
      page,
      {"Other routing, on " + description.title, "routing", what_if_skew(layer, direction, found, description), false},
      column);
}

}  // namespace uniep::cli
