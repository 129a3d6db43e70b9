#pragma once

#include <string>

namespace uniep::io {

// A nlohmann::json as text, of one line or indented. Names of files need not be UTF-8, which JSON is: what is not comes
// out as U+FFFD.
template <typename Json>
std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace uniep::io
