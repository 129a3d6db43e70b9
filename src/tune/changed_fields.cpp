#include "tune/changed_fields.h"

#include <algorithm>

namespace uniep::tune {

std::string changed_fields(const Schedule& schedule, const Schedule& base) {
  const PartialSchedule own = PartialSchedule::from(schedule), other = PartialSchedule::from(base);
  std::string text;
  for (const auto& field : own.values()) {
    const auto& others = other.values();
    if (std::find(others.begin(), others.end(), field) != others.end()) continue;
    text += (text.empty() ? "" : ",") + field.first + "=" + field.second;
  }
  return text;
}

}  // namespace uniep::tune
