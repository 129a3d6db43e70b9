#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "uniep/group.h"

namespace uniep::cuda {

// Where a group takes memory from when its caller gives no allocator. Blocks are kept for the next call that wants
// about as much, so that calls allocate and free nothing once they repeat: to free waits for all work of the device. Of
// a device at most twice what was asked for at one time is kept, and besides what captured calls have. Where another
// block would be more than that, one of up to twice the size does. All calls of a
// group follow one another, so a block may be handed out while the kernels of an earlier call still use it. What a
// captured call has taken stays with the calls of that capture as long as the cache, since replays use it at any time.
// Blocks may be given back on any thread, which takes no memory.
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
  void set_capture(uint64_t capture);
  bool is_capturing() const;

  // Frees what nobody has and no graph uses. No kernel may use it any more.
  void trim() noexcept;

 private:
  using FreeBlocks = std::multimap<std::size_t, void*>;  // by size
  struct Block {
    std::size_t bytes;   // as it was taken
    std::size_t wanted;  // of these, where it is handed out
    int device;
    uint64_t capture;
    FreeBlocks::node_type node;  // its own among the free ones; empty while it is there
  };
  struct Use {
    std::size_t taken = 0, handed_out = 0, most_handed_out = 0;
  };

  void* allocate(std::size_t bytes, int rank, bool unused);
  void* hand_out(FreeBlocks& blocks, FreeBlocks::iterator found, std::size_t wanted, int device);
  static std::size_t limit(const Use& use, std::size_t more);
  void* find_or_take(std::size_t bytes, int device, bool unused);
  void* take(std::size_t bytes, int device);
  void release(void* memory, bool for_good) noexcept;
  void free_one(FreeBlocks& blocks, FreeBlocks::iterator block) noexcept;
  void free_all(FreeBlocks& blocks) noexcept;

  int device_of(int rank) const { return devices_.at(static_cast<std::size_t>(rank - first_rank_)); }

  int first_rank_;
  std::vector<int> devices_;
  mutable std::mutex mutex_;
  uint64_t capture_ = 0;
  std::map<void*, Block> blocks_;
  std::map<std::pair<int, uint64_t>, FreeBlocks> free_;  // by device and capture
  std::map<std::pair<int, uint64_t>, Use> use_;          // likewise
};

}  // namespace uniep::cuda
