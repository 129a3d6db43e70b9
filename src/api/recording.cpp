#include "api/recording.h"

#include "io/file.h"

namespace uniep::api {

void write_recording(const Recording& recording, const std::string& path) {
  io::write_file(path, trace_json("", recording.calls));
}

}  // namespace uniep::api
