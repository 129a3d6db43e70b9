#include "io/markup.h"

namespace uniep::io {

std::string escape_markup(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += (c >= 0x20 && c < 0x7f) || c == '\n' ? c : '?';
    }
  }
  return out;
}

}  // namespace uniep::io
