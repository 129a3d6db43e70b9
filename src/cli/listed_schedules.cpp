#include "cli/listed_schedules.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sstream>

#include "cli/options.h"
#include "io/file.h"
#include "io/quote.h"
#include "program/buildable.h"
#include "uniep/error.h"

namespace uniep::cli {
namespace {

const std::string kOption = "--schedules";

// The line's fields over what was given, which they may repeat.
PartialSchedule over_given(const std::string& line, const LayerOptions& layer, const ScheduleRequest& request) {
  PartialSchedule fields = layer.given(request.direction);
  const Schedule built_in = resolve(fields, request);
  const PartialSchedule kept = PartialSchedule::from(built_in);
  for (const auto& [name, value] : PartialSchedule::parse(line).values()) {
    const bool stays = fields.given(name) || name == "save.xg" || name == "save.z";
    for (const auto& [own, own_value] : kept.values()) {
      if (!stays || own != name || own_value == value) continue;
      throw Error(Status::kInvalidArgument,
                  fmt::format("{}={}; must be {}, as {}", name, value, own_value,
                              fields.given(name) ? "--schedule says" : "the other direction keeps it (--save)"));
    }
    fields.set(name, value);
  }
  return fields;
}

Schedule read_line(const std::string& line, const LayerOptions& layer, const ScheduleRequest& request) {
  const Schedule schedule = resolve(over_given(line, layer, request), request);
  if (const std::vector<std::string> reasons = buildable(schedule, request); !reasons.empty()) {
    throw Error(Status::kInvalidArgument, fmt::format("{}", fmt::join(reasons, "; ")));
  }
  return schedule;
}

}  // namespace

std::vector<Schedule> listed_schedules(const std::string& path, const LayerOptions& layer,
                                       const ScheduleRequest& request, std::size_t most) {
  std::istringstream lines(naming_option(kOption, [&] { return io::read_text_file(path); }));
  std::vector<Schedule> all;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    all.push_back(naming_option(fmt::format("{}: {}, line {}", kOption, io::quote_path(path), number),
                                [&] { return read_line(line, layer, request); }));
    if (all.size() > most) refuse_value(kOption, path, fmt::format("a file with at most {} Schedules", most));
  }
  if (all.empty()) refuse_value(kOption, path, "a file with a Schedule a line");
  return all;
}

}  // namespace uniep::cli
