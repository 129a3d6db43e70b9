#pragma once

#include <fmt/format.h>

#include <string>

#include "tune/changed_fields.h"
#include "uniep/schedule.h"

namespace uniep::cli {

inline const char* direction_name(Direction direction) {
  return direction == Direction::kForward ? "forward" : "backward";
}

// A number as reports have it: six digits.
inline double rounded(double value) {
  return std::stod(fmt::format("{:.6g}", value));
}

// The fields in which a Schedule is not the default.
inline std::string changes(const Schedule& schedule, const Schedule& base) {
  const std::string fields = tune::changed_fields(schedule, base);
  return fields.empty() ? "the default" : fields;
}

}  // namespace uniep::cli
