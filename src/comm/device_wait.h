#pragma once

#include <cuda.h>

#include "comm/deadline.h"

namespace uniep {

// Waits until `device` has done what the default stream orders before this call, and `stream` what was given to it.
// Throw Error(kTimeout) that says "waiting for `what`" once the deadline has passed.
void wait_for_device(int device, const Deadline& deadline, const char* what);
void wait_for_stream(CUstream stream, const Deadline& deadline, const char* what);

}  // namespace uniep
