#pragma once

#include <cuda.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/cuda/device/arguments/placement_tables.h"
#include "engine/cuda/memory/block_cache.h"
#include "engine/cuda/memory/upload_ring.h"
#include "engine/cuda/runtime/device_event.h"
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
  // Where the counts are on the devices only: the tables that each call has made there; `layout` is the largest there
  // can be.
  bool made_on_device = false;
  ProgramTables tables = {};
};

// Padded rows of any rank, in bytes of a row table.
int64_t row_table_bytes(const internal::PlacementState& placement);

// T of any rank, at most.
int64_t most_tokens(const internal::PlacementState& placement);

// Of a rank's x.
std::size_t input_bytes(const DeviceProgram& program, const LayerShape& shape);

// What the host knows of a rank's Program: all of it, or where the counts are on the devices only, with as many row
// blocks as can be.
RankProgram program_on_host(const Program& program, int rank);

// A placement's tables on the devices of this process's ranks, and the Programs that calls have made of it. Kept with
// the placement. Its memory comes from a group's cache: no call that follows may begin before the tables' last use.
class PlacedTables final : public internal::EngineTables {
 public:
  // Takes tables that kernels write, the first rank's on `device`, and their memory.
  PlacedTables(std::vector<PlacementTables> tables, std::vector<internal::MemoryBlock> memory,
               std::shared_ptr<BlockCache> cache, int device);

  // Behind the kernels that count, where the host has not read the counts: with_counts() waits for this point.
  void mark_placed(CUstream stream);

  internal::PlacementState with_counts(const internal::PlacementState& placed) const override;

  const PlacementTables& tables(std::size_t local_rank) const { return tables_[local_rank]; }

  // What with_counts() asks first: throws what the group has noticed of its placements.
  void set_ask(std::function<void()> ask) { ask_ = std::move(ask); }

  bool is_of(const BlockCache& cache) const { return cache_.get() == &cache; }

  // Of the call that placed, which all ranks count alike.
  uint32_t number() const { return number_; }
  void set_number(uint32_t number) { number_ = number; }

  // The layout of a rank's signals under a request. What is built for it serves the call that follows.
  SignalLayout layout(const ProgramRequest& request, const internal::PlacementState& placement, int rank);

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

  std::function<void()> ask_;
  uint32_t number_ = 0;
  std::shared_ptr<BlockCache> cache_;
  DeviceEvent placed_;  // of mark_placed(); none in a graph
  int device_;
  std::vector<internal::MemoryBlock> memory_;
  std::vector<PlacementTables> tables_;  // of local ranks
  std::vector<std::unique_ptr<Made>> made_;
  std::unique_ptr<const Program> asked_;  // for layout() alone, so far
};

// Throws Error(kInvalidArgument) for a placement of another engine.
PlacedTables& tables_of(const internal::PlacementState& placement);

}  // namespace uniep::cuda
