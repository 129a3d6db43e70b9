#pragma once

#include "program/rank_program.h"
#include "program/tile_order.h"

// The order of tiles. A launch has up to five lists; every list is a closed-form sequence of tasks, and every agent
// walks its lists one after the other, in order. Host and device run these very functions.
namespace uniep::program {

enum class ListKind : int32_t { kDispatch = 0, kRelay = 1, kCompute = 2, kSend = 3, kReduce = 4 };
inline constexpr int kListKinds = 5;

// Which of the counters of tickets is a list's.
UNIEP_HOST_DEVICE int64_t ticket_counter(int32_t launch, ListKind list) {
  return int64_t{launch} * kTicketCounters + static_cast<int32_t>(list);
}

inline constexpr int32_t kNoTicket = 0x7fffffff;  // for who takes no more: behind the end of every list

// ---- Turns and spans
// ----------------------------------------------------------------------------------------------------

// Turns of a rank's experts; in a row GEMM's segment spans.
struct ExpertRange {
  int32_t begin, end;
};

// The local expert of a rank that comes `turn`-th: ascending, or those with the most rows first.
UNIEP_HOST_DEVICE int32_t expert_of_turn(const RankProgram& p, int32_t rank, int32_t turn) {
  return p.heavy_first ? p.local_of_turn[rank * p.local_experts + turn] : turn;
}
UNIEP_HOST_DEVICE int32_t expert_of_turn(const RankProgram& p, int32_t turn) {
  return expert_of_turn(p, p.rank, turn);
}
UNIEP_HOST_DEVICE int32_t turn_of_expert(const RankProgram& p, int32_t local_expert) {
  return p.heavy_first ? p.turn_of_local[local_expert] : local_expert;
}

UNIEP_HOST_DEVICE ExpertRange experts_of_wave(const RankProgram& p, int32_t wave) {
  const int32_t begin = wave * p.wave_experts;
  const int32_t end = begin + p.wave_experts;
  return {begin, end < p.local_experts ? end : p.local_experts};
}

UNIEP_HOST_DEVICE int64_t blocks_in(const RankProgram& p, ExpertRange experts) {
  return p.blocks_before[experts.end] - p.blocks_before[experts.begin];
}

// The turn in a range of turns whose expert's entries, of which `before` has the sums, hold entry `at`.
UNIEP_HOST_DEVICE int32_t turn_holding(const int32_t* before, int32_t at, ExpertRange turns) {
  int32_t low = turns.begin, high = turns.end;  // before[low] <= at < before[high]
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (before[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A wave of the row GEMMs is whole spans: of one expert each, all of it, or with order.blocks_per_wave at most so many
// row blocks. Then an expert without rows has none.
struct Span {
  int32_t turn;   // of its expert
  int32_t block;  // of the expert, in order, that it begins with
};

UNIEP_HOST_DEVICE int32_t spans_before(const RankProgram& p, int32_t turn) {
  return p.wave_blocks > 0 ? p.spans_before[turn] : turn;
}

UNIEP_HOST_DEVICE ExpertRange all_spans(const RankProgram& p) {
  return {0, spans_before(p, p.local_experts)};
}

// The one behind the last begins where there is no expert any more.
UNIEP_HOST_DEVICE Span span_at(const RankProgram& p, int32_t index) {
  if (p.wave_blocks == 0) return {index, 0};
  const int32_t turn = turn_holding(p.spans_before, index, {0, p.local_experts + 1});
  return {turn, (index - p.spans_before[turn]) * p.wave_blocks};
}

UNIEP_HOST_DEVICE int32_t gemm_waves(const RankProgram& p) {
  return p.wave_blocks > 0 ? p.spans_before[p.local_experts] : p.waves;
}

UNIEP_HOST_DEVICE ExpertRange spans_of_wave(const RankProgram& p, int32_t wave) {
  if (p.wave_blocks == 0) return experts_of_wave(p, wave);
  return {wave, wave < gemm_waves(p) ? wave + 1 : wave};
}

// The m-th block of an expert in order: my own rows first, then those of rank + 1, ...: no source is asked by all at
// once.
UNIEP_HOST_DEVICE int32_t rotated_block(const RankProgram& p, int32_t local_expert, int32_t m) {
  const int32_t blocks = p.block_begin[local_expert + 1] - p.block_begin[local_expert];
  return (m + p.rotation[local_expert]) % blocks;
}

// The first push tile for the experts of this turn, of any destination.
UNIEP_HOST_DEVICE int32_t push_begin_of(const RankProgram& p, int32_t turn) {
  return p.push_begin[static_cast<int64_t>(turn) * p.ranks];
}

// ---- Segments: a run of tiles of one stage over a range of experts
// ---------------------------------------------------

struct Segment {
  Stage stage;
  ExpertRange experts;
  int32_t chunk;  // of the second GEMM; the operand of a dispatch
};

inline constexpr ExpertRange kNoExperts{0, 0};

// Positions of a grid of tiles. In clusters an odd grid has one position without a tile.
UNIEP_HOST_DEVICE int64_t grid_positions(const RankProgram& p, int32_t m_tiles, int32_t n_tiles) {
  return static_cast<int64_t>(task_count(m_tiles, n_tiles, p.cluster)) * p.cluster;
}

// Positions of a row GEMM over all experts before the begin of a span. An expert's last span alone may be odd.
UNIEP_HOST_DEVICE int64_t row_gemm_positions_before(const RankProgram& p, Span span, int32_t n_tiles) {
  const bool holes = p.cluster == 2 && n_tiles % 2 != 0;
  return static_cast<int64_t>(p.blocks_before[span.turn] + span.block) * n_tiles +
         (holes ? p.odd_blocks[span.turn] : 0);
}

// Positions of a row GEMM over a range of spans.
UNIEP_HOST_DEVICE int64_t row_gemm_positions(const RankProgram& p, ExpertRange spans, int32_t n_tiles) {
  return row_gemm_positions_before(p, span_at(p, spans.end), n_tiles) -
         row_gemm_positions_before(p, span_at(p, spans.begin), n_tiles);
}

UNIEP_HOST_DEVICE int32_t column_tiles(const RankProgram& p, const Segment& s) {
  return s.stage == Stage::kFirstGemm ? p.first_tiles : p.chunk_tile[s.chunk + 1] - p.chunk_tile[s.chunk];
}

// The tile at a position of an expert's grid; kNoTile where there is none.
UNIEP_HOST_DEVICE TilePosition tile_at(const RankProgram& p, int64_t position, int32_t m_tiles, int32_t n_tiles) {
  const int32_t bands = p.raster / p.cluster;
  TilePosition tile =
      tile_of_task(static_cast<int32_t>(position / p.cluster), static_cast<int32_t>(position % p.cluster),
                   {m_tiles, n_tiles, p.cluster, bands > 0 ? bands : 1});
  if (!tile.exists) tile.m_block = kNoTile;
  return tile;
}

UNIEP_HOST_DEVICE Task row_gemm_task(const RankProgram& p, const Segment& s, int64_t index) {
  const int32_t first_column_tile = s.stage == Stage::kFirstGemm ? 0 : p.chunk_tile[s.chunk];
  const int32_t n_tiles = column_tiles(p, s);
  const Span begin = span_at(p, s.experts.begin), end = span_at(p, s.experts.end);
  index += row_gemm_positions_before(p, begin, n_tiles);
  int32_t low = begin.turn, high = end.block > 0 ? end.turn + 1 : end.turn;
  while (high - low > 1) {  // the positions before turn `low` are at most `index`, those before `high` more
    const int32_t middle = low + (high - low) / 2;
    if (row_gemm_positions_before(p, {middle, 0}, n_tiles) <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  int64_t inside = index - row_gemm_positions_before(p, {low, 0}, n_tiles);
  int32_t blocks = p.blocks_before[low + 1] - p.blocks_before[low], first_block = 0;
  if (p.wave_blocks > 0) {
    const int64_t of_span = static_cast<int64_t>(p.wave_blocks) * n_tiles;
    const auto span = static_cast<int32_t>(inside / of_span);
    inside -= span * of_span;
    first_block = span * p.wave_blocks;
    blocks = blocks - first_block < p.wave_blocks ? blocks - first_block : p.wave_blocks;
  }
  const TilePosition at = tile_at(p, inside, blocks, n_tiles);
  const int32_t expert = expert_of_turn(p, low);
  return {s.stage, expert, at.exists ? rotated_block(p, expert, first_block + at.m_block) : kNoTile,
          first_column_tile + at.n_block};
}

UNIEP_HOST_DEVICE Task wgrad_task(const RankProgram& p, const Segment& s, int64_t index) {
  const WgradGrid& grid = s.stage == Stage::kWgradFc2 ? p.wgrad_fc2 : p.wgrad_fc1;
  const int64_t positions = grid_positions(p, grid.m_tiles(), grid.n_tiles());
  const TilePosition at = tile_at(p, index % positions, grid.m_tiles(), grid.n_tiles());
  const int32_t turn = s.experts.begin + static_cast<int32_t>(index / positions);
  return {s.stage, expert_of_turn(p, turn), at.m_block, at.n_block};
}

// The destination whose turn it is: myself first, then rank + 1, ... (or plainly ascending).
UNIEP_HOST_DEVICE int32_t destination_of_turn(const RankProgram& p, int32_t turn) {
  return p.source_rotation ? (p.rank + turn) % p.ranks : turn;
}

UNIEP_HOST_DEVICE Task push_task(const RankProgram& p, const Segment& s, int64_t index) {
  const int64_t tile = push_begin_of(p, s.experts.begin) + index;
  // A run is what one destination gets of its expert of one turn.
  const int32_t run =
      turn_holding(p.push_begin, static_cast<int32_t>(tile), {s.experts.begin * p.ranks, s.experts.end * p.ranks});
  const int32_t destination = destination_of_turn(p, run % p.ranks);
  const int32_t global_expert = destination * p.local_experts + expert_of_turn(p, destination, run / p.ranks);
  return {Stage::kPush, global_expert, p.push_block[run] + static_cast<int32_t>(tile - p.push_begin[run]), s.chunk};
}

UNIEP_HOST_DEVICE Task block_task(const RankProgram& p, const Segment& s, int64_t index) {
  const int32_t parts = s.stage == Stage::kPull ? p.pull_parts : 1;
  const int32_t at = static_cast<int32_t>(index);  // a rank has fewer than 2^31 rows
  const int32_t block = p.blocks_before[s.experts.begin] + at / parts;
  const int32_t turn = turn_holding(p.blocks_before, block, s.experts);
  const int32_t expert = expert_of_turn(p, turn);
  const int32_t m = rotated_block(p, expert, block - p.blocks_before[turn]);
  return {s.stage, expert, m, s.chunk * parts + at % parts};
}

UNIEP_HOST_DEVICE int64_t copy_segment_length(const RankProgram& p, const Segment& s) {
  if (s.stage == Stage::kPush) return push_begin_of(p, s.experts.end) - push_begin_of(p, s.experts.begin);
  return blocks_in(p, s.experts) * (s.stage == Stage::kPull ? p.pull_parts : 1);
}

UNIEP_HOST_DEVICE Task copy_task(const RankProgram& p, const Segment& s, int64_t index) {
  return s.stage == Stage::kPush ? push_task(p, s, index) : block_task(p, s, index);
}

UNIEP_HOST_DEVICE int64_t segment_length(const RankProgram& p, const Segment& s) {
  switch (s.stage) {
    case Stage::kFirstGemm:
    case Stage::kSecondGemm:
      return row_gemm_positions(p, s.experts, column_tiles(p, s));
    case Stage::kWgradFc2:
      return (s.experts.end - s.experts.begin) * grid_positions(p, p.wgrad_fc2.m_tiles(), p.wgrad_fc2.n_tiles());
    case Stage::kWgradFc1:
      return (s.experts.end - s.experts.begin) * grid_positions(p, p.wgrad_fc1.m_tiles(), p.wgrad_fc1.n_tiles());
    default:
      return copy_segment_length(p, s);
  }
}

UNIEP_HOST_DEVICE Task segment_task(const RankProgram& p, const Segment& s, int64_t index) {
  switch (s.stage) {
    case Stage::kFirstGemm:
    case Stage::kSecondGemm:
      return row_gemm_task(p, s, index);
    case Stage::kWgradFc2:
    case Stage::kWgradFc1:
      return wgrad_task(p, s, index);
    default:
      return copy_task(p, s, index);
  }
}

// ---- Lists
// -----------------------------------------------------------------------------------------------------------

// Two segments run through in proportion to their lengths; `second` is often empty.
struct MergedSegments {
  Segment first, second;
};

UNIEP_HOST_DEVICE MergedSegments only(Segment s) {
  return {s, Segment{s.stage, kNoExperts, s.chunk}};
}

// Whether the list mixes the two GEMMs. Under dynamic queues each has a queue of its own instead, and the list is in
// phased order (gemm_queues.h).
UNIEP_HOST_DEVICE bool is_merged(const RankProgram& p) {
  return p.mixed && !p.dynamic;
}

// Both row GEMMs in one launch. Phased: FC1 of a wave, then FC2 of it. Merged: FC2 of a wave beside FC1 of the next, so
// that both directions of NVLink stay busy. Column chunks after the first follow for all waves, chunk by chunk.
UNIEP_HOST_DEVICE int32_t gemm_step_count(const RankProgram& p, LaunchStages stages) {
  if (stages.first_gemm && stages.second_gemm) {
    const int32_t waves = gemm_waves(p);
    return (is_merged(p) ? waves + 1 : 2 * waves) + (p.chunks - 1) * waves;
  }
  if (stages.first_gemm) return 1;
  return stages.second_gemm ? p.chunks : 0;
}

UNIEP_HOST_DEVICE MergedSegments gemm_step(const RankProgram& p, LaunchStages stages, int32_t step) {
  if (!stages.second_gemm) return only({Stage::kFirstGemm, all_spans(p), 0});
  if (!stages.first_gemm) return only({Stage::kSecondGemm, all_spans(p), step});
  const int32_t waves = gemm_waves(p), leading = is_merged(p) ? waves + 1 : 2 * waves;
  if (step >= leading) {
    const int32_t later = step - leading;
    return only({Stage::kSecondGemm, spans_of_wave(p, later % waves), 1 + later / waves});
  }
  if (!is_merged(p)) {
    const ExpertRange wave = spans_of_wave(p, step / 2);
    return only(step % 2 == 0 ? Segment{Stage::kFirstGemm, wave, 0} : Segment{Stage::kSecondGemm, wave, 0});
  }
  const ExpertRange next = step < waves ? spans_of_wave(p, step) : kNoExperts;
  const ExpertRange previous = step > 0 ? spans_of_wave(p, step - 1) : kNoExperts;
  return {{Stage::kFirstGemm, next, 0}, {Stage::kSecondGemm, previous, 0}};
}

// Whether all of FC2's weight gradients come before FC1's, which read x again: it lands last. With fusion=layer they
// alternate all the same.
UNIEP_HOST_DEVICE bool wgrad_fc1_comes_last(const RankProgram& p) {
  return p.operands == 2 && !(p.stages[0].dispatch && p.stages[0].second_gemm);
}

UNIEP_HOST_DEVICE MergedSegments wgrad_step(const RankProgram& p, LaunchStages stages, int32_t step) {
  const ExpertRange all{0, p.local_experts};
  if (!stages.wgrad_fc1) return only({Stage::kWgradFc2, all, 0});
  if (!stages.wgrad_fc2) return only({Stage::kWgradFc1, all, 0});
  if (wgrad_fc1_comes_last(p)) return only({step == 0 ? Stage::kWgradFc2 : Stage::kWgradFc1, all, 0});
  return only({step % 2 == 0 ? Stage::kWgradFc2 : Stage::kWgradFc1, experts_of_wave(p, step / 2), 0});
}

// Push is one wave ahead of receive: whatever a receive waits for stands before every receive of that wave in all
// queues, so no two ranks can wait for each other. Workers that relay have the receives as a list of their own.
UNIEP_HOST_DEVICE int32_t operands_dispatched(LaunchStages stages) {
  return (stages.dispatch ? 1 : 0) + (stages.dispatch_again ? 1 : 0);
}

UNIEP_HOST_DEVICE int32_t dispatch_step_count(const RankProgram& p, LaunchStages stages) {
  if (!p.push) return operands_dispatched(stages);
  return operands_dispatched(stages) * (p.relay_workers > 0 ? p.waves : 2 * p.waves);
}

UNIEP_HOST_DEVICE Segment dispatch_step(const RankProgram& p, LaunchStages stages, int32_t step) {
  const int32_t first = stages.dispatch ? 0 : 1;
  if (!p.push) return {Stage::kPull, {0, p.local_experts}, first + step};
  if (p.relay_workers > 0) return {Stage::kPush, experts_of_wave(p, step % p.waves), first + step / p.waves};
  const int32_t operand = first + step / (2 * p.waves);
  const int32_t inside = step % (2 * p.waves);  // push 0, push 1, receive 0, push 2, receive 1, ..., receive last
  if (inside == 0) return {Stage::kPush, experts_of_wave(p, 0), operand};
  if (inside == 2 * p.waves - 1) return {Stage::kReceive, experts_of_wave(p, p.waves - 1), operand};
  const int32_t wave = (inside - 1) / 2;
  return inside % 2 == 1 ? Segment{Stage::kPush, experts_of_wave(p, wave + 1), operand}
                         : Segment{Stage::kReceive, experts_of_wave(p, wave), operand};
}

UNIEP_HOST_DEVICE int32_t relay_step_count(const RankProgram& p, LaunchStages stages) {
  return p.push && p.relay_workers > 0 ? operands_dispatched(stages) : 0;
}

UNIEP_HOST_DEVICE Segment relay_step(const RankProgram& p, LaunchStages stages, int32_t step) {
  return {Stage::kReceive, {0, p.local_experts}, (stages.dispatch ? 0 : 1) + step};
}

// The lists of copies: their steps are one segment each.
UNIEP_HOST_DEVICE bool is_copy_list(ListKind kind) {
  return kind == ListKind::kDispatch || kind == ListKind::kRelay || kind == ListKind::kSend;
}

UNIEP_HOST_DEVICE Segment copy_step(const RankProgram& p, int32_t launch, ListKind kind, int32_t step) {
  if (kind == ListKind::kDispatch) return dispatch_step(p, p.stages[launch], step);
  if (kind == ListKind::kRelay) return relay_step(p, p.stages[launch], step);
  return {Stage::kSend, {0, p.local_experts}, step};
}

UNIEP_HOST_DEVICE int32_t copy_step_count(const RankProgram& p, int32_t launch, ListKind kind) {
  const LaunchStages stages = p.stages[launch];
  if (kind == ListKind::kDispatch) return dispatch_step_count(p, stages);
  if (kind == ListKind::kRelay) return relay_step_count(p, stages);
  return stages.combine && !p.epilogue_combine && p.combine_groups == 0 ? p.chunks : 0;
}

UNIEP_HOST_DEVICE MergedSegments compute_step(const RankProgram& p, int32_t launch, int32_t step) {
  const int32_t gemm_steps = gemm_step_count(p, p.stages[launch]);
  return step < gemm_steps ? gemm_step(p, p.stages[launch], step) : wgrad_step(p, p.stages[launch], step - gemm_steps);
}

UNIEP_HOST_DEVICE int32_t token_blocks(const RankProgram& p) {
  return p.token_block_begin[p.rank + 1] - p.token_block_begin[p.rank];
}

UNIEP_HOST_DEVICE bool has_group_sends(const RankProgram& p, int32_t launch) {
  return p.stages[launch].combine && p.combine_groups > 0;
}

// The first token block of all ranks, my own first; then the second of all ranks, ...: so blocks become complete, and
// can be reduced, from the begin of the list on.
UNIEP_HOST_DEVICE int64_t group_send_positions(const RankProgram& p) {
  return static_cast<int64_t>(p.most_token_blocks) * p.ranks * p.chunks;
}

// Waves change the order of positions, not their number.
UNIEP_HOST_DEVICE int64_t compute_length(const RankProgram& p, LaunchStages stages) {
  const ExpertRange all{0, p.local_experts};
  int64_t length = stages.first_gemm ? segment_length(p, {Stage::kFirstGemm, all_spans(p), 0}) : 0;
  for (int32_t chunk = 0; stages.second_gemm && chunk < p.chunks; ++chunk) {
    length += segment_length(p, {Stage::kSecondGemm, all_spans(p), chunk});
  }
  if (stages.wgrad_fc2) length += segment_length(p, {Stage::kWgradFc2, all, 0});
  if (stages.wgrad_fc1) length += segment_length(p, {Stage::kWgradFc1, all, 0});
  return length;
}

UNIEP_HOST_DEVICE int64_t list_length(const RankProgram& p, int32_t launch, ListKind kind) {
  if (kind == ListKind::kReduce) {
    return p.stages[launch].combine ? static_cast<int64_t>(token_blocks(p)) * p.chunks : 0;
  }
  if (kind == ListKind::kSend && has_group_sends(p, launch)) {
    return group_send_positions(p);
  }
  if (kind == ListKind::kCompute) return compute_length(p, p.stages[launch]);
  int64_t length = 0;
  const int32_t steps = copy_step_count(p, launch, kind);
  for (int32_t step = 0; step < steps; ++step) length += copy_segment_length(p, copy_step(p, launch, kind, step));
  return length;
}

UNIEP_HOST_DEVICE Task group_send_task(const RankProgram& p, int64_t position) {
  const int32_t at = static_cast<int32_t>(position);
  const int32_t destination = destination_of_turn(p, at % p.ranks);
  const int32_t block = at / p.ranks % p.most_token_blocks, chunk = at / p.ranks / p.most_token_blocks;
  const int32_t blocks = p.token_block_begin[destination + 1] - p.token_block_begin[destination];
  return {Stage::kGroupSend, destination, block < blocks ? block : kNoTile, chunk};
}

// The task at a position of two merged segments; in clusters pairs of positions stay together.
UNIEP_HOST_DEVICE Task merged_task(const RankProgram& p, const MergedSegments& merged, int64_t position, int64_t first,
                                   int64_t second) {
  if (second == 0) return segment_task(p, merged.first, position);
  const int64_t firsts = first / p.cluster, both = firsts + second / p.cluster;
  const int64_t pair = position / p.cluster, in_pair = position % p.cluster;
  const int64_t firsts_before = pair * firsts / both;
  const bool take_first = (pair + 1) * firsts / both > firsts_before;
  return take_first ? segment_task(p, merged.first, firsts_before * p.cluster + in_pair)
                    : segment_task(p, merged.second, (pair - firsts_before) * p.cluster + in_pair);
}

// Where a walk through a list stands, for one that only moves forward.
struct ListCursor {
  int32_t step = 0;
  int64_t begin = 0;  // position at which the step begins
};

UNIEP_HOST_DEVICE Task copy_list_task(const RankProgram& p, int32_t launch, ListKind kind, int64_t position,
                                      ListCursor& cursor) {
  if (kind == ListKind::kSend && has_group_sends(p, launch)) return group_send_task(p, position);
  for (;; ++cursor.step) {
    const Segment segment = copy_step(p, launch, kind, cursor.step);
    const int64_t length = copy_segment_length(p, segment);
    if (position - cursor.begin < length) return copy_task(p, segment, position - cursor.begin);
    cursor.begin += length;
  }
}

// The task at a position of a list; 0 <= position < list_length(), and not before the cursor's step.
UNIEP_HOST_DEVICE Task list_task(const RankProgram& p, int32_t launch, ListKind kind, int64_t position,
                                 ListCursor& cursor) {
  if (kind == ListKind::kReduce) {
    const int32_t blocks = token_blocks(p);
    return {Stage::kReduce, -1, static_cast<int32_t>(position % blocks), static_cast<int32_t>(position / blocks)};
  }
  if (is_copy_list(kind)) return copy_list_task(p, launch, kind, position, cursor);
  for (;; ++cursor.step) {
    const MergedSegments merged = compute_step(p, launch, cursor.step);
    const int64_t first = segment_length(p, merged.first), second = segment_length(p, merged.second);
    if (position - cursor.begin < first + second) {
      return merged_task(p, merged, position - cursor.begin, first, second);
    }
    cursor.begin += first + second;
  }
}

UNIEP_HOST_DEVICE Task list_task(const RankProgram& p, int32_t launch, ListKind kind, int64_t position) {
  ListCursor cursor;
  return list_task(p, launch, kind, position, cursor);
}

// ---- Agents: who walks which lists
// -----------------------------------------------------------------------------------

enum class AgentRole : int32_t { kCopy = 0, kCompute = 1 };

// The workers [begin, end) share a list; those below `late` join it at late_position.
struct Participants {
  int32_t begin, end, late;
};

// Of eight workers so many have copy warps that pull x again in a launch that combines. The warps that do would sum
// behind it, so the others sum meanwhile; fewer would not fill the links.
inline constexpr int32_t kAgainEighths = 5;

// Lent workers take no task that waits for peers: they leave as soon as the rank's own work lets them. Nor are they in
// launches of weight gradients alone, whose kernels have no queue.
UNIEP_HOST_DEVICE bool are_lent_workers_in(const RankProgram& p, int32_t launch, ListKind kind) {
  const LaunchStages& stages = p.stages[launch];
  return kind == ListKind::kDispatch || (kind == ListKind::kCompute && (stages.first_gemm || stages.second_gemm));
}

UNIEP_HOST_DEVICE Participants participants_of(const RankProgram& p, int32_t launch, ListKind kind) {
  if (p.lent_workers > 0 && !are_lent_workers_in(p, launch, kind)) return {0, kept_workers(p), 0};
  if (!p.on_sms) {
    const bool beside_sums = kind == ListKind::kDispatch && p.stages[launch].combine && !p.stages[launch].dispatch;
    return {0, beside_sums ? (p.workers * kAgainEighths + 7) / 8 : p.workers, 0};
  }
  const int32_t shared = p.workers - p.combine_workers - p.reduce_workers;
  switch (kind) {
    case ListKind::kDispatch:
      return {0, p.dispatch_workers, 0};
    case ListKind::kRelay:
      return {p.dispatch_workers, first_copying_workers(p), 0};
    case ListKind::kCompute:
      return {0, shared, p.stages[launch].dispatch ? first_copying_workers(p) : 0};
    case ListKind::kSend:
      return p.combine_workers > 0 ? Participants{shared, shared + p.combine_workers, 0} : Participants{0, shared, 0};
    default:
      return p.reduce_workers > 0 ? Participants{p.workers - p.reduce_workers, p.workers, 0}
                                  : Participants{0, p.workers, 0};
  }
}

UNIEP_HOST_DEVICE bool walks_list(const RankProgram& p, int32_t launch, int32_t worker, AgentRole role, ListKind kind) {
  const bool computes = p.on_sms || kind == ListKind::kCompute;
  if ((role == AgentRole::kCompute) != computes) return false;
  const Participants who = participants_of(p, launch, kind);
  return worker >= who.begin && worker < who.end;
}

// The index-th position that falls to a worker where all participants take equal turns. Each round begins one pair of
// workers further on: where tiles of two sizes alternate, no worker gets more of one than others. Pairs stay together.
UNIEP_HOST_DEVICE int64_t even_position(const Participants& who, int32_t worker, int64_t index) {
  const int32_t size = who.end - who.begin;
  const int32_t turn = (worker - who.begin + 2 * static_cast<int32_t>(index % size)) % size;
  return index * size + turn;
}

// The index-th position of a list that falls to a worker under static queues (it may lie past the list's end).
UNIEP_HOST_DEVICE int64_t static_position(const RankProgram& p, const Participants& who, int32_t worker,
                                          int64_t index) {
  const int64_t size = who.end - who.begin;
  const int64_t early = who.late < who.end ? who.end - who.late : 0;
  if (who.late <= who.begin || early == 0) return even_position(who, worker, index);
  if (worker < who.late) return p.late_position + index * size + (worker - who.begin);
  const int64_t turn = worker - who.late;
  const int64_t early_share = p.late_position > turn ? (p.late_position - turn + early - 1) / early : 0;
  if (index < early_share) return index * early + turn;
  return p.late_position + (index - early_share) * size + (worker - who.begin);
}

}  // namespace uniep::program
