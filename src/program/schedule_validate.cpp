#include <fmt/format.h>

#include <algorithm>

#include "program/schedule_rules.h"
#include "uniep/error.h"

namespace uniep {

std::vector<std::string> validate(const Schedule& schedule, const ScheduleRequest& request) {
  std::vector<std::string> violations = shape_violations(request);
  FieldMask out_of_range = 0;
  for (int field = 0; field < kFieldCount; ++field) {
    const FieldDescriptor& descriptor = descriptor_of(field);
    const std::optional<int> value = descriptor.get(schedule);
    if (!value || is_legal_value(descriptor.field, *value)) continue;
    out_of_range |= field_bit(field);
    violations.push_back(
        fmt::format("{}={}: legal are {}", descriptor.field.name, *value, legal_text(descriptor.field)));
  }
  const RuleContext context = rule_context(request);
  for (const Rule& rule : schedule_rules(context)) {
    if ((rule.reads & out_of_range) != 0 || rule.holds(schedule, context, rule.stage)) continue;
    std::string violation = rule.explain(schedule, context, rule.stage);
    // Stages that share the common tile break the same rule in the same words.
    if (std::find(violations.begin(), violations.end(), violation) == violations.end()) {
      violations.push_back(std::move(violation));
    }
  }
  return violations;
}

Schedule resolve(const PartialSchedule& given, const ScheduleRequest& request) {
  const Schedule schedule = fill(given, request);
  const std::vector<std::string> violations = validate(schedule, request);
  if (violations.empty()) return schedule;
  std::string message = "illegal schedule: ";
  for (std::size_t i = 0; i < violations.size(); ++i) message += (i == 0 ? "" : "; ") + violations[i];
  throw Error(Status::kInvalidArgument, message);
}

}  // namespace uniep
