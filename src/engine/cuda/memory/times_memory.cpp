#include "engine/cuda/memory/times_memory.h"

#include <cstring>

#include "engine/cuda/runtime/driver.h"

namespace uniep::cuda {

using program::RankTimes;

TimesMemory::~TimesMemory() {
  if (all_.empty()) return;
  const ScopedDevice scope(device_, std::nothrow);
  for (RankTimes* memory : all_) driver().cuMemFreeHost(memory);
}

std::shared_ptr<RankTimes> TimesMemory::take(const std::shared_ptr<TimesMemory>& memory) {
  const std::lock_guard lock(memory->mutex_);
  if (memory->unused_.empty()) {
    memory->unused_.reserve(memory->all_.size() + 1);  // giving back must not fail
    memory->all_.reserve(memory->all_.size() + 1);
    const ScopedDevice scope(memory->device_);
    void* block = nullptr;
    const std::size_t bytes = memory->ranks_ * sizeof(RankTimes);
    check(driver().cuMemHostAlloc(&block, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
          "taking pinned memory");
    std::memset(block, 0, bytes);
    memory->all_.push_back(static_cast<RankTimes*>(block));
    memory->unused_.push_back(memory->all_.back());
  }
  RankTimes* const block = memory->unused_.back();
  std::shared_ptr<RankTimes> taken(block, [memory](RankTimes* given_back) {
    const std::lock_guard own(memory->mutex_);
    memory->unused_.push_back(given_back);
  });
  memory->unused_.pop_back();
  return taken;
}

}  // namespace uniep::cuda
