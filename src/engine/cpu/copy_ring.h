#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "uniep/bfloat16.h"

namespace uniep::cpu {

// A copy agent's finite ring: a row travels in chunks, each loaded into a slot of the ring and stored, to one or
// several places, when the slot is needed again. So `stages` chunks are between their load and their stores at any
// time, as on the GPU.
class CopyRing {
 public:
  void configure(int chunk_bytes, int stages) {
    chunk_bytes_ = chunk_bytes;
    slots_.resize(stages);
    memory_.resize(static_cast<std::size_t>(chunk_bytes) * stages);
  }

  // Queues a row of `count` values for all destinations.
  void copy(const BFloat16* from, const std::vector<BFloat16*>& to, std::size_t count) {
    const std::size_t bytes = count * sizeof(BFloat16);
    for (std::size_t offset = 0; offset < bytes; offset += chunk_bytes_) {
      Slot& slot = slots_[next_];
      store(slot);
      slot.offset = offset;
      slot.bytes = bytes - offset < chunk_bytes_ ? bytes - offset : chunk_bytes_;
      slot.to = to;
      std::memcpy(memory_of(next_), reinterpret_cast<const std::byte*>(from) + offset, slot.bytes);
      next_ = (next_ + 1) % slots_.size();
    }
  }

  // Stores what is still in the ring, oldest first. Nothing may be signalled before.
  void drain() {
    for (std::size_t i = 0; i < slots_.size(); ++i) store(slots_[(next_ + i) % slots_.size()]);
  }

 private:
  struct Slot {
    std::vector<BFloat16*> to;
    std::size_t offset = 0;
    std::size_t bytes = 0;  // 0: empty
  };

  std::byte* memory_of(std::size_t slot) { return memory_.data() + slot * chunk_bytes_; }

  void store(Slot& slot) {
    if (slot.bytes == 0) return;
    const std::byte* from = memory_of(static_cast<std::size_t>(&slot - slots_.data()));
    for (BFloat16* to : slot.to) std::memcpy(reinterpret_cast<std::byte*>(to) + slot.offset, from, slot.bytes);
    slot.bytes = 0;
  }

  std::size_t chunk_bytes_ = 0;
  std::size_t next_ = 0;
  std::vector<Slot> slots_;
  std::vector<std::byte> memory_;
};

}  // namespace uniep::cpu
