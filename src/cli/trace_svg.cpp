#include "cli/trace_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>

#include "io/markup.h"

namespace uniep::cli {
namespace {

// All lengths are pixels.
constexpr double kWidth = 1600;
constexpr double kPlotLeft = 200, kPlotRight = kWidth - 30;
constexpr double kPlotTop = 104;
constexpr double kGroupGap = 10;
constexpr double kTallestLane = 22, kLowestLane = 5, kLowestLabelled = 13;
constexpr double kLanesHeight = 900;  // that the lanes share, as far as the limits above let them
constexpr double kColumn = 0.5;       // slices narrower than four of these are drawn as such columns
constexpr double kNarrow = 4 * kColumn;
constexpr double kLegendStep = 118;
constexpr double kAxisHeight = 60;

struct StageColour {
  const char* stage;
  const char* colour;
};
// Paul Tol's "muted" scheme with an orange: ten hues that stay apart under the common kinds of colour blindness.
constexpr std::array<StageColour, 10> kStageColours = {{{"dispatch", "#88ccee"},
                                                        {"receive", "#332288"},
                                                        {"fc1", "#e69f00"},
                                                        {"fc2", "#cc6677"},
                                                        {"dgrad_fc2", "#999933"},
                                                        {"dgrad_fc1", "#882255"},
                                                        {"wgrad_fc2", "#ddcc77"},
                                                        {"wgrad_fc1", "#aa4499"},
                                                        {"combine", "#44aa99"},
                                                        {"reduce", "#117733"}}};
constexpr const char* kOtherColour = "#555555";
constexpr const char* kWaitFill = "url(#wait)";

// Index into the legend: a stage's, then "other", then the wait's.
constexpr std::size_t kOther = kStageColours.size();
constexpr std::size_t kWait = kOther + 1;
constexpr std::size_t kCategories = kWait + 1;

std::size_t category_of(const std::string& stage) {
  if (stage == kWaitCategory) return kWait;
  const auto at = std::find_if(kStageColours.begin(), kStageColours.end(),
                               [&](const StageColour& each) { return stage == each.stage; });
  return static_cast<std::size_t>(at - kStageColours.begin());
}
std::string fill_of(std::size_t category) {
  if (category == kWait) return kWaitFill;
  return category == kOther ? kOtherColour : kStageColours[category].colour;
}
std::string legend_of(std::size_t category) {
  if (category == kWait) return "waiting";
  return category == kOther ? "other" : kStageColours[category].stage;
}

class Picture {
 public:
  explicit Picture(const Trace& trace) : trace_(trace) {
    begin_us_ = end_us_ = trace.slices.front().begin_us;
    for (const TraceSlice& slice : trace.slices) {
      begin_us_ = std::min(begin_us_, slice.begin_us);
      end_us_ = std::max(end_us_, slice.begin_us + slice.duration_us);
    }
    for (const TraceMark& mark : trace.marks) {
      begin_us_ = std::min(begin_us_, mark.time_us);
      end_us_ = std::max(end_us_, mark.time_us);
    }
    end_us_ = std::max(end_us_, begin_us_ + 1);  // an axis needs some length
    place_lanes();
  }

  std::string draw() {
    header();
    legend();
    axis();
    lane_labels();
    slices();
    marks();
    return text_ + "</svg>\n";
  }

 private:
  template <typename... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Args>(args)...);
  }

  double x_of(double time_us) const {
    return kPlotLeft + (time_us - begin_us_) / (end_us_ - begin_us_) * (kPlotRight - kPlotLeft);
  }

  bool begins_group(std::size_t lane) const {
    return lane == 0 || trace_.lanes[lane].process != trace_.lanes[lane - 1].process;
  }

  void place_lanes() {
    lane_height_ = std::clamp(kLanesHeight / static_cast<double>(trace_.lanes.size()), kLowestLane, kTallestLane);
    double y = kPlotTop;
    for (std::size_t lane = 0; lane < trace_.lanes.size(); ++lane) {
      if (lane > 0 && begins_group(lane)) y += kGroupGap;
      lane_top_.push_back(y);
      y += lane_height_;
    }
    plot_bottom_ = y;
  }

