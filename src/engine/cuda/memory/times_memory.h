#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "program/call_times.h"

namespace uniep::cuda {

// Page-locked memory that kernels write RankTimes to, an entry a local rank. What a timer no longer uses another one
// takes, since a call may still be about to write it; all of it goes with the last owner.
class TimesMemory {
 public:
  TimesMemory(int device, std::size_t ranks) : device_(device), ranks_(ranks) {}
  ~TimesMemory();
  TimesMemory(const TimesMemory&) = delete;
  TimesMemory& operator=(const TimesMemory&) = delete;

  // Throws uniep::Error where there is no more memory.
  static std::shared_ptr<program::RankTimes> take(const std::shared_ptr<TimesMemory>& memory);

 private:
  const int device_;
  const std::size_t ranks_;
  std::mutex mutex_;
  std::vector<program::RankTimes*> all_, unused_;
};

}  // namespace uniep::cuda
