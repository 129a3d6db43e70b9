#include "cli/solver_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/simulated_layer.h"
#include "cli/solve_request.h"
#include "program/buildable.h"
#include "tune/solve.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

constexpr int kBestSimulated = 8;
// Nine of ten ratios of one measuring run are predicted better (docs/simulator.md); and of short calls, of which few
// were measured.
constexpr double kError = 0.13, kShortError = 0.15;
constexpr int64_t kShortTokens = 4096;

}  // namespace

std::optional<SolverChoice> solver_choice(const LayerOptions& layer, Direction direction, const Machine& machine,
                                          const sim::MachineDescription& description, std::string* unasked) {
  LayerOptions uniform = layer;
  const std::vector<int64_t> tokens = layer.tokens();
  uniform.routing = "uniform";
  uniform.tokens_given = {std::min(*std::max_element(tokens.begin(), tokens.end()), kSimulatedTokens)};
  const auto not_asked = [&](const std::string& why) {
    if (unasked != nullptr) *unasked = why;
    return std::nullopt;
  };
  const int most_ranks = std::min(description.most_ranks(), kMaxBuiltRanks);
  if (machine.engine != EngineKind::kCuda) return not_asked("it is for the cuda engine");
  if (machine.ranks > most_ranks) return not_asked(fmt::format("it knows up to {} ranks", most_ranks));
  if (uniform.tokens_given.front() == 0) return not_asked("there are no tokens");
  // One such layer was measured: too few to know how far the simulator is off.
  if (layer.numerics.combine_groups > 0) return not_asked("it knows too little of combine groups");
  tune::SolveRequest request = solve_request({uniform, direction}, description, Placement());
  request.best = kBestSimulated;
  request.fixed = with_only_buildable(std::move(request.fixed), machine);
  tune::Solution solution;
  try {
    solution = tune::solve(request);
  } catch (const Error&) {
    return not_asked("what was given leaves nothing that it knows");
  }
  const SimulatedLayer simulated(request, place_ids(uniform, make_ids(uniform)), one_rank_stands_for_all(uniform));
  const double base = simulated.milliseconds(solution.default_schedule);
  const ScheduleRequest wanted = {
      .direction = direction, .shape = layer.shape, .numerics = layer.numerics, .machine = machine};
  const double error = uniform.tokens_given.front() < kShortTokens ? kShortError : kError;
  std::optional<SolverChoice> best;
  for (const tune::Ranked& ranked : solution.best) {
    // This GPU may have fewer SMs than the description's.
    if (!validate(ranked.schedule, wanted).empty() || !buildable(ranked.schedule, wanted).empty()) continue;
    const double ratio = simulated.milliseconds(ranked.schedule) / base;
    if (ratio < 1 - error && (!best || ratio < best->ratio)) best = SolverChoice{ranked.schedule, ratio};
  }
  return best;
}

}  // namespace uniep::cli
