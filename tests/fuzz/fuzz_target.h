#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "uniep/error.h"

// What the fuzz targets share. A target is one source file that defines this function, which libFuzzer calls with
// inputs that it invents, and replay.cpp with the files of the seed corpus.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace uniep::fuzz {

// A broken property ends the process, which libFuzzer takes for a finding and ctest for a failure.
inline void require(bool holds, const std::string& property) {
  if (holds) return;
  std::fprintf(stderr, "broken property: %s\n", property.c_str());
  std::abort();
}

// Runs `read`; false when it refused its input. It may only do so by Error(kInvalidArgument), in one printable line.
template <class Read>
bool accepts(Read&& read) {
  try {
    read();
    return true;
  } catch (const Error& error) {
    const std::string message = error.what();
    require(error.status() == Status::kInvalidArgument, "refused as invalid, not by: " + message);
    for (const char c : message) require(c >= ' ' && c <= '~', "the message is one printable line: " + message);
    return false;
  }
}

}  // namespace uniep::fuzz
