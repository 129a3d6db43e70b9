#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "program/schedule_fields.h"
#include "uniep/error.h"

// Schedules as text: key=value lists and flat JSON. The text may come from anywhere and be anything.
namespace uniep {
namespace {

constexpr const char* kLegalForms = "legal are 'auto', key=value,key=value, or flat JSON with the same keys";

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

FieldId require_field(std::string_view name) {
  if (const std::optional<FieldId> field = find_field(name)) return *field;
  throw Error(Status::kInvalidArgument,
              fmt::format("schedule field '{}' is unknown; the nearest legal field is {} (all: docs/schedule.md)",
                          printable(name), nearest_field_name(name)));
}

void set_once(PartialSchedule& partial, std::string_view name, std::string_view value) {
  if (partial.given(name)) {
    throw Error(Status::kInvalidArgument,
                fmt::format("{}={}: the field is given twice; legal is once", printable(name), printable(value)));
  }
  partial.set(name, value);
}

// Takes a flat JSON object event by event, so that nothing but the fields is ever built.
class FlatObjectReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit FlatObjectReader(PartialSchedule& partial) : partial_(partial) {}

  bool start_object(std::size_t) override {
    if (inside_) refuse_nested("object");
    inside_ = true;
    return true;
  }
  bool key(string_t& name) override {
    key_ = name;
    return true;
  }
  bool string(string_t& value) override { return take(value); }
  bool number_integer(number_integer_t value) override { return take(std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override { return take(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { return take(text); }
  bool boolean(bool value) override {
    const std::optional<FieldId> field = find_field(key_);
    const bool is_switch = field && descriptor_of(*field).field.words == std::vector<std::string>{"off", "on"};
    if (is_switch) return take(value ? "on" : "off");
    return take(value ? "true" : "false");
  }
  bool null() override { return take("null"); }
  bool start_array(std::size_t) override { refuse_nested("array"); }
  bool binary(binary_t&) override { return false; }
  bool end_object() override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    refuse_json(position);
  }
  [[noreturn]] void refuse_json(std::size_t position) const {
    throw Error(Status::kInvalidArgument,
                fmt::format("the schedule is not valid JSON at byte {}; {}", position, kLegalForms));
  }

 private:
  bool take(std::string_view value) {
    set_once(partial_, key_, value);
    return true;
  }
  [[noreturn]] void refuse_nested(const char* what) {
    throw Error(Status::kInvalidArgument, fmt::format("schedule field '{}' is an {}; legal is a string, a number or a "
                                                      "bool, with dotted names as keys",
                                                      printable(key_), what));
  }

  PartialSchedule& partial_;
  std::string key_;
  bool inside_ = false;
};

// The fields that a schedule has a value for, in order: visit(descriptor, text of the value).
template <typename Visit>
void for_each_value(const Schedule& schedule, Visit&& visit) {
  for (const FieldDescriptor& descriptor : field_descriptors()) {
    if (const std::optional<int> value = descriptor.get(schedule)) {
      visit(descriptor.field, value_text(descriptor.field, *value));
    }
  }
}

}  // namespace

PartialSchedule PartialSchedule::parse(std::string_view text) {
  PartialSchedule partial;
  const std::string_view whole = trimmed(text);
  if (whole.empty() || whole == "auto") return partial;
  if (whole.front() == '{') {
    FlatObjectReader reader(partial);
    // The parser takes a NUL for the end of the text.
    if (const std::size_t nul = whole.find('\0'); nul != std::string_view::npos) {
      reader.refuse_json(nul + 1);
    }
    nlohmann::json::sax_parse(whole.begin(), whole.end(), &reader);
    return partial;
  }
  for (std::size_t begin = 0; begin <= whole.size();) {
    const std::size_t comma = std::min(whole.find(',', begin), whole.size());
    const std::string_view entry = trimmed(whole.substr(begin, comma - begin));
    const std::size_t equals = entry.find('=');
    if (equals == std::string_view::npos) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("schedule entry '{}' has no '='; {}", printable(entry), kLegalForms));
    }
    set_once(partial, trimmed(entry.substr(0, equals)), trimmed(entry.substr(equals + 1)));
    begin = comma + 1;
  }
  return partial;
}

PartialSchedule PartialSchedule::from(const Schedule& schedule) {
  PartialSchedule partial;
  for_each_value(schedule,
                 [&](const ScheduleField& field, const std::string& value) { partial.set(field.name, value); });
  return partial;
}

void PartialSchedule::set(std::string_view name, std::string_view value) {
  const FieldId id = require_field(name);
  const ScheduleField& field = descriptor_of(id).field;
  const std::string text = value_text(field, parse_value(field, value));
  const auto at = std::find_if(values_.begin(), values_.end(), [id](const std::pair<std::string, std::string>& entry) {
    return *find_field(entry.first) >= id;
  });
  if (at != values_.end() && at->first == field.name) {
    at->second = text;
  } else {
    values_.insert(at, {field.name, text});
  }
}

bool PartialSchedule::given(std::string_view name) const {
  return std::any_of(values_.begin(), values_.end(),
                     [name](const std::pair<std::string, std::string>& entry) { return entry.first == name; });
}

std::string to_json(const Schedule& schedule) {
  std::string json;
  for_each_value(schedule, [&](const ScheduleField& field, const std::string& value) {
    const char* const quote = field.words.empty() ? "" : "\"";
    json += fmt::format("{}\"{}\": {}{}{}", json.empty() ? "{" : ", ", field.name, quote, value, quote);
  });
  return json + "}";
}

std::string to_text(const Schedule& schedule) {
  std::string text;
  for_each_value(schedule, [&](const ScheduleField& field, const std::string& value) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", field.name, value);
  });
  return text;
}

}  // namespace uniep
