#pragma once

#include "engine/cuda/device/signals/waiting.h"
#include "engine/cuda/device/transfer/copy_ring.h"

// Dispatch: rows of x (or dy) from their source rank into the expert rows of the owner, by one warp.
namespace uniep::cuda {

// Padding is written as zero, never multiplied by it: what lay there before may be NaN.
UNIEP_DEVICE void zero_rows(BFloat16* rows, int64_t hidden, int32_t begin, int32_t end) {
  constexpr int64_t kElements = sizeof(ptx::Vector16) / sizeof(BFloat16);
  const int64_t limit = end * hidden;
  for (int64_t i = begin * hidden + ptx::lane_index() * kElements; i < limit; i += ptx::kThreadsPerWarp * kElements) {
    ptx::store_global_16(rows + i, ptx::Vector16{});
  }
}

// Bulk stores of a row's chunks to all rows of this rank that it fills: lane k to that of the token's slot k. Where
// those are is read while the row is on its way.
class RowFiller {
 public:
  // With `to_itself` false, to the others only.
  UNIEP_DEVICE RowFiller(const RankCall& call, int32_t operand, bool to_itself)
      : call_(call), operand_(operand), to_itself_(to_itself) {}

  // One lane, of the row that it was asked of.
  UNIEP_DEVICE void remember(const RowSource& source) {
    const RankProgram& p = call_.program;
    entries_ = p.row_of_source + p.source_begin[source.rank] + static_cast<int64_t>(source.token) * p.topk;
  }

  // The whole warp: this lane's target of the row that lane `lane` remembers.
  UNIEP_DEVICE const int32_t* note(int lane) const {
    const auto* const entries =
        reinterpret_cast<const int32_t*>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(entries_), lane));
    const int32_t slot = static_cast<int32_t>(ptx::lane_index());
    return call_.program.dedup && slot < call_.program.topk ? entries + slot : nullptr;
  }

  template <typename Chunk>
  UNIEP_DEVICE void store(const Chunk& chunk, uint32_t bytes) {
    if (chunk.offset == 0) target_ = target_of(chunk);  // chunks of a row come one after the other
    if (target_ < 0) return;
    BFloat16* const rows = call_.gathered_of[operand_][call_.program.rank];
    ptx::bulk_store(reinterpret_cast<uint8_t*>(rows + target_ * call_.hidden) + chunk.offset, chunk.address, bytes);
  }

 private:
  template <typename Chunk>
  UNIEP_DEVICE int32_t target_of(const Chunk& chunk) const {
    const RankProgram& p = call_.program;
    const int32_t slot = static_cast<int32_t>(ptx::lane_index());
    if (!p.dedup) return slot == 0 ? chunk.row : -1;
    if (slot >= p.topk) return -1;
    return to_itself_ || chunk.note != chunk.row ? chunk.note : -1;
  }

  const RankCall& call_;
  const int32_t operand_;
  const bool to_itself_;
  const int32_t* entries_ = nullptr;
  int32_t target_ = -1;
};

// The counters that for_each_counter_signal lists for a pull or receive, by all lanes together.
UNIEP_DEVICE void count_full_rows(const RunningCall& running, const uniep::Task& task) {
  const RankProgram& p = running.call.program;
  const RowRange rows = rows_of_dispatch(p, task);
  const RowRange block = rows_of_block(p, p.first_expert + task.expert, task.m);
  const int32_t operand = operand_of(p, task);
  const auto add = [&](const CounterSignal& signal) {
    ptx::add_relaxed_gpu(counter_of(running, signal.space, signal.index), signal.amount);
  };
  disturb(running, DisturbedAt::kSignal);
  __syncwarp();
  ptx::fence_gpu();  // releases what all lanes have written
  uint32_t own = 0;
  const int32_t first = rows.begin + static_cast<int32_t>(ptx::lane_index());
  for (int32_t row = first; p.dedup && row < rows.end; row += ptx::kThreadsPerWarp) {
    if (!is_primary_row(p, row)) continue;
    for_each_filled_row(p, row, [&](int32_t filled) {
      if (filled >= block.begin && filled < block.end) {
        ++own;
      } else {
        add(full_row(p, operand, filled));
      }
    });
  }
  own =
      __reduce_add_sync(0xffffffffu, own) + static_cast<uint32_t>(rows.padded_end - (p.dedup ? rows.end : rows.begin));
  if (ptx::lane_index() == 0 && own > 0) {
    add(full_rows(operand, task.expert, p.block_begin[task.expert] + task.m, own));
  }
}

