#include "cli/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "io/quote.h"

namespace uniep::cli {
namespace {

using Parsed = nlohmann::json;

constexpr double kLatestUs = 4e15;  // from 1970 on that is 2096; beyond, a double can not tell microseconds apart

[[noreturn]] void refuse_trace(const std::string& name, const std::string& what) {
  throw Error(Status::kInvalidArgument,
              fmt::format("{}: {}; must be a timeline as uniep run --trace writes it", io::quote_path(name), what));
}

class TraceReader {
 public:
  explicit TraceReader(const std::string& name) : name_(name) {}

  Trace read(const Parsed& root) {
    if (root.is_object() && root.contains("otherData") && root["otherData"].is_object()) {
      trace_.title =
          root["otherData"].value("title", Parsed("")).is_string() ? root["otherData"].value("title", "") : "";
    }
    const Parsed* events = root.is_array() ? &root : nullptr;
    if (root.is_object() && root.contains("traceEvents")) events = &root["traceEvents"];
    if (events == nullptr || !events->is_array()) refuse_trace(name_, "holds no list traceEvents");
    for (const Parsed& event : *events) {
      if (!event.is_object()) refuse_trace(name_, fmt::format("event {} is not an object", index_));
      read_event(event);
      ++index_;
    }
    if (trace_.slices.empty()) refuse_trace(name_, "holds no complete event (ph X)");
    order_lanes();
    return std::move(trace_);
  }

 private:
  using ThreadKey = std::pair<int64_t, int64_t>;

  void read_event(const Parsed& event) {
    const std::string phase = text(event, "ph");
    if (phase == "X") {
      const double duration = time(event, "dur");
      if (duration < 0) refuse_trace(name_, fmt::format("event {} has dur {}", index_, duration));
      trace_.slices.push_back(
          {lane_of(thread_of(event)), text(event, "cat"), text(event, "name"), time(event, "ts"), duration});
    } else if (phase == "i") {
      TraceMark& mark = trace_.marks.emplace_back(TraceMark{text(event, "name"), time(event, "ts")});
      if (!event.contains("args") || !event["args"].is_object() || !event["args"].contains("schedule")) return;
      mark.shape = text(event["args"], "shape");
      mark.schedule = text(event["args"], "schedule");
      for (const auto& [key, value] : event["args"].items()) {
        if (!value.is_string())
          refuse_trace(name_, fmt::format("event {}: {} is no string", index_, io::quote_text(key)));
        if (key != "shape" && key != "schedule") mark.more[key] = value.get<std::string>();
      }
    } else if (phase == "M" && event.contains("args") && event["args"].is_object()) {
      const std::string what = text(event, "name");
      if (what == "process_name") process_names_[integer(event, "pid")] = text(event["args"], "name");
      if (what == "thread_name") thread_names_[thread_of(event)] = text(event["args"], "name");
    }
  }

  ThreadKey thread_of(const Parsed& event) const { return {integer(event, "pid"), integer(event, "tid")}; }

  std::size_t lane_of(const ThreadKey& thread) {
    const auto [at, added] = lanes_.emplace(thread, lanes_.size());
    return at->second;
  }

  // Lanes were numbered as they came; they are shown by process and thread.
  void order_lanes() {
    std::vector<std::size_t> shown(lanes_.size());
    for (const auto& [thread, lane] : lanes_) {
      shown[lane] = trace_.lanes.size();
      const auto process = process_names_.find(thread.first);
      const auto name = thread_names_.find(thread);
      trace_.lanes.push_back(
          {process != process_names_.end() ? process->second : fmt::format("process {}", thread.first),
           name != thread_names_.end() ? name->second : fmt::format("thread {}", thread.second)});
    }
    for (TraceSlice& slice : trace_.slices) slice.lane = shown[slice.lane];
  }

  const Parsed& member(const Parsed& object, const char* key) const {
    const auto at = object.find(key);
    if (at == object.end()) refuse_trace(name_, fmt::format("event {} has no {}", index_, key));
    return *at;
  }
  std::string text(const Parsed& object, const char* key) const {
    const Parsed& value = member(object, key);
    if (!value.is_string()) refuse_trace(name_, fmt::format("event {}: {} is no string", index_, key));
    return value.get<std::string>();
  }
  double time(const Parsed& object, const char* key) const {
    const Parsed& value = member(object, key);
    if (!value.is_number()) refuse_trace(name_, fmt::format("event {}: {} is no number", index_, key));
    const double us = value.get<double>();
    if (!(std::abs(us) <= kLatestUs)) {
      refuse_trace(name_,
                   fmt::format("event {}: {} is {}, farther than {} microseconds from 0", index_, key, us, kLatestUs));
    }
    return us;
  }
  int64_t integer(const Parsed& object, const char* key) const {
    const Parsed& value = member(object, key);
    if (!value.is_number_integer()) refuse_trace(name_, fmt::format("event {}: {} is no whole number", index_, key));
    return value.get<int64_t>();
  }

  std::string name_;
  std::size_t index_ = 0;
  Trace trace_;
  std::map<ThreadKey, std::size_t> lanes_;
  std::map<int64_t, std::string> process_names_;
  std::map<ThreadKey, std::string> thread_names_;
};

}  // namespace

Trace parse_trace(std::string_view text, const std::string& name) {
  const Parsed root = Parsed::parse(text, nullptr, false);
  if (root.is_discarded()) refuse_trace(name, "is not valid JSON");
  return TraceReader(name).read(root);
}

namespace {

// "worker 12" of "worker 12 copy"; empty for another lane.
std::string worker_of(const TraceLane& lane) {
  if (lane.thread.rfind("worker ", 0) != 0) return {};
  return lane.thread.substr(0, lane.thread.find(' ', std::string_view("worker ").size()));
}

// Worker by worker in their order, those of each process: whether it stays.
std::map<std::pair<std::string, std::string>, bool> chosen_workers(const Trace& trace, int workers) {
  std::map<std::string, std::vector<std::string>> of_process;
  for (const TraceLane& lane : trace.lanes) {
    std::vector<std::string>& names = of_process[lane.process];
    const std::string name = worker_of(lane);
    if (!name.empty() && (names.empty() || names.back() != name)) names.push_back(name);
  }
  std::map<std::pair<std::string, std::string>, bool> chosen;
  for (const auto& [process, names] : of_process) {
    const std::size_t wanted = std::min(names.size(), static_cast<std::size_t>(workers));
    for (std::size_t i = 0; i < wanted; ++i) chosen[{process, names[i * names.size() / wanted]}] = true;
  }
  return chosen;
}

}  // namespace

Trace with_fewer_workers(Trace trace, int workers) {
  auto chosen = chosen_workers(trace, workers);
  std::vector<std::optional<std::size_t>> place(trace.lanes.size());
  std::vector<TraceLane> lanes;
  for (std::size_t i = 0; i < trace.lanes.size(); ++i) {
    const std::string worker = worker_of(trace.lanes[i]);
    if (!worker.empty() && !chosen[{trace.lanes[i].process, worker}]) continue;
    place[i] = lanes.size();
    lanes.push_back(trace.lanes[i]);
  }
  std::vector<TraceSlice> slices;
  for (TraceSlice& slice : trace.slices) {
    if (!place[slice.lane]) continue;
    slice.lane = *place[slice.lane];
    slices.push_back(std::move(slice));
  }
  trace.lanes = std::move(lanes);
  trace.slices = std::move(slices);
  return trace;
}

}  // namespace uniep::cli
