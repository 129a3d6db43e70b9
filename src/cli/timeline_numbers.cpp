#include "cli/timeline_numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "io/quote.h"

namespace uniep::cli {
namespace {

constexpr double kEndless = std::numeric_limits<double>::infinity();
constexpr double kShortestWait = 1;  // us; shorter ones are in no file

// A share of a time, and microseconds that clocks and records are off by.
struct Off {
  double share, us;
};
constexpr Off kEnd = {0.03, 2}, kTile = {0.03, 0.2}, kCopy = {0.1, 0.5}, kStageEnd = {0.05, 2}, kBegin = {0.1, 2},
              kBehind = {0.25, 4};
constexpr Off kSum = {0.15, 0.3}, kWaits = {0.2, 2};
constexpr double kWaitsOfAll = 0.02;  // of the whole call

double mean(double sum, double count) {
  return count > 0 ? sum / count : 0;
}

// "worker 12 copy" and "worker 12 compute".
bool read_lane(const std::string& name, TimelineTask& task) {
  constexpr std::string_view kLane = "worker ", kCopyLane = " copy", kComputeLane = " compute";
  if (!name.starts_with(kLane)) return false;
  task.copies = name.ends_with(kCopyLane);
  const std::string_view kind = task.copies ? kCopyLane : kComputeLane;
  if (!name.ends_with(kind) || name.size() <= kLane.size() + kind.size()) return false;
  const char* const last = name.data() + name.size() - kind.size();
  const auto [end, error] = std::from_chars(name.data() + kLane.size(), last, task.worker);
  return error == std::errc() && end == last && task.worker >= 0;
}

class Counter {
 public:
  Counter(Timeline timeline, const TimelineStyle& style)
      : timeline_(std::move(timeline)), style_(style), stages_(timeline_.stages.size()), ranks_(timeline_.ranks) {
    for (const std::string& name : timeline_.stages) copies_.push_back(is_copy_stage(name));
  }

  TimelineNumbers count() {
    begin_with_first_tasks();
    for (const TimelineTask& task : timeline_.tasks) order_.push_back(&task);
    std::sort(order_.begin(), order_.end(), [](const TimelineTask* a, const TimelineTask* b) {
      return std::tuple(a->rank, a->worker, a->copies, a->begin, a->end) <
             std::tuple(b->rank, b->worker, b->copies, b->begin, b->end);
    });
    for (std::size_t i = 0; i < order_.size();) {
      std::size_t end = i + 1;
      while (end < order_.size() && of_one_agent(*order_[i], *order_[end])) ++end;
      count_agent(i, end);
      i = end;
    }
    count_sums();
    fill();
    return std::move(made_);
  }

 private:
  struct Stage {
    int64_t tiles = 0;
    double us = 0;  // of all tasks, each until its agent is ready for the next one
    std::vector<double> rank_end;
  };
  struct Rank {
    double first_gemm = kEndless, last_gemm = -kEndless, end = -kEndless;
    std::map<int, double> last_gemm_of_worker;
  };

  // Each rank's times from its own first task on: what ranks wait for each other before that is no part of it, and
  // clocks of GPUs are together only at the end of a call.
  void begin_with_first_tasks() {
    std::vector<double> begin(ranks_.size(), kEndless);
    const auto of = [&](const TimelineTask& task) -> double& { return begin[static_cast<std::size_t>(task.rank)]; };
    for (const TimelineTask& task : timeline_.tasks) of(task) = std::min(of(task), task.begin);
    for (TimelineTask& task : timeline_.tasks) {
      task.wait_begin -= of(task);
      task.begin -= of(task);
      task.end -= of(task);
    }
  }

  static bool of_one_agent(const TimelineTask& a, const TimelineTask& b) {
    return a.rank == b.rank && a.worker == b.worker && a.copies == b.copies;
  }

