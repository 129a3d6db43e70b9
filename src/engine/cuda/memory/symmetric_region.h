#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/symmetric_memory.h"
#include "engine/cuda/device/arguments/place_arguments.h"
#include "engine/cuda/memory/signals.h"
#include "uniep/bfloat16.h"

namespace uniep::cuda {

// Bytes of what peers reach, of one rank. Equal on all ranks: the largest that any of them needs.
struct SymmetricNeed {
  int64_t flags = 0;
  int64_t slots = 0;       // rows on their way into the ordered sum
  int64_t prob_slots = 0;  // dprobs on their way
  int64_t inputs = 0;      // copies of x or dy, where peers can not read the caller's own
  int64_t rows = 0;        // row tables that peers write, where they can not reach a placement's own

  int64_t total() const;
};

// Of two calls, one after the other.
SymmetricNeed most_of(const SymmetricNeed& a, const SymmetricNeed& b);

// A group's symmetric memory: a control part that lives as long as the group, and a part in pieces, with the flags at
// its begin, that is replaced by a larger one when a call needs more.
class SymmetricRegion {
 public:
  using Make = std::function<std::unique_ptr<SymmetricMemory>(int64_t bytes)>;
  // Collective.
  explicit SymmetricRegion(Make make);

  // Collective where fits() is false, which it then is on all ranks: they all ask for the same. Nothing of this
  // process's that uses the region may run.
  void reserve(const SymmetricNeed& need);
  bool fits(const SymmetricNeed& need) const;

  // What a captured call points to stays as long as the group.
  void keep() { kept_ = true; }

  // Pieces of `peer`'s memory as `own_rank` reaches them.
  uint32_t* flags(int own_rank, int peer) const { return at<uint32_t>(own_rank, peer, 0); }
  BFloat16* slots(int own_rank, int peer) const;
  float* prob_slots(int own_rank, int peer) const;
  BFloat16* inputs(int own_rank, int peer) const;
  RowSource* rows(int own_rank, int peer) const;

  // Of one rank, all that the region holds.
  int64_t bytes() const;

  CallBoard* board(int own_rank, int peer) const {
    return &static_cast<GroupControl*>(control_->address(own_rank, peer))->board;
  }
  SymmetricMemory& control() const { return *control_; }
  Signals& signals() const { return *signals_; }

  // For tests: every own rank's epoch. Nothing may run, and all ranks do the same.
  void set_epoch(uint32_t epoch);

  // Frees all of it; nothing but bytes() and is_released() may be asked any more. Nothing may run that uses it.
  void release() noexcept;
  bool is_released() const { return control_ == nullptr; }

  // Collective: all signals and epochs start again, and what `clear` clears with them. Nothing of this process's that
  // uses the region may run.
  void recover(const std::function<void()>& clear);

 private:
  template <typename T>
  T* at(int own_rank, int peer, int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_->address(own_rank, peer)) + offset);
  }

  void clear_flags();

  Make make_;
  SymmetricNeed capacity_;
  std::unique_ptr<SymmetricMemory> control_, memory_;
  std::unique_ptr<Signals> signals_;
  bool kept_ = false;
  struct Kept {
    std::unique_ptr<SymmetricMemory> memory;
    int64_t flags;
  };
  std::vector<Kept> earlier_;
};

}  // namespace uniep::cuda
