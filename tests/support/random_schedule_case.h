#pragma once

#include <random>

#include "program/schedule_fields.h"
#include "support/branch_counts.h"

namespace uniep::test {

// What a schedule is filled for and checked against.
struct ScheduleCase {
  Direction direction = Direction::kForward;
  LayerShape shape{256, 128, 8, 2};
  Numerics numerics;
  Machine machine{EngineKind::kCpu, 2, 4};

  ScheduleRequest request() const {
    return {.direction = direction, .shape = shape, .numerics = numerics, .machine = machine};
  }
  Schedule filled(const PartialSchedule& given = {}) const { return fill(given, request()); }
  std::vector<std::string> violations(const Schedule& schedule) const { return validate(schedule, request()); }
};

inline ScheduleCase case_of(EngineKind engine, Direction direction, int workers) {
  ScheduleCase c;
  c.direction = direction;
  c.machine.engine = engine;
  c.machine.workers = workers;
  return c;
}

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
    // The smallest kernel takes 87 KiB, backward's with dgrad FC2 119.
    const int least = c.direction == Direction::kForward ? 88 : 120;
    if (below(random, 3) == 0) c.machine.shared_memory_bytes = 1024 * (least + below(random, 228 - least));
  }
  return c;
}

// What backward.wgrad needs, written by hand.
inline bool may_have_wgrad(const Schedule& s) {
  if (s.wgrad != WgradOrder::kMixed && s.wgrad_reserve != 5) return false;
  if (s.wgrad == WgradOrder::kFill) return s.fusion != Fusion::kNone;
  const bool phased = s.order.interleave == Interleave::kPhased, dynamic = s.queue == QueueKind::kDynamic;
  const bool whole = s.order.blocks_per_wave == 0;
  return s.wgrad == WgradOrder::kAfter || (s.fusion == Fusion::kLayer && phased && dynamic && whole);
}

inline void count_case(BranchCounts& branches, const ScheduleCase& c) {
  const bool cuda = c.machine.engine == EngineKind::kCuda;
  branches.count("forward", c.direction == Direction::kForward);
  branches.count("backward", c.direction == Direction::kBackward);
  branches.count("the cpu engine", c.machine.engine == EngineKind::kCpu);
  branches.count("the engine open", c.machine.engine == EngineKind::kAuto);
  branches.count("the cuda engine, 132 workers", cuda && c.machine.workers == 132);
  branches.count("the cuda engine, an odd number of workers", cuda && c.machine.workers % 2 != 0);
  branches.count("the cuda engine, little shared memory", cuda && c.machine.shared_memory_bytes < 150 * 1024);
  branches.count("one worker", c.machine.workers == 1);
  branches.count("one rank", c.machine.ranks == 1);
  branches.count("64 ranks", c.machine.ranks == 64);
  branches.count("one expert a rank", c.shape.experts == c.machine.ranks);
  branches.count("one slot a token", c.shape.topk == 1);
  branches.count("combine groups", c.numerics.combine_groups > 0);
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
