#include "program/build.h"

#include <algorithm>

#include "model/activation_choice.h"
#include "program/program_tables.h"

namespace uniep {

std::vector<LaunchStages> launch_stages(const Schedule& schedule, Direction direction, bool weight_gradients) {
  const bool wgrad = direction == Direction::kBackward && weight_gradients;
  const bool fill = wgrad && schedule.wgrad == WgradOrder::kFill;
  std::vector<LaunchStages> launches;
  switch (schedule.fusion) {
    case Fusion::kNone:
      launches = {{.dispatch = true}, {.first_gemm = true}, {.second_gemm = true}, {.combine = true}};
      if (wgrad) {
        launches.push_back({.wgrad_fc2 = true});
        launches.push_back({.wgrad_fc1 = true});
      }
      return launches;
    case Fusion::kPairs:
      launches = {{.dispatch = true, .first_gemm = true}, {.second_gemm = true, .combine = true}};
      break;
    case Fusion::kLayer:
      launches = {{.dispatch = true, .first_gemm = true, .second_gemm = true, .combine = true}};
      break;
  }
  if (fill) {
    launches.back().wgrad_fc2 = launches.back().wgrad_fc1 = true;
  } else if (wgrad) {
    launches.push_back({.wgrad_fc2 = true, .wgrad_fc1 = true});
  }
  return launches;
}

bool comes_in_clusters(const Schedule& schedule, int workers, int cluster) {
  const CommSchedule& comm = schedule.comm;
  const int kinds[] = {workers - comm.reserve_sms, comm.dispatch_sms, comm.combine_sms, comm.reduce_sms};
  return std::all_of(std::begin(kinds), std::end(kinds), [&](int count) { return count % cluster == 0; });
}

std::vector<int32_t> column_chunk_bounds(int64_t columns, int chunks) {
  std::vector<int32_t> bounds{0};
  for (int chunk = 1; chunk <= chunks; ++chunk) {
    const int32_t bound = static_cast<int32_t>(columns / 8 * chunk / chunks * 8);
    if (bound > bounds.back()) bounds.push_back(bound);
  }
  return bounds;
}

int first_tile_columns(const Schedule& schedule, Direction direction) {
  return direction == Direction::kForward ? schedule.tile_of(GemmStage::kFc1).n / 2
                                          : schedule.tile_of(GemmStage::kDgradFc2).n;
}

RankProgram part_of(const RankProgram& layer, ProgramPart part) {
  RankProgram p = layer;
  if (part == ProgramPart::kLayer) return p;
  const bool combine = part == ProgramPart::kCombine;
  p.on_sms = false;
  p.launches = 1;
  p.stages[0] = {.dispatch = !combine, .combine = combine};
  if (!combine) return p;
  p.epilogue_combine = false;
  for (int32_t& tile : p.chunk_tile) tile = 0;  // no GEMM's tiles to wait for
  return p;
}

namespace {

// An exchange has no GEMMs to share its workers with.
ProgramRequest with_own_workers(ProgramRequest request) {
  if (request.part == ProgramPart::kLayer) return request;
  CommSchedule& comm = request.schedule.comm;
  comm.where = CommWhere::kWarps;
  comm.dispatch_sms = comm.combine_sms = comm.reduce_sms = 0;
  request.schedule.fusion = Fusion::kNone;
  request.schedule.order.interleave = Interleave::kPhased;
  return request;
}

}  // namespace

Program::Program(const ProgramRequest& request, std::shared_ptr<const internal::PlacementState> placement)
    : request_(with_own_workers(request)), placement_(std::move(placement)) {
  tables_.resize(placement_->ranks);
  ranks_.resize(placement_->ranks);
  build_shared_tables();
  for (int rank = 0; rank < placement_->ranks; ++rank) build_rank(rank);
}

void Program::build_shared_tables() {
  const internal::PlacementState& state = *placement_;
  expert_block_.resize(state.shape.experts);
  blocks_of_rank_.resize(state.ranks);
  token_block_begin_.assign(1, 0);
  for (int rank = 0; rank < state.ranks; ++rank) {
    int32_t blocks = 0;
    for (int32_t expert = state.expert_begin[rank]; expert < state.expert_begin[rank + 1]; ++expert) {
      expert_block_[expert] = blocks;
      blocks += blocks_of_rows(state.expert_rows[expert], request_.schedule.tile.m);
    }
    blocks_of_rank_[rank] = blocks;
    tokens_of_rank_.push_back(static_cast<int32_t>(state.rank[rank].tokens));
    token_block_begin_.push_back(token_block_begin_.back() +
                                 static_cast<int32_t>(divide_up(state.rank[rank].tokens, kTokenBlock)));
  }
}

namespace {

// What is computed, of which rank.
void set_sizes(RankProgram& p, const ProgramRequest& request, const internal::PlacementState& state, int rank) {
  const auto hidden = static_cast<int32_t>(state.shape.hidden);
  const auto intermediate = static_cast<int32_t>(state.shape.intermediate);
  p.direction = request.direction;
  p.rank = rank;
  p.ranks = state.ranks;
  p.experts = static_cast<int32_t>(state.shape.experts);
  p.topk = static_cast<int32_t>(state.shape.topk);
  p.tokens = static_cast<int32_t>(state.rank[rank].tokens);
  p.first_expert = state.expert_begin[rank];
  p.local_experts = state.expert_begin[rank + 1] - p.first_expert;
  p.operands = request.direction == Direction::kBackward && request.redispatch ? 2 : 1;
  p.combine_groups = static_cast<int32_t>(request.numerics.combine_groups);
  const TileShape wgrad_fc2 = request.schedule.tile_of(GemmStage::kWgradFc2);
  const TileShape wgrad_fc1 = request.schedule.tile_of(GemmStage::kWgradFc1);
  p.wgrad_fc2 = {hidden, intermediate, wgrad_fc2.m, wgrad_fc2.n};
  p.wgrad_fc1 = {static_cast<int32_t>(z_columns(state.shape, request.numerics)), hidden, wgrad_fc1.m, wgrad_fc1.n};
}

// What the Schedule says, but for the bands of columns.
void set_schedule(RankProgram& p, const ProgramRequest& request) {
  const Schedule& schedule = request.schedule;
  p.push = schedule.dispatch.transport == DispatchTransport::kPush;
  p.dedup = schedule.dispatch.dedup;
  p.epilogue_combine = schedule.combine.transport == CombineTransport::kEpilogue;
  p.on_sms = schedule.comm.where == CommWhere::kSms;
  p.dynamic = schedule.queue == QueueKind::kDynamic;
  p.mixed = schedule.order.interleave == Interleave::kMixed;
  p.source_rotation = schedule.order.source_rotation;
  p.workers = request.workers - schedule.comm.reserve_sms;
  p.dispatch_workers = schedule.comm.dispatch_sms;
  p.combine_workers = schedule.comm.combine_sms;
  p.reduce_workers = schedule.comm.reduce_sms;
  p.wave_experts = schedule.order.experts_per_wave;
  p.waves = static_cast<int32_t>(divide_up(p.local_experts, p.wave_experts));
  p.raster = schedule.order.raster;
  p.cluster = request.cluster;
  p.pull_parts = request.pull_parts;
  p.tile_m = schedule.tile.m;
  const std::vector<LaunchStages> launches = launch_stages(schedule, request.direction, request.weight_gradients);
  p.launches = static_cast<int32_t>(launches.size());
  std::copy(launches.begin(), launches.end(), p.stages);
}

// The column tiles of both row GEMMs, and the column chunks.
void set_columns(RankProgram& p, const ProgramRequest& request, const LayerShape& shape) {
  const Schedule& schedule = request.schedule;
  const bool forward = request.direction == Direction::kForward;
  p.first_tiles = static_cast<int32_t>(divide_up(shape.intermediate, first_tile_columns(schedule, request.direction)));
  p.second_tile_n = schedule.tile_of(forward ? GemmStage::kFc2 : GemmStage::kDgradFc1).n;
  const std::vector<int32_t> bounds = column_chunk_bounds(shape.hidden, schedule.combine.column_chunks);
  p.chunks = static_cast<int32_t>(bounds.size()) - 1;
  for (int chunk = 0; chunk <= p.chunks; ++chunk) p.chunk_column[chunk] = bounds[chunk];
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    p.chunk_tile[chunk + 1] =
        p.chunk_tile[chunk] + static_cast<int32_t>(divide_up(bounds[chunk + 1] - bounds[chunk], p.second_tile_n));
  }
}

void point_to_placement(RankProgram& p, const internal::PlacementState& state) {
  const auto& own = state.rank[p.rank];
  p.rank_of_expert = state.rank_of_expert.data();
  p.counts = state.counts.data();
  p.source_offset = state.source_offset.data();
  p.expert_rows = state.expert_rows.data();
  p.segment_start = state.segment_start.data();
  p.expert_of_slot = own.expert_of_slot.data();
  p.row_of_slot = own.row_of_slot.data();
  p.token_order = own.token_order.data();
  p.rows = own.rows.data();
  p.source_begin = own.source_begin.data();
  p.row_of_source = own.row_of_source.data();
}

template <typename Tables>
void build_own_tables(RankProgram& p, Tables& tables) {
  tables.block_begin.assign(1, 0);
  tables.odd_blocks.assign(1, 0);
  for (int32_t local = 0; local < p.local_experts; ++local) {
    const int32_t expert = p.first_expert + local;
    const int32_t blocks = blocks_of_rows(p.expert_rows[expert], p.tile_m);
    tables.block_begin.push_back(tables.block_begin.back() + blocks);
    tables.odd_blocks.push_back(tables.odd_blocks.back() + blocks % 2);
    tables.rotation.push_back(first_block_in_order(p, local));
  }
  tables.push_begin.assign(1, 0);
  for (int32_t local = 0; local < p.local_experts; ++local) {
    for (int32_t turn = 0; turn < p.ranks; ++turn) {
      const PushRun run = push_run(p, local, turn);
      tables.push_block.push_back(run.first);
      tables.push_begin.push_back(tables.push_begin.back() + run.blocks);
    }
  }
  p.block_begin = tables.block_begin.data();
  p.odd_blocks = tables.odd_blocks.data();
  p.rotation = tables.rotation.data();
  p.push_begin = tables.push_begin.data();
  p.push_block = tables.push_block.data();
}

}  // namespace

void Program::build_rank(int rank) {
  const internal::PlacementState& state = *placement_;
  RankProgram& p = ranks_[rank];
  p = RankProgram{};
  set_sizes(p, request_, state, rank);
  set_schedule(p, request_);
  set_columns(p, request_, state.shape);
  point_to_placement(p, state);
  p.expert_block = expert_block_.data();
  p.blocks_of_rank = blocks_of_rank_.data();
  p.token_block_begin = token_block_begin_.data();
  p.tokens_of_rank = tokens_of_rank_.data();
  p.most_blocks = *std::max_element(blocks_of_rank_.begin(), blocks_of_rank_.end());
  p.most_token_blocks = 0;
  for (int r = 0; r < p.ranks; ++r) {
    p.most_token_blocks = std::max(p.most_token_blocks, token_block_begin_[r + 1] - token_block_begin_[r]);
  }
  build_own_tables(p, tables_[rank]);
  p.late_position = late_position_of(p, state.rows[rank], static_cast<int32_t>(state.shape.hidden),
                                     static_cast<int32_t>(state.shape.intermediate));
  p = part_of(p, request_.part);
}

}  // namespace uniep
