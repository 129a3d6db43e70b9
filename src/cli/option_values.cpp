#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "cli/options.h"
#include "io/quote.h"

namespace uniep::cli {
namespace {

template <typename Integer>
bool read_number(std::string_view text, Integer& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string legal_range(int64_t minimum, int64_t maximum) {
  return fmt::format("a whole number from {} to {}", minimum, maximum);
}

}  // namespace

void refuse_value(std::string_view option, std::string_view value, std::string_view legal) {
  throw Error(Status::kInvalidArgument, fmt::format("{}: {}; must be {}", option, io::quote_text(value), legal));
}

int64_t parse_integer(std::string_view option, std::string_view text, int64_t minimum, int64_t maximum) {
  int64_t value = 0;
  if (!read_number(text, value) || value < minimum || value > maximum) {
    refuse_value(option, text, legal_range(minimum, maximum));
  }
  return value;
}

uint64_t parse_unsigned(std::string_view option, std::string_view text, uint64_t minimum) {
  uint64_t value = 0;
  if (!read_number(text, value) || value < minimum) {
    refuse_value(option, text, fmt::format("a whole number from {} to 2^64 - 1", minimum));
  }
  return value;
}

std::vector<int64_t> parse_integers(std::string_view option, std::string_view text, int64_t minimum, int64_t maximum) {
  std::vector<int64_t> values;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    int64_t value = 0;
    if (!read_number(text.substr(begin, end - begin), value) || value < minimum || value > maximum) {
      refuse_value(option, text, legal_range(minimum, maximum) + ", or several of them separated by commas");
    }
    values.push_back(value);
    begin = end + 1;
  }
  return values;
}

}  // namespace uniep::cli
