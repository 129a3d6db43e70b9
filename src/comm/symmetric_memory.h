#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/rank_mesh.h"

namespace uniep {

// Memory of the same size on every rank of a group, zero at first, all of which every rank's kernels can read and
// write. It never changes its size or its addresses. Its end is no collective call and waits for nobody; this process's
// devices must have done with it.
class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;

  virtual int ranks() const = 0;
  virtual int64_t bytes() const = 0;

  // The ranks that this process drives, and the CUDA device of each: all of the group, or one.
  virtual const std::vector<int>& own_ranks() const = 0;
  virtual int device(int own_rank) const = 0;

  // Where kernels of `own_rank` find the memory of `peer` (its own included).
  virtual void* address(int own_rank, int peer) const = 0;

  // Collective. Returns when every rank has called it and its device has done what was given to it in the order of the
  // default stream, as all streams are but those made non-blocking. Throws Error(kTimeout) instead of waiting for ever.
  virtual void barrier() = 0;

  // The sockets to the other ranks' processes; null where this process drives all ranks.
  virtual RankMesh* mesh() const { return nullptr; }
};

// One process drives all ranks: rank r runs on devices[r]. A device may stand for several ranks (virtual ranks), so
// that whole multi-rank kernels run on one GPU. Throws uniep::Error where two devices can not reach each other.
std::unique_ptr<SymmetricMemory> make_local_symmetric_memory(const std::vector<int>& devices, int64_t bytes,
                                                             double wait_seconds = 600);

// A process a rank, all of them on one host: memory of `device` that the CUDA driver shares between processes. The size
// is rounded up; a rank's memory lives until the last process that has it mapped lets go. Collective. What fails on one
// rank, out of memory say, is the same Error on all, nothing is left behind, and the mesh goes on. `verify`: looks
// whether each peer's memory is the peer's.
std::unique_ptr<SymmetricMemory> make_process_memory(std::shared_ptr<RankMesh> mesh, int64_t bytes, int device,
                                                     bool verify = false);

// The same for `bytes` bytes from `base` on that the caller has and keeps: from the above, or ncclMemAlloc. Not
// cleared. Collective. Throws Error(kInvalidArgument) on all ranks where one rank's can not be shared (cudaMalloc's can
// not).
std::unique_ptr<SymmetricMemory> share_memory(std::shared_ptr<RankMesh> mesh, void* base, int64_t bytes, int device);

}  // namespace uniep
