#pragma once

#include <string>
#include <vector>

#include "cli/layer_options.h"

namespace uniep::cli {

// The Schedules of a file for `uniep tune --schedules`, one a line as --schedule takes them (key=value,... or flat
// JSON); empty lines are passed over. Each is filled, and stays beside what was given. Error(kInvalidArgument) names
// the line: of a field that was given otherwise, of save.xg and save.z, which are another direction's business, of a
// Schedule that is not legal or has no kernel, and of a file with none or more than `most`.
std::vector<Schedule> listed_schedules(const std::string& path, const LayerOptions& layer,
                                       const ScheduleRequest& request, std::size_t most);

}  // namespace uniep::cli
