#include <algorithm>

#include "engine/cpu/tile_work.h"

// Dispatch: rows of x (or dy) from their source rank into the expert rows of the owner.
namespace uniep::cpu {
namespace {

// Padding is written as zero, never multiplied by it: what lay there before may be NaN.
void zero_padding(Call& call, const RankProgram& p, const Task& task) {
  if (call.fault == Fault::kSkippedPadding) return;
  const RowRange range = rows_of_dispatch(p, task);
  BFloat16* rows = call.ranks[p.rank].gathered[operand_of(p, task)];
  std::fill(rows + range.end * call.shape.hidden, rows + range.padded_end * call.shape.hidden, BFloat16{0});
}

void pull(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  const int64_t hidden = call.shape.hidden;
  const RowRange range = rows_of_dispatch(p, task);
  const int32_t operand = operand_of(p, task);
  BFloat16* rows = call.ranks[p.rank].gathered[operand];
  const int64_t shift = call.fault == Fault::kWrongOffset && range.end - range.begin > 1 ? 1 : 0;
  for (int32_t row = range.begin; row < range.end; ++row) {
    if (!is_primary_row(p, row)) continue;
    const RowSource source = p.rows[row];
    scratch.destinations.clear();
    for_each_filled_row(p, row, [&](int32_t filled) {
      const int64_t at = filled == range.begin ? filled + shift : filled;
      scratch.destinations.push_back(rows + at * hidden);
    });
    scratch.ring.copy(call.ranks[source.rank].input[operand] + source.token * hidden, scratch.destinations, hidden);
  }
  scratch.ring.drain();
  zero_padding(call, p, task);
}

// The source's rows of a block stand in the order (token, slot), so they are found by walking the row table of the
// owner, which the source wrote.
void push(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  const int64_t hidden = call.shape.hidden;
  const int32_t owner = p.rank_of_expert[task.expert];
  const RowSource* table = call.program.rank(owner).rows;
  BFloat16* rows = call.ranks[owner].gathered[task.n];
  const RowRange part = rows_from_source(p, task.expert, rows_of_block(p, task.expert, task.m), p.rank);
  for (int32_t row = part.begin; row < part.end; ++row) {
    if (!is_primary_slot(p, table[row].token, table[row].slot)) continue;
    scratch.destinations.assign(1, rows + row * hidden);
    scratch.ring.copy(call.ranks[p.rank].input[task.n] + table[row].token * hidden, scratch.destinations, hidden);
  }
  scratch.ring.drain();
}

void receive(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  zero_padding(call, p, task);
  if (!p.dedup) return;
  const int64_t hidden = call.shape.hidden;
  const RowRange range = rows_of_block(p, p.first_expert + task.expert, task.m);
  BFloat16* rows = call.ranks[p.rank].gathered[task.n];
  for (int32_t row = range.begin; row < range.end; ++row) {
    if (!is_primary_row(p, row)) continue;
    scratch.destinations.clear();
    for_each_filled_row(p, row, [&](int32_t filled) {
      if (filled != row) scratch.destinations.push_back(rows + filled * hidden);
    });
    if (!scratch.destinations.empty()) scratch.ring.copy(rows + row * hidden, scratch.destinations, hidden);
  }
  scratch.ring.drain();
}

}  // namespace

void run_dispatch_tile(Call& call, const RankProgram& p, const Task& task, AgentScratch& scratch) {
  switch (task.stage) {
    case Stage::kPull:
      return pull(call, p, task, scratch);
    case Stage::kPush:
      return push(call, p, task, scratch);
    default:
      return receive(call, p, task, scratch);
  }
}

}  // namespace uniep::cpu
