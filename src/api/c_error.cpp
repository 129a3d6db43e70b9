#include <cstdio>

#include "api/c_handles.h"

// The C API's errors, and which library runs.
namespace uniep {
namespace {

constexpr bool same(uniep_status c, Status cpp) {
  return static_cast<int>(c) == static_cast<int>(cpp);
}
static_assert(same(UNIEP_OK, Status::kOk) && same(UNIEP_INVALID_ARGUMENT, Status::kInvalidArgument) &&
                  same(UNIEP_UNSUPPORTED, Status::kUnsupported) && same(UNIEP_OVERFLOW, Status::kOverflow) &&
                  same(UNIEP_TIMEOUT, Status::kTimeout) && same(UNIEP_IO, Status::kIo) &&
                  same(UNIEP_OUT_OF_MEMORY, Status::kOutOfMemory) && same(UNIEP_DEVICE, Status::kDevice) &&
                  same(UNIEP_INTERNAL, Status::kInternal),
              "uniep_status holds the values of uniep::Status");
constexpr std::size_t kMessageBytes = 4096;
thread_local char last_error[kMessageBytes] = "";

}  // namespace

uniep_status fail(Status status, const char* message) noexcept {
  const int length = std::snprintf(last_error, kMessageBytes, "%s", message);
  if (length >= static_cast<int>(kMessageBytes)) std::snprintf(last_error + kMessageBytes - 4, 4, "...");
  return static_cast<uniep_status>(status);
}

}  // namespace uniep

using namespace uniep;

const char* uniep_status_name(int status) {
  return status_name(static_cast<Status>(status));
}
const char* uniep_last_error(void) {
  return last_error;
}
int uniep_version(void) {
  return UNIEP_VERSION;
}
const char* uniep_version_string(void) {
  return UNIEP_VERSION_STRING;
}

uniep_status uniep_use_library(const char* library, const char* path) {
  return guarded([&] {
    require_pointer(library, "library");
    require_pointer(path, "path");
    use_library(library, path);
  });
}
