#include "tune/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "io/quote.h"
#include "program/schedule_fields.h"
#include "uniep/error.h"

namespace uniep::tune {
namespace {

using Json = nlohmann::ordered_json;
using Parsed = nlohmann::json;

constexpr const char* kFormatName = "uniep calibration";
constexpr int kVersion = 1;
constexpr std::size_t kMaxLayers = 1000, kMaxCalls = 10000, kMaxTextBytes = 2000;
constexpr int64_t kMaxSize = 1 << 17, kMaxTokens = 1 << 16, kMaxExperts = 1 << 12, kMaxRanks = 8;
constexpr double kMostMilliseconds = 1e6;

class Reader {
 public:
  explicit Reader(const std::string& file) : file_(printable(file)) {}

  Calibration read(std::string_view text) {
    if (text.size() > kMaxCalibrationText) {
      refuse(fmt::format("holds {} bytes; a calibration has at most {}", text.size(), kMaxCalibrationText));
    }
    const Parsed root = Parsed::parse(text, nullptr, false);
    if (root.is_discarded()) refuse("is not valid JSON; must be what `uniep calibrate --raw` wrote");
    if (!root.is_object()) refuse("is not a JSON object");
    if (!root.contains("format") || root["format"] != kFormatName) {
      refuse("format", root.contains("format") ? shown(root["format"]) : "is missing",
             fmt::format("\"{}\"", kFormatName));
    }
    require_keys(root, "", {"format", "version", "device", "compute_units", "layers", "dropped"});
    whole(root, "", "version", kVersion, kVersion);
    Calibration calibration;
    calibration.device = text_of(root, "", "device");
    calibration.compute_units = static_cast<int>(whole(root, "", "compute_units", 1, 4096));
    const Parsed& layers = list_of(root, "", "layers", kMaxLayers);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      calibration.layers.push_back(layer_of(layers[i], fmt::format("layers[{}]", i)));
    }
    const Parsed& dropped = list_of(root, "", "dropped", kMaxLayers);
    for (const Parsed& line : dropped) {
      if (!line.is_string()) refuse("dropped", shown(line), "lines of text");
      calibration.dropped.push_back(line.get<std::string>());
    }
    return calibration;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(Status::kInvalidArgument, fmt::format("{}: {}", file_, what));
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& value, const std::string& legal) const {
    refuse(fmt::format("{}: {}; must be {}", key, value, legal));
  }
  static std::string shown(const Parsed& value) {
    return value.is_primitive() ? io::quote_text(value.dump(-1, ' ', true, Parsed::error_handler_t::replace))
                                : std::string("a ") + value.type_name();
  }
  static std::string join(const std::string& at, const char* key) {
    return at.empty() ? std::string(key) : fmt::format("{}.{}", at, key);
  }

  void require_keys(const Parsed& object, const std::string& at, const std::vector<std::string>& keys) const {
    if (!object.is_object()) refuse(at, shown(object), "an object");
    for (const auto& [key, value] : object.items()) {
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
      refuse(join(at, printable(key).c_str()), "is not known", "left out");
    }
    for (const std::string& key : keys) {
      if (!object.contains(key)) refuse(join(at, key.c_str()), "is missing", "there");
    }
  }
  int64_t whole(const Parsed& object, const std::string& at, const char* key, int64_t least, int64_t most) const {
    const Parsed& value = object[key];
    if (!value.is_number_integer() || value < least || value > most) {
      refuse(join(at, key), shown(value), fmt::format("a whole number from {} to {}", least, most));
    }
    return value.get<int64_t>();
  }
  std::string text_of(const Parsed& object, const std::string& at, const char* key) const {
    const Parsed& value = object[key];
    if (!value.is_string() || value.get_ref<const std::string&>().size() > kMaxTextBytes) {
      refuse(join(at, key), shown(value), fmt::format("a text of at most {} bytes", kMaxTextBytes));
    }
    return value.get<std::string>();
  }
  const Parsed& list_of(const Parsed& object, const std::string& at, const char* key, std::size_t most) const {
    const Parsed& list = object[key];
    if (!list.is_array() || list.size() > most) {
      refuse(join(at, key), list.is_array() ? fmt::format("{} entries", list.size()) : shown(list),
             fmt::format("a list of at most {}", most));
    }
    return list;
  }
  bool word(const Parsed& object, const std::string& at, const char* key, const char* no, const char* yes) const {
    const Parsed& value = object[key];
    if (value != no && value != yes) refuse(join(at, key), shown(value), fmt::format("{} or {}", no, yes));
    return value == yes;
  }

