#include "cli/tune_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "cli/html_page.h"
#include "cli/layer_report.h"
#include "cli/report_words.h"
#include "cli/simulated_layer.h"
#include "cli/solve_request.h"
#include "cli/solver_choice.h"
#include "cli/trace_compare.h"
#include "sim/simulate.h"
#include "tune/changed_fields.h"
#include "tune/median.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

using Rows = std::vector<std::vector<std::string>>;

// A time with the 95 % interval of its median.
std::string time_text(const tune::Tried& tried) {
  const tune::Interval interval = tune::median_interval(tried.milliseconds, 1.96);
  std::string middle = ms_text(tune::median(tried.milliseconds));
  if (!std::isfinite(interval.low)) return middle;
  return fmt::format("{} ({} to {})", middle, ms_text(interval.low), ms_text(interval.high));
}

std::string ratio_text(const tune::Tried& tried) {
  if (!std::isfinite(tried.ratio)) return "-";
  if (!std::isfinite(tried.ratio_low)) return fmt::format("{:.3f}", tried.ratio);
  return fmt::format("{:.3f} ({:.3f} to {:.3f})", tried.ratio, tried.ratio_low, tried.ratio_high);
}

// The chosen one first, then the default, then the others by their ratio; what was not timed last.
std::vector<std::size_t> order_of(const tune::SearchResult& search) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < search.tried.size(); ++i) order.push_back(i);
  const auto place = [&](std::size_t i) {
    const tune::Tried& tried = search.tried[i];
    if (i == search.best) return -2.0;
    if (i == 0) return -1.0;
    return std::isfinite(tried.ratio) ? tried.ratio : 1e9;
  };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return place(a) < place(b); });
  return order;
}

// The default and the chosen Schedule on the described machine.
struct SimulatedCalls {
  sim::Simulated base, chosen;
  TracedCall chosen_call;
};

class Report {
 public:
  Report(const LayerOptions& layer, const sim::MachineDescription& description, const std::string& measured_on)
      : layer_(layer),
        description_(description),
        measured_on_(measured_on),
        is_described_(description.calibrated ? measured_on.starts_with(description.calibrated->device + ",")
                                             : sim::machine_of_device(measured_on) != nullptr &&
                                                   sim::machine_of_device(measured_on)->name == description.name),
        page_("UniEP: tuned schedules of a layer") {}

  std::string text(const std::vector<TunedDirection>& directions) {
    add_layer_table(page_, layer_, {{"measured on", measured_on_}, {"simulated machine", description_.title}});
    page_.paragraph(
        "No schedule changes a bit of a result; each candidate's checksums were compared with the default's before it "
        "was timed.");
    for (const TunedDirection& tuned : directions) add(tuned);
    return page_.text();
  }

 private:
  void add(const TunedDirection& tuned) {
    const Direction direction = tuned.entry.key.direction;
    const std::string name = direction_name(direction);
    page_.heading(direction == Direction::kForward ? "Forward" : "Backward");
    choice(tuned);
    std::optional<SimulatedCalls> simulated;
    std::string why;
    try {
      simulated = simulate(tuned, direction);
    } catch (const Error& error) {
      why = error.what();
    }
    stages(tuned, simulated, name);
    page_.subheading("Timelines");
    page_.picture(timeline_picture("measured, chosen schedule", tuned.chosen_call, layer_.ranks),
                  "Measured: one call of the chosen schedule. A few workers of each rank, each with its copies above "
                  "its tiles.");
    if (simulated) {
      page_.picture(timeline_picture("simulated, " + description_.title, simulated->chosen_call, simulated_ranks()),
                    "Simulated: the chosen schedule's fields on " + description_.title + ".");
      bound(tuned, *simulated);
    } else {
      page_.note("Not simulated on " + description_.title + ": " + why);
    }
    const std::string found = tune::changed_fields(tuned.entry.schedule, tuned.search.tried.front().schedule);
    add_what_ifs(page_, {layer_, direction, found, description_}, "chosen here");
  }

  void choice(const TunedDirection& tuned) {
    const std::vector<tune::Tried>& tried = tuned.search.tried;
    const tune::Tried& best = tried[tuned.search.best];
    if (tuned.search.best == 0) {
      page_.paragraph(fmt::format("The default stays, {} ms: nothing was surely half a percent faster.",
                                  ms_text(tuned.entry.default_milliseconds)));
    } else {
      page_.paragraph(fmt::format("Chosen: {} ms beside the default's {} ms, {:.1f} % less time.",
                                  ms_text(tuned.entry.milliseconds), ms_text(tuned.entry.default_milliseconds),
                                  100 * (1 - best.ratio)));
    }
    page_.code(to_text(best.schedule));
    Rows rows;
    for (const std::size_t i : order_of(tuned.search)) {
      const tune::Tried& one = tried[i];
      const bool timed = !one.milliseconds.empty();
      std::string verdict = i == tuned.search.best ? "chosen" : tune::verdict_name(one.verdict);
      if (!one.reason.empty()) verdict += ": " + one.reason;
      rows.push_back({changes(one.schedule, tried.front().schedule), verdict, timed ? time_text(one) : "-",
                      ratio_text(one), fmt::format("{}", one.milliseconds.size())});
    }
    page_.table({"schedule", "verdict", "ms", "time over the default's", "calls"}, rows, 0);
    page_.note(
        "Medians, in brackets their 95 % interval by order statistics, where there are calls enough for one. The ratio "
        "is of calls beside each other; slower ones were left behind after a few calls." +
        std::string(tuned.search.budget_ended ? " The budget ended before all rounds were over." : ""));
  }

