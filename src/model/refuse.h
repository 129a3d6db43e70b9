#pragma once

#include <string>

#include "uniep/error.h"

namespace uniep {

// What was given is not legal; the message names it, its value and what is legal.
[[noreturn]] inline void refuse(const std::string& message) {
  throw Error(Status::kInvalidArgument, message);
}

}  // namespace uniep
