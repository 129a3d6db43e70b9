#pragma once

#include <algorithm>

#include "sim/machine.h"

namespace uniep::sim {

// A tile of a row GEMM, `n` columns wide: its K blocks of operands come into `stages` stages of shared memory.
struct PipelinedTile {
  double rows = 0, n = 0;
  double depth = 0;         // K
  double cycles_per_k = 0;  // of tensor cores
  int cluster = 1;          // workers that share a weight tile
  int stages = 1;
};

// How operands come into a worker, in cycles of its clock: memory does not follow that.
struct OperandPath {
  double latency = 0;  // until what is asked for begins to come
  double port = 0;     // bytes/cycle; 0: no limit, and no wait

  // While this share of the workers run tiles.
  OperandPath(const MachineDescription& machine, double busy_share, double clock_ghz)
      : latency((machine.pipeline.latency + machine.pipeline.busy * busy_share) * clock_ghz * 1e3),
        port(machine.pipeline.port * machine.clock.highest / clock_ghz) {}
};

// How long such a tile waits for operands. A stage is asked for once its last reader is through, so that a K block
// takes as long as `stages` of them share one way through memory; as many are there when the tile begins.
class OperandWait {
 public:
  OperandWait() = default;
  explicit OperandWait(const PipelinedTile& tile)
      : bytes_(2 * kBlockK * (tile.rows + tile.n * (1 - kShared + kShared / tile.cluster))),
        work_(kBlockK * tile.cycles_per_k),
        blocks_(tile.depth / kBlockK),
        stages_(tile.stages),
        late_blocks_(std::max(0.0, blocks_ - tile.stages)) {}

  double cycles(const OperandPath& path) const {
    if (path.port == 0) return 0;
    const double carried = bytes_ / path.port, each = std::max(work_, carried);
    const double by_port = blocks_ * (each - work_);
    return by_port + late_blocks_ * std::max(0.0, (path.latency + carried + work_) / stages_ - each);
  }

 private:
  static constexpr double kBlockK = 64;  // of Hopper's pipelines
  // Of what workers share: it leaves L2 once, but comes into each of them.
  static constexpr double kShared = 0.5;
  double bytes_ = 0, work_ = 0;  // of a K block
  double blocks_ = 0, stages_ = 1;
  double late_blocks_ = 0;  // that are asked for during the tile
};

}  // namespace uniep::sim
