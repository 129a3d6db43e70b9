#pragma once

#include <string>
#include <vector>

#include "program/schedule_rules.h"

// Schedules that run alike.
namespace uniep {

// One name for Schedules of a layer that run alike on a machine, whatever the routing: the same tasks in the same order
// with the same waits, by the same kernels. Fields that other fields, the shape or the machine make meaningless get one
// value, and so do numbers that are cut to the same. It is legal (and buildable) where the Schedule is, and its own
// canonical(). Two Schedules with different names may still run alike. In forward save.xg does not count: what is kept
// costs memory, not time.
Schedule canonical(const Schedule& schedule, const ScheduleRequest& request);

// Which fields canonical() changes and why, a line each: "order.experts_per_wave=4 is 32: nothing goes by waves ...".
std::vector<std::string> canonical_reasons(const Schedule& schedule, const ScheduleRequest& request);

// What keeps two Schedules apart: the fields in which their canonical ones differ, a line each; empty when they run
// alike.
std::vector<std::string> canonical_differences(const Schedule& one, const Schedule& other,
                                               const ScheduleRequest& request);

// For counting: rules that hold for exactly one of the Schedules that run alike, in a space in which the fields of
// `varied` vary and no stage has tile fields that do.
std::vector<Rule> canonical_rules(FieldMask varied, const Schedule& base, const RuleContext& context);

}  // namespace uniep
