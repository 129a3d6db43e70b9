#include "tune/online_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tune/median.h"

namespace uniep::tune {
namespace {

constexpr std::size_t kWindow = 32;  // calls of the incumbent that say how it does

// How unevenly routing loads the ranks, in classes for which other Schedules may be best.
int skew_class(double skew) {
  constexpr double kBounds[] = {1.25, 2, 4};
  return static_cast<int>(std::upper_bound(std::begin(kBounds), std::end(kBounds), skew) - std::begin(kBounds));
}

// A class changes only where the skew has left it by more than noise.
bool leaves_class(double skew, double reference) {
  constexpr double kMargin = 1.05;
  const int own = skew_class(reference);
  return skew_class(skew * kMargin) < own || skew_class(skew / kMargin) > own;
}

}  // namespace

std::vector<double> Candidate::pooled() const {
  std::vector<double> all = ratios;
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

OnlineSearch::OnlineSearch(const Schedule& incumbent, const OnlineLimits& limits)
    : limits_(limits), incumbent_(incumbent), incumbent_text_(to_text(incumbent_)) {}

void OnlineSearch::begin_with(const Schedule& incumbent) {
  if (incumbent == incumbent_) return;
  earlier_.push_back(incumbent_);
  incumbent_ = incumbent;
  incumbent_text_ = to_text(incumbent_);
}

PlannedCall OnlineSearch::next_call() {
  PlannedCall call;
  call.incumbents = incumbents_;
  call.epoch = epoch_;
  if (plan_.empty()) return call;
  Segment& segment = plan_.front();
  Candidate& candidate = candidates_[segment.candidate];
  call.candidate = static_cast<int>(segment.candidate);
  call.pair = candidate.begun;
  // One order, then the other, so that times that drift favour neither.
  call.of_candidate = (candidate.begun % 2 == 0) == (segment.position == 1);
  if (++segment.position < 2) return call;
  segment.position = 0;
  ++candidate.begun;
  if (--segment.pairs == 0) plan_.pop_front();
  return call;
}

void OnlineSearch::apply(const PlannedCall& call, const AgreedTime& time) {
  const bool of_incumbent = !call.of_candidate && call.incumbents == incumbents_;
  if (of_incumbent && time.is_known()) note_incumbent(time);
  if (of_incumbent && time.failed_on >= 0 && can_fall_back()) fall_back(time.failed_on);
  if (call.epoch != epoch_) return;
  if (call.candidate < 0) return;
  const auto i = static_cast<std::size_t>(call.candidate);
  if (call.of_candidate && !time.is_known() && !time.is_void) {
    drop(i, Verdict::kFailed,
         time.failed_on >= 0 ? fmt::format("its call failed on rank {}", time.failed_on)
                             : fmt::format("no time of its call came from rank {}: it hangs", time.missing_on));
  }
  if (half_ && half_->call.candidate == call.candidate && half_->call.pair == call.pair) {
    const Half first = *half_;
    half_.reset();
    end_pair(first, call, time);
  } else {
    half_ = Half{call, time};
  }
}

void OnlineSearch::note_incumbent(const AgreedTime& time) {
  samples_.push_back({time.milliseconds, time.milliseconds / time.forecast, time.skew});
  ++samples_since_;
  if (samples_.size() > kWindow) samples_.pop_front();
}

void OnlineSearch::end_pair(const Half& first, const PlannedCall& call, const AgreedTime& time) {
  Candidate& candidate = candidates_[static_cast<std::size_t>(call.candidate)];
  if (!first.time.is_known() || !time.is_known()) {
    ++candidate.lost_pairs;
    return;
  }
  const AgreedTime& own = call.of_candidate ? time : first.time;
  const AgreedTime& base = call.of_candidate ? first.time : time;
  const double ratio = (own.milliseconds / own.forecast) / (base.milliseconds / base.forecast);
  candidate.excess += (ratio - 1) * base.milliseconds;
  if (candidate.verdict != Verdict::kInTheRunning) return;
  candidate.ratios.push_back(ratio);
  if (candidate.ratios.size() == 1) {
    events_.push_back({OnlineEvent::Kind::kStaysIn, static_cast<std::size_t>(call.candidate)});
  }
}

void OnlineSearch::drop(std::size_t i, Verdict verdict, const std::string& reason) {
  Candidate& candidate = candidates_[i];
  if (candidate.verdict != Verdict::kInTheRunning) return;
  candidate.verdict = verdict;
  candidate.reason = reason;
  std::erase_if(plan_, [&](const Segment& segment) { return segment.candidate == i; });
  events_.push_back({OnlineEvent::Kind::kOut, i, reason});
}

bool OnlineSearch::is_faster(const Candidate& candidate) const {
  const std::vector<double>& own = candidate.ratios;
  if (candidate.verdict != Verdict::kInTheRunning || own.size() < limits_.slower_pairs) return false;
  const std::vector<double> all = candidate.pooled();
  const double most = 1 - limits_.least_gain;
  return all.size() >= limits_.faster_pairs && median(own) < most && median_interval(all, limits_.sure).high < most;
}

void OnlineSearch::judge(std::size_t i) {
  const Candidate& candidate = candidates_[i];
  if (candidate.verdict != Verdict::kInTheRunning) return;
  if (candidate.lost_pairs > limits_.most_pairs) return drop(i, Verdict::kSlower, "its calls are not measured");
  if (candidate.ratios.empty()) return;
  const std::vector<double>& own = candidate.ratios;
  if (own.size() >= limits_.gross_pairs && *std::min_element(own.begin(), own.end()) >= limits_.gross) {
    return drop(i, Verdict::kSlower, "much slower");
  }
  // Other groups' pairs make it surer, and own ones have to say the same.
  if (own.size() < limits_.slower_pairs) return;
  const std::vector<double> all = candidate.pooled();
  if (median(own) >= limits_.slower && median(all) >= limits_.slower) {
    return drop(i, Verdict::kSlower, "slower");
  }
  if (is_faster(candidate) || all.size() < limits_.faster_pairs) return;
  const double most = 1 - limits_.least_gain;
  const bool never = median(own) > most && median_interval(all, limits_.sure).low > most;
  if (never || own.size() >= limits_.most_pairs) drop(i, Verdict::kSlower, "no faster");
}

void OnlineSearch::take(std::size_t i) {
  events_.push_back({OnlineEvent::Kind::kTaken, i});
  earlier_.push_back(incumbent_);
  candidates_[i].verdict = Verdict::kUntried;
  set_incumbent(candidates_[i].schedule);
}

void OnlineSearch::fall_back(int rank) {
  const std::string reason = fmt::format("a call of the incumbent failed on rank {}", rank);
  events_.push_back({OnlineEvent::Kind::kFellBack, 0, reason, incumbent_});
  std::erase(earlier_, incumbent_);  // it may have been one before, too
  const Schedule earlier = earlier_.back();
  earlier_.pop_back();
  set_incumbent(earlier);
}

void OnlineSearch::incumbent_failed(const Schedule& schedule, int rank) {
  if (earlier_.empty() || schedule == earlier_.front()) return;
  if (schedule == incumbent_) return fall_back(rank);
  // Another one has taken its place meanwhile.
  if (std::erase(earlier_, schedule) == 0) return;
  const std::string reason = fmt::format("a call of it as the incumbent failed on rank {}", rank);
  events_.push_back({OnlineEvent::Kind::kFellBack, 0, reason, schedule});
}

void OnlineSearch::set_incumbent(const Schedule& schedule) {
  incumbent_ = schedule;
  incumbent_text_ = to_text(incumbent_);
  for (Candidate& candidate : candidates_) {
    lost_before_ += std::max(0.0, candidate.excess);
    candidate.excess = 0;
    if (candidate.verdict != Verdict::kInTheRunning) continue;
    candidate.ratios.clear();
    candidate.others.clear();
    candidate.planned = candidate.begun = candidate.lost_pairs = 0;
  }
  plan_.clear();
  half_.reset();
  samples_.clear();
  samples_since_ = 0;
  reference_.reset();
  ++epoch_;
  ++incumbents_;
}

uint64_t OnlineSearch::target(const Candidate& candidate) const {
  const std::size_t done = candidate.ratios.size() + candidate.others.size();
  if (candidate.ratios.empty()) return candidate.others.size() + 1;
  if (candidate.ratios.size() < limits_.gross_pairs && median(candidate.ratios) >= limits_.gross) {
    return candidate.others.size() + limits_.gross_pairs;
  }
  if (candidate.ratios.size() < limits_.slower_pairs) return candidate.others.size() + limits_.slower_pairs;
  if (done < limits_.faster_pairs) return limits_.faster_pairs;
  return std::min(done / limits_.faster_pairs * limits_.faster_pairs + limits_.faster_pairs,
                  candidate.others.size() + limits_.most_pairs);
}

double OnlineSearch::expected_loss(const Candidate& candidate) const {
  const double share = candidate.ratios.empty() ? limits_.predicted : std::max(0.002, median(candidate.ratios) - 1);
  return share * milliseconds();
}

void OnlineSearch::plan(double& allowed, uint64_t calls, bool& first_use) {
  if (samples_.empty()) return;  // nothing says yet what a call costs
  uint64_t room = std::max<uint64_t>(1, calls / 2);
  for (const Segment& segment : plan_) room -= std::min(room, segment.pairs);
  std::vector<std::size_t> order(candidates_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto seen = [&](std::size_t i) { return candidates_[i].ratios.size() + candidates_[i].in_flight(); };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return seen(a) < seen(b); });
  for (const std::size_t i : order) {
    Candidate& candidate = candidates_[i];
    if (candidate.verdict != Verdict::kInTheRunning) continue;
    const uint64_t done = candidate.ratios.size() + candidate.others.size() + candidate.in_flight();
    const uint64_t wanted = target(candidate);
    const double loss = expected_loss(candidate);
    uint64_t pairs = std::min(room, wanted > done ? wanted - done : 0);
    pairs = std::min(pairs, static_cast<uint64_t>(std::max(0.0, std::min(allowed / loss, 1e6))));
    const bool first = candidate.ratios.empty();
    if (pairs == 0 || (first && first_use)) continue;
    first_use |= first;
    if (candidate.planned == 0) events_.push_back({OnlineEvent::Kind::kFirstUse, i});
    plan_.push_back({i, pairs});
    candidate.planned += pairs;
    room -= pairs;
    allowed -= static_cast<double>(pairs) * loss;
  }
}

// While nothing is tried: times that drift away from the forecast, and routing of another kind, begin a new round.
void OnlineSearch::watch() {
  if (is_trying() || !exhausted_ || samples_since_ < kWindow) return;
  std::vector<double> ratios, skews;
  for (const Sample& sample : samples_) {
    ratios.push_back(sample.ratio);
    skews.push_back(sample.skew);
  }
  const double now = median(ratios), skew = median(skews);
  if (!reference_) {
    reference_ = now;
    skew_reference_ = skew;
    return;
  }
  std::string reason;
  if (std::abs(now / *reference_ - 1) > limits_.drift) {
    reason = fmt::format("calls take {:.3f} of what they did, beside the forecast", now / *reference_);
  } else if (skew > 0 && *skew_reference_ > 0 && leaves_class(skew, *skew_reference_)) {
    reason = fmt::format("the busiest rank has {:.2f} times the mean's rows, before {:.2f}", skew, *skew_reference_);
  }
  if (reason.empty()) return;
  reference_.reset();
  samples_since_ = 0;
  exhausted_ = false;
  events_.push_back({OnlineEvent::Kind::kNewRound, 0, reason});
}

std::vector<OnlineEvent> OnlineSearch::decide(double& allowed, uint64_t calls, bool& first_use) {
  for (std::size_t i = 0; i < candidates_.size(); ++i) judge(i);
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < candidates_.size(); ++i) {
    if (!is_faster(candidates_[i])) continue;
    if (!best || median(candidates_[i].pooled()) < median(candidates_[*best].pooled())) best = i;
  }
  if (best) take(*best);
  plan(allowed, calls, first_use);
  watch();
  std::vector<OnlineEvent> events;
  events.swap(events_);
  return events;
}