  void header() {
    const double height = plot_bottom_ + kAxisHeight;
    add("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:g}\" height=\"{1:g}\" viewBox=\"0 0 {0:g} {1:g}\" "
        "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"14\" fill=\"#222222\">\n",
        kWidth, height);
    add("<defs><pattern id=\"wait\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" "
        "patternTransform=\"rotate(45)\"><rect width=\"5\" height=\"5\" fill=\"#f2f2f2\"/>"
        "<line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"5\" stroke=\"#cccccc\" stroke-width=\"2\"/></pattern></defs>\n");
    add("<rect width=\"{:g}\" height=\"{:g}\" fill=\"#ffffff\"/>\n", kWidth, height);
    const std::string title = trace_.title.empty() ? "timeline" : trace_.title;
    // Long titles are set smaller, so that they stay inside.
    const double size = std::clamp(1.9 * (kWidth - 40) / static_cast<double>(title.size()), 10.0, 20.0);
    add("<text x=\"20\" y=\"34\" font-size=\"{:.1f}\" font-weight=\"bold\">{}</text>\n", size,
        io::escape_markup(title));
  }

  void legend() {
    std::array<bool, kCategories> present = {};
    for (const TraceSlice& slice : trace_.slices) present[category_of(slice.category)] = true;
    double x = 20;
    for (std::size_t category = 0; category < kCategories; ++category) {
      if (!present[category]) continue;
      add("<rect x=\"{:g}\" y=\"52\" width=\"18\" height=\"14\" fill=\"{}\" stroke=\"#999999\" stroke-width=\"0.5\"/>"
          "<text class=\"legend\" x=\"{:g}\" y=\"64\">{}</text>\n",
          x, fill_of(category), x + 24, legend_of(category));
      x += kLegendStep;
    }
  }

  // Ticks at multiples of 1, 2 or 5 times a power of ten, about ten of them.
  void axis() {
    const double span_ms = (end_us_ - begin_us_) / 1000;
    const double power = std::pow(10, std::floor(std::log10(span_ms / 10)));
    const double ratio = span_ms / 10 / power;
    const double step = power * (ratio <= 1 ? 1 : ratio <= 2 ? 2 : ratio <= 5 ? 5 : 10);
    const int digits = std::max(0, static_cast<int>(-std::floor(std::log10(step) + 1e-9)));
    for (int tick = 0; tick * step <= span_ms * (1 + 1e-9); ++tick) {
      const double x = x_of(begin_us_ + tick * step * 1000);
      add("<line x1=\"{0:.2f}\" y1=\"{1:g}\" x2=\"{0:.2f}\" y2=\"{2:g}\" stroke=\"#dddddd\"/>"
          "<text class=\"tick\" x=\"{0:.2f}\" y=\"{3:g}\" text-anchor=\"middle\">{4:.{5}f}</text>\n",
          x, kPlotTop - 4, plot_bottom_ + 6, plot_bottom_ + 24, tick * step, digits);
    }
    add("<line x1=\"{0:g}\" y1=\"{2:g}\" x2=\"{1:g}\" y2=\"{2:g}\" stroke=\"#666666\"/>\n", kPlotLeft, kPlotRight,
        plot_bottom_ + 4);
    add("<text class=\"axis\" x=\"{:g}\" y=\"{:g}\" text-anchor=\"middle\">time (ms)</text>\n",
        (kPlotLeft + kPlotRight) / 2, plot_bottom_ + 46);
  }

  void lane_labels() {
    for (std::size_t lane = 0; lane < trace_.lanes.size(); ++lane) {
      const double top = lane_top_[lane];
      if (begins_group(lane)) {
        add("<text class=\"rank\" x=\"20\" y=\"{:g}\" font-weight=\"bold\">{}</text>\n",
            top + std::max(lane_height_ * 0.7, 10.0), io::escape_markup(trace_.lanes[lane].process));
      }
      if (lane_height_ >= kLowestLabelled) {
        add("<text class=\"lane\" x=\"{:g}\" y=\"{:g}\" font-size=\"12\" text-anchor=\"end\">{}</text>\n",
            kPlotLeft - 10, top + lane_height_ * 0.7, io::escape_markup(trace_.lanes[lane].thread));
      }
      add("<rect class=\"lane\" x=\"{:g}\" y=\"{:g}\" width=\"{:g}\" height=\"{:g}\" fill=\"#888888\" "
          "fill-opacity=\"0.05\"/>\n",
          kPlotLeft, top, kPlotRight - kPlotLeft, lane_height_ - 1);
    }
  }

