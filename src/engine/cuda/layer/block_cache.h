#pragma once

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "uniep/group.h"

namespace uniep::cuda {

// Where a group takes memory from when its caller gives no allocator. Blocks are kept for the next call that wants
// about as much, so that calls allocate nothing once they repeat. All calls of a group follow one another, so a block
// may be handed out while the kernels of an earlier call still use it.
class BlockCache {
 public:
  // `devices`: of the ranks from `first_rank` on.
  BlockCache(int first_rank, std::vector<int> devices) : first_rank_(first_rank), devices_(std::move(devices)) {}
  ~BlockCache();
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  // An allocator that stays valid as long as the cache.
  Allocator allocator();

 private:
  using FreeBlocks = std::multimap<std::size_t, void*>;  // by size

  void* allocate(std::size_t bytes, int rank);
  void release(void* memory, int rank);
  void* take_from_device(std::size_t bytes, int device);
  void free_all(FreeBlocks& blocks, int device);

  int device_of(int rank) const { return devices_.at(static_cast<std::size_t>(rank - first_rank_)); }

  int first_rank_;
  std::vector<int> devices_;
  std::map<int, FreeBlocks> free_;       // by device
  std::map<void*, std::size_t> in_use_;  // sizes as they were taken
};

}  // namespace uniep::cuda
