#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "program/schedule_fields.h"
#include "sim/machine_fields.h"
#include "uniep/error.h"

namespace uniep::sim {
namespace {

using Json = nlohmann::ordered_json;  // to write: ordered_map copies what it holds, however deep, as it grows
using Parsed = nlohmann::json;

constexpr const char* kFormat = "uniep machine";
constexpr std::array<const char*, 3> kSourceNames = {"measured", "published", "assumed"};
constexpr std::size_t kLongestText = 400;  // of a name or a source in words
constexpr std::size_t kMaxClasses = 8, kMaxTiles = 64, kMaxLevels = 4, kMaxRates = 16;
constexpr std::size_t kMaxDoubtful = 200;
constexpr int kMaxRanks = 4096;

// A value in a message. Lists and objects are not written out, however deep they are.
std::string shown(const Parsed& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("a list of {}", value.size());
  return printable(value.dump(-1, ' ', true, Parsed::error_handler_t::replace));
}

class MachineReader {
 public:
  explicit MachineReader(const std::string& file) : file_(printable(file)) {}

  MachineDescription read(std::string_view text) {
    if (text.size() > kMaxMachineText) {
      refuse(fmt::format("holds {} bytes; a description has at most {}", text.size(), kMaxMachineText));
    }
    const Parsed root = parse(text);
    if (!root.is_object()) refuse("is not a JSON object");
    read_version(root);
    std::vector<std::string> keys = {"format", "version", "name", "title", "workers", "tiles", "links"};
    for (const NumberField& field : number_fields()) {
      if (field.since > version_) continue;
      if (std::find(keys.begin(), keys.end(), field.section) == keys.end()) keys.emplace_back(field.section);
    }
    if (root.contains("calibrated")) keys.emplace_back("calibrated");
    require_keys(root, "", keys);
    if (root.contains("calibrated")) read_calibrated(root["calibrated"]);
    machine_.name = text_of(root, "", "name");
    machine_.title = text_of(root, "", "title");
    read_sections(root);
    read_list(root, "workers", 1, kMaxClasses,
              [&](const Parsed& item, const std::string& at) { read_class(item, at); });
    read_list(root, "tiles", 1, kMaxTiles, [&](const Parsed& item, const std::string& at) { read_tile(item, at); });
    read_list(root, "links", 0, kMaxLevels, [&](const Parsed& item, const std::string& at) { read_level(item, at); });
    require_whole();
    return std::move(machine_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(Status::kInvalidArgument, fmt::format("{}: {}", file_, what));
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& value, const std::string& legal) const {
    refuse(fmt::format("{}: {}; must be {}", key, value, legal));
  }

  // Refuses a key that comes twice in an object: which one counts would be a matter of the parser.
  Parsed parse(std::string_view text) const {
    std::vector<std::set<std::string>> seen;
    std::optional<std::string> twice;
    const auto look = [&](int, nlohmann::detail::parse_event_t event, Parsed& parsed) {
      using Event = nlohmann::detail::parse_event_t;
      if (event == Event::object_start) seen.emplace_back();
      if (event == Event::object_end && !seen.empty()) seen.pop_back();
      if (event == Event::key && !seen.empty() && !seen.back().insert(parsed.get<std::string>()).second && !twice) {
        twice = parsed.get<std::string>();
      }
      return true;
    };
    Parsed root = Parsed::parse(text, look, false);
    if (root.is_discarded()) refuse("is not valid JSON; must be a machine description (docs/simulator.md)");
    if (twice) refuse(printable(*twice), "comes twice in an object", "there once");
    return root;
  }

  void read_version(const Parsed& root) {
    if (!root.contains("format") || root["format"] != kFormat) {
      refuse("format", root.contains("format") ? shown(root["format"]) : "is missing", fmt::format("\"{}\"", kFormat));
    }
    const bool whole = root.contains("version") && root["version"].is_number_integer();
    if (whole && root["version"] > kMachineVersion) {
      refuse("version", shown(root["version"]),
             fmt::format("1 to {}: this file is of a later version of uniep", kMachineVersion));
    }
    if (!whole || root["version"] < 1) {
      refuse("version", root.contains("version") ? shown(root["version"]) : "is missing",
             fmt::format("1 to {}", kMachineVersion));
    }
    version_ = root["version"].get<int>();
  }

  static std::string join(const std::string& at, std::string_view key) {
    return at.empty() ? std::string(key) : fmt::format("{}.{}", at, key);
  }

  void require_keys(const Parsed& object, const std::string& at, const std::vector<std::string>& keys) const {
    if (!object.is_object()) refuse(at, shown(object), fmt::format("an object with {}", fmt::join(keys, ", ")));
    for (const auto& [key, value] : object.items()) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
        refuse(join(at, printable(key)), "is not known", fmt::format("one of {}", fmt::join(keys, ", ")));
      }
    }
    for (const std::string& key : keys) {
      if (!object.contains(key)) refuse(join(at, key), "is missing", "there");
    }
  }