// Pulls one task, whose waits hold; ends when its rows are in place and counted.
template <typename Ring>
UNIEP_DEVICE void pull_rows(const RunningCall& running, const uniep::Task& task, Ring& ring) {
  const RankCall& call = running.call;
  const RankProgram& p = call.program;
  const int32_t operand = operand_of(p, task);
  const RowRange range = rows_of_dispatch(p, task);
  zero_rows(call.gathered_of[operand][p.rank], call.hidden, range.end, range.padded_end);
  RowFiller filler(call, operand, true);
  const auto selects = [&](int32_t row) { return is_primary_row(p, row); };
  const auto source = [&](int32_t row) {
    const RowSource source = p.rows[row];
    filler.remember(source);
    return call.input[operand][source.rank] + source.token * call.hidden;
  };
  const auto note = [&](int lane) { return filler.note(lane); };
  const auto store = [&](const auto& chunk, uint32_t bytes) { filler.store(chunk, bytes); };
  const auto row_bytes = static_cast<uint32_t>(call.hidden * sizeof(BFloat16));
  copy_rows(ring, {range.begin, range.end, row_bytes}, RowChoice{selects, source}, note, store);
  ring.complete();
  count_full_rows(running, task);
}

// Pushes one task, whose waits hold; ends when its rows are in place. The source's rows of a block stand in the order
// (token, slot), so they are found by walking the row table of the owner, which the source wrote.
template <typename Ring>
UNIEP_DEVICE void push_rows(const RunningCall& running, const uniep::Task& task, Ring& ring) {
  const RankCall& call = running.call;
  const RankProgram& p = call.program;
  const int32_t owner = p.rank_of_expert[task.expert];
  const RowSource* const table = call.rows_of[owner];
  BFloat16* const rows = call.gathered_of[task.n][owner];
  const RowRange part = rows_from_source(p, task.expert, rows_of_block(p, task.expert, task.m), p.rank);
  const auto selects = [&](int32_t row) { return is_primary_slot(p, table[row].token, table[row].slot); };
  const auto source = [&](int32_t row) { return call.input[task.n][p.rank] + table[row].token * call.hidden; };
  const auto store = [&](const auto& chunk, uint32_t bytes) {
    if (ptx::lane_index() != 0) return;
    ptx::bulk_store(reinterpret_cast<uint8_t*>(rows + chunk.row * call.hidden) + chunk.offset, chunk.address, bytes);
  };
  const auto row_bytes = static_cast<uint32_t>(call.hidden * sizeof(BFloat16));
  copy_rows(ring, {part.begin, part.end, row_bytes}, RowChoice{selects, source}, NoNote{}, store);
  ring.complete();
  signal_task(running, task);
}

// What the owner does about pushed rows: copies to a token's other rows here, zero padding, readiness.
template <typename Ring>
UNIEP_DEVICE void receive_rows(const RunningCall& running, const uniep::Task& task, Ring& ring) {
  const RankCall& call = running.call;
  const RankProgram& p = call.program;
  BFloat16* const rows = call.gathered_of[task.n][p.rank];
  const RowRange range = rows_of_dispatch(p, task);
  const auto has_copies = [&](int32_t row) {
    bool some = false;
    if (is_primary_row(p, row)) for_each_filled_row(p, row, [&](int32_t filled) { some |= filled != row; });
    return some;
  };
  if (p.dedup) {
    RowFiller filler(call, task.n, false);
    const auto source = [&](int32_t row) {
      filler.remember(p.rows[row]);
      return rows + row * call.hidden;
    };
    const auto note = [&](int lane) { return filler.note(lane); };
    const auto store = [&](const auto& chunk, uint32_t bytes) { filler.store(chunk, bytes); };
    const auto row_bytes = static_cast<uint32_t>(call.hidden * sizeof(BFloat16));
    copy_rows(ring, {range.begin, range.end, row_bytes}, RowChoice{has_copies, source}, note, store);
  }
  zero_rows(rows, call.hidden, range.end, range.padded_end);
  ring.complete();
  count_full_rows(running, task);
}

}  // namespace uniep::cuda
