#include <gtest/gtest.h>

#include <map>
#include <random>
#include <regex>
#include <set>

#include "cli/trace_file.h"
#include "cli/trace_svg.h"
#include "io/file.h"
#include "support/command.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace uniep::test {
namespace {

using Json = nlohmann::json;
using cli::TracedCall;

// A shape's smallest of everything an XML parser demands: balanced tags, quoted attributes each given once, escaped
// text. Returns what is wrong, or nothing.
std::string xml_problem(const std::string& text) {
  std::vector<std::string> open;
  std::size_t at = 0;
  bool had_root = false;
  const std::regex tag(R"(<(/?)([A-Za-z][A-Za-z0-9]*)((?:\s+[A-Za-z0-9:_-]+="[^"<>]*")*)\s*(/?)>)");
  const std::regex attribute(R"(([A-Za-z0-9:_-]+)="([^"]*)\")");
  const std::regex reference("&(?!(lt|gt|amp|quot);)");
  while (at < text.size()) {
    if (text[at] != '<') {
      const std::size_t end = std::min(text.find('<', at), text.size());
      const std::string between = text.substr(at, end - at);
      if (between.find('>') != std::string::npos) return "bare >: " + between;
      if (std::regex_search(between, reference)) return "bare &: " + between;
      if (open.empty() && between.find_first_not_of(" \n") != std::string::npos) return "text outside: " + between;
      at = end;
      continue;
    }
    std::smatch match;
    const std::string rest = text.substr(at, std::min(text.find('>', at), text.size()) + 1 - at);
    if (!std::regex_match(rest, match, tag)) return "no tag: " + rest;
    std::set<std::string> names;
    const std::string attributes = match[3];
    if (std::regex_search(attributes, reference)) return "bare & in " + rest;
    for (std::sregex_iterator each(attributes.begin(), attributes.end(), attribute), end; each != end; ++each) {
      if (!names.insert((*each)[1]).second) return "attribute twice: " + rest;
    }
    if (match[1] == "/") {
      if (open.empty() || open.back() != match[2]) return "closes what is not open: " + rest;
      open.pop_back();
    } else {
      if (open.empty() && had_root) return "second root: " + rest;
      had_root = true;
      if (match[4] != "/") open.push_back(match[2]);
    }
    at += rest.size();
  }
  if (!open.empty()) return "never closed: " + open.back();
  return had_root ? "" : "empty";
}

std::vector<std::string> texts_of_class(const std::string& svg, const std::string& name) {
  std::vector<std::string> texts;
  const std::regex text("<text class=\"" + name + "\"[^>]*>([^<]*)</text>");
  for (std::sregex_iterator each(svg.begin(), svg.end(), text), end; each != end; ++each) texts.push_back((*each)[1]);
  return texts;
}

TileEvent event(int rank, int worker, bool copy, const char* stage, int expert, int64_t wait, int64_t begin,
                int64_t end) {
  return {rank, worker, copy, stage, expert, 0, 2, wait, begin, end};
}

std::vector<TracedCall> two_calls() {
  return {{"forward",
           {event(0, 0, true, "dispatch", 0, 0, 500, 2500), event(0, 0, false, "fc1", 3, 0, 3000, 9000),
            event(1, 1, true, "reduce", -1, 100, 9000, 10000)}},
          {"backward", {event(1, 1, false, "wgrad_fc1", 7, 1000, 1900, 4000)}}};
}

TEST(TraceFile, HoldsTheEventsAsPerfettoReadsThem) {
  const Json json = Json::parse(cli::trace_json("a \"title\"", two_calls()));
  EXPECT_EQ(json["otherData"]["title"], "a \"title\"");
  std::map<std::string, Json> slices;
  std::map<int, std::string> process_names, thread_names;
  for (const Json& each : json["traceEvents"]) {
    if (each["ph"] == "X") slices[each["cat"].get<std::string>() + " " + each["name"].get<std::string>()] = each;
    if (each["name"] == "process_name") process_names[each["pid"]] = each["args"]["name"];
    if (each["name"] == "thread_name") thread_names[each["tid"]] = each["args"]["name"];
  }
  EXPECT_EQ(process_names, (std::map<int, std::string>{{1, "rank 0"}, {2, "rank 1"}}));
  EXPECT_EQ(thread_names.size(), 4u);  // no two agents share a thread id

  const Json& fc1 = slices.at("fc1 fc1 e3 m0 n2");
  EXPECT_EQ(fc1["ts"], 3.0);
  EXPECT_EQ(fc1["dur"], 6.0);
  EXPECT_EQ(fc1["pid"], 1);
  EXPECT_EQ(thread_names[fc1["tid"]], "worker 0 compute");
  EXPECT_EQ(fc1["args"], Json::parse(R"({"expert": 3, "m": 0, "n": 2})"));
  EXPECT_TRUE(slices.contains("dispatch dispatch e0 m0 n2"));
  EXPECT_TRUE(slices.contains("reduce reduce m0 n2"));
  // Backward comes after forward's end at 10 us; its wait of 0.9 us is too short to be shown.
  EXPECT_DOUBLE_EQ(slices.at("wgrad_fc1 wgrad_fc1 e7 m0 n2")["ts"], 11.9);
}

TEST(TraceFile, AMarkSaysWhatItsCallRan) {
  std::vector<TracedCall> calls = two_calls();
  Schedule schedule;
  schedule.order.raster = 5;
  calls[1].layer = cli::TracedLayer{{64, 32, 8, 2}, schedule};
  const std::string text = cli::trace_json("", calls);
  const cli::Trace trace = cli::parse_trace(text, "memory");
  ASSERT_EQ(trace.marks.size(), 2u);
  EXPECT_EQ(trace.marks[0].shape + trace.marks[0].schedule, "");
  EXPECT_EQ(trace.marks[1].shape, "64,32,8,2");
  EXPECT_EQ(trace.marks[1].schedule, to_text(schedule));
  EXPECT_TRUE(trace.marks[0].more.empty() && trace.marks[1].more.empty());
  calls[1].layer->more = {{"device", "a \"GPU\"\n"}, {"tokens", "3,4"}};
  EXPECT_EQ(cli::parse_trace(cli::trace_json("", calls), "memory").marks[1].more,
            (std::map<std::string, std::string>{{"device", "a \"GPU\"\n"}, {"tokens", "3,4"}}));
}

TEST(TraceFile, LongWaitsAreSlicesOfTheirOwn) {
  const Json json = Json::parse(cli::trace_json("", two_calls()));
  int waits = 0;
  for (const Json& each : json["traceEvents"]) {
    if (each["ph"] != "X" || each["cat"] != "wait") continue;
    ++waits;
    if (each["args"]["for"] == "fc1 e3 m0 n2") {
      EXPECT_EQ(each["ts"], 0.0);
      EXPECT_EQ(each["dur"], 3.0);
    } else {
      EXPECT_EQ(each["args"]["for"], "reduce m0 n2");
      EXPECT_EQ(each["dur"], 8.9);
    }
  }
  EXPECT_EQ(waits, 2);
}

TEST(TraceFile, ReadsBackWhatItWrote) {
  const cli::Trace trace = cli::parse_trace(cli::trace_json("title", two_calls()), "memory");
  EXPECT_EQ(trace.title, "title");
  ASSERT_EQ(trace.lanes.size(), 4u);
  EXPECT_EQ(trace.lanes[0].process, "rank 0");
  EXPECT_EQ(trace.lanes[0].thread, "worker 0 copy");
  EXPECT_EQ(trace.lanes[1].thread, "worker 0 compute");
  EXPECT_EQ(trace.lanes[3].process, "rank 1");
  EXPECT_EQ(trace.lanes[3].thread, "worker 1 compute");
  EXPECT_EQ(trace.slices.size(), 6u);
  ASSERT_EQ(trace.marks.size(), 2u);
  EXPECT_EQ(trace.marks[1].name, "backward");
  EXPECT_DOUBLE_EQ(trace.marks[1].time_us, 10.0);
}

TEST(TraceFile, WithFewerWorkersKeepsTheirLanesAndSlices) {
  std::vector<TileEvent> events;
  for (int rank = 0; rank < 2; ++rank) {
    for (int worker = 0; worker < 12; ++worker) {
      events.push_back(event(rank, worker, true, "dispatch", worker, 0, 0, 1000));
      events.push_back(event(rank, worker, false, "fc1", worker, 0, 0, 2000));
    }
  }
  const cli::Trace whole = cli::parse_trace(cli::trace_json("", std::vector<TracedCall>{{"forward", events}}), "m");
  const cli::Trace some = cli::with_fewer_workers(whole, 3);
  ASSERT_EQ(some.lanes.size(), 2u * 3 * 2);
  EXPECT_EQ(some.lanes[0].thread, "worker 0 copy");
  EXPECT_EQ(some.lanes[3].thread, "worker 4 compute");
  EXPECT_EQ(some.lanes[10].process, "rank 1");
  EXPECT_EQ(some.lanes[10].thread, "worker 8 copy");
  ASSERT_EQ(some.slices.size(), 12u);
  for (const cli::TraceSlice& slice : some.slices) {
    const std::string worker = "worker " + slice.name.substr(slice.name.find(" e") + 2);
    EXPECT_EQ(some.lanes[slice.lane].thread.find(worker.substr(0, worker.find(' ', 7)) + " "), 0u) << slice.name;
  }
  EXPECT_EQ(cli::with_fewer_workers(whole, 100).lanes.size(), whole.lanes.size());
}

TEST(TraceFile, RefusesWhatIsNoTimeline) {
  for (const char* text : {"", "nonsense", "[]", "{}", "{\"traceEvents\": 7}", "[1]", "[{\"ph\": \"X\"}]",
                           R"([{"ph": "X", "cat": "c", "name": "n", "ts": "0", "dur": 1, "pid": 1, "tid": 1}])",
                           R"([{"ph": "X", "cat": "c", "name": "n", "ts": 0, "dur": -1, "pid": 1, "tid": 1}])",
                           R"([{"ph": "X", "cat": "c", "name": "n", "ts": 0, "dur": 1, "pid": 1.5, "tid": 1}])",
                           R"([{"ph": "X", "cat": "c", "name": "n", "ts": 1e999, "dur": 1, "pid": 1, "tid": 1}])"}) {
    expect_error(Status::kInvalidArgument, "'it'", [&] { cli::parse_trace(text, "it"); });
  }
  const std::string mark = R"([{"ph": "i", "name": "n", "ts": 0, "args": {"shape": "1", "schedule": "", "seed": 1}},
                               {"ph": "X", "cat": "c", "name": "n", "ts": 0, "dur": 1, "pid": 1, "tid": 1}])";
  expect_error(Status::kInvalidArgument, "event 0: 'seed' is no string", [&] { cli::parse_trace(mark, "it"); });
}

