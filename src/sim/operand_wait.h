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

// How long such a tile waits for operands. A stage is asked for once its last reader is through, so that a K block
// takes as long as `stages` of them share one way through memory; as many are there when the tile begins.
class OperandWait {
 public:
  OperandWait() = default;
  OperandWait(const PipelinedTile& tile, const Pipeline& pipeline) {
    if (pipeline.port == 0) return;
    constexpr double kBlockK = 64;  // of Hopper's pipelines
    const double carried = 2 * kBlockK * (tile.rows + tile.n / tile.cluster) / pipeline.port;
    const double work = kBlockK * tile.cycles_per_k, blocks = tile.depth / kBlockK;
    each_ = std::max(work, carried);
    way_ = carried + work;
    stages_ = tile.stages;
    by_port_ = blocks * (each_ - work);
    late_blocks_ = std::max(0.0, blocks - tile.stages);
  }

  // `latency`: cycles until what is asked for begins to come.
  double cycles(double latency) const {
    return by_port_ + late_blocks_ * std::max(0.0, (latency + way_) / stages_ - each_);
  }

 private:
  double by_port_ = 0;      // cycles in which the port is slower than tensor cores
  double late_blocks_ = 0;  // K blocks that are asked for during the tile
  double way_ = 0, each_ = 0, stages_ = 1;
};

// us of that latency while this share of the workers run tiles.
inline double operand_latency(const Pipeline& pipeline, double busy_share) {
  return pipeline.latency + pipeline.busy * busy_share;
}

}  // namespace uniep::sim
