#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "uniep/schedule.h"

// Finds by measurement which of a few Schedules is fastest. All decisions follow from times and checksums that are
// equal on all ranks, never from a rank's own clock, so ranks in several processes decide alike without asking.
namespace uniep::tune {

// How a Schedule is tried. Collective calls of one layer on the same inputs; what they return is equal on all ranks.
class Trial {
 public:
  virtual ~Trial() = default;
  // One call on the slowest rank. Throws uniep::Error where it fails.
  virtual double milliseconds(const Schedule& schedule) = 0;
  // Whether calls can be queued behind each other; then one call of each. Throws likewise, where one of them fails.
  virtual bool queues_calls() const { return false; }
  virtual std::vector<double> milliseconds_in_turn(std::span<const Schedule> schedules) {
    std::vector<double> all;
    for (const Schedule& schedule : schedules) all.push_back(milliseconds(schedule));
    return all;
  }
  // The checksum of everything that a call writes. Throws likewise.
  virtual uint64_t checksum(const Schedule& schedule) = 0;
  // Bytes of a thread that its kernels spill for want of registers, once one has run.
  virtual int64_t spilled_bytes(const Schedule& /*schedule*/) { return 0; }
  // What such a call takes of the budget.
  virtual double cost(double milliseconds) const { return milliseconds; }
  // Brings the machine into the state that times are wanted of, by calls of a Schedule that works.
  virtual void warm_up(const Schedule& /*schedule*/) {}
  // After an Error, so that the next Schedule can be tried. Throws where nothing can be tried any more.
  virtual void recover() = 0;
};

enum class Verdict : int {
  kUntried = 0,
  kInTheRunning,
  kSlower,     // left behind
  kFailed,     // its call ended in an Error, or the program that tried it ended; or its kernels spill registers
  kWrong,      // other bits than the default's: a fault of the machine or of the library
  kUndecided,  // the budget ended before it was compared
};
const char* verdict_name(Verdict verdict);

struct Tried {
  Schedule schedule;
  Verdict verdict = Verdict::kUntried;
  std::string reason = {};                                  // of kFailed
  std::vector<double> milliseconds = {};                    // each call
  double ratio = std::numeric_limits<double>::quiet_NaN();  // median over rounds of its time to the default's
  // The 95 % interval of that median; infinite ends where there are too few rounds.
  double ratio_low = -std::numeric_limits<double>::infinity(), ratio_high = std::numeric_limits<double>::infinity();
};

struct SearchOptions {
  double budget_milliseconds = 60e3;  // of calls that count, in the mean over ranks; the round that is begun is ended
  int rounds = 4;                     // in which each is called once, before the slower half is left behind
  int final_rounds = 16;              // of the default and the best beside it
  double far = 3;                     // times the default's time: what takes that in two calls is left behind at once
  double least_gain = 0.005;          // what is less far below the default is not worth another kernel
  // Of a Schedule whose verdict is known now, or that is tried next (kUntried).
  std::function<void(const Tried&)> progress = {};
};

struct SearchResult {
  std::vector<Tried> tried;   // as given
  std::size_t best = 0;       // the default, unless one is surely faster by least_gain
  bool budget_ended = false;  // before all rounds were over
};

// `schedules`: the default first, then others; with verdicts kFailed and kWrong they are not tried. They take turns, in
// a drawn order and then in the other, so that neither clocks that drift nor what runs before a call favour any. What
// takes `far` times as long as the default in the first round is called once more, and left behind where it does again.
SearchResult search(std::vector<Tried> schedules, Trial& trial, const SearchOptions& options = {});

}  // namespace uniep::tune