TEST(TraceSvg, ShowsLanesLegendAndAxis) {
  const std::string svg = cli::trace_svg(cli::parse_trace(cli::trace_json("title <&>", two_calls()), "memory"));
  EXPECT_EQ(xml_problem(svg), "");
  EXPECT_EQ(texts_of_class(svg, "rank"), (std::vector<std::string>{"rank 0", "rank 1"}));
  EXPECT_EQ(texts_of_class(svg, "lane"),
            (std::vector<std::string>{"worker 0 copy", "worker 0 compute", "worker 1 copy", "worker 1 compute"}));
  EXPECT_EQ(texts_of_class(svg, "legend"),
            (std::vector<std::string>{"dispatch", "fc1", "wgrad_fc1", "reduce", "waiting"}));
  EXPECT_EQ(texts_of_class(svg, "axis"), (std::vector<std::string>{"time (ms)"}));
  EXPECT_EQ(texts_of_class(svg, "mark"), (std::vector<std::string>{"forward", "backward"}));
  EXPECT_EQ(texts_of_class(svg, "tick"),
            (std::vector<std::string>{"0.000", "0.002", "0.004", "0.006", "0.008", "0.010", "0.012", "0.014"}));
  EXPECT_NE(svg.find("title &lt;&amp;&gt;"), std::string::npos);
  EXPECT_NE(svg.find("<title>fc1 e3 m0 n2, 0.006 ms</title>"), std::string::npos);
}

