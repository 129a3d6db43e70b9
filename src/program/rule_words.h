#pragma once

#include <algorithm>
#include <string>

#include "program/schedule_rules.h"

// What rules say of fields, in their own words.
namespace uniep {

template <typename... Fields>
constexpr FieldMask reads(Fields... fields) {
  return (field_bit(fields) | ...);
}

inline std::string given(const Schedule& schedule, FieldId field) {
  return name_of(field) + "=" + value_text(descriptor_of(field).field, descriptor_of(field).get(schedule).value());
}

// The field that decides a stage's tile value: the stage's own where it is given, else the common one.
inline FieldId origin(const Schedule& schedule, GemmStage stage, FieldId tile_field) {
  const FieldId own = stage_field(stage, tile_field);
  return descriptor_of(own).get(schedule) ? own : tile_field;
}
inline std::string given(const Schedule& schedule, GemmStage stage, FieldId tile_field) {
  return given(schedule, origin(schedule, stage, tile_field));
}

// Workers that take part from begin to end; at least one, so that comm.reserve_sms is blamed for itself only.
inline int64_t available(const Schedule& schedule, const RuleContext& context) {
  return std::max<int64_t>(1, context.workers - schedule.comm.reserve_sms);
}

}  // namespace uniep
