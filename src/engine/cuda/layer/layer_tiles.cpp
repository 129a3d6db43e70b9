#include "engine/cuda/layer/layer_tiles.h"

#include <string>

#include "program/build.h"
#include "uniep/error.h"

namespace uniep::cuda {
void require_summable(const LayerShape& shape, const Numerics& numerics) {
  constexpr int64_t kMostSummands = 32;  // row_sum.h: a lane of a warp for each
  const auto require = [](const char* name, int64_t value) {
    if (value <= kMostSummands) return;
    throw Error(Status::kUnsupported, std::string(name) + ": " + std::to_string(value) +
                                          "; the cuda engine sums up to " + std::to_string(kMostSummands));
  };
  require("topk", shape.topk);
  require("combine_groups", numerics.combine_groups);
}

void require_instantiable(const Schedule& schedule, const Numerics& numerics, Direction direction) {
  if (direction == Direction::kBackward) {
    throw Error(Status::kUnsupported, "cuda: the backward pass is not built; run it with engine cpu");
  }
  for (const LaunchStages& stages : launch_stages(schedule, direction)) launch_config(schedule, numerics, stages);
}

LayerKernelConfig launch_config(const Schedule& schedule, const Numerics& numerics, const LaunchStages& stages) {
  const TileShape tile = schedule.tile_of(stages.second_gemm ? GemmStage::kFc2 : GemmStage::kFc1);
  LayerKernelOptions options;
  options.tile_n = tile.n;
  options.cluster = tile.cluster;
  options.stages = tile.stages;
  options.copy_chunk_bytes = schedule.comm.chunk_bytes;
  options.copy_stages = schedule.comm.stages;
  if (schedule.combine.transport == CombineTransport::kStaged) {
    options.combine = numerics.combine_groups > 0 ? CombineKind::kGroups : CombineKind::kStaged;
  }
  options.on_sms = schedule.comm.where == CommWhere::kSms;
  return layer_config(options);
}

int cluster_of(const Schedule& schedule) {
  return schedule.tile_of(GemmStage::kFc1).cluster;
}

int pull_parts(const LayerShape& shape) {
  constexpr int64_t kPartBytes = 64 << 10;
  constexpr int kMostParts = 16;
  int parts = 1;
  while (parts < kMostParts && kTileM * shape.hidden * 2 / (int64_t{2} * parts) >= kPartBytes) parts *= 2;
  return parts;
}

}  // namespace uniep::cuda
