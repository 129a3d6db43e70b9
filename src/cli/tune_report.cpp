#include "cli/tune_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "cli/html_page.h"
#include "cli/solve_request.h"
#include "cli/solver_choice.h"
#include "cli/trace_compare.h"
#include "cli/trace_svg.h"
#include "cli/what_if.h"
#include "sim/simulate.h"
#include "tune/changed_fields.h"
#include "tune/median.h"
#include "uniep/error.h"
#include "uniep/version.h"

namespace uniep::cli {
namespace {

constexpr int kMaxLanes = 48;  // of a timeline's picture, about
constexpr int kSimulatedRanks = 8;

using Rows = std::vector<std::vector<std::string>>;

std::string direction_name(Direction direction) {
  return direction == Direction::kForward ? "forward" : "backward";
}

std::string ms(double value) {
  return fmt::format("{:.3f}", value);
}
std::string ms(const std::optional<double>& value) {
  return value ? ms(*value) : "-";
}

std::string tokens_text(const LayerOptions& layer) {
  const std::vector<int64_t> tokens = layer.tokens();
  const auto [least, most] = std::minmax_element(tokens.begin(), tokens.end());
  return *least == *most ? fmt::format("{}", *least) : fmt::format("{} to {}", *least, *most);
}

std::string changes(const Schedule& schedule, const Schedule& base) {
  const std::string fields = tune::changed_fields(schedule, base);
  return fields.empty() ? "the default" : fields;
}

// A time with the 95 % interval of its median.
std::string time_text(const tune::Tried& tried) {
  const tune::Interval interval = tune::median_interval(tried.milliseconds, 1.96);
  std::string middle = ms(tune::median(tried.milliseconds));
  if (!std::isfinite(interval.low)) return middle;
  return fmt::format("{} ({} to {})", middle, ms(interval.low), ms(interval.high));
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

Trace trace_of(const std::string& title, const TracedCall& call) {
  return parse_trace(trace_json(title, std::span(&call, 1)), title);
}

std::string picture_of(const Trace& trace, int ranks) {
  return trace_svg(with_fewer_workers(trace, std::max(1, kMaxLanes / (2 * ranks))));
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
    const LayerShape& shape = layer_.shape;
    page_.table({"", ""}, {{"layer", fmt::format("H {}, I {}, E {}, K {}, {}", shape.hidden, shape.intermediate,
                                                 shape.experts, shape.topk, activation_text(layer_.numerics))},
                           {"ranks", fmt::format("EP {}", layer_.ranks)},
                           {"tokens of a rank", "T " + tokens_text(layer_)},
                           {"routing", layer_.routing},
                           {"measured on", measured_on_},
                           {"simulated machine", description_.title},
                           {"library", "UniEP " UNIEP_VERSION_STRING}});
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
    page_.picture(picture_of(trace_of("measured, chosen schedule", tuned.chosen_call), layer_.ranks),
                  "Measured: one call of the chosen schedule. A few workers of each rank, each with its copies above "
                  "its tiles.");
    if (simulated) {
      page_.picture(picture_of(trace_of("simulated, " + description_.title, simulated->chosen_call), simulated_ranks()),
                    "Simulated: the chosen schedule's fields on " + description_.title + ".");
      bound(tuned, *simulated);
    } else {
      page_.note("Not simulated on " + description_.title + ": " + why);
    }
    elsewhere(tuned, direction);
  }

  void choice(const TunedDirection& tuned) {
    const std::vector<tune::Tried>& tried = tuned.search.tried;
    const tune::Tried& best = tried[tuned.search.best];
    if (tuned.search.best == 0) {
      page_.paragraph(fmt::format("The default stays, {} ms: nothing was surely half a percent faster.",
                                  ms(tuned.entry.default_milliseconds)));
    } else {
      page_.paragraph(fmt::format("Chosen: {} ms beside the default's {} ms, {:.1f} % less time.",
                                  ms(tuned.entry.milliseconds), ms(tuned.entry.default_milliseconds),
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
    const TraceSummary chosen = summarize(trace_of("chosen", tuned.chosen_call), call, "chosen");
    const TraceSummary base = summarize(trace_of("default", tuned.default_call), call, "default");
    std::optional<TraceSummary> other;
    if (simulated) other = summarize(trace_of("simulated", simulated->chosen_call), call, "simulated");
    page_.subheading("Time by stage");
    Rows rows;
    for (const auto& [stage, times] : chosen.stages) {
      const auto before = base.stages.find(stage);
      std::vector<std::string> row = {stage, fmt::format("{}", times.tiles), fmt::format("{:.1f}", times.mean_us),
                                      ms(times.begin_ms), ms(times.end_ms)};
      row.push_back(before == base.stages.end() ? "-" : fmt::format("{:.1f}", before->second.mean_us));
      row.push_back(before == base.stages.end() ? "-" : ms(before->second.end_ms));
      const auto predicted = other ? other->stages.find(stage) : chosen.stages.end();
      const bool is_predicted = other && predicted != other->stages.end();
      row.push_back(is_predicted ? fmt::format("{:.1f}", predicted->second.mean_us) : "-");
      row.push_back(is_predicted ? ms(predicted->second.end_ms) : "-");
      rows.push_back(row);
    }
    rows.push_back({"waits of a worker, ms", "", "", "", ms(chosen.waits_ms), "", ms(base.waits_ms), "",
                    other ? ms(other->waits_ms) : "-"});
    page_.table({"stage", "tiles", "a tile, us", "begin, ms", "end, ms", "default: a tile, us", "default: end, ms",
                 "simulated: a tile, us", "simulated: end, ms"},
                rows);
    page_.note("Of one recorded call each, of all ranks. Recording makes a call a little longer.");
  }

  void bound(const TunedDirection& tuned, const SimulatedCalls& simulated) {
    page_.subheading("Bound and gap");
    const sim::Limits& limits = simulated.chosen.limits;
    page_.table({"what no order of tiles beats, on " + description_.title, "ms"},
                {{"GEMMs of the busiest rank, all workers busy", ms(limits.gemm_ms)},
                 {"links, the busiest way in or out of a rank", ms(limits.links_ms)},
                 {"memory", ms(limits.memory_ms)},
                 {"begin and end", ms(limits.begin_end_ms)},
                 {fmt::format("the bound, by {}", limits.name()), ms(limits.bound_ms())}},
                4);
    const auto gap = [&](double value) { return fmt::format("{:.1f} %", 100 * (value / limits.bound_ms() - 1)); };
    Rows rows = {{"simulated, chosen", ms(simulated.chosen.ms), gap(simulated.chosen.ms)},
                 {"simulated, default", ms(simulated.base.ms), gap(simulated.base.ms)}};
    if (is_described_) {
      rows.push_back({"measured, chosen", ms(tuned.entry.milliseconds), gap(tuned.entry.milliseconds)});
      rows.push_back(
          {"measured, default", ms(tuned.entry.default_milliseconds), gap(tuned.entry.default_milliseconds)});
    }
    page_.table({"", "ms", "above the bound"}, rows);
    if (!is_described_) {
      page_.note(
          "What was measured is not the machine that is simulated, so its times stand in no relation to this bound.");
    }
  }

  void what_ifs(const std::string& title, const std::string& head, const std::vector<WhatIf>& rows, bool with_machine) {
    page_.subheading(title);
    Rows cells;
    for (const WhatIf& row : rows) {
      std::vector<std::string> line = {row.what};
      if (with_machine) line.push_back(row.machine);
      if (row.refused.empty()) {
        const double least = std::min(
            {row.default_ms.value_or(HUGE_VAL), row.found_ms.value_or(HUGE_VAL), row.solved_ms.value_or(HUGE_VAL)});
        line.insert(line.end(), {ms(row.default_ms), ms(row.found_ms), ms(row.solved_ms), ms(row.bound_ms),
                                 fmt::format("{:.1f} %", 100 * (least / row.bound_ms.value_or(HUGE_VAL) - 1)),
                                 row.limits, row.predicted_by});
      } else {
        line.insert(line.end(), {"-", "-", "-", "-", "-", row.refused, ""});
      }
      cells.push_back(line);
    }
    std::vector<std::string> names = {head};
    if (with_machine) names.emplace_back("machine");
    names.insert(names.end(), {"default, ms", "chosen here, ms", "solver's, ms", "bound, ms", "best above it",
                               "what limits", "predicted by"});
    page_.table(names, cells);
  }

  void elsewhere(const TunedDirection& tuned, Direction direction) {
    const std::string found = tune::changed_fields(tuned.entry.schedule, tuned.search.tried.front().schedule);
    page_.heading("What if: " + direction_name(direction));
    page_.note(
        "Predicted, not measured. 'Chosen here' is what differs from the default above, where that is legal and has a "
        "kernel. Routing is uniform but in the last table, and T is the largest of "
        "any rank." +
        std::string(layer_.ranks > kSimulatedRanks ? " All but ranks are for EP 8." : "") +
        " The bound is what no schedule beats. Above EP 8 no "
        "engine is built; these rows are for one as it would be.");
    what_ifs("Other machines", "machine", what_if_machines(layer_, direction, found, description_), false);
    what_ifs("Other numbers of ranks", "ranks", what_if_ranks(layer_, direction, found, description_), true);
    what_ifs("Other numbers of tokens, on " + description_.title, "tokens of a rank",
             what_if_tokens(layer_, direction, found, description_), false);
    what_ifs("Other routing, on " + description_.title, "routing", what_if_skew(layer_, direction, found, description_),
             false);
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
