#pragma once

#include <string>

namespace uniep::io {

// Text as HTML or XML: markup escaped, what is not printable ASCII replaced, ends of lines kept.
std::string escape_markup(const std::string& text);

}  // namespace uniep::io
