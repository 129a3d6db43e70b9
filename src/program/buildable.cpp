#include "program/buildable.h"

#include <fmt/format.h>

#include <algorithm>

#include "program/schedule_rules.h"

namespace uniep {

std::vector<std::string> engine_limits(const ScheduleRequest& request) {
  std::vector<std::string> reasons;
  if (request.machine.engine != EngineKind::kCuda) return reasons;
  const auto require = [&](const char* name, int64_t value, int64_t most, const char* does) {
    if (value > most) reasons.push_back(fmt::format("{}={}: the cuda engine {} up to {}", name, value, does, most));
  };
  require("ranks", request.machine.ranks, kMaxBuiltRanks, "runs");
  require("experts", request.shape.experts, kMaxBuiltExperts, "places");
  require("topk", request.shape.topk, kMaxBuiltSlots, "sums");
  require("combine_groups", request.numerics.combine_groups, kMaxBuiltSlots, "sums");
  return reasons;
}

std::vector<std::string> buildable(const Schedule& schedule, const ScheduleRequest& request) {
  std::vector<std::string> reasons = engine_limits(request);
  const RuleContext context = rule_context(request);
  for (const Rule& rule : kernel_rules(context)) {
    if (rule.holds(schedule, context, rule.stage)) continue;
    std::string reason = rule.explain(schedule, context, rule.stage);
    if (std::find(reasons.begin(), reasons.end(), reason) == reasons.end()) reasons.push_back(std::move(reason));
  }
  if (context.cuda && request.machine.processes && schedule.dispatch.transport == DispatchTransport::kPush) {
    reasons.emplace_back(
        "dispatch.transport=push: with a process a rank no peer reaches a rank's expert rows; legal is pull");
  }
  return reasons;
}

PartialSchedule with_only_buildable(PartialSchedule given, const Machine& machine) {
  const std::string transport = name_of(kDispatchTransport);
  if (machine.engine == EngineKind::kCuda && machine.processes && !given.given(transport)) given.set(transport, "pull");
  return given;
}

int pull_parts(const LayerShape& shape) {
  constexpr int64_t kPartBytes = 64 << 10, kBlockRows = 128;
  constexpr int kMaxParts = 16;
  int parts = 1;
  while (parts < kMaxParts && kBlockRows * shape.hidden * 2 / (int64_t{2} * parts) >= kPartBytes) parts *= 2;
  return parts;
}

}  // namespace uniep
