#pragma once

#include <cuda.h>

#include <memory>
#include <vector>

#include "engine/cuda/device/placement_tables.h"
#include "engine/cuda/layer/block_cache.h"
#include "engine/cuda/layer/upload_ring.h"
#include "engine/engine.h"
#include "program/build.h"
#include "program/edges.h"

namespace uniep::cuda {

// Where the tables of one of this process's ranks go.
struct RankTarget {
  int rank;
  int device;
  CUstream stream;  // in whose order the tables are written, behind all earlier calls
  UploadRing* uploads;
};

// A Program of one rank whose tables lie on the rank's device.
struct DeviceProgram {
  RankProgram program;
  SignalLayout layout;
};

// A placement's tables on the devices of this process's ranks, and the Programs that calls have made of it. Kept with
// the placement. Its memory comes from a group's cache: no call that follows may begin before the tables' last use.
class PlacedTables final : public internal::EngineTables {
 public:
  // Uploads the tables of a placement that was made on the host.
  PlacedTables(const internal::PlacementState& placement, std::shared_ptr<BlockCache> cache,
               const std::vector<RankTarget>& targets);

  const PlacementTables& tables(std::size_t local_rank) const { return tables_[local_rank]; }

  // The Programs of this process's ranks under a request; their tables are uploaded at the first call.
  const std::vector<DeviceProgram>& programs(const ProgramRequest& request,
                                             const std::shared_ptr<const internal::PlacementState>& placement,
                                             const std::vector<RankTarget>& targets);

 private:
  struct Made {
    ProgramRequest request;
    std::vector<internal::MemoryBlock> memory;
    std::vector<DeviceProgram> programs;
  };

  std::shared_ptr<BlockCache> cache_;
  std::vector<internal::MemoryBlock> memory_;
  std::vector<PlacementTables> tables_;  // of local ranks
  std::vector<std::unique_ptr<Made>> made_;
};

}  // namespace uniep::cuda
