#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace uniep {

// Memory of the same size on every rank of a group, all of which every rank's kernels can read and write.
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

  // Returns when every rank has called it and has finished its device work.
  virtual void barrier() = 0;
};

// One process drives all ranks: rank r runs on devices[r]. A device may stand for several ranks (virtual ranks), so
// that whole multi-rank kernels run on one GPU. Throws uniep::Error where two devices can not reach each other.
std::unique_ptr<SymmetricMemory> make_local_symmetric_memory(const std::vector<int>& devices, int64_t bytes);

// A process a rank, over NCCL's symmetric windows (NCCL 2.28 or later, found at run time; all ranks within NVLink's
// reach).
struct NcclBootstrap {
  int rank = 0;
  int ranks = 1;
  int device = 0;
  std::string unique_id;         // the 128 bytes of ncclGetUniqueId from one rank; or
  void* communicator = nullptr;  // a ncclComm_t that the caller has and keeps
};

// From torchrun's environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (the port after it is used).
NcclBootstrap nccl_bootstrap_from_environment();

// For one rank, to be handed to the others by the caller's own means.
std::string make_nccl_unique_id();

std::unique_ptr<SymmetricMemory> make_nccl_symmetric_memory(const NcclBootstrap& bootstrap, int64_t bytes);

}  // namespace uniep
