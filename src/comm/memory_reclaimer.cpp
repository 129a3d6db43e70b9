#include "comm/memory_reclaimer.h"

#include <mutex>

#include "uniep/group.h"

namespace uniep {
namespace {

struct Reclaimer {
  void (*reclaim)(void* context, int device) = nullptr;
  void* context = nullptr;
};

std::mutex mutex;
Reclaimer current;

}  // namespace

void set_memory_reclaimer(void (*reclaim)(void* context, int device), void* context) {
  const std::lock_guard lock(mutex);
  current = {reclaim, context};
}

// Outside of the lock, as it may wait for locks of its own.
bool reclaim_memory(int device) {
  Reclaimer now;
  {
    const std::lock_guard lock(mutex);
    now = current;
  }
  if (now.reclaim == nullptr) return false;
  now.reclaim(now.context, device);
  return true;
}

}  // namespace uniep
