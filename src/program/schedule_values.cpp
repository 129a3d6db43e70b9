#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <numeric>

#include "program/schedule_fields.h"
#include "uniep/error.h"

// A field's legal values, and values as text.
namespace uniep {
namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_field_name(std::string_view name) {
  const std::string_view bounded = name.substr(0, 64);
  int nearest = 0;
  std::size_t nearest_distance = std::numeric_limits<std::size_t>::max();
  for (int field = 0; field < kFieldCount; ++field) {
    const std::size_t distance = edit_distance(bounded, name_of(field));
    if (distance < nearest_distance) {
      nearest = field;
      nearest_distance = distance;
    }
  }
  return name_of(nearest);
}

bool is_legal_value(const ScheduleField& field, int value) {
  if (!field.numbers.empty()) {
    return std::find(field.numbers.begin(), field.numbers.end(), value) != field.numbers.end();
  }
  if (value < field.minimum || value > field.maximum) return false;
  return !field.power_of_two || (value & (value - 1)) == 0;
}

std::vector<int> legal_values(const ScheduleField& field, int64_t most) {
  std::vector<int> values;
  const int64_t last = std::min<int64_t>(field.maximum, most);
  for (int64_t value = field.minimum; value <= last; value += field.power_of_two ? value : 1) {
    if (is_legal_value(field, static_cast<int>(value))) values.push_back(static_cast<int>(value));
  }
  return values;
}

std::string legal_text(const ScheduleField& field) {
  if (field.words.empty() && field.numbers.empty()) {
    return fmt::format("{}{} to {}", field.power_of_two ? "powers of two from " : "", field.minimum, field.maximum);
  }
  std::string text;
  const std::vector<int> values = legal_values(field);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += i + 1 == values.size() ? " or " : ", ";
    text += value_text(field, values[i]);
  }
  return text;
}

std::string value_text(const ScheduleField& field, int value) {
  const bool has_word = value >= 0 && value < static_cast<int>(field.words.size());
  return has_word ? field.words[value] : std::to_string(value);
}

int parse_value(const ScheduleField& field, std::string_view text) {
  for (std::size_t word = 0; word < field.words.size(); ++word) {
    if (field.words[word] == text) return static_cast<int>(word);
  }
  int value = 0;
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const std::from_chars_result result = std::from_chars(begin, end, value);
  const bool is_number = result.ec == std::errc() && result.ptr == end && field.words.empty();
  if (!is_number || !is_legal_value(field, value)) {
    throw Error(Status::kInvalidArgument,
                fmt::format("{}={}: legal are {}", field.name, printable(text), legal_text(field)));
  }
  return value;
}

std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 60;
  std::string out;
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += fmt::format("\\x{:02x}", byte);
    }
  }
  return text.size() > kLongest ? out + "..." : out;
}

}  // namespace uniep
