#pragma once

#include <random>

#include "program/schedule_fields.h"

namespace uniep::test {

// What a schedule is filled for and checked against.
struct ScheduleCase {
  Direction direction = Direction::kForward;
  LayerShape shape{256, 128, 8, 2};
  Numerics numerics;
  Machine machine{EngineKind::kCpu, 2, 4};

  Schedule filled(const PartialSchedule& given = {}) const { return fill(given, direction, shape, numerics, machine); }
  std::vector<std::string> violations(const Schedule& schedule) const {
    return validate(schedule, direction, shape, numerics, machine);
  }
};

using RandomBits = std::mt19937_64;  // its numbers, unlike those of the distributions, are the same everywhere

inline int below(RandomBits& random, std::size_t bound) {
  return static_cast<int>(random() % bound);
}

template <typename T>
T pick(RandomBits& random, const std::vector<T>& values) {
  return values[random() % values.size()];
}

// Legal shapes and machines of both engines: one expert a rank, 1 to 64 ranks, one worker, little shared memory.
inline ScheduleCase random_schedule_case(RandomBits& random) {
  ScheduleCase c;
  c.direction = pick(random, std::vector<Direction>{Direction::kForward, Direction::kBackward});
  c.machine.ranks = pick(random, std::vector<int>{1, 2, 3, 4, 8, 64});
  c.shape.experts = c.machine.ranks * static_cast<int64_t>(1 + below(random, 12));
  c.shape.topk = 1 + below(random, c.shape.experts);
  c.shape.hidden = 8 * (1 + below(random, 1000));
  c.shape.intermediate = 8 * (1 + below(random, 1000));
  const int64_t groups = c.machine.ranks * static_cast<int64_t>(1 + below(random, 4));
  if (below(random, 3) == 0 && c.shape.experts % groups == 0) c.numerics.combine_groups = groups;
  if (below(random, 2) == 0) {
    c.machine.engine = pick(random, std::vector<EngineKind>{EngineKind::kCpu, EngineKind::kAuto});
    c.machine.workers = 1 + below(random, 8);
  } else {
    c.machine.engine = EngineKind::kCuda;
    c.machine.workers = below(random, 2) == 0 ? 132 : 1 + below(random, 8);
    // The smallest kernel takes 87 KiB.
    if (below(random, 3) == 0) c.machine.shared_memory_bytes = 1024 * (88 + below(random, 140));
  }
  return c;
}

// Every field at random within its own range, legal as a whole or not.
inline Schedule random_in_range_schedule(RandomBits& random) {
  Schedule schedule;
  for (const FieldDescriptor& descriptor : field_descriptors()) {
    if (descriptor.stage && below(random, 4) != 0) continue;
    descriptor.set(schedule, pick(random, legal_values(descriptor.field)));
  }
  return schedule;
}

inline std::string listed(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += "\n  " + line;
  return text;
}

}  // namespace uniep::test
