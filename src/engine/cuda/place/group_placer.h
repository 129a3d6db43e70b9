#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/cuda/memory/symmetric_region.h"
#include "engine/cuda/place/device_placement.h"
#include "engine/cuda/place/placed_tables.h"

namespace uniep::cuda {

// Makes placements on the GPUs of a group.
class GroupPlacer {
 public:
  // What waits may take, and a rank's arrival.
  struct Limits {
    double wait_seconds, arrival_seconds;
  };
  // `kernels`: of the device of each own rank.
  // `through_inbox`: peers can not reach a placement's row table (a process a GPU).
  GroupPlacer(SymmetricRegion& symmetric, const std::vector<KernelStore*>& kernels, std::shared_ptr<BlockCache> cache,
              const Limits& limits, bool through_inbox);

  void set_wait(Placer::WaitForStream wait) { placer_.set_wait(std::move(wait)); }

  struct Call {
    const LayerShape& shape;
    std::span<const Routing> routings;
    Capacity capacity;
    const std::vector<RankTarget>& targets;  // whose streams and memory the tables go to, one an own rank
    uint32_t number;                         // of the call on this rank
    // Makes room for what the placement needs of the group's symmetric memory.
    std::function<void(const SymmetricNeed& need)> reserve;
  };

  void load_again() { placer_.load_again(); }

  // From routings on the devices to tables there. By need: the host waits for the counts, and throws as place_on_host()
  // does. Within a capacity: it does not wait, and what is wrong is noticed later.
  std::shared_ptr<internal::PlacementState> place(const Call& call);

  // Completes the RankCalls of a call (their device addresses, one a rank) whose Programs are made on the devices.
  void build_programs(const std::vector<RankCall*>& calls, const std::vector<DeviceProgram>& programs,
                      const std::vector<CUstream>& streams);

  // Throws what has gone wrong on the devices as far as the host has been told. Does not wait. After a time-out it
  // refuses every call until clear().
  void throw_noticed_failure();

  // After a time-out, between two barriers of the group.
  void clear() { placer_.clear(); }

 private:
  void read_counts(const Call& call, internal::PlacementState& state, const std::vector<RankToPlace>& ranks);
  SymmetricNeed need_of(const internal::PlacementState& state) const;

  SymmetricRegion& symmetric_;
  std::shared_ptr<BlockCache> cache_;
  Placer placer_;
  bool through_inbox_;
};

}  // namespace uniep::cuda
