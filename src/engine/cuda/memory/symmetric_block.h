#pragma once

#include <cstddef>
#include <memory>

#include "comm/symmetric_memory.h"
#include "engine/engine.h"

namespace uniep::cuda {

// A SymmetricBuffer's memory.
class SharedBlock final : public internal::SymmetricBlock {
 public:
  // `number`: of the group's buffers, equal on all ranks.
  SharedBlock(std::unique_ptr<SymmetricMemory> memory, std::size_t bytes, uint32_t number)
      : memory_(std::move(memory)), bytes_(bytes), number_(number) {}

  internal::RankSpan local() const override {
    return {memory_->own_ranks().front(), static_cast<int>(memory_->own_ranks().size())};
  }
  void* data(int rank) const override { return memory_->address(rank, rank); }
  std::size_t bytes() const override { return bytes_; }
  uint32_t number() const { return number_; }

  // Where so many bytes lie in the first local rank's part; -1: not there, or not all of them.
  std::ptrdiff_t offset_of(const void* address, std::size_t bytes) const {
    const auto* const begin = static_cast<const std::byte*>(data(memory_->own_ranks().front()));
    const auto* const place = static_cast<const std::byte*>(address);
    return place >= begin && place + bytes <= begin + bytes_ ? place - begin : -1;
  }
  // The same place of a peer's part, as the first local rank reaches it.
  const void* address(int peer, std::ptrdiff_t offset) const {
    return static_cast<const std::byte*>(memory_->address(memory_->own_ranks().front(), peer)) + offset;
  }

 private:
  std::unique_ptr<SymmetricMemory> memory_;
  std::size_t bytes_;
  uint32_t number_;
};

}  // namespace uniep::cuda
