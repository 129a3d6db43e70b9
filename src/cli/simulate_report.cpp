#include "cli/simulate_report.h"

#include <fmt/format.h>

#include "cli/layer_report.h"
#include "tune/changed_fields.h"

namespace uniep::cli {

std::string simulate_report(const SimulatedCall& call) {
  const sim::Simulated& result = call.result;
  const std::string direction = call.direction == Direction::kForward ? "forward" : "backward";
  const std::string fields = tune::changed_fields(call.schedule, call.default_schedule);
  HtmlPage page("UniEP: a simulated " + direction);
  add_layer_table(
      page, call.layer,
      {{"simulated machine", call.description.title}, {"clock", fmt::format("{:.2f} GHz", result.clock_ghz)}});
  const std::string gap =
      fmt::format("{:.1f} % above the bound, {} ms by {}.", 100 * (result.ms / result.limits.bound_ms() - 1),
                  ms_text(result.limits.bound_ms()), result.limits.name());
  page.paragraph(fields.empty() ? fmt::format("The default takes {} ms, {}", ms_text(result.ms), gap)
                                : fmt::format("{} ms beside the default's {} ms, {}", ms_text(result.ms),
                                              ms_text(call.default_ms), gap));
  page.code(to_text(call.schedule));
  if (!fields.empty()) page.note("Not as in the default: " + fields);

  page.subheading("Time by stage");
  std::vector<std::vector<std::string>> rows;
  if (result.again_ms > 0) rows.push_back({"FC1 again, before all else", "", ms_text(result.again_ms), ""});
  for (const auto& [name, stage] : result.stages) {
    rows.push_back({name, ms_text(stage.begin_ms), ms_text(stage.end_ms), ms_text(stage.busy_ms)});
  }
  page.table({"stage", "begin of the first tile, ms", "end of the last, ms", "a worker busy with it, ms"}, rows);
  page.subheading("Timeline");
  page.picture(timeline_picture("simulated, " + call.description.title, call.timeline,
                                static_cast<int>(result.ms_per_rank.size())),
               "A few workers of each rank, each with its copies above its tiles.");
  page.subheading("Bound");
  add_limits(page, call.description, result.limits);

  LayerOptions layer = call.layer;
  layer.schedule = layer.schedule_backward = {};
  add_what_ifs(page, {layer, call.direction, fields, call.description}, "this schedule");
  return page.text();
}

}  // namespace uniep::cli