  int simulated_ranks() const { return std::min(layer_.ranks, description_.most_ranks()); }

  SimulatedCalls simulate(const TunedDirection& tuned, Direction direction) const {
    LayerOptions own = layer_;
    own.engine = EngineKind::kAuto;
    own.workers = 0;
    if (own.ranks > description_.most_ranks()) {
      throw Error(Status::kInvalidArgument, fmt::format("it links at most {} ranks", description_.most_ranks()));
    }
    const Machine machine = sim::schedule_machine(description_, own.ranks);
    const Schedule base = own.resolved(direction, machine);
    PartialSchedule fields = own.given(direction);
    const std::string changed = tune::changed_fields(tuned.entry.schedule, tuned.search.tried.front().schedule);
    if (!changed.empty()) {
      const PartialSchedule found = PartialSchedule::parse(changed);
      for (const auto& [key, value] : found.values()) fields.set(key, value);
    }
    const Schedule chosen =
        resolve(fields, {.direction = direction, .shape = own.shape, .numerics = own.numerics, .machine = machine});
    const Placement placement = place_ids(own, make_ids(own));
    sim::SimulateOptions how;
    how.one_rank = own.ranks > kSimulatedRanks && is_uniform(own);
    const auto run = [&](const Schedule& schedule, bool record, TracedCall* call) {
      const Program program(sim::simulated_request(own.shape, own.numerics, schedule, direction, description_),
                            placement.state());
      how.record = record;
      sim::Simulated result = sim::simulate(program, description_, how);
      if (call != nullptr) *call = {direction_name(direction), sim::tile_events(program, result.timeline)};
      return result;
    };
    SimulatedCalls calls;
    calls.base = run(base, false, nullptr);
    calls.chosen = run(chosen, true, &calls.chosen_call);
    return calls;
  }

  void stages(const TunedDirection& tuned, const std::optional<SimulatedCalls>& simulated, const std::string& call) {
    const TraceSummary chosen = summarize(recorded("chosen", tuned.chosen_call), call, "chosen");
    const TraceSummary base = summarize(recorded("default", tuned.default_call), call, "default");
    std::optional<TraceSummary> other;
    if (simulated) other = summarize(recorded("simulated", simulated->chosen_call), call, "simulated");
    page_.subheading("Time by stage");
    Rows rows;
    for (const auto& [stage, times] : chosen.stages) {
      const auto before = base.stages.find(stage);
      std::vector<std::string> row = {stage, fmt::format("{}", times.tiles), fmt::format("{:.1f}", times.mean_us),
                                      ms_text(times.begin_ms), ms_text(times.end_ms)};
      row.push_back(before == base.stages.end() ? "-" : fmt::format("{:.1f}", before->second.mean_us));
      row.push_back(before == base.stages.end() ? "-" : ms_text(before->second.end_ms));
      const auto predicted = other ? other->stages.find(stage) : chosen.stages.end();
      const bool is_predicted = other && predicted != other->stages.end();
      row.push_back(is_predicted ? fmt::format("{:.1f}", predicted->second.mean_us) : "-");
      row.push_back(is_predicted ? ms_text(predicted->second.end_ms) : "-");
      rows.push_back(row);
    }
    rows.push_back({"waits of a worker, ms", "", "", "", ms_text(chosen.waits_ms), "", ms_text(base.waits_ms), "",
                    other ? ms_text(other->waits_ms) : "-"});
    page_.table({"stage", "tiles", "a tile, us", "begin, ms", "end, ms", "default: a tile, us", "default: end, ms",
                 "simulated: a tile, us", "simulated: end, ms"},
                rows);
    page_.note("Of one recorded call each, of all ranks. Recording makes a call a little longer.");
  }

  void bound(const TunedDirection& tuned, const SimulatedCalls& simulated) {
    page_.subheading("Bound and gap");
    const sim::Limits& limits = simulated.chosen.limits;
    add_limits(page_, description_, limits);
    const auto gap = [&](double value) { return fmt::format("{:.1f} %", 100 * (value / limits.bound_ms() - 1)); };
    Rows rows = {{"simulated, chosen", ms_text(simulated.chosen.ms), gap(simulated.chosen.ms)},
                 {"simulated, default", ms_text(simulated.base.ms), gap(simulated.base.ms)}};
    if (is_described_) {
      rows.push_back({"measured, chosen", ms_text(tuned.entry.milliseconds), gap(tuned.entry.milliseconds)});
      rows.push_back(
          {"measured, default", ms_text(tuned.entry.default_milliseconds), gap(tuned.entry.default_milliseconds)});
    }
    page_.table({"", "ms", "above the bound"}, rows);
    if (!is_described_) {
      page_.note(
          "What was measured is not the machine that is simulated, so its times stand in no relation to this bound.");
    }
  }

  const LayerOptions& layer_;
  const sim::MachineDescription& description_;
  std::string measured_on_;
  bool is_described_;
  HtmlPage page_;
};

}  // namespace

std::string tune_report(const LayerOptions& layer, const sim::MachineDescription& description,
                        const std::string& measured_on, const std::vector<TunedDirection>& directions) {
  return Report(layer, description, measured_on).text(directions);
}

}  // namespace uniep::cli
