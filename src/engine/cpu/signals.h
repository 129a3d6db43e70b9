#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "program/edges.h"

namespace uniep::cpu {

// The counters and flags of one rank. Counters live in two banks, chosen by the call's epoch; the owner clears a bank
// one call ahead. Flags are never cleared: they hold the epoch of the call that stored them.
class RankSignals {
 public:
  // Makes room for a call's layout. New flags hold 0, which is no epoch.
  void reserve(const SignalLayout& layout);
  void clear_bank(uint32_t epoch);
  void clear_all();

  std::atomic<uint32_t>& counter(const SignalLayout& layout, uint32_t epoch, CounterSpace space, int64_t index) {
    return banks_[epoch % kBanks][layout.counters[static_cast<int>(space)] + index];
  }
  std::atomic<uint32_t>& flag(const SignalLayout& layout, FlagSpace space, int64_t index) {
    return flags_[layout.flags[static_cast<int>(space)] + index];
  }
  std::size_t bytes() const;

 private:
  static constexpr int kBanks = 2;
  using Words = std::unique_ptr<std::atomic<uint32_t>[]>;
  std::array<Words, kBanks> banks_;
  Words flags_;
  int64_t counter_count_ = 0;
  int64_t flag_count_ = 0;
};

// Wakes threads that found nothing to do. It orders no data (that is the signals' work), so it is relaxed throughout
// and a sleeper also wakes by itself after a while.
class WakeUp {
 public:
  uint32_t seen() const { return events_.load(std::memory_order_relaxed); }
  void notify();
  void sleep(uint32_t seen, int64_t nanoseconds);

 private:
  std::atomic<uint32_t> events_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace uniep::cpu