  std::string text_of(const Parsed& object, const std::string& at, const char* key) const {
    const Parsed& value = object[key];
    if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
      refuse(join(at, key), shown(value), "a text that is not empty");
    }
    const std::string& text = value.get_ref<const std::string&>();
    if (text.size() > kLongestText) {
      refuse(join(at, key), shown(value), fmt::format("a text of at most {} bytes", kLongestText));
    }
    return text;
  }

  // {"value": 1.33, "unit": "GHz", "source": "measured", "from": "..."}
  double number_of(const Parsed& object, const std::string& at, const NumberField& field) {
    const std::string key = join(at, field.key);
    const Parsed& number = object[field.key];
    require_keys(number, key, {"value", "unit", "source", "from"});
    if (number["unit"] != field.unit) {
      refuse(join(key, "unit"), shown(number["unit"]), fmt::format("\"{}\"", field.unit));
    }
    const auto source = std::find_if(kSourceNames.begin(), kSourceNames.end(),
                                     [&](const char* name) { return number["source"] == name; });
    if (source == kSourceNames.end()) {
      refuse(join(key, "source"), shown(number["source"]), "measured, published or assumed");
    }
    const Parsed& value = number["value"];
    const double read = value.is_number() ? value.get<double>() : std::nan("");
    if (!(read >= field.least && read <= field.most) || (field.whole && read != std::floor(read))) {
      refuse(join(key, "value"), shown(value),
             fmt::format("a {} from {} to {} ({})", field.whole ? "whole number" : "number", field.least, field.most,
                         field.unit));
    }
    machine_.origin[key] = {static_cast<Source>(source - kSourceNames.begin()), text_of(number, key, "from")};
    return read;
  }

  int whole_of(const Parsed& object, const std::string& at, const char* key, int least, int most) const {
    const Parsed& value = object[key];
    if (!value.is_number_integer() || value < least || value > most) {
      refuse(join(at, key), shown(value), fmt::format("a whole number from {} to {}", least, most));
    }
    return value.get<int>();
  }

