#pragma once

#include <functional>
#include <memory>

#include "comm/signals.h"
#include "comm/symmetric_memory.h"
#include "uniep/bfloat16.h"

namespace uniep::cuda {

// Bytes of what peers reach, of one rank. Equal on all ranks: the largest that any of them needs.
struct SymmetricNeed {
  int64_t flags = 0;
  int64_t slots = 0;       // rows on their way into the ordered sum
  int64_t prob_slots = 0;  // dprobs on their way
  int64_t inputs = 0;      // copies of x or dy, where peers can not read the caller's own
  int64_t exchange = 0;    // what hosts tell each other

  int64_t total() const;
};

// A group's symmetric memory, in pieces, with the flags at its begin. It grows when a call needs more, and never
// shrinks.
class SymmetricRegion {
 public:
  using Make = std::function<std::unique_ptr<SymmetricMemory>(int64_t bytes)>;
  explicit SymmetricRegion(Make make) : make_(std::move(make)) {}

  // Collective: every rank asks for the same. Growing waits for all ranks' devices and begins a new generation of
  // flags.
  void reserve(const SymmetricNeed& need);

  // Pieces of `peer`'s memory as `own_rank` reaches them.
  uint32_t* flags(int own_rank, int peer) const { return at<uint32_t>(own_rank, peer, 0); }
  BFloat16* slots(int own_rank, int peer) const;
  float* prob_slots(int own_rank, int peer) const;
  BFloat16* inputs(int own_rank, int peer) const;
  void* exchange(int own_rank, int peer) const;

  SymmetricMemory& memory() const { return *memory_; }
  bool empty() const { return memory_ == nullptr; }
  Signals& signals() const { return *signals_; }

 private:
  template <typename T>
  T* at(int own_rank, int peer, int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_->address(own_rank, peer)) + offset);
  }

  Make make_;
  SymmetricNeed capacity_;
  std::unique_ptr<SymmetricMemory> memory_;
  std::unique_ptr<Signals> signals_;
};

}  // namespace uniep::cuda