TEST(TraceSvg, StagesHaveColoursOfTheirOwn) {
  std::vector<TileEvent> events;
  const std::vector<const char*> stages = {"dispatch",  "receive",   "fc1",       "fc2",     "dgrad_fc2",
                                           "dgrad_fc1", "wgrad_fc2", "wgrad_fc1", "combine", "reduce"};
  for (const char* stage : stages) {
    const int64_t begin = static_cast<int64_t>(events.size()) * 1000;
    events.push_back(event(0, 0, false, stage, 0, begin, begin, begin + 1000));
  }
  const std::string svg =
      cli::trace_svg(cli::parse_trace(cli::trace_json("", std::vector<TracedCall>{{"forward", events}}), "m"));
  EXPECT_EQ(texts_of_class(svg, "legend"), std::vector<std::string>(stages.begin(), stages.end()));
  std::set<std::string> colours;
  const std::regex tile("fill=\"(#[0-9a-f]{6})\"><title>");
  for (std::sregex_iterator each(svg.begin(), svg.end(), tile), end; each != end; ++each) colours.insert((*each)[1]);
  EXPECT_EQ(colours.size(), stages.size());
}

TEST(TraceSvg, StaysSmallAndWellFormedWhateverTheTimeline) {
  std::mt19937_64 random(9);
  const char* const stages[] = {"dispatch", "fc1", "fc2", "reduce", "<odd> & \"new\"\n\xc3\xa9"};
  for (int round = 0; round < 20; ++round) {
    cli::Trace trace;
    trace.title = std::string(random() % 200, 'a') + "\"'<>&";
    const std::size_t lanes = 1 + random() % 300;
    for (std::size_t lane = 0; lane < lanes; ++lane)
      trace.lanes.push_back({"rank " + std::to_string(lane / 4), "w<&>"});
    const double length = std::pow(10.0, static_cast<double>(random() % 12) - 3);
    for (int i = 0; i < 20000; ++i) {
      const double begin = static_cast<double>(random() % 1000000) * length;
      trace.slices.push_back({random() % lanes, stages[random() % 5], stages[random() % 5], begin,
                              static_cast<double>(random() % 100) * length});
    }
    trace.marks.push_back({"mark & <", length});
    const std::string svg = cli::trace_svg(trace);
    if (round < 3) {
      EXPECT_EQ(xml_problem(svg), "");
    }
    EXPECT_LT(svg.size(), 4u << 20);
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_EQ(svg.find("inf"), std::string::npos);
  }
  // One slice of no length at all.
  cli::Trace point;
  point.lanes.push_back({"rank 0", "worker 0 copy"});
  point.slices.push_back({0, "fc1", "fc1", 5, 0});
  const std::string svg = cli::trace_svg(point);
  EXPECT_EQ(xml_problem(svg), "");
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(TraceXml, TheTestsParserSeesFaults) {
  EXPECT_EQ(xml_problem("<a b=\"1\"><c/>text &amp; more</a>\n"), "");
  for (const char* bad :
       {"", "<a>", "<a></b>", "<a/><b/>", "<a>&</a>", "<a b=\"1\" b=\"2\"/>", "<a b=1/>", "<a>></a>", "<a/>x"}) {
    EXPECT_NE(xml_problem(bad), "") << bad;
  }
}

// The whole way: a run's timeline holds every tile once, no agent does two things at once, and backward follows
// forward.
TEST(TraceCommand, DrawsARun) {
  const TemporaryFolder folder;
  const std::string json = (folder / "trace.json").string(), svg = (folder / "trace.svg").string();
  const CommandResult run = run_command({"run", "--engine", "cpu", "--ranks", "4", "--workers", "2", "--tokens", "64",
                                         "--backward", "--repeat", "2", "--trace", json});
  ASSERT_EQ(run.status, 0) << run.err;
  const cli::Trace trace = cli::parse_trace(io::read_text_file(json), json);
  EXPECT_EQ(trace.lanes.size(), 4u * 2 * 2);
  ASSERT_EQ(trace.marks.size(), 2u);

  std::map<std::size_t, std::vector<const cli::TraceSlice*>> by_lane;
  std::set<std::tuple<std::size_t, std::string>> tiles;
  for (const cli::TraceSlice& slice : trace.slices) {
    by_lane[slice.lane].push_back(&slice);
    if (slice.category == cli::kWaitCategory) continue;
    EXPECT_TRUE(
        tiles.emplace(slice.lane / 4, slice.name + (slice.begin_us < trace.marks[1].time_us ? "f" : "b")).second)
        << slice.name << " twice";
    const bool backward = slice.category.find("grad") != std::string::npos;
    const bool forward = slice.category == "fc1" || slice.category == "fc2";
    if (forward) {
      EXPECT_LE(slice.begin_us + slice.duration_us, trace.marks[1].time_us + 0.002) << slice.name;
    }
    if (backward) {
      EXPECT_GE(slice.begin_us, trace.marks[1].time_us) << slice.name;
    }
  }
  for (auto& [lane, slices] : by_lane) {
    std::sort(slices.begin(), slices.end(), [](const auto* a, const auto* b) { return a->begin_us < b->begin_us; });
    for (std::size_t i = 1; i < slices.size(); ++i) {
      EXPECT_LE(slices[i - 1]->begin_us + slices[i - 1]->duration_us, slices[i]->begin_us + 0.002);
    }
  }
  const CommandResult drawn = run_command({"trace", json, "--svg", svg});
  EXPECT_EQ(drawn.status, 0) << drawn.err;
  EXPECT_EQ(drawn.out, "");
  const std::string picture = io::read_text_file(svg);
  EXPECT_EQ(xml_problem(picture), "");
  EXPECT_EQ(texts_of_class(picture, "rank").size(), 4u);
  EXPECT_EQ(texts_of_class(picture, "lane").size(), 16u);
  EXPECT_NE(picture.find("4 ranks x 2 workers"), std::string::npos);
  for (const char* stage : {"dispatch", "fc1", "fc2", "dgrad_fc2", "wgrad_fc1", "reduce"}) {
    const std::vector<std::string> legend = texts_of_class(picture, "legend");
    EXPECT_NE(std::find(legend.begin(), legend.end(), stage), legend.end()) << stage;
  }
}

}  // namespace
}  // namespace uniep::test
