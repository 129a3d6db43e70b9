#include "tune/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "tune/median.h"
#include "uniep/error.h"

namespace uniep::tune {
namespace {

constexpr std::size_t kDefault = 0;
constexpr double kSure = 1.96;  // standard deviations: 95 %

class Search {
 public:
  Search(std::vector<Tried> schedules, Trial& trial, const SearchOptions& options)
      : trial_(trial), options_(options), rounds_of_(schedules.size()) {
    result_.tried = std::move(schedules);
  }

  SearchResult run() {
    compare_bits();
    trial_.warm_up(at(kDefault).schedule);
    for (int rounds = options_.rounds; running().size() > 2 && measure(running(), rounds); rounds *= 2) leave_half();
    const std::vector<std::size_t> last = running();
    if (last.size() <= 2) measure(last, options_.final_rounds);  // the default alone, too: its time is told
    choose();
    return std::move(result_);
  }

 private:
  Tried& at(std::size_t i) { return result_.tried[i]; }

  std::vector<std::size_t> running() {
    std::vector<std::size_t> all;
    for (std::size_t i = 0; i < result_.tried.size(); ++i) {
      if (at(i).verdict == Verdict::kInTheRunning) all.push_back(i);
    }
    return all;
  }

  void tell(std::size_t i) {
    if (options_.progress) options_.progress(at(i));
  }

  void decide(std::size_t i, Verdict verdict, const std::string& reason = {}) {
    at(i).verdict = verdict;
    at(i).reason = reason;
    tell(i);
  }

  // A Schedule that fails is out; the default has to work.
  template <typename Call>
  bool tried(std::size_t i, Call&& call) {
    try {
      call();
      return true;
    } catch (const Error& error) {
      if (i == kDefault) throw;
      decide(i, Verdict::kFailed, error.what());
      trial_.recover();
      return false;
    }
  }

  void compare_bits() {
    uint64_t expected = 0;
    int64_t spilled_by_default = 0;
    for (std::size_t i = 0; i < result_.tried.size(); ++i) {
      if (i != kDefault && at(i).verdict != Verdict::kUntried) continue;
      tell(i);
      uint64_t seen = 0;
      const bool works = tried(i, [&] {
        seen = trial_.checksum(at(i).schedule);
        const int64_t spilled = trial_.spilled_bytes(at(i).schedule);
        if (i == kDefault) {
          expected = seen;
          spilled_by_default = spilled;
        } else if (seen == expected && spilled > spilled_by_default) {
          throw Error(Status::kUnsupported, fmt::format("its kernels spill {} bytes of registers a thread; the "
                                                        "default's {}",
                                                        spilled, spilled_by_default));
        }
      });
      if (works) decide(i, seen == expected ? Verdict::kInTheRunning : Verdict::kWrong);
    }
  }

  // What runs beside a far slower one finds a GPU that has cooled down, so orders are drawn, each of all ranks alike.
  void next_order(std::vector<std::size_t>& schedules, int round) {
    if (round % 2 == 1) return std::reverse(schedules.begin(), schedules.end());
    for (std::size_t left = schedules.size(); left > 1; --left)
      std::swap(schedules[left - 1], schedules[random_() % left]);
  }

  void note(std::size_t i, int round, double milliseconds) {
    at(i).milliseconds.push_back(milliseconds);
    rounds_of_[i].push_back(round);
    spent_ += trial_.cost(milliseconds);
  }

  void time(std::size_t i, int round) {
    double milliseconds = 0;
    const Schedule& own = at(i).schedule;
    const bool works = tried(i, [&] {
      milliseconds = trial_.queues_calls() ? trial_.milliseconds_in_turn({&own, 1}).front() : trial_.milliseconds(own);
    });
    if (works) note(i, round, milliseconds);
  }

  void time(const std::vector<std::size_t>& several, int round) {
    if (!trial_.queues_calls() || one_by_one_) {
      for (const std::size_t i : several) time(i, round);
      return;
    }
    std::vector<Schedule> schedules;
    for (const std::size_t i : several) schedules.push_back(at(i).schedule);
    std::vector<double> milliseconds;
    try {
      milliseconds = trial_.milliseconds_in_turn(schedules);
    } catch (const Error&) {
      // Which one it was shows when each is called by itself, now or in a later round.
      trial_.recover();
      for (const std::size_t i : several) time(i, round);
      const auto works = [&](std::size_t i) { return at(i).verdict == Verdict::kInTheRunning; };
      one_by_one_ = std::all_of(several.begin(), several.end(), works);
      return;
    }
    for (std::size_t n = 0; n < several.size(); ++n) note(several[n], round, milliseconds[n]);
  }

