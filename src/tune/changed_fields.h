#pragma once

#include <string>

#include "uniep/schedule.h"

namespace uniep::tune {

// The fields in which a Schedule differs from another, "key=value,key=value"; empty where they are equal.
std::string changed_fields(const Schedule& schedule, const Schedule& base);

}  // namespace uniep::tune
