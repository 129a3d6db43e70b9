#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "uniep/error.h"

namespace uniep {

// What was given is not legal; the message names it, its value and what is legal.
[[noreturn]] inline void refuse(const std::string& message) {
  throw Error(Status::kInvalidArgument, message);
}

inline void check_index(int64_t value, int64_t begin, int64_t end, const char* name) {
  if (value < begin || value >= end) refuse(fmt::format("{}: {}; legal are {} to {}", name, value, begin, end - 1));
}

}  // namespace uniep
