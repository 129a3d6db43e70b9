#pragma once

#include <string>

#include "uniep/group.h"

namespace uniep::verify {

// What a message calls a local rank's chip: the GPU's serial number, or its id where it tells none, and the host.
std::string rank_name(const Group& group, int rank);

}  // namespace uniep::verify
