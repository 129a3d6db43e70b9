#pragma once

#include <array>
#include <cstddef>
#include <mutex>
#include <optional>

#include "uniep/layer.h"

namespace uniep::internal {

// What was found legal on a group lately. To ask the rules takes some 2 us of each call on the host, and a job's calls
// ask the same again and again. From any thread.
class LegalSchedules {
 public:
  struct Question {
    Schedule schedule;
    LayerShape shape;
    Numerics numerics;
    Direction direction;
    Operation operation;
    bool operator==(const Question&) const = default;
  };

  bool has(const Question& question) const {
    const std::lock_guard lock(mutex_);
    for (const std::optional<Question>& one : kept_) {
      if (one == question) return true;
    }
    return false;
  }
  void add(const Question& question) {
    const std::lock_guard lock(mutex_);
    kept_[next_++ % kept_.size()] = question;
  }

 private:
  mutable std::mutex mutex_;
  std::array<std::optional<Question>, 16> kept_;
  std::size_t next_ = 0;  // the oldest goes
};

}  // namespace uniep::internal