  bool is_far_behind(std::size_t i) const {
    const std::vector<double>& own = result_.tried[i].milliseconds;
    const double base = result_.tried[kDefault].milliseconds.front();
    return *std::min_element(own.begin(), own.end()) > options_.far * base;
  }

  // After the first round. A short call that was delayed may look as slow, so each of these is called once more.
  void leave_far_behind() {
    for (const std::size_t i : running()) {
      if (i == kDefault || !is_far_behind(i)) continue;
      time(i, 0);
      if (at(i).verdict != Verdict::kInTheRunning || !is_far_behind(i)) continue;
      rate(i);
      decide(i, Verdict::kSlower);
    }
  }

  // Returns whether there was time for all rounds.
  bool measure(std::vector<std::size_t> schedules, int rounds) {
    for (int round = 0; round < rounds; ++round) {
      next_order(schedules, round);
      if (spent_ >= options_.budget_milliseconds) {
        result_.budget_ended = true;
        return false;
      }
      std::vector<std::size_t> left = schedules;
      std::erase_if(left, [&](std::size_t i) { return at(i).verdict != Verdict::kInTheRunning; });
      time(left, rounds_begun_);
      if (++rounds_begun_ == 1) leave_far_behind();
    }
    return true;
  }

  // A Schedule's times over the default's of the same rounds.
  std::vector<double> ratios(std::size_t i) const {
    std::vector<double> all;
    const Tried& own = result_.tried[i];
    const Tried& base = result_.tried[kDefault];
    for (std::size_t call = 0; call < own.milliseconds.size(); ++call) {
      const std::vector<int>& rounds = rounds_of_[kDefault];
      const auto same = std::lower_bound(rounds.begin(), rounds.end(), rounds_of_[i][call]);
      if (same == rounds.end() || *same != rounds_of_[i][call]) continue;
      all.push_back(own.milliseconds[call] / base.milliseconds[static_cast<std::size_t>(same - rounds.begin())]);
    }
    return all;
  }

  void rate(std::size_t i) {
    const std::vector<double> all = ratios(i);
    if (all.empty()) return;
    const Interval interval = median_interval(all, kSure);
    at(i).ratio = median(all);
    at(i).ratio_low = interval.low;
    at(i).ratio_high = interval.high;
  }

  void rate() {
    for (std::size_t i = 0; i < result_.tried.size(); ++i) rate(i);
  }

  // The default stays, to be compared with.
  void leave_half() {
    rate();
    std::vector<std::size_t> others = running();
    others.erase(others.begin());
    std::stable_sort(others.begin(), others.end(), [&](auto a, auto b) { return at(a).ratio < at(b).ratio; });
    for (std::size_t place = (others.size() + 1) / 2; place < others.size(); ++place) {
      decide(others[place], Verdict::kSlower);
    }
  }

  // Whether a Schedule is surely faster: the upper end of the 95 % interval of its ratios' median.
  bool is_faster(std::size_t i) const { return result_.tried[i].ratio_high < 1 - options_.least_gain; }

  void choose() {
    rate();
    for (const std::size_t i : running()) {
      if (i == kDefault) continue;
      const bool better = result_.best == kDefault || at(i).ratio < at(result_.best).ratio;
      if (better && is_faster(i)) result_.best = i;
    }
    for (const std::size_t i : running()) {
      if (i == result_.best) continue;
      const bool compared = i == kDefault || !result_.budget_ended || at(i).ratio_low > 1 || result_.best != kDefault;
      decide(i, compared ? Verdict::kSlower : Verdict::kUndecided);
    }
  }

  Trial& trial_;
  const SearchOptions& options_;
  SearchResult result_;
  std::vector<std::vector<int>> rounds_of_;  // the round of each call
  int rounds_begun_ = 0;
  bool one_by_one_ = false;  // a round has failed, and no Schedule by itself
  std::mt19937 random_{1};
  double spent_ = 0;
};

}  // namespace

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kUntried:
      return "untried";
    case Verdict::kInTheRunning:
      return "in the running";
    case Verdict::kSlower:
      return "slower";
    case Verdict::kFailed:
      return "failed";
    case Verdict::kWrong:
      return "wrong";
    case Verdict::kUndecided:
      return "undecided";
  }
  return "unknown";
}

SearchResult search(std::vector<Tried> schedules, Trial& trial, const SearchOptions& options) {
  if (schedules.empty()) throw Error(Status::kInvalidArgument, "schedules: none; the default must be among them");
  return Search(std::move(schedules), trial, options).run();
}

}  // namespace uniep::tune