  void count_agent(std::size_t begin, std::size_t end) {
    bool computes = false;
    double waits = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const TimelineTask& task = *order_[i];
      Stage& stage = stages_[task.stage];
      Rank& rank = ranks_[static_cast<std::size_t>(task.rank)];
      double until = task.end;
      if (i + 1 < end && order_[i + 1]->stage == task.stage) until = std::max(until, order_[i + 1]->wait_begin);
      stage.us += until - task.begin;
      ++stage.tiles;
      stage.rank_end.resize(ranks_.size(), -kEndless);
      double& last = stage.rank_end[static_cast<std::size_t>(task.rank)];
      last = std::max(last, task.end);
      rank.end = std::max(rank.end, task.end);
      waits += task.begin - std::max(task.wait_begin, 0.0);
      if (copies_[task.stage]) continue;
      computes = true;
      rank.first_gemm = std::min(rank.first_gemm, task.begin);
      rank.last_gemm = std::max(rank.last_gemm, task.end);
      double& of_worker = rank.last_gemm_of_worker.emplace(task.worker, -kEndless).first->second;
      of_worker = std::max(of_worker, task.end);
    }
    if (!computes) return;
    waits_ += waits;
    ++computing_;
  }

  // Those that a copy agent does beside its worker's tiles: what math warps sum, only one of them records.
  void count_sums() {
    for (const TimelineTask* task : order_) {
      if (!task->copies || timeline_.stages[task->stage] != "reduce") continue;
      const Rank& rank = ranks_[static_cast<std::size_t>(task->rank)];
      const auto last = rank.last_gemm_of_worker.find(task->worker);
      if (last == rank.last_gemm_of_worker.end() || task->end > last->second) continue;
      sums_ += task->end - task->begin;
      ++summed_;
    }
  }

  // Of a rank, in the mean: between its first task and its last one, without any.
  double idle() {
    std::sort(order_.begin(), order_.end(), [](const TimelineTask* a, const TimelineTask* b) {
      return std::tuple(a->rank, a->begin) < std::tuple(b->rank, b->begin);
    });
    double sum = 0, until = 0;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const TimelineTask& task = *order_[i];
      if (i > 0 && order_[i - 1]->rank == task.rank) sum += std::max(0.0, task.begin - until);
      until = i > 0 && order_[i - 1]->rank == task.rank ? std::max(until, task.end) : task.end;
    }
    return mean(sum, timeline_.ranks);
  }

  void add(const std::string& name, double us, const Off& off) {
    if (!(us >= kLeastUs) && !made_.numbers.empty()) return;
    us = std::max(us, kLeastUs);
    made_.numbers.push_back({name, us, std::hypot(off.share, off.us / us)});
  }

  // Of the ranks that have such a task.
  double mean_of_ranks(const std::vector<double>& ends) const {
    double sum = 0, count = 0;
    for (const double end : ends) {
      if (!std::isfinite(end)) continue;
      sum += end;
      ++count;
    }
    return mean(sum, count);
  }

  void fill() {
    double last = -kEndless;
    std::vector<double> first_gemm, behind;
    for (const Rank& rank : ranks_) {
      last = std::max(last, rank.end);
      first_gemm.push_back(rank.first_gemm);
      behind.push_back(rank.end - rank.last_gemm);
    }
    made_.ranks = timeline_.ranks;
    add("end", last, kEnd);
    add("first GEMM tile", mean_of_ranks(first_gemm), kBegin);
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      const Stage& stage = stages_[i];
      const std::string& name = timeline_.stages[i];
      made_.tiles[name] = stage.tiles;
      if (name == "reduce") continue;
      const bool told = !copies_[i] || !style_.copies_on_sms;
      if (told) {
        add(name + (copies_[i] ? ": a task" : ": a tile"), mean(stage.us, static_cast<double>(stage.tiles)),
            copies_[i] ? kCopy : kTile);
      }
      add(name + ": end", mean_of_ranks(stage.rank_end), kStageEnd);
    }
    add("a sum beside tiles", mean(sums_, static_cast<double>(summed_)), kSum);
    add("behind the last GEMM tile", mean_of_ranks(behind), kBehind);
    if (style_.launches > 1) add("between launches", idle(), kBegin);
    const double all = made_.numbers.front().us;
    add("waits of a worker", mean(waits_, static_cast<double>(computing_)),
        {kWaits.share, kWaits.us + kWaitsOfAll * all});
  }

  static constexpr double kLeastUs = 1;  // a number below it says nothing

  Timeline timeline_;
  const TimelineStyle style_;
  std::vector<const TimelineTask*> order_;
  std::vector<Stage> stages_;
  std::vector<Rank> ranks_;
  std::vector<char> copies_;  // by stage
  double waits_ = 0, sums_ = 0;
  int64_t computing_ = 0, summed_ = 0;
  TimelineNumbers made_;
};

}  // namespace

