#include "uniep/schedule.h"

#include <algorithm>

#include "fuzz_target.h"

using uniep::Direction;
using uniep::EngineKind;
using uniep::PartialSchedule;
using uniep::Schedule;
using uniep::fuzz::accepts;
using uniep::fuzz::require;

namespace {

constexpr uniep::LayerShape kShape{256, 128, 8, 2};

// A filled schedule keeps what was given, prints to what it parses from, and is refused exactly when a rule is broken.
void check_filled(const PartialSchedule& given, Direction direction, const uniep::Machine& machine) {
  const Schedule schedule = uniep::fill(given, {.direction = direction, .shape = kShape, .machine = machine});
  const PartialSchedule all = PartialSchedule::from(schedule);
  for (const auto& value : given.values()) {
    require(std::count(all.values().begin(), all.values().end(), value) == 1, "kept: " + value.first);
  }
  require(PartialSchedule::parse(uniep::to_text(schedule)).values() == all.values(),
          "the text is read as the schedule");
  require(PartialSchedule::parse(uniep::to_json(schedule)).values() == all.values(),
          "the JSON is read as the schedule");

  const bool legal = uniep::validate(schedule, {.direction = direction, .shape = kShape, .machine = machine}).empty();
  require(legal || !given.values().empty(), "an open schedule is filled legally");
  Schedule again;
  const bool resolved =
      accepts([&] { again = uniep::resolve(all, {.direction = direction, .shape = kShape, .machine = machine}); });
  require(resolved == legal, "resolve() refuses what validate() refuses");
  require(!resolved || again == schedule, "a whole schedule stays as it is");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  PartialSchedule given;
  if (!accepts([&] { given = PartialSchedule::parse(text); })) return 0;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    check_filled(given, direction, {EngineKind::kCpu, 2, 4});
    check_filled(given, direction, {EngineKind::kCuda, 4, 132});
  }
  return 0;
}
