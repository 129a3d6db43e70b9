#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "uniep/layer.h"

// Timelines in the JSON format of Chrome and Perfetto: ranks are processes, agents are threads, tiles are complete
// events in microseconds whose category is the stage. What an agent waited for before a tile is an event of its own, of
// the category kWaitCategory, where it took longer than a microsecond. Calls begin with a mark, whose arguments are
// shape and schedule as --shape and --schedule take them, and what else is known.
namespace uniep::api {

inline constexpr const char* kWaitCategory = "wait";

// What a call ran.
struct TracedLayer {
  LayerShape shape;
  Schedule schedule;
  std::vector<std::pair<std::string, std::string>> more = {};  // arguments of the mark beside these two, by name
};

// One call's events, under the name that its beginning is marked with.
struct TracedCall {
  std::string name;  // "forward", "backward"
  std::vector<TileEvent> events;
  std::optional<TracedLayer> layer = {};  // that the mark says
};

// The calls one after the other on one time axis.
std::string trace_json(const std::string& title, std::span<const TracedCall> calls);

}  // namespace uniep::api