bool is_copy_stage(const std::string& stage) {
  return stage == "dispatch" || stage == "receive" || stage == "combine" || stage == "reduce";
}

std::size_t Timeline::stage(const std::string& name) {
  const auto place = static_cast<std::size_t>(std::find(stages.begin(), stages.end(), name) - stages.begin());
  if (place == stages.size()) stages.push_back(name);
  return place;
}

Timeline timeline_of(const Trace& trace, std::size_t mark) {
  for (std::size_t i = 1; i < trace.marks.size(); ++i) {
    const double time = trace.marks[i].time_us, before = trace.marks[i - 1].time_us;
    if (time <= before) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("its mark {} is at {} us, and the one before at {}; must be later", i, time, before));
    }
  }
  const double from = trace.marks.at(mark).time_us;
  double until = kEndless;
  if (mark + 1 < trace.marks.size()) until = trace.marks[mark + 1].time_us;
  Timeline timeline;
  std::vector<TimelineTask> of_lane;
  std::map<std::string, int> ranks;
  for (const TraceLane& lane : trace.lanes) {
    TimelineTask task;
    if (!read_lane(lane.thread, task)) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("its lane {} is no worker's; must be 'worker N copy' or 'worker N compute'",
                              io::quote_text(lane.thread)));
    }
    task.rank = ranks.emplace(lane.process, static_cast<int>(ranks.size())).first->second;
    of_lane.push_back(task);
  }
  std::vector<const TraceSlice*> slices;
  for (const TraceSlice& slice : trace.slices) {
    if (slice.begin_us >= from && slice.begin_us < until) slices.push_back(&slice);
  }
  std::stable_sort(slices.begin(), slices.end(),
                   [](const TraceSlice* a, const TraceSlice* b) { return a->begin_us < b->begin_us; });
  std::vector<double> wait_begin(trace.lanes.size(), kEndless);  // of what comes next in a lane
  std::vector<char> seen(ranks.size());
  for (const TraceSlice* slice : slices) {
    if (slice->category == kWaitCategory) {
      wait_begin[slice->lane] = std::min(wait_begin[slice->lane], slice->begin_us);
      continue;
    }
    TimelineTask task = of_lane[slice->lane];
    task.stage = timeline.stage(slice->category);
    if (timeline.stages.size() > kStageCount) {
      throw Error(Status::kInvalidArgument, fmt::format("its stage {} is not known", io::quote_text(slice->category)));
    }
    task.begin = slice->begin_us;
    task.end = slice->begin_us + slice->duration_us;
    task.wait_begin = std::min(wait_begin[slice->lane], task.begin);
    wait_begin[slice->lane] = kEndless;
    seen[static_cast<std::size_t>(task.rank)] = 1;
    timeline.tasks.push_back(task);
  }
  if (timeline.tasks.empty()) throw Error(Status::kInvalidArgument, "holds no tile");
  if (std::count(seen.begin(), seen.end(), 1) < std::ssize(seen)) {
    throw Error(Status::kInvalidArgument, "has ranks without a tile");
  }
  timeline.ranks = static_cast<int>(ranks.size());
  return timeline;
}

Timeline timeline_of(const program::Program& program, const std::vector<sim::TimedTask>& tasks) {
  Timeline timeline;
  const Direction direction = program.request().direction;
  std::vector<std::size_t> places(kStageCount, kStageCount);
  timeline.tasks.reserve(tasks.size());
  for (const sim::TimedTask& timed : tasks) {
    std::size_t& place = places[static_cast<std::size_t>(timed.task.stage)];
    if (place == kStageCount) place = timeline.stage(program::stage_name(timed.task.stage, direction));
    const double wait_begin = timed.begin - timed.wait_begin > kShortestWait ? timed.wait_begin : timed.begin;
    timeline.tasks.push_back({timed.rank, timed.worker, timed.copy_agent, place, wait_begin, timed.begin, timed.end});
    timeline.ranks = std::max(timeline.ranks, timed.rank + 1);
  }
  return timeline;
}

double TimelineNumbers::of(const std::string& name) const {
  for (const TimelineNumber& number : numbers) {
    if (number.name == name) return number.us;
  }
  return 0;
}

TimelineNumbers timeline_numbers(Timeline timeline, const TimelineStyle& style) {
  return Counter(std::move(timeline), style).count();
}

}  // namespace uniep::cli
