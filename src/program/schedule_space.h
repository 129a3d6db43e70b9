#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "uniep/schedule.h"

// The legal schedules of a direction, shape and machine: all of them in a fixed order, their number, or one at random.
// Whatever comes out of here passes validate().
namespace uniep {

struct SpaceLimits {
  PartialSchedule fixed;  // values that every schedule of the space has
  // Fields that vary, by dotted name; the rest has the values of fill(fixed). Empty: every field that is not fixed and
  // that the direction reads, but for the stages' own tile fields (tile.fc1.n, ...), which vary only when named; "no
  // value of its own" is then one of their values.
  std::vector<std::string> vary;
};

// False ends the enumeration.
using ScheduleVisitor = std::function<bool(const Schedule&)>;

// Visits the space in lexicographic order of the fields (see schedule_fields()), values ascending. Fields with many
// values take representative ones: comm.*_sms 0, 1, 2, 4 and multiples of 8; order.experts_per_wave 1 to 8, powers of
// two and El; order.raster and comm.stages powers of two, and 3 stages. The whole space of a large machine is far too
// large to visit: limit what varies. An illegal shape, or fixed values that admit nothing, give no visit. Throws
// Error(kInvalidArgument) when `vary` names no field or a fixed one.
void for_each_legal(const ScheduleRequest& request, const ScheduleVisitor& visitor, const SpaceLimits& limits = {});

// How many visits for_each_legal() makes, without making them; 2^64 - 1 stands for that many or more.
uint64_t count_legal(const ScheduleRequest& request, const SpaceLimits& limits = {});

// Three sizes of the same space.
struct SpaceCounts {
  uint64_t legal = 0;                // by the rules of every engine
  uint64_t buildable = 0;            // legal on this machine's engine, which has a kernel: all that run
  std::optional<uint64_t> distinct;  // of those, how many differ in their canonical() ones
};

// Counts without visiting, where it can: exact, not an estimate; 2^64 - 1 stands for that many or more. Where stages'
// own tile fields vary, `distinct` is counted by visiting all that are buildable, and left out above `most_visits`.
SpaceCounts count_space(const ScheduleRequest& request, const SpaceLimits& limits = {},
                        uint64_t most_visits = 1'000'000);

// The values that the fields of the space take, as "field: value, value, ...", a line each.
std::vector<std::string> space_values(const ScheduleRequest& request, const SpaceLimits& limits = {});

// One legal schedule, the same for the same arguments everywhere. Every value of every field that can be legal here is
// drawn by some seed, also those that for_each_legal() leaves out; a stage's own tile fields are given in a small share
// of the draws. Throws Error(kInvalidArgument) with the violated rules when fill(fixed) is illegal.
Schedule sample_legal(uint64_t seed, const ScheduleRequest& request, const PartialSchedule& fixed = {});

}  // namespace uniep
