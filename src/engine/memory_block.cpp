#include <fmt/format.h>

#include <cstdint>
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

MemoryBlock::MemoryBlock(const GivenMemory& named, const Allocator& allocator, std::size_t bytes, int rank,
                         Stream stream)
    : MemoryBlock(allocator, named.memory.data == nullptr ? bytes : 0, rank, stream) {
  const CallerMemory& given = named.memory;
  if (given.data == nullptr || bytes == 0) return;
  if (given.bytes < bytes) {
    throw Error(Status::kOutOfMemory,  // one rank's alone: the others have to be told
                fmt::format("{}: {} bytes on rank {}; must be {} or more", named.name, given.bytes, rank, bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(given.data) % kMemoryAlignment != 0) {
    throw Error(Status::kInvalidArgument, fmt::format("{}: its address on rank {} is {}; must be a multiple of {}",
                                                      named.name, rank, given.data, kMemoryAlignment));
  }
  memory_ = given.data;
  bytes_ = bytes;
  allocator_ = {};
}

MemoryBlock::~MemoryBlock() {
  if (memory_ != nullptr && allocator_.release != nullptr)
    allocator_.release(allocator_.context, memory_, bytes_, rank_, stream_);
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
