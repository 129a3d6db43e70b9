#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "uniep/group.h"

namespace uniep::cuda {

// Where a group takes memory from when its caller gives no allocator. Blocks are kept for the next call that wants
// about as much, so that calls allocate nothing once they repeat. All calls of a group follow one another, so a block
// may be handed out while the kernels of an earlier call still use it. What a captured call has taken stays with the
// calls of that capture as long as the cache, since replays use it at any time.
class BlockCache {
 public:
  // `devices`: of the ranks from `first_rank` on.
  BlockCache(int first_rank, std::vector<int> devices) : first_rank_(first_rank), devices_(std::move(devices)) {}
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  // An allocator that stays valid as long as the cache.
  Allocator allocator();
  // The same, but nobody else has had or gets what a captured call takes.
  Allocator allocator_of_one();

  // Of a device, handed out or kept for later.
  std::size_t bytes(int device) const;

  // Which capture the next call goes into; 0: none.
  void set_capture(uint64_t capture) { capture_ = capture; }

 private:
  using FreeBlocks = std::multimap<std::size_t, void*>;  // by size
  struct Block {
    std::size_t bytes;  // as it was taken
    uint64_t capture;
  };

  void* allocate(std::size_t bytes, int rank);
  void* allocate_unused(std::size_t bytes, int rank);
  void* take(std::size_t bytes, int device);
  void release(void* memory, int rank) noexcept;
  void release_for_good(void* memory, int rank) noexcept;
  void* take_from_device(std::size_t bytes, int device);
  void free_all(FreeBlocks& blocks, int device);

  int device_of(int rank) const { return devices_.at(static_cast<std::size_t>(rank - first_rank_)); }

  int first_rank_;
  std::vector<int> devices_;
  uint64_t capture_ = 0;
  std::map<std::pair<int, uint64_t>, FreeBlocks> free_;  // by device and capture
  std::multimap<int, void*> unused_;                     // by device: of captured calls, not to be handed out again
  std::map<void*, Block> in_use_;
  std::map<int, std::size_t> taken_;  // by device
};

}  // namespace uniep::cuda
