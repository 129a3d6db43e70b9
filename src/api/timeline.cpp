#include "api/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <tuple>
#include <utility>

namespace uniep::api {
namespace {

using Json = nlohmann::json;

constexpr int64_t kShortestWaitNs = 1000;

using AgentKey = std::tuple<int, int, bool>;  // rank, worker, compute agent (its lane comes second)

AgentKey agent_of(const TileEvent& event) {
  return {event.rank, event.worker, !event.copy_agent};
}

double microseconds(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / 1000;
}

std::string coordinates(const TileEvent& event) {
  const std::string expert = event.expert >= 0 ? fmt::format(" e{}", event.expert) : "";
  return fmt::format("{}{} m{} n{}", event.stage, expert, event.m, event.n);
}

std::string arguments_of(const TracedLayer& layer) {
  const LayerShape& shape = layer.shape;
  std::string more;
  for (const auto& [name, value] : layer.more) more += fmt::format(", {}: {}", Json(name).dump(), Json(value).dump());
  return fmt::format(R"(, "args": {{"shape": "{},{},{},{}", "schedule": "{}"{}}})", shape.hidden, shape.intermediate,
                     shape.experts, shape.topk, to_text(layer.schedule), more);
}

// Events as lines of JSON. Process and thread ids begin at 1 and no two threads share one, as Perfetto wants it.
class TraceWriter {
 public:
  explicit TraceWriter(std::span<const TracedCall> calls) {
    for (const TracedCall& call : calls) {
      for (const TileEvent& event : call.events) threads_.emplace(agent_of(event), 0);
    }
    int next = 1;
    for (auto& [agent, thread] : threads_) thread = next++;
  }

  void name_agents() {
    int named_rank = -1;
    for (const auto& [agent, thread] : threads_) {
      const auto& [rank, worker, compute] = agent;
      if (rank != named_rank) {
        metadata("process_name", rank, 0, fmt::format("\"name\": \"rank {}\"", rank));
        metadata("process_sort_index", rank, 0, fmt::format("\"sort_index\": {}", rank));
      }
      named_rank = rank;
      metadata("thread_name", rank, thread,
               fmt::format("\"name\": \"worker {} {}\"", worker, compute ? "compute" : "copy"));
      metadata("thread_sort_index", rank, thread, fmt::format("\"sort_index\": {}", thread));
    }
  }

  // Appends a call that begins at `offset_ns`; returns when it ended.
  int64_t add_call(const TracedCall& call, int64_t offset_ns) {
    line(fmt::format("\"ph\": \"i\", \"s\": \"g\", \"name\": {}, \"pid\": 1, \"tid\": 0, \"ts\": {:.3f}{}",
                     Json(call.name).dump(), microseconds(offset_ns), call.layer ? arguments_of(*call.layer) : ""));
    std::vector<const TileEvent*> ordered;
    for (const TileEvent& event : call.events) ordered.push_back(&event);
    std::sort(ordered.begin(), ordered.end(),
              [](const TileEvent* a, const TileEvent* b) { return a->begin_ns < b->begin_ns; });
    int64_t end_ns = offset_ns;
    for (const TileEvent* event : ordered) {
      if (event->begin_ns - event->wait_begin_ns > kShortestWaitNs) {
        complete(*event, {kWaitCategory, kWaitCategory, offset_ns + event->wait_begin_ns, offset_ns + event->begin_ns,
                          fmt::format("\"for\": \"{}\"", coordinates(*event))});
      }
      complete(*event, {event->stage, coordinates(*event), offset_ns + event->begin_ns, offset_ns + event->end_ns,
                        fmt::format("\"expert\": {}, \"m\": {}, \"n\": {}", event->expert, event->m, event->n)});
      end_ns = std::max(end_ns, offset_ns + event->end_ns);
    }
    return end_ns;
  }

  std::string take() { return std::move(text_); }

 private:
  void line(const std::string& members) {
    text_ += text_.empty() ? "{" : ",\n{";
    text_ += members;
    text_ += '}';
  }
  void metadata(const char* what, int rank, int thread, const std::string& args) {
    line(fmt::format("\"ph\": \"M\", \"name\": \"{}\", \"pid\": {}, \"tid\": {}, \"args\": {{{}}}", what, rank + 1,
                     thread, args));
  }
  struct Slice {
    std::string_view category, name;
    int64_t begin_ns, end_ns;
    std::string args;
  };
  void complete(const TileEvent& event, const Slice& slice) {
    line(
        fmt::format("\"ph\": \"X\", \"cat\": \"{}\", \"name\": \"{}\",{} \"pid\": {}, \"tid\": {}, \"ts\": {:.3f}, "
                    "\"dur\": {:.3f}, \"args\": {{{}}}",
                    slice.category, slice.name, slice.category == kWaitCategory ? " \"cname\": \"grey\"," : "",
                    event.rank + 1, threads_.at(agent_of(event)), microseconds(slice.begin_ns),
                    microseconds(slice.end_ns - slice.begin_ns), slice.args));
  }

  std::map<AgentKey, int> threads_;
  std::string text_;
};

}  // namespace

std::string trace_json(const std::string& title, std::span<const TracedCall> calls) {
  TraceWriter writer(calls);
  writer.name_agents();
  int64_t offset_ns = 0;
  for (const TracedCall& call : calls) offset_ns = writer.add_call(call, offset_ns);
  return fmt::format("{{\"displayTimeUnit\": \"ms\", \"otherData\": {{\"title\": {}}}, \"traceEvents\": [\n{}\n]}}\n",
                     Json(title).dump(), writer.take());
}

}  // namespace uniep::api
