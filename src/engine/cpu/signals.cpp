#include "engine/cpu/signals.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace uniep::cpu {

void RankSignals::reserve(const SignalLayout& layout) {
  if (layout.counter_total > counter_count_) {
    const int64_t count = layout.counter_total + layout.counter_total / 2;
    for (Words& bank : banks_) bank = std::make_unique<std::atomic<uint32_t>[]>(count);
    counter_count_ = count;  // when all banks have it
  }
  if (layout.flag_total > flag_count_) {
    const int64_t count = layout.flag_total + layout.flag_total / 2;
    flags_ = std::make_unique<std::atomic<uint32_t>[]>(count);
    flag_count_ = count;
  }
}

void RankSignals::clear_bank(uint32_t epoch) {
  for (int64_t i = 0; i < counter_count_; ++i) banks_[epoch % kBanks][i].store(0, std::memory_order_relaxed);
}

void RankSignals::clear_all() {
  for (int bank = 0; bank < kBanks; ++bank) clear_bank(bank);
  for (int64_t i = 0; i < flag_count_; ++i) flags_[i].store(0, std::memory_order_relaxed);
}

std::size_t RankSignals::bytes() const {
  return (kBanks * counter_count_ + flag_count_) * sizeof(uint32_t);
}

namespace {
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free,
              "a futex waits on the plain 32-bit word of an atomic");

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}
}  // namespace

void WakeUp::notify() {
  events_.fetch_add(1, std::memory_order_relaxed);
  if (sleepers_.load(std::memory_order_relaxed) > 0) futex(events_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr);
}

void WakeUp::sleep(uint32_t seen, int64_t nanoseconds) {
  const timespec timeout{nanoseconds / 1000000000, nanoseconds % 1000000000};
  sleepers_.fetch_add(1, std::memory_order_relaxed);
  futex(events_, FUTEX_WAIT_PRIVATE, seen, &timeout);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace uniep::cpu