  CalibrationLayer layer_of(const Parsed& item, const std::string& at) const {
    require_keys(item, at, {"shape", "ranks", "tokens", "direction", "state", "schedule", "held_out", "ms"});
    CalibrationLayer layer;
    const std::string shape = join(at, "shape");
    require_keys(item["shape"], shape, {"hidden", "intermediate", "experts", "topk"});
    layer.shape = {
        whole(item["shape"], shape, "hidden", 1, kMaxSize), whole(item["shape"], shape, "intermediate", 1, kMaxSize),
        whole(item["shape"], shape, "experts", 1, kMaxExperts), whole(item["shape"], shape, "topk", 1, kMaxExperts)};
    layer.ranks = static_cast<int>(whole(item, at, "ranks", 1, kMaxRanks));
    layer.tokens = whole(item, at, "tokens", 1, kMaxTokens);
    if (layer.tokens * layer.ranks * layer.shape.topk > int64_t{1} << 22) {
      refuse(join(at, "tokens"), std::to_string(layer.tokens), "of at most 4194304 slots on all ranks");
    }
    if (word(item, at, "direction", "forward", "backward")) layer.direction = Direction::kBackward;
    if (word(item, at, "state", "sustained", "paused")) layer.state = sim::State::kPaused;
    layer.schedule = text_of(item, at, "schedule");
    if (!item["held_out"].is_boolean()) refuse(join(at, "held_out"), shown(item["held_out"]), "true or false");
    layer.held_out = item["held_out"].get<bool>();
    const Parsed& times = list_of(item, at, "ms", kMaxCalls);
    for (const Parsed& time : times) {
      const double ms = time.is_number() ? time.get<double>() : 0;
      if (!(ms > 0 && ms <= kMostMilliseconds)) refuse(join(at, "ms"), shown(time), "times above 0, at most 1e6");
      layer.milliseconds.push_back(ms);
    }
    if (times.empty()) refuse(join(at, "ms"), "is empty", "at least one time");
    return layer;
  }

  std::string file_;
};

}  // namespace

Calibration parse_calibration(std::string_view text, const std::string& file) {
  return Reader(file).read(text);
}

std::string to_json(const Calibration& calibration) {
  Json json = {{"format", kFormatName},        {"version", kVersion},
               {"device", calibration.device}, {"compute_units", calibration.compute_units},
               {"layers", Json::array()},      {"dropped", calibration.dropped}};
  for (const CalibrationLayer& layer : calibration.layers) {
    const LayerShape& shape = layer.shape;
    json["layers"].push_back({{"shape",
                               {{"hidden", shape.hidden},
                                {"intermediate", shape.intermediate},
                                {"experts", shape.experts},
                                {"topk", shape.topk}}},
                              {"ranks", layer.ranks},
                              {"tokens", layer.tokens},
                              {"direction", layer.direction == Direction::kForward ? "forward" : "backward"},
                              {"state", layer.state == sim::State::kSustained ? "sustained" : "paused"},
                              {"schedule", layer.schedule},
                              {"held_out", layer.held_out},
                              {"ms", layer.milliseconds}});
  }
  return json.dump(1) + "\n";
}

}  // namespace uniep::tune
