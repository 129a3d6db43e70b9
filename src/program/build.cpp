#include "program/build.h"

#include <algorithm>

#include "model/activation_choice.h"
#include "program/program_tables.h"

namespace uniep::program {

std::vector<LaunchStages> launch_stages(const Schedule& schedule, Direction direction, bool weight_gradients) {
  const bool wgrad = direction == Direction::kBackward && weight_gradients;
  const bool fill = wgrad && schedule.wgrad != WgradOrder::kAfter;
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

std::vector<LaunchStages> launch_stages(const ProgramRequest& request) {
  if (request.part != ProgramPart::kRecompute) {
    std::vector<LaunchStages> launches = launch_stages(request.schedule, request.direction, request.weight_gradients);
    // Nothing in the first launch of two waits for x: beside the second one's GEMMs it costs less. Workers that copy
    // first have their share of the first launch's tiles alone.
    const bool second = request.schedule.fusion == Fusion::kPairs && request.schedule.comm.where == CommWhere::kWarps;
    const bool again = request.redispatch && request.direction == Direction::kBackward;
    if (again) launches[second ? 1 : 0].dispatch_again = true;
    return launches;
  }
  if (!request.redispatch) return {{.first_gemm = true}};
  if (request.schedule.fusion == Fusion::kNone) return {{.dispatch = true}, {.first_gemm = true}};
  return {{.dispatch = true, .first_gemm = true}};
}

bool comes_in_clusters(const Schedule& schedule, int workers, int cluster) {
  const CommSchedule& comm = schedule.comm;
  const int kinds[] = {comm.lend_sms ? workers : 0,
                       workers - comm.reserve_sms,
                       comm.dispatch_sms,
                       comm.relay_sms,
                       comm.combine_sms,
                       comm.reduce_sms};
  return std::all_of(std::begin(kinds), std::end(kinds), [&](int count) { return count % cluster == 0; });
}

int idle_workers(const Schedule& schedule) {
  return schedule.comm.lend_sms ? 0 : schedule.comm.reserve_sms;
}

std::vector<int32_t> column_chunk_bounds(int64_t columns, int chunks) {
  std::vector<int32_t> bounds{0};
  for (int chunk = 1; chunk <= chunks; ++chunk) {
    const int32_t bound = static_cast<int32_t>(columns / 8 * chunk / chunks * 8);
    if (bound > bounds.back()) bounds.push_back(bound);
  }
  return bounds;
}

int first_tile_columns(const Schedule& schedule, const Numerics& numerics, Direction direction) {
  if (direction == Direction::kBackward) return schedule.tile_of(GemmStage::kDgradFc2).n;
  return schedule.tile_of(GemmStage::kFc1).n / (is_gated(numerics.activation) ? 2 : 1);
}

RankProgram part_of(const RankProgram& layer, ProgramPart part) {
  RankProgram p = layer;
  if (part == ProgramPart::kLayer || part == ProgramPart::kRecompute) return p;
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
  if (request.part == ProgramPart::kLayer || request.part == ProgramPart::kRecompute) return request;
  CommSchedule& comm = request.schedule.comm;
  comm.where = CommWhere::kWarps;
  comm.lend_sms = false;
  comm.dispatch_sms = comm.relay_sms = comm.combine_sms = comm.reduce_sms = 0;
  request.schedule.fusion = Fusion::kNone;
  request.schedule.order.interleave = Interleave::kPhased;
  request.schedule.order.blocks_per_wave = 0;
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
  shared_.expert_block.resize(state.shape.experts);
  shared_.local_of_turn.resize(state.shape.experts);
  shared_.blocks_of_rank.resize(state.ranks);
  shared_.token_block_begin.assign(1, 0);
  for (int rank = 0; rank < state.ranks; ++rank) {
    slots_of_rank_.push_back({state.rank[rank].expert_of_slot.data(), state.rank[rank].row_of_slot.data()});
    int32_t blocks = 0;
    for (int32_t expert = state.expert_begin[rank]; expert < state.expert_begin[rank + 1]; ++expert) {
      shared_.expert_block[expert] = blocks;
      blocks += blocks_of_rows(state.expert_rows[expert], request_.schedule.tile.m);
    }
    shared_.blocks_of_rank[rank] = blocks;
    shared_.tokens_of_rank.push_back(static_cast<int32_t>(state.rank[rank].tokens));
    shared_.token_block_begin.push_back(shared_.token_block_begin.back() +
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
  p.rows_in_place = request.part == ProgramPart::kRecompute && !request.redispatch;
  p.operands = p.rows_in_place ? 0 : request.direction == Direction::kBackward && request.redispatch ? 2 : 1;
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
  p.heavy_first = schedule.order.experts == ExpertOrder::kHeavyFirst;
  p.second_share = static_cast<int8_t>(schedule.order.second_share);
  p.lent_workers = schedule.comm.lend_sms ? schedule.comm.reserve_sms : 0;
  p.workers = request.workers - idle_workers(schedule);
  p.dispatch_workers = schedule.comm.dispatch_sms;
  p.relay_workers = schedule.comm.relay_sms;
  p.combine_workers = schedule.comm.combine_sms;
  p.reduce_workers = schedule.comm.reduce_sms;
  // Beside dgrads both weight gradients of an expert come together, or where x is dispatched again all of FC2 first.
  // The dgrads do not go by waves, nor where weight gradients come later.
  const bool mixes_wgrads = p.direction == Direction::kBackward && schedule.wgrad == WgradOrder::kMixed;
  p.wgrad_reserve = static_cast<int8_t>(mixes_wgrads && request.weight_gradients ? schedule.wgrad_reserve : -1);
  p.wave_experts = schedule.order.experts_per_wave;
  if (mixes_wgrads) p.wave_experts = request.weight_gradients && p.operands == 1 ? 1 : p.local_experts;
  p.waves = static_cast<int32_t>(divide_up(p.local_experts, p.wave_experts));
  p.raster = schedule.order.raster;
  p.cluster = request.cluster;
  p.wave_blocks = static_cast<int32_t>(round_up(schedule.order.blocks_per_wave, p.cluster));
  p.pull_parts = request.pull_parts;
  p.tile_m = schedule.tile.m;
  const std::vector<LaunchStages> launches = launch_stages(request);
  p.launches = static_cast<int32_t>(launches.size());
  std::copy(launches.begin(), launches.end(), p.stages);
}

// The column tiles of both row GEMMs, and the column chunks.
void set_columns(RankProgram& p, const ProgramRequest& request, const LayerShape& shape) {
  const Schedule& schedule = request.schedule;
  const bool forward = request.direction == Direction::kForward;
  p.first_tiles = static_cast<int32_t>(
      divide_up(shape.intermediate, first_tile_columns(schedule, request.numerics, request.direction)));
  p.second_tile_n = schedule.tile_of(forward ? GemmStage::kFc2 : GemmStage::kDgradFc1).n;
  const std::vector<int32_t> bounds = column_chunk_bounds(shape.hidden, schedule.combine.column_chunks);
  p.chunks = static_cast<int32_t>(bounds.size()) - 1;
  for (int chunk = 0; chunk <= p.chunks; ++chunk) p.chunk_column[chunk] = bounds[chunk];
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    p.chunk_tile[chunk + 1] =
        p.chunk_tile[chunk] + static_cast<int32_t>(divide_up(bounds[chunk + 1] - bounds[chunk], p.second_tile_n));
  }
}

template <typename Tables>
void point_to_tables(RankProgram& p, const internal::PlacementState& state, const Tables& tables) {
#define UNIEP_TABLE(type, name, entries) p.name = state.name.data();
  UNIEP_EXPERT_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
#define UNIEP_TABLE(type, name, entries) p.name = state.rank[p.rank].name.data();
  UNIEP_SLOT_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
#define UNIEP_TABLE(type, name, entries) p.name = tables.name.data();
  UNIEP_SCHEDULE_TABLES(UNIEP_TABLE)
  UNIEP_RANK_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
}

template <typename Tables>
void build_own_tables(RankProgram& p, Tables& tables) {
  const auto experts = static_cast<std::size_t>(p.local_experts), runs = experts * static_cast<std::size_t>(p.ranks);
  for (auto* const table : {&tables.block_begin, &tables.rotation, &tables.blocks_before, &tables.odd_blocks,
                            &tables.spans_before, &tables.turn_of_local}) {
    table->reserve(experts + 1);
  }
  for (auto* const table : {&tables.push_block, &tables.push_begin}) table->reserve(runs + 1);
  const auto blocks_of = [&](int32_t local) { return blocks_of_rows(p.expert_rows[p.first_expert + local], p.tile_m); };
  for (auto* const sums : {&tables.block_begin, &tables.blocks_before, &tables.odd_blocks, &tables.spans_before}) {
    sums->assign(1, 0);
  }
  for (int32_t local = 0; local < p.local_experts; ++local) {
    tables.block_begin.push_back(tables.block_begin.back() + blocks_of(local));
    tables.rotation.push_back(first_block_in_order(p, local));
    tables.turn_of_local.push_back(p.heavy_first ? heavy_turn(p, p.first_expert + local) : local);
  }
  for (int32_t turn = 0; turn < p.local_experts; ++turn) {
    const int32_t blocks = blocks_of(expert_of_turn(p, turn));
    tables.blocks_before.push_back(tables.blocks_before.back() + blocks);
    tables.odd_blocks.push_back(tables.odd_blocks.back() + blocks % 2);
    tables.spans_before.push_back(tables.spans_before.back() + spans_of_blocks(p, blocks));
  }
  tables.push_begin.assign(1, 0);
  for (int32_t index = 0; index < static_cast<int32_t>(runs); ++index) {
    const PushRun run = push_run_in_order(p, index);
    tables.push_block.push_back(run.first);
    tables.push_begin.push_back(tables.push_begin.back() + run.blocks);
  }
}

}  // namespace

void Program::build_rank(int rank) {
  const internal::PlacementState& state = *placement_;
  RankTables& tables = tables_[rank];
  tables = shared_;
  RankProgram& p = ranks_[rank];
  p = RankProgram{};
  set_sizes(p, request_, state, rank);
  set_schedule(p, request_);
  set_columns(p, request_, state.shape);
  point_to_tables(p, state, tables);  // what the tables of this rank are made with
  p.slots_of_rank = slots_of_rank_.data();
  p.most_blocks = *std::max_element(tables.blocks_of_rank.begin(), tables.blocks_of_rank.end());
  p.most_token_blocks = 0;
  for (int r = 0; r < p.ranks; ++r) {
    p.most_token_blocks = std::max(p.most_token_blocks, tables.token_block_begin[r + 1] - tables.token_block_begin[r]);
  }
  for (int32_t expert = 0; expert < p.experts; ++expert) {
    const int32_t first = expert / p.local_experts * p.local_experts;
    tables.local_of_turn[first + (p.heavy_first ? heavy_turn(p, expert) : expert - first)] = expert - first;
  }
  build_own_tables(p, tables);
  point_to_tables(p, state, tables);
  p.late_position = late_position_of(p, state.rows[rank], static_cast<int32_t>(state.shape.hidden),
                                     static_cast<int32_t>(state.shape.intermediate));
  p = part_of(p, request_.part);
}

}  // namespace uniep::program
