#include <cmath>

#include "cli/timeline_numbers.h"
#include "cli/trace_file.h"
#include "cli/trace_svg.h"
#include "cli/traced_run.h"
#include "fuzz_target.h"

using uniep::cli::Trace;
using uniep::fuzz::accepts;
using uniep::fuzz::require;

namespace {

// Text from the file must be escaped: no bare '<' inside a tag or between tags, and no control characters.
void require_well_formed(const std::string& svg) {
  require(svg.starts_with("<svg"), "a picture begins with its root");
  require(svg.find("</svg>") != std::string::npos, "a picture ends with its root");
  bool in_tag = false;
  for (const char c : svg) {
    require(static_cast<unsigned char>(c) >= ' ' || c == '\n', "control characters are not written");
    if (c == '<') require(!in_tag, "tags do not begin inside tags");
    if (c == '<') in_tag = true;
    if (c == '>') in_tag = false;
  }
  require(!in_tag, "the last tag is closed");
}

}  // namespace

// A call that says what it ran is of a bounded layer, and its numbers are finite.
void require_numbers(const Trace& trace) {
  for (std::size_t mark = 0; mark < trace.marks.size() && mark < 4; ++mark) {
    uniep::cli::TracedRun run;
    if (accepts([&] { run = uniep::cli::traced_run(trace.marks[mark]); })) {
      int64_t tokens = 0;
      for (const int64_t own : run.layer.tokens_given) tokens += own;
      require(run.layer.ranks <= 64 && tokens * run.layer.shape.topk <= int64_t{1} << 22, "a call is bounded");
    }
    uniep::cli::Timeline timeline;
    if (!accepts([&] { timeline = uniep::cli::timeline_of(trace, mark); })) continue;
    for (std::size_t i = 1; i < trace.marks.size(); ++i) {
      require(trace.marks[i].time_us > trace.marks[i - 1].time_us, "no calls share their tiles");
    }
    for (const uniep::cli::TimelineNumber& number : timeline_numbers(timeline, {.launches = 2}).numbers) {
      require(number.us >= 1 && std::isfinite(number.us), "a number is finite, a microsecond or more");
      require(number.error > 0 && std::isfinite(number.error), "and so is its error");
    }
  }
}

// What is accepted can be drawn: every slice lies in a lane, at a finite time.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  Trace trace;
  if (!accepts([&] { trace = uniep::cli::parse_trace(text, "fuzzed.json"); })) return 0;
  require(!trace.slices.empty(), "a timeline has slices");
  for (const uniep::cli::TraceSlice& slice : trace.slices) {
    require(slice.lane < trace.lanes.size(), "a slice lies in a lane");
    require(std::isfinite(slice.begin_us) && slice.duration_us >= 0, "a slice has a finite beginning and a length");
  }
  require_numbers(trace);
  require_well_formed(trace_svg(trace));
  return 0;
}
