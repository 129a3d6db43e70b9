#include "tune/tuned.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/cache_folder.h"
#include "io/file.h"
#include "io/hash64.h"
#include "io/json_text.h"
#include "io/quote.h"
#include "model/refuse.h"
#include "program/schedule_fields.h"
#include "uniep/error.h"

namespace uniep::tune {
namespace {

using Json = nlohmann::ordered_json;  // to write: ordered_map copies what it holds, however deep, as it grows
using Parsed = nlohmann::json;

constexpr int kFileFormat = 2;
constexpr int64_t kBucket = 4096;
constexpr int kMostRanks = 64;
constexpr int64_t kMax = int64_t{1} << 40;
const char* const kGradients[] = {"bf16", "fp32", "main_grad"};
const char* const kRouterWeights[] = {"activation", "output", "input"};
const char* const kSuffix = ".tuned.json";
const char* const kDirections[] = {"forward", "backward"};

// A value in a message. Lists and objects are not written out, however deep they are.
std::string shown(const Parsed& value) {
  return value.is_primitive() ? io::quote_text(value.dump()) : std::string("a ") + value.type_name();
}

// The fields of an object, each of which has to be there and no other.
class Fields {
 public:
  // `may`: one that may be there besides.
  Fields(const Parsed& json, std::string where, const std::vector<std::string>& names, const char* may = nullptr)
      : json_(json), where_(std::move(where)) {
    if (!json.is_object()) refuse(fmt::format("{}: must be an object", where_));
    for (const auto& [name, value] : json.items()) {
      const bool known = std::find(names.begin(), names.end(), name) != names.end() || (may != nullptr && name == may);
      if (!known) {
        refuse(fmt::format("{}: {} is no key of it; must be one of {}", where_, io::quote_text(name), list(names)));
      }
    }
    for (const std::string& name : names) {
      if (!json.contains(name)) refuse(fmt::format("{}: {} is missing", where_, name));
    }
  }

  bool has(const char* name) const { return json_.contains(name); }
  const Parsed& at(const char* name) const { return json_.at(name); }
  std::string where(const char* name) const { return fmt::format("{}.{}", where_, name); }

  int64_t integer(const char* name, int64_t least, int64_t most) const {
    const Parsed& value = at(name);
    if (!value.is_number_integer() || value > most || value < least) {
      refuse(fmt::format("{}: {}; must be a whole number from {} to {}", where(name), shown(value), least, most));
    }
    return value.get<int64_t>();
  }

  bool boolean(const char* name) const {
    const Parsed& value = at(name);
    if (!value.is_boolean()) refuse(fmt::format("{}: {}; must be true or false", where(name), shown(value)));
    return value.get<bool>();
  }

  double time(const char* name) const {
    const Parsed& value = at(name);
    if (!value.is_number() || !(value.get<double>() > 0) || !std::isfinite(value.get<double>())) {
      refuse(fmt::format("{}: {}; must be a time above 0", where(name), shown(value)));
    }
    return value.get<double>();
  }

  std::string text(const char* name) const {
    if (!at(name).is_string()) refuse(fmt::format("{}: must be text", where(name)));
    return at(name).get<std::string>();
  }

  template <typename Words>
  int word(const char* name, const Words& words) const {
    const std::string value = text(name);
    std::vector<std::string> legal;
    for (const char* const word : words) {
      if (value == word) return static_cast<int>(legal.size());
      legal.emplace_back(word);
    }
    refuse(fmt::format("{}: {}; must be one of {}", where(name), io::quote_text(value), list(legal)));
  }

 private:
  static std::string list(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
  }

