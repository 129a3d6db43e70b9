#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

namespace uniep {

// The end of a bounded wait.
class Deadline {
 public:
  explicit Deadline(double seconds)
      : seconds_(seconds),
        end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                std::chrono::duration<double>(std::clamp(seconds, 0.0, kForever)))) {}

  bool passed() const { return Clock::now() >= end_; }

  // For poll(): rounded up, and at most `most`.
  int milliseconds(int most = 60'000) const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now()).count();
    return static_cast<int>(std::clamp<decltype(left)>(left, 0, most));
  }

  // What was given, in words: "2.5 s".
  std::string text() const {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g s", seconds_);
    return digits;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double kForever = 1e8;

  double seconds_;
  Clock::time_point end_;
};

}  // namespace uniep