void OnlineSearch::begin_round(const std::vector<Schedule>& candidates, bool last) {
  lost_before_ = lost();
  exhausted_ = last;
  candidates_.clear();
  plan_.clear();
  half_.reset();
  ++epoch_;
  for (const Schedule& schedule : candidates) candidates_.push_back({schedule, to_text(schedule)});
}

void OnlineSearch::stop() {
  begin_round({}, true);
}

bool OnlineSearch::has_first_use() const {
  return std::any_of(candidates_.begin(), candidates_.end(),
                     [](const Candidate& candidate) { return candidate.is_first_used(); });
}

bool OnlineSearch::is_trying() const {
  return std::any_of(candidates_.begin(), candidates_.end(),
                     [](const Candidate& candidate) { return candidate.verdict == Verdict::kInTheRunning; });
}

double OnlineSearch::milliseconds() const {
  if (samples_.empty()) return 0;
  std::vector<double> all;
  for (const Sample& sample : samples_) all.push_back(sample.milliseconds);
  return median(all);
}

double OnlineSearch::lost() const {
  double sum = lost_before_;
  for (const Candidate& candidate : candidates_) sum += std::max(0.0, candidate.excess);
  return sum;
}

double OnlineSearch::expected() const {
  if (samples_.empty()) return 0;
  double sum = 0;
  for (const Candidate& candidate : candidates_) {
    if (candidate.verdict != Verdict::kInTheRunning) continue;
    sum += static_cast<double>(candidate.in_flight()) * expected_loss(candidate);
  }
  return sum;
}

}  // namespace uniep::tune