  const Parsed& json_;
  std::string where_;
};

Json json_of(const TunedKey& key) {
  const LayerShape& shape = key.shape;
  Json json = {{"machine", key.machine},
               {"ranks", key.ranks},
               {"shape",
                {{"hidden", shape.hidden},
                 {"intermediate", shape.intermediate},
                 {"experts", shape.experts},
                 {"topk", shape.topk}}},
               {"numerics",
                {{"activation", activation_text(key.numerics)},
                 {"router_weight", kRouterWeights[static_cast<int>(key.numerics.router_weight)]},
                 {"weight_gradient", kGradients[static_cast<int>(key.numerics.weight_gradient)]},
                 {"combine_groups", key.numerics.combine_groups},
                 {"bias", key.numerics.bias}}},
               {"direction", kDirections[static_cast<int>(key.direction)]},
               {"tokens", key.tokens}};
  if (!key.conditions.empty()) json["conditions"] = key.conditions;
  return json;
}

Schedule whole_schedule(const PartialSchedule& fields) {
  Schedule schedule;
  for (int field = 0; field < kCommonFieldCount; ++field) {
    if (!fields.given(name_of(field))) refuse(fmt::format("{} is missing", name_of(field)));
  }
  for (const auto& [name, value] : fields.values()) {
    const FieldDescriptor& descriptor = descriptor_of(*find_field(name));
    descriptor.set(schedule, parse_value(descriptor.field, value));
  }
  return schedule;
}

Numerics read_numerics(const Fields& numerics) {
  Numerics read;
  const std::string activation = numerics.text("activation");
  try {
    set_activation(read, activation);
  } catch (const Error&) {
    refuse(fmt::format("{}: {}; must be one as `uniep run --activation` takes it", numerics.where("activation"),
                       io::quote_text(activation)));
  }
  read.router_weight = static_cast<RouterWeight>(numerics.word("router_weight", kRouterWeights));
  read.weight_gradient = static_cast<WeightGradient>(numerics.word("weight_gradient", kGradients));
  read.combine_groups = numerics.integer("combine_groups", 0, kMax);
  read.bias = numerics.boolean("bias");
  return read;
}

TunedSchedule read_entry(const Parsed& json, const std::string& where) {
  const Fields entry(json, where,
                     {"machine", "ranks", "shape", "numerics", "direction", "tokens", "schedule", "ms", "default_ms"},
                     "conditions");
  TunedSchedule tuned;
  TunedKey& key = tuned.key;
  key.machine = entry.text("machine");
  key.ranks = static_cast<int>(entry.integer("ranks", 1, kMostRanks));
  const Fields shape(entry.at("shape"), entry.where("shape"), {"hidden", "intermediate", "experts", "topk"});
  key.shape = {shape.integer("hidden", 1, kMax), shape.integer("intermediate", 1, kMax),
               shape.integer("experts", 1, kMax), shape.integer("topk", 1, kMax)};
  key.numerics = read_numerics({entry.at("numerics"),
                                entry.where("numerics"),
                                {"activation", "router_weight", "weight_gradient", "combine_groups", "bias"}});
  key.direction = static_cast<Direction>(entry.word("direction", kDirections));
  key.tokens = entry.integer("tokens", 1, kMax);
  if (entry.has("conditions")) key.conditions = entry.text("conditions");
  tuned.milliseconds = entry.time("ms");
  tuned.default_milliseconds = entry.time("default_ms");
  try {
    const Parsed& schedule = entry.at("schedule");
    const bool flat = schedule.is_object() && std::all_of(schedule.begin(), schedule.end(),
                                                          [](const Parsed& value) { return value.is_primitive(); });
    if (!flat) refuse("must be an object of words and numbers");
    tuned.schedule = whole_schedule(PartialSchedule::parse(schedule.dump()));
  } catch (const Error& error) {
    refuse(fmt::format("{}: {}", entry.where("schedule"), error.what()));
  }
  return tuned;
}

}  // namespace

bool is_utf8(const std::string& text) {
  try {
    return !Json(text).dump().empty();
  } catch (const Json::type_error&) {
    return false;
  }
}

std::string conditions_of(const PartialSchedule& given) {
  std::vector<std::pair<std::string, std::string>> fields = given.values();
  std::sort(fields.begin(), fields.end());
  std::string text;
  for (const auto& [name, value] : fields) text += fmt::format("{}{}={}", text.empty() ? "" : ",", name, value);
  return text;
}

std::vector<TunedKey> keys_of(const TunedKey& key) {
  if (key.conditions.empty()) return {key};
  TunedKey plain = key;
  plain.conditions.clear();
  return {key, plain};
}

int64_t token_bucket(int64_t tokens) {
  if (tokens <= 1) return 1;
  if (tokens <= kBucket) return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens)));
  return std::min((tokens - 1) / kBucket, kMax / kBucket - 1) * kBucket + kBucket;
}

