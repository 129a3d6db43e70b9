#include "engine/cuda/layer/block_cache.h"

#include "engine/cuda/driver.h"
#include "model/row_table.h"

namespace uniep::cuda {
namespace {

constexpr int64_t kSmallStep = 64 << 10;
constexpr int64_t kLargeStep = 2 << 20;

// Sizes come in steps, so that batches that differ a little use the same blocks.
std::size_t stepped(std::size_t bytes) {
  const auto wanted = static_cast<int64_t>(bytes);
  return static_cast<std::size_t>(round_up(wanted, wanted > 8 * kLargeStep ? kLargeStep : kSmallStep));
}

// A block is handed out for a request that leaves at most an eighth of it unused, or a step.
bool suits(std::size_t block, std::size_t wanted) {
  return block - wanted <= block / 8 + kSmallStep;
}

}  // namespace

BlockCache::~BlockCache() {
  for (auto& [of, blocks] : free_) free_all(blocks, of.first);
  for (const auto& [device, memory] : unused_) {
    const ScopedDevice scope(device, std::nothrow);
    driver().cuMemFree(reinterpret_cast<CUdeviceptr>(memory));
  }
}

Allocator BlockCache::allocator() {
  Allocator functions;
  functions.allocate = [](void* cache, std::size_t bytes, std::size_t, int rank, Stream) {
    return static_cast<BlockCache*>(cache)->allocate(bytes, rank);
  };
  functions.release = [](void* cache, void* memory, std::size_t, int rank, Stream) {
    static_cast<BlockCache*>(cache)->release(memory, rank);
  };
  functions.context = this;
  return functions;
}

Allocator BlockCache::allocator_of_one() {
  Allocator functions = allocator();
  functions.allocate = [](void* cache, std::size_t bytes, std::size_t, int rank, Stream) {
    return static_cast<BlockCache*>(cache)->allocate_unused(bytes, rank);
  };
  functions.release = [](void* cache, void* memory, std::size_t, int rank, Stream) {
    static_cast<BlockCache*>(cache)->release_for_good(memory, rank);
  };
  return functions;
}

std::size_t BlockCache::bytes(int device) const {
  const auto found = taken_.find(device);
  return found == taken_.end() ? 0 : found->second;
}

// What an earlier call of the same capture has given back it writes again at every replay.
void* BlockCache::allocate_unused(std::size_t bytes, int rank) {
  return capture_ == 0 ? allocate(bytes, rank) : take(stepped(bytes), device_of(rank));
}

void* BlockCache::allocate(std::size_t bytes, int rank) {
  const int device = device_of(rank);
  FreeBlocks& blocks = free_[{device, capture_}];
  const std::size_t wanted = stepped(bytes);
  const auto found = blocks.lower_bound(wanted);
  if (found != blocks.end() && suits(found->first, wanted)) {
    void* const memory = found->second;
    in_use_.emplace(memory, Block{found->first, capture_});
    blocks.erase(found);
    return memory;
  }
  return take(wanted, device);
}

void* BlockCache::take(std::size_t bytes, int device) {
  void* memory = take_from_device(bytes, device);
  if (memory == nullptr) {
    free_all(free_[{device, 0}], device);
    memory = take_from_device(bytes, device);
  }
  if (memory != nullptr) {
    in_use_.emplace(memory, Block{bytes, capture_});
    taken_[device] += bytes;
  }
  return memory;
}

// Both are called by destructors: without host memory to note it the block stays in use.
void BlockCache::release(void* memory, int rank) noexcept {
  try {
    const auto found = in_use_.find(memory);
    free_[{device_of(rank), found->second.capture}].emplace(found->second.bytes, memory);
    in_use_.erase(found);
  } catch (const std::bad_alloc&) {
  }
}

void BlockCache::release_for_good(void* memory, int rank) noexcept {
  const auto found = in_use_.find(memory);
  if (found->second.capture == 0) return release(memory, rank);
  try {
    unused_.emplace(device_of(rank), memory);
    in_use_.erase(found);
  } catch (const std::bad_alloc&) {
  }
}

void* BlockCache::take_from_device(std::size_t bytes, int device) {
  const ScopedDevice scope(device);
  CUdeviceptr address = 0;
  return driver().cuMemAlloc(&address, bytes) == CUDA_SUCCESS ? reinterpret_cast<void*>(address) : nullptr;
}

void BlockCache::free_all(FreeBlocks& blocks, int device) {
  const ScopedDevice scope(device, std::nothrow);
  for (const auto& [bytes, memory] : blocks) {
    driver().cuMemFree(reinterpret_cast<CUdeviceptr>(memory));
    taken_[device] -= bytes;
  }
  blocks.clear();
}

}  // namespace uniep::cuda
