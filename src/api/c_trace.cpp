#include <utility>

#include "api/c_handles.h"

// The C API's timelines.
using namespace uniep;

uniep_status uniep_trace_begin(uniep_group* group) {
  return guarded([&] {
    require_pointer(group, "group");
    group->state->recording.emplace();
  });
}

uniep_status uniep_trace_end(uniep_group* group, const char* path) {
  return guarded([&] {
    require_pointer(group, "group");
    require_pointer(path, "path");
    std::optional<api::Recording>& recording = group->state->recording;
    if (!recording.has_value()) {
      throw Error(Status::kInvalidArgument, "group: nothing is recorded; call uniep_trace_begin() first");
    }
    const api::Recording ended = std::move(*recording);
    recording.reset();
    api::write_recording(ended, path);
  });
}
