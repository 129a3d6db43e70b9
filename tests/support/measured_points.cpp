#include "support/measured_points.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "io/file.h"
#include "uniep/error.h"

namespace uniep::test {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostTokens = 8192, kHeldOutHidden = 7168;
constexpr double kMostRatio = 2.2;

// FNV-1a.
uint32_t hash_of(const std::string& text) {
  uint32_t hash = 2166136261u;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 16777619u;
  return hash;
}

std::string schedule_of(const Json& tried) {
  if (!tried.contains("schedule")) return "auto";
  std::string text;
  for (const auto& [name, value] : tried["schedule"].items()) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", name,
                        value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

}  // namespace

std::vector<tune::CalibrationLayer> read_measured_points(const std::string& path) {
  std::vector<tune::CalibrationLayer> layers;
  std::istringstream lines(io::read_text_file(path));
  for (std::string line; std::getline(lines, line);) {
    const Json set = Json::parse(line);
    if (set.at("routing") != "uniform" || set.at("tokens") > kMostTokens) continue;
    for (const Json& tried : set.at("tried")) {
      if (!tried.contains("ms") || tried["ms"].is_null()) continue;
      const std::string changes = tried.at("changes");
      tune::CalibrationLayer layer;
      const std::string shape = set.at("shape");
      LayerShape& s = layer.shape;
      if (std::sscanf(shape.c_str(), "%ld,%ld,%ld,%ld", &s.hidden, &s.intermediate, &s.experts, &s.topk) != 4) {
        throw Error(Status::kInvalidArgument, fmt::format("{}: shape {}; must be H,I,E,K", path, shape));
      }
      layer.ranks = set.at("ranks");
      layer.tokens = set.at("tokens");
      layer.direction = set.at("direction") == "forward" ? Direction::kForward : Direction::kBackward;
      layer.schedule = schedule_of(tried);
      layer.milliseconds.assign(tried.at("calls").get<std::size_t>(), tried["ms"].get<double>());
      const bool is_default = changes == "the default";
      layer.held_out = s.hidden == kHeldOutHidden || (!is_default && hash_of(changes) % 3 == 0) ||
                       (!is_default && tried.at("ratio") > kMostRatio);
      layers.push_back(std::move(layer));
    }
  }
  return layers;
}

}  // namespace uniep::test
