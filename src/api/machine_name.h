#pragma once

#include <string>

#include "uniep/group.h"

namespace uniep::api {

// What tuned Schedules are for: device and its speed, compute units, launch, library_label().
std::string machine_name(const Group& group);

}  // namespace uniep::api
