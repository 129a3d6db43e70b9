#include "tune/neighbours.h"

#include <algorithm>
#include <cstdlib>

#include "program/schedule_fields.h"

namespace uniep::tune {
namespace {

constexpr int64_t kMaxNumber = 256;  // of a field whose numbers have no end of their own

// A field's other values, the nearest first.
std::vector<int> other_values(const FieldDescriptor& descriptor, int own) {
  std::vector<int> values = legal_values(descriptor.field, kMaxNumber);
  std::erase(values, own);
  std::stable_sort(values.begin(), values.end(), [&](int a, int b) { return std::abs(a - own) < std::abs(b - own); });
  // Of numbers that follow each other, those twice as far each time.
  if (values.size() <= 8 || !descriptor.field.words.empty()) return values;
  std::vector<int> spread;
  for (const int value : values) {
    const int distance = std::abs(value - own);
    if ((distance & (distance - 1)) == 0) spread.push_back(value);
  }
  return spread;
}

}  // namespace

std::vector<Schedule> neighbours(const Schedule& schedule, const PartialSchedule& given, const ScheduleRequest& request,
                                 std::size_t most) {
  std::vector<std::vector<Schedule>> of_fields;
  for (int field = 0; field < kCommonFieldCount; ++field) {
    const FieldDescriptor& descriptor = descriptor_of(field);
    // What is kept costs memory, and SMs may be lent to streams of high priority alone: neither is for a search to
    // choose.
    const bool is_callers = field == kSaveXg || field == kSaveZ || field == kCommLendSms;
    if (is_callers || given.given(descriptor.field.name)) continue;
    std::vector<Schedule> found;
    for (const int value : other_values(descriptor, *descriptor.get(schedule))) {
      // Alone, or with what the rules make of it.
      Schedule changed = schedule;
      descriptor.set(changed, value);
      if (!validate(changed, request).empty()) {
        PartialSchedule fields = given;
        fields.set(descriptor.field.name, value_text(descriptor.field, value));
        changed = fill(fields, request);
        if (!validate(changed, request).empty()) continue;
      }
      // Those who measure add them by themselves: the model says twice the gain that was measured.
      if (changed.wgrad == WgradOrder::kMixed && schedule.wgrad != WgradOrder::kMixed) continue;
      found.push_back(changed);
    }
    of_fields.push_back(std::move(found));
  }
  std::vector<Schedule> all;
  std::size_t deepest = 0;
  for (const std::vector<Schedule>& found : of_fields) deepest = std::max(deepest, found.size());
  for (std::size_t depth = 0; depth < deepest; ++depth) {
    for (const std::vector<Schedule>& found : of_fields) {
      if (all.size() == most) return all;
      if (depth >= found.size() || found[depth] == schedule) continue;
      if (std::find(all.begin(), all.end(), found[depth]) == all.end()) all.push_back(found[depth]);
    }
  }
  return all;
}

}  // namespace uniep::tune
