#pragma once

#include <stdexcept>
#include <string>

#include "uniep/export.h"

namespace uniep {

// Why a call failed. The C API returns these values as they are.
enum class Status : int {
  kOk = 0,
  kInvalidArgument = 1,  // bad usage or input: refused before anything ran
  kUnsupported = 2,      // legal, but this build, engine or machine cannot do it
  kOverflow = 3,         // a fixed capacity was too small; nothing was dropped silently
  kTimeout = 4,          // a bounded wait ran out; Group::recover() makes the group usable again
  kIo = 5,               // a file could not be read or written
  kOutOfMemory = 6,      // the allocator, the C++ heap, a device or the system (threads, files) had none left
  kDevice = 7,           // a CUDA, NVRTC or NCCL call failed
  kInternal = 8,         // a broken invariant of the library itself
};

UNIEP_API const char* status_name(Status status);

// The one exception type that the library throws. what() is one line that names the argument, its value and what is
// legal, and needs no further context.
class UNIEP_API Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

}  // namespace uniep
