#include "uniep/error.h"

namespace uniep {

const char* status_name(Status status) {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kInvalidArgument:
      return "invalid argument";
    case Status::kUnsupported:
      return "unsupported";
    case Status::kOverflow:
      return "overflow";
    case Status::kTimeout:
      return "time-out";
    case Status::kIo:
      return "input/output error";
    case Status::kOutOfMemory:
      return "out of memory";
    case Status::kDevice:
      return "device error";
    case Status::kInternal:
      return "internal error";
  }
  return "unknown";
}

}  // namespace uniep
