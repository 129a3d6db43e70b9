#pragma once

#include "engine/cuda/device/ptx/mbarrier.h"
#include "engine/cuda/device/ptx/memory.h"
#include "engine/cuda/device/ptx/tma.h"
#include "engine/cuda/device/ptx/warpgroup.h"

namespace uniep::cuda {

// One warp's ring in shared memory, through which bulk copies move chunks of rows.
template <int kChunkBytes, int kStages>
struct CopyRingStorage {
  static_assert(kChunkBytes % 16 == 0 && kChunkBytes > 0, "bulk copies move multiples of 16 bytes");
  static_assert(kStages >= 1 && kStages <= 32, "lane s remembers what stage s holds");
  static constexpr uint32_t kBytes = kChunkBytes;
  static constexpr uint32_t kCount = kStages;

  alignas(128) uint8_t chunks[kStages][kChunkBytes];
  uint64_t full[kStages];
  ptx::Vector16 notes[kStages];  // to be at hand when pieces are full
};

// One thread; ptx::fence_mbarrier_init() and a barrier must follow.
template <typename Storage>
UNIEP_DEVICE void init_copy_ring(Storage& storage) {
  for (uint32_t stage = 0; stage < Storage::kCount; ++stage) ptx::mbarrier_init(storage.full[stage], 1);
}

// One thread: before the ring's memory is used for anything else.
template <typename Storage>
UNIEP_DEVICE void invalidate_copy_ring(Storage& storage) {
  for (uint32_t stage = 0; stage < Storage::kCount; ++stage) ptx::mbarrier_invalidate(storage.full[stage]);
}

// The walk of a whole warp around its ring: chunks are loaded, land in order, and are stored to any number of places.
// Bulk stores belong to the lane that issues them; every lane commits one group a chunk.
template <typename Storage>
class CopyRing {
 public:
  static constexpr uint32_t kChunkBytes = Storage::kBytes;

  struct Chunk {
    uint32_t address;
    int32_t row;
    uint32_t offset;  // bytes from the row's begin
  };

  UNIEP_DEVICE explicit CopyRing(Storage& storage) : storage_(storage) {}

  UNIEP_DEVICE bool is_empty() const { return loads_ == 0; }
  UNIEP_DEVICE bool is_full() const { return loads_ == kMaxLoads; }
  // For a warp that stores nothing by bulk copies: it may have all stages loaded.
  UNIEP_DEVICE bool has_no_stage() const { return loads_ == Storage::kCount; }

  // Of the chunk at `offset` of a row of so many bytes.
  UNIEP_DEVICE static uint32_t chunk_size(uint32_t row_bytes, uint32_t offset) {
    return row_bytes - offset < kChunkBytes ? row_bytes - offset : kChunkBytes;
  }

  // Begins to load a chunk of a row. The ring is not full.
  UNIEP_DEVICE void load(const void* source, uint32_t bytes, int32_t row, uint32_t offset) {
    ptx::bulk_wait_read<kStoresReading>();
    const uint32_t stage = take_stage();
    if (ptx::lane_index() == stage) {
      row_ = row;
      offset_ = offset;
    }
    if (ptx::lane_index() == 0) {
      ptx::mbarrier_arrive_expect_bytes(storage_.full[stage], bytes);
      ptx::bulk_load(ptx::shared_address(storage_.chunks[stage]), source, bytes, storage_.full[stage]);
    }
  }

  // Waits for the oldest chunk to land. The ring is not empty.
  UNIEP_DEVICE Chunk wait_for_chunk() {
    ptx::mbarrier_wait(storage_.full[stage_], phase_, "copied chunk");
    return {ptx::shared_address(storage_.chunks[stage_]), __shfl_sync(0xffffffffu, row_, static_cast<int>(stage_)),
            __shfl_sync(0xffffffffu, offset_, static_cast<int>(stage_))};
  }

  struct Pieces {
    uint32_t address;
    ptx::Vector16 note;
  };