  void read_calibrated(const Parsed& item) {
    const std::string at = "calibrated";
    require_keys(item, at, {"device", "doubtful"});
    CalibratedGpu& calibrated = machine_.calibrated.emplace();
    calibrated.device = text_of(item, at, "device");
    const Parsed& list = item["doubtful"];
    if (!list.is_array() || list.size() > kMaxDoubtful) {
      refuse(join(at, "doubtful"), shown(list), fmt::format("a list of at most {} keys", kMaxDoubtful));
    }
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!list[i].is_string()) refuse(fmt::format("{}.doubtful[{}]", at, i), shown(list[i]), "a key");
      calibrated.doubtful.push_back(printable(list[i].get<std::string>()));
    }
  }

  void read_sections(const Parsed& root) {
    for (const NumberField& first : number_fields()) {
      std::vector<std::string> keys;
      for (const NumberField& field : number_fields()) {
        if (std::string_view(field.section) == first.section && field.since <= version_) keys.emplace_back(field.key);
      }
      if (first.since > version_) {
        first.of(machine_) = first.before;
        machine_.origin[join(first.section, first.key)] = {
            Source::kAssumed, fmt::format("not in descriptions of version {}, which mean this", version_)};
        continue;
      }
      if (keys.front() == first.key) require_keys(root[first.section], first.section, keys);
      first.of(machine_) = number_of(root[first.section], first.section, first);
    }
  }

  template <typename Read>
  void read_list(const Parsed& root, const char* key, std::size_t least, std::size_t most, Read&& read) {
    const Parsed& list = root[key];
    if (!list.is_array() || list.size() < least || list.size() > most) {
      refuse(key, list.is_array() ? fmt::format("{} entries", list.size()) : shown(list),
             fmt::format("a list of {} to {}", least, most));
    }
    for (std::size_t i = 0; i < list.size(); ++i) read(list[i], fmt::format("{}[{}]", key, i));
  }

  WorkSet stages_of(const Parsed& object, const std::string& at, bool only_gemms) const {
    std::vector<const char*> legal;
    for (int work = 0; work < kWorkCount; ++work) {
      const bool gemm = work >= static_cast<int>(Work::kFc1) && work <= static_cast<int>(Work::kWgradFc1);
      if (gemm || !only_gemms) legal.push_back(work_name(static_cast<Work>(work)));
    }
    const std::string words = fmt::format("a list of {}", fmt::join(legal, ", "));
    const Parsed& list = object["stages"];
    if (!list.is_array() || list.empty()) refuse(join(at, "stages"), shown(list), words);
    WorkSet set;
    for (const Parsed& item : list) {
      bool found = false;
      for (int work = 0; work < kWorkCount && !found; ++work) {
        const char* name = work_name(static_cast<Work>(work));
        found = item == name && std::find_if(legal.begin(), legal.end(), [&](const char* one) {
                                  return std::string_view(one) == name;
                                }) != legal.end();
        if (found) set.add(static_cast<Work>(work));
      }
      if (!found) refuse(join(at, "stages"), shown(item), words);
    }
    return set;
  }

  void read_class(const Parsed& item, const std::string& at) {
    static constexpr NumberField kCount{"", "count", "count", 1, 4096, true, nullptr, ""};
    require_keys(item, at, {"name", "count", "stages"});
    machine_.workers.push_back({text_of(item, at, "name"), number_of(item, at, kCount), stages_of(item, at, false)});
  }

  void read_tile(const Parsed& item, const std::string& at) {
    static constexpr NumberField kPerK{"", "cycles_per_k", "cycles", 1e-6, 1e6, false, nullptr, ""};
    static constexpr NumberField kCycles{"", "cycles", "cycles", 0, 1e9, false, nullptr, ""};
    require_keys(item, at, {"stages", "rows", "columns", "cycles_per_k", "cycles"});
    machine_.tiles.push_back({stages_of(item, at, true), whole_of(item, at, "rows", 1, 65536),
                              whole_of(item, at, "columns", 1, 65536), number_of(item, at, kPerK),
                              number_of(item, at, kCycles)});
  }

  void read_level(const Parsed& item, const std::string& at) {
    static constexpr NumberField kLatency{"", "latency", "us", 0, 1e6, false, nullptr, ""};
    static constexpr NumberField kRates[] = {{"", "read", "GB/s", 0.001, 1e6, false, nullptr, ""},
                                             {"", "write", "GB/s", 0.001, 1e6, false, nullptr, ""},
                                             {"", "both", "GB/s", 0.001, 1e6, false, nullptr, ""}};
    require_keys(item, at, {"name", "ranks", "relay", "latency", "rates"});
    LinkLevel level;
    level.name = text_of(item, at, "name");
    level.ranks = whole_of(item, at, "ranks", 2, kMaxRanks);
    if (!machine_.links.empty() && level.ranks <= machine_.links.back().ranks) {
      refuse(join(at, "ranks"), std::to_string(level.ranks), "more than those of the level before");
    }
    if (!item["relay"].is_boolean()) refuse(join(at, "relay"), shown(item["relay"]), "true or false");
    level.relay = item["relay"].get<bool>();
    level.latency = number_of(item, at, kLatency);
    const Parsed& rates = item["rates"];
    if (!rates.is_array() || rates.empty() || rates.size() > kMaxRates) {
      refuse(join(at, "rates"), rates.is_array() ? fmt::format("{} entries", rates.size()) : shown(rates),
             fmt::format("a list of 1 to {}", kMaxRates));
    }
    for (std::size_t i = 0; i < rates.size(); ++i) {
      const std::string here = fmt::format("{}.rates[{}]", at, i);
      require_keys(rates[i], here, {"ranks", "read", "write", "both"});
      LinkRate rate;
      rate.ranks = whole_of(rates[i], here, "ranks", 2, kMaxRanks);
      if (!level.rates.empty() && rate.ranks <= level.rates.back().ranks) {
        refuse(join(here, "ranks"), std::to_string(rate.ranks), "more than those of the entry before");
      }
      rate.read = number_of(rates[i], here, kRates[0]);
      rate.write = number_of(rates[i], here, kRates[1]);
      rate.both = number_of(rates[i], here, kRates[2]);
      level.rates.push_back(rate);
    }
    machine_.links.push_back(std::move(level));
  }

  // What no key by itself can say.
  void require_whole() const {
    WorkSet run, timed;
    for (const WorkerClass& workers : machine_.workers) {
      if (run.bits & workers.work.bits) refuse("workers", "two classes run the same stage", "one class for each stage");
      run.bits |= workers.work.bits;
    }
    for (const TileCost& tile : machine_.tiles) timed.bits |= tile.work.bits;
    for (int work = 0; work < kWorkCount; ++work) {
      const Work stage = static_cast<Work>(work);
      const bool gemm = stage >= Work::kFc1 && stage <= Work::kWgradFc1;
      if (!run.has(stage) && stage != Work::kActivation) {
        refuse("workers", fmt::format("no class runs {}", work_name(stage)), "a class for each stage");
      }
      if (gemm && !timed.has(stage)) {
        refuse("tiles", fmt::format("none is for {}", work_name(stage)), "an entry for each GEMM stage");
      }
    }
    for (Work stage = Work::kFc2; stage <= Work::kWgradFc1; stage = static_cast<Work>(static_cast<int>(stage) + 1)) {
      for (const WorkerClass& workers : machine_.workers) {
        if (workers.work.has(stage) != workers.work.has(Work::kFc1)) {
          refuse("workers", fmt::format("{} and fc1 are run by different classes", work_name(stage)),
                 "one class for all GEMM stages");
        }
      }
    }
    if (machine_.clock.pause_lowest > machine_.clock.pause) {
      refuse("clock.pause_lowest.value", fmt::format("{}", machine_.clock.pause_lowest),
             fmt::format("at most clock.pause, {}", machine_.clock.pause));
    }
  }

  std::string file_;
  int version_ = kMachineVersion;
  MachineDescription machine_;
};

