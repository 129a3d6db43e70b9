#include "api/recording.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>

namespace uniep::api {

void write_recording(const Recording& recording, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  file << trace_json("", recording.calls);
  file.close();
  if (!file) throw Error(Status::kIo, fmt::format("{}: can not be written: {}", path, std::strerror(errno)));
}

}  // namespace uniep::api