  // Pieces instead of chunks, which no bulk store leaves from: each lane of the mask `lanes` loads one, laid one behind
  // the other.
  UNIEP_DEVICE void load_pieces(uint32_t lanes, const void* source, uint32_t bytes, const ptx::Vector16& note) {
    ptx::fence_proxy_async_shared();  // what this lane has read of the stage, before bulk copies write there again
    const uint32_t stage = take_stage();
    if (ptx::lane_index() == 0) {
      ptx::store_shared_16(ptx::shared_address(&storage_.notes[stage]), note);  // before the stage can be full
      ptx::mbarrier_arrive_expect_bytes(storage_.full[stage], static_cast<uint32_t>(__popc(lanes)) * bytes);
    }
    __syncwarp();
    if ((lanes >> ptx::lane_index() & 1u) == 0) return;
    const uint32_t before = static_cast<uint32_t>(__popc(lanes & ((1u << ptx::lane_index()) - 1)));
    ptx::bulk_load(ptx::shared_address(storage_.chunks[stage]) + before * bytes, source, bytes, storage_.full[stage]);
  }

  UNIEP_DEVICE Pieces wait_for_pieces() {
    ptx::mbarrier_wait(storage_.full[stage_], phase_, "copied pieces");
    return {ptx::shared_address(storage_.chunks[stage_]),
            ptx::load_shared_16(ptx::shared_address(&storage_.notes[stage_]))};
  }

  // After the stores of the oldest chunk have been issued.
  UNIEP_DEVICE void release() {
    ptx::bulk_commit();
    release_pieces();
  }

  // After the oldest pieces have been read.
  UNIEP_DEVICE void release_pieces() {
    --loads_;
    stage_ = stage_ + 1 == Storage::kCount ? 0 : stage_ + 1;
    phase_ ^= stage_ == 0;
  }

  // Until the stores of all released chunks are complete in memory, so that a signal may announce them.
  UNIEP_DEVICE void complete() {
    ptx::bulk_wait_complete<0>();
    __syncwarp();
  }

 private:
  // Stores that may still be reading their stages while further chunks are loaded.
  static constexpr uint32_t kStoresReading = Storage::kCount / 4;
  static constexpr uint32_t kMaxLoads = Storage::kCount - kStoresReading;

  // The next stage, which all lanes are through with.
  UNIEP_DEVICE uint32_t take_stage() {
    const uint32_t ahead = stage_ + loads_;
    __syncwarp();
    ++loads_;
    return ahead >= Storage::kCount ? ahead - Storage::kCount : ahead;
  }

  Storage& storage_;
  uint32_t stage_ = 0;  // of the oldest chunk
  uint32_t phase_ = 0;
  uint32_t loads_ = 0;  // chunks that have been loaded and not yet released
  int32_t row_ = 0;     // of the chunk in stage `lane`
  uint32_t offset_ = 0;
};

struct CopiedRows {
  int32_t begin, end;
  uint32_t bytes;  // of a row
};

template <typename Selects, typename Source>
struct RowChoice {
  Selects selects;
  Source source;
};
template <typename Selects, typename Source>
RowChoice(Selects, Source) -> RowChoice<Selects, Source>;

// Copies the bytes of each of the rows for which `choice.selects(row)` is true. `choice.source(row)` is where a row's
// bytes lie: both are asked by one lane a row. `store(chunk, bytes)` issues the bulk stores of a full chunk, by the
// whole warp. On return all loads are complete; stores may still be under way.
template <typename Ring, typename Choice, typename Store>
UNIEP_DEVICE void copy_rows(Ring& ring, const CopiedRows& rows, Choice&& choice, Store&& store) {
  const int32_t end = rows.end;
  const uint32_t bytes = rows.bytes;
  const auto retire = [&] {
    const auto chunk = ring.wait_for_chunk();
    store(chunk, ring.chunk_size(bytes, chunk.offset));
    ring.release();
  };
  for (int32_t first = rows.begin; first < end; first += ptx::kThreadsPerWarp) {
    const int32_t mine = first + static_cast<int32_t>(ptx::lane_index());
    const bool copied = mine < end && choice.selects(mine);
    const uint64_t address = copied ? reinterpret_cast<uint64_t>(choice.source(mine)) : 0;
    for (uint32_t left = __ballot_sync(0xffffffffu, copied); left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const auto* const row = reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffffu, address, lane));
      for (uint32_t offset = 0; offset < bytes; offset += Ring::kChunkBytes) {
        if (ring.is_full()) retire();
        ring.load(row + offset, ring.chunk_size(bytes, offset), first + lane, offset);
      }
    }
  }
  while (!ring.is_empty()) retire();
}

}  // namespace uniep::cuda
