#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/cuda/device_placement.h"
#include "engine/cuda/layer/placed_tables.h"
#include "engine/cuda/layer/rank_devices.h"

namespace uniep::cuda {

// Makes placements on the GPUs of a group whose ranks are all in this process.
class GroupPlacer : public std::enable_shared_from_this<GroupPlacer> {
 public:
  // `kernels`: of the device of each rank. Waits may take `wait_seconds`, a rank's arrival `arrival_seconds`.
  GroupPlacer(const RankDevices& ranks, const std::vector<KernelStore*>& kernels, std::shared_ptr<BlockCache> cache,
              double wait_seconds, double arrival_seconds);

  // From routings on the devices to tables there, in the streams of `targets` (one a rank). By need: the host waits for
  // the counts, and throws as place_on_host() does. Within a capacity: it does not wait, and what is wrong is noticed
  // later.
  std::shared_ptr<internal::PlacementState> place(const LayerShape& shape, std::span<const Routing> routings,
                                                  Capacity capacity, const std::vector<RankTarget>& targets);

  // Completes the RankCalls of a call (their device addresses, one a rank) whose Programs are made on the devices.
  void build_programs(const std::vector<RankCall*>& calls, const std::vector<DeviceProgram>& programs,
                      const std::vector<CUstream>& streams);

  // The counts [W, E] of a placement, once the devices have made it. Throws what has gone wrong there.
  std::vector<int32_t> counts(const LayerShape& shape, const PlacementTables& tables);

  // Throws what has gone wrong on the devices as far as the host has been told. Does not wait. After a time-out it
  // refuses every call until clear().
  void throw_noticed_failure();

  // After a time-out, when nothing runs any more.
  void clear() { placer_->clear(); }

 private:
  std::shared_ptr<BlockCache> cache_;
  std::unique_ptr<SymmetricMemory> memory_;
  std::unique_ptr<Placer> placer_;
};

}  // namespace uniep::cuda
