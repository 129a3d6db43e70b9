#include "engine/cuda/layer/layer_tiles.h"

#include <string>

#include "program/build.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(Status::kUnsupported, "schedule on cuda: " + message);
}

void require_tile(const Schedule& schedule, GemmStage stage, const std::string& name) {
  const TileShape tile = schedule.tile_of(stage);
  const auto require = [&](bool holds, const char* field, int value, const std::string& legal) {
    if (!holds) refuse(name + ": tile." + field + " is " + std::to_string(value) + "; built is " + legal);
  };
  require(tile.m == kTileM, "m", tile.m, std::to_string(kTileM));
  require(tile.k == kTileK, "k", tile.k, std::to_string(kTileK));
  require(tile.n == 128 || tile.n == 256, "n", tile.n, "128 and 256");
  if (tile.pipeline != Pipeline::kCooperative) refuse(name + ": tile.pipeline is pingpong; built is cooperative");
}

}  // namespace

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
  if (direction == Direction::kBackward) refuse("the backward pass is not built; run it with engine cpu");
  require_tile(schedule, GemmStage::kFc1, "fc1");
  require_tile(schedule, GemmStage::kFc2, "fc2");
  const TileShape first = schedule.tile_of(GemmStage::kFc1), second = schedule.tile_of(GemmStage::kFc2);
  if (first.cluster != second.cluster) refuse("fc1 and fc2 must have the same tile.cluster");
  if (schedule.fusion == Fusion::kLayer && (first.n != second.n || first.stages != second.stages)) {
    refuse("fusion=layer runs fc1 and fc2 in one kernel, with the same tile.n and tile.stages");
  }
  try {
    for (const LaunchStages& stages : launch_stages(schedule, direction)) launch_config(schedule, numerics, stages);
  } catch (const Error& error) {
    refuse(error.what());
  }
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
