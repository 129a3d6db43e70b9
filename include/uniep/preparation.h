#pragma once

#include <string>

namespace uniep {

// How far what a call needs has been made ready in the background.
struct Preparation {
  int compiling = 0;        // kernels that are not compiled yet
  std::string failed = {};  // why one cannot be; empty: none is known to fail

  bool is_ready() const { return compiling == 0 && failed.empty(); }
};

}  // namespace uniep
