#include "engine/cuda/calls/layer_tiles.h"

#include <cstdint>
#include <string>

#include "engine/cuda/device/arguments/gemm_config.h"
#include "engine/cuda/device/arguments/placement_tables.h"
#include "engine/cuda/device/arguments/rank_call.h"
#include "engine/cuda/device/arguments/signals.h"
#include "model/activation_choice.h"
#include "model/row_table.h"
#include "program/build.h"
#include "program/buildable.h"
#include "uniep/error.h"

namespace uniep::cuda {

static_assert(kMaxBuiltRanks == kMaxCudaRanks && kMaxBuiltSlots == kMaxCudaSlots &&
              kMaxBuiltExperts == kMaxPlaceExperts);

namespace {

FilledGradients filled_by(const Numerics& numerics) {
  switch (numerics.weight_gradient) {
    case WeightGradient::kBFloat16:
      return FilledGradients::kBFloat16;
    case WeightGradient::kFloat32:
      return FilledGradients::kFloat32;
    default:
      return FilledGradients::kAccumulate;
  }
}

// In backward `output` is as `activation`, da . a is dy . o; and z has its bias.
ExpertConfig expert_config(const Numerics& numerics, Direction direction) {
  ExpertConfig config;
  config.activation = activation_kind(numerics);
  config.weighs_z = numerics.router_weight == RouterWeight::kInput;
  config.weighs_output = numerics.router_weight == RouterWeight::kOutput && direction == Direction::kForward;
  config.bias = numerics.bias && direction == Direction::kForward;
  if (config.activation != ActivationKind::kShapedSwiglu) return config;
  const ActivationParameters parameters = activation_parameters(numerics);
  config.alpha = bits_of_float(parameters.alpha);
  config.gate_limit = bits_of_float(parameters.gate_limit);
  config.up_limit = bits_of_float(parameters.up_limit);
  config.up_offset = bits_of_float(parameters.up_offset);
  return config;
}

}  // namespace

void require_summable(const LayerShape& shape, const Numerics& numerics) {
  constexpr int64_t kMaxSummands = 32;  // row_sum.h: a lane of a warp for each
  const auto require = [](const char* name, int64_t value) {
    if (value <= kMaxSummands) return;
    throw Error(Status::kUnsupported, std::string(name) + ": " + std::to_string(value) +
                                          "; the cuda engine sums up to " + std::to_string(kMaxSummands));
  };
  require("topk", shape.topk);
  require("combine_groups", numerics.combine_groups);
}

void require_countable(const LayerShape& shape) {
  constexpr int64_t kMax = int64_t{UINT16_MAX} * 8;  // LayerTask::column_eighth
  static_assert(kMaxPlaceExperts <= UINT16_MAX, "LayerTask::expert");
  const auto require = [](const char* name, int64_t value) {
    if (value <= kMax) return;
    throw Error(Status::kUnsupported, std::string(name) + ": " + std::to_string(value) +
                                          "; on cuda a layer has up to " + std::to_string(kMax) + " columns");
  };
  require("hidden", shape.hidden);
  require("intermediate", shape.intermediate);
}

void require_countable_rows(int64_t rows, int rank, Direction direction) {
  const bool backward = direction == Direction::kBackward;
  // K blocks of a weight gradient; row blocks of an expert.
  const int64_t most = int64_t{UINT16_MAX} * (backward ? kTileK : kRowAlignment);
  if (rows <= most) return;
  throw Error(Status::kUnsupported, "rows: " + std::to_string(rows) + " on rank " + std::to_string(rank) +
                                        "; on cuda " + (backward ? "backward" : "forward") + " takes up to " +
                                        std::to_string(most) + " rows of a rank");
}

void require_instantiable(const Schedule& schedule, const Numerics& numerics, Direction direction) {
  for (const LaunchStages& stages : launch_stages(schedule, direction)) {
    if (!is_weight_gradients_alone(stages)) launch_config(schedule, numerics, direction, stages);
  }
}

bool is_weight_gradients_alone(const LaunchStages& stages) {
  return !stages.dispatch && !stages.first_gemm && !stages.second_gemm && !stages.combine;
}

GemmConfig weight_gradient_config(const Schedule& schedule, const Numerics& numerics, GemmStage stage) {
  const TileShape tile = schedule.tile_of(stage);
  GemmConfig config;
  config.layout = Layout::kWgrad;
  config.epilogue = epilogue_of(filled_by(numerics));
  config.tile_n = tile.n;
  config.cluster = tile.cluster;
  config.pipeline_stages = tile.stages;
  require_legal(config);
  return config;
}

LayerKernelConfig launch_config(const Schedule& schedule, const Numerics& numerics, Direction direction,
                                const LaunchStages& stages) {
  const bool backward = direction == Direction::kBackward, second = stages.second_gemm || stages.combine;
  const GemmStage stage = backward ? (second ? GemmStage::kDgradFc1 : GemmStage::kDgradFc2)
                                   : (stages.second_gemm ? GemmStage::kFc2 : GemmStage::kFc1);
  const TileShape tile = schedule.tile_of(stage);
  LayerKernelOptions options;
  if (backward) options.gemms = second ? LayerGemms::kSecondGradient : LayerGemms::kFirstGradient;
  if (backward && stages.first_gemm && stages.second_gemm) {
    options.gemms = LayerGemms::kGradients;
    options.first_tile_n = schedule.tile_of(GemmStage::kDgradFc2).n;
  }
  options.tile_n = tile.n;
  options.cluster = tile.cluster;
  options.pipeline_stages = tile.stages;
  options.ring_stage_bytes = schedule.comm.chunk_bytes;
  options.copy_stages = schedule.comm.stages;
  const bool combines = !backward || second;
  if (combines && schedule.combine.transport == CombineTransport::kStaged) {
    options.combine = numerics.combine_groups > 0 ? CombineKind::kGroups : CombineKind::kStaged;
  }
  options.expert = expert_config(numerics, direction);
  options.on_sms = schedule.comm.where == CommWhere::kSms;
  if (stages.wgrad_fc2 || stages.wgrad_fc1) {
    options.filled = filled_by(numerics);
    options.mixed = schedule.wgrad == WgradOrder::kMixed;
  }
  return layer_config(options);
}

int cluster_of(const Schedule& schedule, Direction direction) {
  return schedule.tile_of(direction == Direction::kForward ? GemmStage::kFc1 : GemmStage::kDgradFc2).cluster;
}

}  // namespace uniep::cuda
