#include "engine/cuda/memory/block_cache.h"

#include <algorithm>
#include <iterator>

#include "comm/memory_reclaimer.h"
#include "engine/cuda/runtime/driver.h"
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

// Null where the device has no room.
void* take_from_device(std::size_t bytes, int device) {
  const ScopedDevice scope(device);
  CUdeviceptr address = 0;
  return driver().cuMemAlloc(&address, bytes) == CUDA_SUCCESS ? reinterpret_cast<void*>(address) : nullptr;
}

void free_on_device(void* memory, int device) noexcept {
  const ScopedDevice scope(device, std::nothrow);
  driver().cuMemFree(reinterpret_cast<CUdeviceptr>(memory));
}

}  // namespace

BlockCache::~BlockCache() {
  for (const auto& [memory, block] : blocks_) free_on_device(memory, block.device);
}

Allocator BlockCache::allocator() {
  Allocator functions;
  functions.allocate = [](void* cache, std::size_t bytes, std::size_t, int rank, Stream) {
    return static_cast<BlockCache*>(cache)->allocate(bytes, rank, false);
  };
  functions.release = [](void* cache, void* memory, std::size_t, int, Stream) {
    static_cast<BlockCache*>(cache)->release(memory, false);
  };
  functions.context = this;
  return functions;
}

Allocator BlockCache::allocator_of_one() {
  Allocator functions = allocator();
  functions.allocate = [](void* cache, std::size_t bytes, std::size_t, int rank, Stream) {
    return static_cast<BlockCache*>(cache)->allocate(bytes, rank, true);
  };
  functions.release = [](void* cache, void* memory, std::size_t, int, Stream) {
    static_cast<BlockCache*>(cache)->release(memory, true);
  };
  return functions;
}

std::size_t BlockCache::bytes(int device) const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const auto& [of, use] : use_) bytes += of.first == device ? use.taken : 0;
  return bytes;
}

void BlockCache::set_capture(uint64_t capture) {
  const std::lock_guard lock(mutex_);
  capture_ = capture;
}

bool BlockCache::is_capturing() const {
  const std::lock_guard lock(mutex_);
  return capture_ != 0;
}

void BlockCache::trim() noexcept {
  const std::lock_guard lock(mutex_);
  for (auto& [of, blocks] : free_) {
    if (of.second == 0) free_all(blocks);
  }
}

// `unused`: what an earlier call of the same capture has given back it writes again at every replay.
void* BlockCache::allocate(std::size_t bytes, int rank, bool unused) {
  std::unique_lock lock(mutex_);
  const int device = device_of(rank);
  const std::size_t wanted = stepped(bytes);
  if (void* const memory = find_or_take(wanted, device, unused)) return memory;
  lock.unlock();  // the caller's function may wait for a thread that gives a block back
  reclaim_memory(device);
  lock.lock();
  return find_or_take(wanted, device, unused);
}

void* BlockCache::find_or_take(std::size_t bytes, int device, bool unused) {
  if (unused && capture_ != 0) return take(bytes, device);
  FreeBlocks& blocks = free_[{device, capture_}];
  const auto found = blocks.lower_bound(bytes);
  if (found == blocks.end()) return take(bytes, device);
  const Use& use = use_[{device, capture_}];
  const bool is_full = capture_ == 0 && use.taken + bytes > limit(use, bytes);
  const bool does = suits(found->first, bytes) || (is_full && found->first <= 2 * bytes);
  return does ? hand_out(blocks, found, bytes, device) : take(bytes, device);
}

std::size_t BlockCache::limit(const Use& use, std::size_t more) {
  return 2 * std::max(use.most_handed_out, use.handed_out + more);
}

void* BlockCache::hand_out(FreeBlocks& blocks, FreeBlocks::iterator found, std::size_t wanted, int device) {
  void* const memory = found->second;
  Use& use = use_[{device, capture_}];
  use.handed_out += wanted;
  use.most_handed_out = std::max(use.most_handed_out, use.handed_out);
  Block& block = blocks_.find(memory)->second;
  block.wanted = wanted;
  block.node = blocks.extract(found);
  return memory;
}

void* BlockCache::take(std::size_t bytes, int device) {
  Use& use = use_[{device, capture_}];
  FreeBlocks& kept = free_[{device, 0}];
  FreeBlocks own;  // all that giving it back will need
  own.emplace(bytes, nullptr);
  const auto block = blocks_.emplace(nullptr, Block{bytes, bytes, device, capture_, own.extract(own.begin())}).first;
  free_[{device, capture_}];
  auto node = blocks_.extract(block);
  if (capture_ == 0) {
    while (!kept.empty() && use.taken + bytes > limit(use, bytes)) free_one(kept, std::prev(kept.end()));
  }
  void* memory = take_from_device(bytes, device);
  if (memory == nullptr) {
    free_all(kept);
    memory = take_from_device(bytes, device);
  }
  if (memory == nullptr) return nullptr;
  node.key() = memory;
  node.mapped().node.mapped() = memory;
  blocks_.insert(std::move(node));
  use.taken += bytes;
  use.handed_out += bytes;
  use.most_handed_out = std::max(use.most_handed_out, use.handed_out);
  return memory;
}

void BlockCache::release(void* memory, bool for_good) noexcept {
  const std::lock_guard lock(mutex_);
  Block& block = blocks_.find(memory)->second;
  use_.find({block.device, block.capture})->second.handed_out -= block.wanted;
  if (for_good && block.capture != 0) return;  // not to be handed out again
  free_.find({block.device, block.capture})->second.insert(std::move(block.node));
}

void BlockCache::free_one(FreeBlocks& blocks, FreeBlocks::iterator found) noexcept {
  void* const memory = found->second;
  const auto block = blocks_.find(memory);
  use_.find({block->second.device, block->second.capture})->second.taken -= found->first;
  free_on_device(memory, block->second.device);
  blocks.erase(found);
  blocks_.erase(block);
}

void BlockCache::free_all(FreeBlocks& blocks) noexcept {
  while (!blocks.empty()) free_one(blocks, blocks.begin());
}

}  // namespace uniep::cuda
