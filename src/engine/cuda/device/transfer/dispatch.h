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

// The rows that a warp copies together, and where each goes. With deduplication a token comes once, as the first of its
// rows here, its primary row, and is stored to all of them. The lanes look those up together, a lane a slot of a row,
// in a few rounds whose loads do not wait for each other; what they find stays at hand until the rows are counted. With
// kInPlace primary rows are where they belong, and only those are copied that have others.
template <bool kInPlace>
class RowBatch {
 public:
  // How many rows one takes at most.
  UNIEP_DEVICE static int32_t capacity(const RankProgram& p) {
    const int32_t rows = p.dedup ? kRounds * rows_at_once(p) : ptx::kThreadsPerWarp;
    return rows < static_cast<int32_t>(ptx::kThreadsPerWarp) ? rows : static_cast<int32_t>(ptx::kThreadsPerWarp);
  }

  // A whole warp. `begin` to `end` are rows of this rank.
  UNIEP_DEVICE RowBatch(const RankProgram& p, int32_t begin, int32_t end) : begin_(begin) {
    const auto lane = static_cast<int32_t>(ptx::lane_index());
    const int32_t rows = end - begin;
    if (lane < rows) source_ = p.rows[begin + lane];
    copied_ = lane < rows && (p.dedup || !kInPlace);
    if (!p.dedup) return;
    const int64_t entry = copied_ ? first_entry(p, source_.rank, source_.token) : 0;
    const int32_t at_once = rows_at_once(p), group = lane / p.topk, slot = lane % p.topk;
#pragma unroll
    for (int32_t round = 0; round < kRounds; ++round) {
      const int32_t row = round * at_once + group;
      const int64_t of_row = __shfl_sync(0xffffffffu, entry, row % ptx::kThreadsPerWarp);
      filled_[round] = group < at_once && row < rows ? p.row_of_source[of_row + slot] : -1;
    }
    // Lane i: which slots of row i's token take rows here, and which rows before it.
    uint32_t here = 0, before = 0;
#pragma unroll
    for (int32_t round = 0; round < kRounds; ++round) {
      const int32_t filled = filled_[round];
      const uint32_t lanes_here = __ballot_sync(0xffffffffu, filled >= 0);
      const uint32_t lanes_before = __ballot_sync(0xffffffffu, filled >= 0 && filled < begin + round * at_once + group);
      if (round != lane / at_once) continue;
      here = lanes_here;
      before = lanes_before;
    }
    const int32_t shift = lane % at_once * p.topk;
    const uint32_t slots = 0xffffffffu >> (ptx::kThreadsPerWarp - p.topk);
    copied_ &= (before >> shift & slots) == 0;
    primary_ = __ballot_sync(0xffffffffu, copied_);
    if (kInPlace) copied_ &= __popc(here >> shift & slots) > 1;
  }

  // Of the row that falls to this lane: whether it is copied, and from where its token is.
  UNIEP_DEVICE bool is_copied() const {
    return copied_;
  }
  UNIEP_DEVICE const RowSource& source() const {
    return source_;
  }

  // A whole warp: where a copied row goes by this lane, or -1.
  UNIEP_DEVICE int32_t target(const RankProgram& p, int32_t row) const {
    const auto lane = static_cast<int32_t>(ptx::lane_index());
    if (!p.dedup) return lane == 0 ? row : -1;
    const int32_t index = row - begin_, at_once = rows_at_once(p);
    const int32_t filled =
        __shfl_sync(0xffffffffu, of_round(index / at_once), (index % at_once * p.topk + lane) % ptx::kThreadsPerWarp);
    return lane < p.topk && (!kInPlace || filled != row) ? filled : -1;
  }

  // visit(row) for the rows that copies of the batch fill, each by one lane. With deduplication only.
  template <typename Visit>
  UNIEP_DEVICE void for_each_filled_row(const RankProgram& p, Visit&& visit) const {
    const int32_t at_once = rows_at_once(p), group = static_cast<int32_t>(ptx::lane_index()) / p.topk;
#pragma unroll 1
    for (int32_t round = 0; round < kRounds; ++round) {
      const int32_t filled = of_round(round), row = round * at_once + group;
      if (filled >= 0 && (primary_ >> row & 1u) != 0) visit(filled);
    }
  }

 private:
  static constexpr int32_t kRounds = 4;

  UNIEP_DEVICE static int32_t rows_at_once(const RankProgram& p) {
    return ptx::kThreadsPerWarp / p.topk;
  }

  UNIEP_DEVICE int32_t of_round(int32_t round) const {
    int32_t filled = filled_[0];
#pragma unroll
    for (int32_t i = 1; i < kRounds; ++i) filled = round == i ? filled_[i] : filled;
    return filled;
  }