Json number_json(const MachineDescription& machine, const std::string& key, const char* unit, double value) {
  const auto origin = machine.origin.find(key);
  Json json;
  json["value"] = value;
  json["unit"] = unit;
  json["source"] = kSourceNames[origin == machine.origin.end() ? 2 : static_cast<std::size_t>(origin->second.source)];
  json["from"] = origin == machine.origin.end() ? "not told" : origin->second.from;
  return json;
}

Json stages_json(const WorkSet& work) {
  Json list = Json::array();
  for (int i = 0; i < kWorkCount; ++i) {
    if (work.has(static_cast<Work>(i))) list.push_back(work_name(static_cast<Work>(i)));
  }
  return list;
}

}  // namespace

MachineDescription parse_machine(std::string_view text, const std::string& file) {
  return MachineReader(file).read(text);
}

std::string machine_json(const MachineDescription& machine) {
  Json json;
  json["format"] = kFormat;
  json["version"] = kMachineVersion;
  json["name"] = machine.name;
  json["title"] = machine.title;
  if (machine.calibrated) {
    json["calibrated"] = {{"device", machine.calibrated->device}, {"doubtful", machine.calibrated->doubtful}};
  }
  json["workers"] = Json::array();
  for (std::size_t i = 0; i < machine.workers.size(); ++i) {
    Json item;
    item["name"] = machine.workers[i].name;
    item["count"] = number_json(machine, fmt::format("workers[{}].count", i), "count", machine.workers[i].count);
    item["stages"] = stages_json(machine.workers[i].work);
    json["workers"].push_back(std::move(item));
  }
  json["tiles"] = Json::array();
  for (std::size_t i = 0; i < machine.tiles.size(); ++i) {
    const TileCost& tile = machine.tiles[i];
    const std::string at = fmt::format("tiles[{}]", i);
    Json item;
    item["stages"] = stages_json(tile.work);
    item["rows"] = tile.rows;
    item["columns"] = tile.columns;
    item["cycles_per_k"] = number_json(machine, at + ".cycles_per_k", "cycles", tile.cycles_per_k);
    item["cycles"] = number_json(machine, at + ".cycles", "cycles", tile.cycles);
    json["tiles"].push_back(std::move(item));
  }
  json["links"] = Json::array();
  for (std::size_t i = 0; i < machine.links.size(); ++i) {
    const LinkLevel& level = machine.links[i];
    const std::string at = fmt::format("links[{}]", i);
    Json item;
    item["name"] = level.name;
    item["ranks"] = level.ranks;
    item["relay"] = level.relay;
    item["latency"] = number_json(machine, at + ".latency", "us", level.latency);
    item["rates"] = Json::array();
    for (std::size_t j = 0; j < level.rates.size(); ++j) {
      const std::string here = fmt::format("{}.rates[{}]", at, j);
      Json rate;
      rate["ranks"] = level.rates[j].ranks;
      rate["read"] = number_json(machine, here + ".read", "GB/s", level.rates[j].read);
      rate["write"] = number_json(machine, here + ".write", "GB/s", level.rates[j].write);
      rate["both"] = number_json(machine, here + ".both", "GB/s", level.rates[j].both);
      item["rates"].push_back(std::move(rate));
    }
    json["links"].push_back(std::move(item));
  }
  MachineDescription copy = machine;
  for (const NumberField& field : number_fields()) {
    json[field.section][field.key] =
        number_json(machine, fmt::format("{}.{}", field.section, field.key), field.unit, field.of(copy));
  }
  return json.dump(1) + "\n";
}

}  // namespace uniep::sim