std::vector<TunedSchedule> parse_tuned(std::string_view text) {
  const Parsed json = Parsed::parse(text, nullptr, false);
  if (json.is_discarded()) refuse("no JSON");
  const Fields file(json, "file", {"format", "schedules"});
  if (file.at("format") != kFileFormat) {
    refuse(fmt::format("file.format: {}; this version reads {}", shown(file.at("format")), kFileFormat));
  }
  if (!file.at("schedules").is_array()) refuse("file.schedules: must be a list");
  std::vector<TunedSchedule> all;
  for (const Parsed& entry : file.at("schedules"))
    all.push_back(read_entry(entry, fmt::format("schedules[{}]", all.size())));
  return all;
}

std::string to_json(const std::vector<TunedSchedule>& schedules) {
  Json json;
  json["format"] = kFileFormat;
  json["schedules"] = Json::array();
  for (const TunedSchedule& tuned : schedules) {
    Json entry = json_of(tuned.key);
    entry["schedule"] = Json::parse(to_json(tuned.schedule));
    entry["ms"] = tuned.milliseconds;
    entry["default_ms"] = tuned.default_milliseconds;
    json["schedules"].push_back(std::move(entry));
  }
  return io::json_text(json, 2) + "\n";
}

std::filesystem::path TunedFolder::path(const TunedKey& key) const {
  uint64_t hash = 0;
  for (const char c : io::json_text(json_of(key)))
    hash = io::avalanche64(hash + io::kGolden64 + static_cast<unsigned char>(c));
  return folder_ / fmt::format("{:016x}{}", hash, kSuffix);
}

std::optional<TunedSchedule> TunedFolder::find(const TunedKey& key, std::string* problem) const {
  std::error_code ignored;
  if (folder_.empty() || !std::filesystem::is_regular_file(path(key), ignored)) return std::nullopt;
  try {
    const std::vector<TunedSchedule> entries = parse_tuned(io::read_text_file(path(key)));
    if (entries.size() == 1 && entries[0].key == key) return entries[0];
    if (problem != nullptr) *problem = fmt::format("{}: not the entry of its name", io::quote_path(path(key).string()));
  } catch (const Error& error) {
    const std::string name = io::quote_path(path(key).string());
    const bool named = error.status() == Status::kIo;
    if (problem != nullptr) *problem = named ? error.what() : fmt::format("{}: {}", name, error.what());
  }
  return std::nullopt;
}

std::vector<TunedSchedule> TunedFolder::all() const {
  std::vector<TunedSchedule> found;
  if (folder_.empty()) return found;
  std::error_code error;
  std::filesystem::directory_iterator file(folder_, error);
  for (; !error && file != std::filesystem::directory_iterator(); file.increment(error)) {
    if (!file->path().filename().string().ends_with(kSuffix) || !file->is_regular_file(error)) continue;
    try {
      const std::vector<TunedSchedule> entries = parse_tuned(io::read_text_file(file->path()));
      found.insert(found.end(), entries.begin(), entries.end());
    } catch (const Error&) {  // find() says so to who looks for it
    }
  }
  return found;
}

void TunedFolder::remove(const TunedKey& key) const {
  std::error_code ignored;
  if (keeps()) std::filesystem::remove(path(key), ignored);
}

void TunedFolder::store(const TunedSchedule& tuned) const {
  if (folder_.empty()) return;
  make_cache_folder(folder_);
  io::write_file(path(tuned.key), to_json({tuned}));
}

}  // namespace uniep::tune
