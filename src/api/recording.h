#pragma once

#include <optional>
#include <string>
#include <vector>

#include "api/timeline.h"

// Calls of a group that are traced, as the C API has them.
namespace uniep::api {

struct Recording {
  std::vector<TracedCall> calls;
};

// One call: takes part where something is recorded, and is kept only if it ends well.
class RecordedCall {
 public:
  RecordedCall(std::optional<Recording>& recording, const char* name, CallOptions& options) : recording_(recording) {
    call_.name = name;
    if (recording.has_value()) options.events = &call_.events;
  }
  RecordedCall(const RecordedCall&) = delete;
  RecordedCall& operator=(const RecordedCall&) = delete;

  void keep() {
    if (recording_.has_value()) recording_->calls.push_back(std::move(call_));
  }

 private:
  std::optional<Recording>& recording_;
  TracedCall call_;
};

// Throws Error(kIo) that names the file.
void write_recording(const Recording& recording, const std::string& path);

}  // namespace uniep::api
