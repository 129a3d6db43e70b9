#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace uniep::io {

// Text from a file or a command line, made fit for a one-line message: in single quotes, everything but printable ASCII
// as \xNN, cut after `limit` characters.
inline std::string quote_text(std::string_view text, std::size_t limit = 80) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "'";
  for (const char c : text.substr(0, limit)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += "\\x";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    }
  }
  out += text.size() > limit ? "...'" : "'";
  return out;
}

// A path in a message, in full.
inline std::string quote_path(std::string_view path) {
  return quote_text(path, 4096);
}

}  // namespace uniep::io