  void rectangle(std::size_t lane, double left, double right, std::size_t category, const std::string& tooltip) {
    add("<rect x=\"{:.2f}\" y=\"{:g}\" width=\"{:.2f}\" height=\"{:g}\" fill=\"{}\"", left, lane_top_[lane],
        right - left, lane_height_ - 1, fill_of(category));
    if (tooltip.empty()) {
      add("/>\n");
    } else {
      add("><title>{}</title></rect>\n", io::escape_markup(tooltip));
    }
  }

  void slices() {
    std::vector<std::vector<const TraceSlice*>> narrow(trace_.lanes.size());
    for (const TraceSlice& slice : trace_.slices) {
      const double left = x_of(slice.begin_us), right = x_of(slice.begin_us + slice.duration_us);
      if (right - left < kNarrow) {
        narrow[slice.lane].push_back(&slice);
      } else {
        // A hairline between neighbours shows where a tile ends.
        rectangle(slice.lane, left, right - 0.4, category_of(slice.category),
                  fmt::format("{}, {:.3f} ms", slice.name, slice.duration_us / 1000));
      }
    }
    for (std::size_t lane = 0; lane < narrow.size(); ++lane) columns(lane, narrow[lane]);
  }

  // Slices too narrow to be seen one by one: each column has the colour that fills the most of it. So the picture stays
  // small whatever the number of tiles.
  void columns(std::size_t lane, const std::vector<const TraceSlice*>& slices) {
    std::map<int64_t, std::array<double, kCategories>> filled;
    for (const TraceSlice* slice : slices) {
      const double left = x_of(slice->begin_us);
      const double right = std::max(x_of(slice->begin_us + slice->duration_us), left + 0.01);
      for (double x = left; x < right;) {
        const int64_t column = static_cast<int64_t>(std::floor(x / kColumn));
        const double end = std::min(right, static_cast<double>(column + 1) * kColumn);
        filled[column][category_of(slice->category)] += end - x;
        if (!(end > x)) break;
        x = end;
      }
    }
    for (auto at = filled.begin(); at != filled.end();) {
      const std::size_t category = strongest(at->second);
      const int64_t first = at->first;
      int64_t end = first;
      while (at != filled.end() && at->first == end && strongest(at->second) == category) ++at, ++end;
      rectangle(lane, static_cast<double>(first) * kColumn, static_cast<double>(end) * kColumn, category, "");
    }
  }

  static std::size_t strongest(const std::array<double, kCategories>& shares) {
    return static_cast<std::size_t>(std::max_element(shares.begin(), shares.end()) - shares.begin());
  }

  void marks() {
    for (const TraceMark& mark : trace_.marks) {
      const double x = x_of(mark.time_us);
      add("<line x1=\"{0:.2f}\" y1=\"{1:g}\" x2=\"{0:.2f}\" y2=\"{2:g}\" stroke=\"#222222\" stroke-width=\"1.2\"/>"
          "<text class=\"mark\" x=\"{3:.2f}\" y=\"{4:g}\" font-size=\"13\" font-style=\"italic\">{5}</text>\n",
          x, kPlotTop - 16, plot_bottom_ + 4, x + 5, kPlotTop - 8, io::escape_markup(mark.name));
    }
  }

  const Trace& trace_;
  double begin_us_ = 0, end_us_ = 0;
  double lane_height_ = 0;
  std::vector<double> lane_top_;
  double plot_bottom_ = 0;
  std::string text_;
};

}  // namespace

std::string trace_svg(const Trace& trace) {
  return Picture(trace).draw();
}

}  // namespace uniep::cli