  const int32_t begin_;
  RowSource source_{};
  bool copied_;
  uint32_t primary_ = 0;       // bit i: of row i
  int32_t filled_[kRounds]{};  // by this lane's slot of a row of each round; -1: none here
};

// Ends the copies of a batch: once its rows are in place they are counted, and `plain_rows` of the task's block with
// them; part of what for_each_counter_signal lists for a pull or receive. A whole warp.
template <typename Ring, typename Batch>
UNIEP_DEVICE void complete_rows(const RunningCall& running, const uniep::Task& task, Ring& ring, const Batch& batch,
                                int32_t plain_rows) {
  const RankProgram& p = running.call.program;
  // Looked up while the last rows are on their way.
  const RowRange block = rows_of_block(p, p.first_expert + task.expert, task.m);
  const int32_t index = p.block_begin[task.expert] + task.m;
  const int32_t operand = operand_of(p, task);
  const auto add = [&](const CounterSignal& signal) {
    ptx::add_relaxed_gpu(counter_of(running, signal.space, signal.index), signal.amount);
  };
  ring.complete();
  disturb(running, DisturbedAt::kSignal);
  __syncwarp();
  ptx::fence_gpu();  // releases what all lanes have written
  uint32_t own = 0;
  if (p.dedup) {
    batch.for_each_filled_row(p, [&](int32_t row) {
      if (row >= block.begin && row < block.end) {
        ++own;
      } else {
        add(full_row(p, operand, row));
      }
    });
  }
  own = __reduce_add_sync(0xffffffffu, own) + static_cast<uint32_t>(plain_rows);
  if (ptx::lane_index() == 0 && own > 0) add(full_rows(operand, task.expert, index, own));
}

// Fills the rows of a task from where `address(row, source)` says, asked by one lane a row, and zeroes its padding;
// ends when they are in place and counted.
template <bool kInPlace, typename Ring, typename Address>
UNIEP_DEVICE void fill_rows(const RunningCall& running, const uniep::Task& task, Ring& ring, Address&& address) {
  const RankCall& call = running.call;
  const RankProgram& p = call.program;
  BFloat16* const rows = call.gathered_of[operand_of(p, task)][p.rank];
  const RowRange range = rows_of_dispatch(p, task);
  const auto row_bytes = static_cast<uint32_t>(call.hidden * sizeof(BFloat16));
  zero_rows(rows, call.hidden, range.end, range.padded_end);
  int32_t begin = range.begin;
  do {
    const int32_t limit = begin + RowBatch<kInPlace>::capacity(p);
    const int32_t end = limit < range.end ? limit : range.end;
    const RowBatch<kInPlace> batch(p, begin, end);
    int32_t target = -1;
    const auto store = [&](const auto& chunk, uint32_t bytes) {
      // Chunks of a row come one after the other.
      if (chunk.offset == 0) target = batch.target(p, chunk.row);
      if (target < 0) return;
      ptx::bulk_store(reinterpret_cast<uint8_t*>(rows + target * call.hidden) + chunk.offset, chunk.address, bytes);
    };
    const auto selects = [&](int32_t) { return batch.is_copied(); };
    const auto source = [&](int32_t row) { return address(row, batch.source()); };
    copy_rows(ring, {begin, end, row_bytes}, RowChoice{selects, source}, store);
    const int32_t padding = end == range.end ? range.padded_end - range.end : 0;
    complete_rows(running, task, ring, batch, padding + (p.dedup ? 0 : end - begin));
    begin = end;
  } while (begin < range.end);
}

// Pulls one task, whose waits hold.
template <typename Ring>
UNIEP_DEVICE void pull_rows(const RunningCall& running, const uniep::Task& task, Ring& ring) {
  const RankCall& call = running.call;
  const int32_t operand = operand_of(call.program, task);
  fill_rows<false>(running, task, ring, [&](int32_t /*row*/, const RowSource& source) {
    return call.input[operand][source.rank] + source.token * call.hidden;
  });
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
  copy_rows(ring, {part.begin, part.end, row_bytes}, RowChoice{selects, source}, store);
  ring.complete();
  signal_task(running, task);
}

// What the owner does about pushed rows: copies to a token's other rows here, zero padding, readiness.
template <typename Ring>
UNIEP_DEVICE void receive_rows(const RunningCall& running, const uniep::Task& task, Ring& ring) {
  const RankCall& call = running.call;
  const BFloat16* const rows = call.gathered_of[task.n][call.program.rank];
  fill_rows<true>(running, task, ring, [&](int32_t row, const RowSource&) { return rows + row * call.hidden; });
}

}  // namespace uniep::cuda
