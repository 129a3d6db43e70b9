#pragma once

#include <span>
#include <string>
#include <vector>

#include "uniep/layer.h"

// Timelines in the JSON format of Chrome and Perfetto: ranks are processes, agents are threads, tiles are complete
// events in microseconds whose category is the stage. What an agent waited for before a tile is an event of its own, of
// the category kWaitCategory, where it took longer than a microsecond.
namespace uniep::api {

inline constexpr const char* kWaitCategory = "wait";

// One call's events, under the name that its beginning is marked with.
struct TracedCall {
  std::string name;  // "forward", "backward"
  std::vector<TileEvent> events;
};

// The calls one after the other on one time axis.
std::string trace_json(const std::string& title, std::span<const TracedCall> calls);

}  // namespace uniep::api
