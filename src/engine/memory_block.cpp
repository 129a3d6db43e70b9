#include <fmt/format.h>

#include <utility>

#include "engine/engine.h"

namespace uniep::internal {

namespace {
constexpr std::size_t kBlockAlignment = 256;
}

MemoryBlock::MemoryBlock(const Allocator& allocator, std::size_t bytes, int rank, Stream stream)
    : allocator_(allocator), bytes_(bytes), rank_(rank), stream_(stream) {
  if (bytes == 0) return;
  memory_ = allocator.allocate(allocator.context, bytes, kBlockAlignment, rank, stream);
  if (memory_ == nullptr) {
    throw Error(Status::kOutOfMemory, fmt::format("allocator: no room for {} bytes on rank {}", bytes, rank));
  }
}

MemoryBlock::~MemoryBlock() {
  if (memory_ != nullptr) allocator_.release(allocator_.context, memory_, bytes_, rank_, stream_);
}

MemoryBlock::MemoryBlock(MemoryBlock&& other) noexcept {
  *this = std::move(other);
}

MemoryBlock& MemoryBlock::operator=(MemoryBlock&& other) noexcept {
  std::swap(allocator_, other.allocator_);
  std::swap(memory_, other.memory_);
  std::swap(bytes_, other.bytes_);
  std::swap(rank_, other.rank_);
  std::swap(stream_, other.stream_);
  return *this;
}

}  // namespace uniep::internal
