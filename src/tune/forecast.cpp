#include "tune/forecast.h"

#include <algorithm>

#include "tune/closed_form.h"

namespace uniep::tune {

Forecast::Forecast(const LayerConfig& config, const Machine& machine, const Schedule& schedule, int64_t tokens)
    : config_(config), machine_(machine), schedule_(schedule) {
  const sim::MachineDescription& description = sim::shipped_machine(sim::kDefaultMachine);
  if (machine.engine != EngineKind::kCuda || machine.ranks > description.most_ranks()) return;
  description_ = &description;
  load_ = uniform_load(config.shape, machine.ranks, static_cast<double>(std::max<int64_t>(tokens, 1)), description,
                       config.numerics.combine_groups);
}

double Forecast::of(double busiest_rows, double mean_rows) const {
  if (description_ == nullptr) return mean_rows > 0 ? mean_rows : 1;
  RankLoad load = load_;
  if (busiest_rows > 0 && mean_rows > 0) {
    const double more = mean_rows / load_.rows, skew = busiest_rows / mean_rows;
    load.tokens *= more;
    load.summands *= more;
    load.results *= more * skew;
    load.rows *= more * skew;
    load.rows_once *= more * skew;
    // What an expert's last block lacks does not grow with its rows.
    load.blocks = std::max(load.local_experts, load.blocks + (load.rows - load_.rows) / kBlockRows);
    for (LevelRows& rows : load.levels) {
      rows.dispatched *= more * skew;
      rows.dispatched_once *= more * skew;
      rows.returned *= more * skew;
      rows.sent *= more;
      rows.sent_once *= more;
      rows.received *= more;
    }
  }
  return estimate(make_problem({.layer = config_, .ranks = machine_.ranks}, load, *description_), schedule_).us;
}

}  // namespace uniep::tune
