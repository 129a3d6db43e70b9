#include "sim/task_costs.h"

#include <algorithm>

namespace uniep::sim {

RankCosts::RankCosts(const RankProgram& program, const SignalLayout& layout) : program_(program) {
  blocks_ = static_cast<std::size_t>(local_blocks(program));
  bool dispatches = false;
  for (int launch = 0; launch < program.launches; ++launch) dispatches |= program.stages[launch].dispatch;
  const int32_t parts = program.push ? 1 : program.pull_parts;
  if (dispatches) copies_.reserve(blocks_ * parts * program.operands);
  block_begin_.assign(1, 0);
  for (int32_t expert = 0; expert < program.local_experts; ++expert) {
    const int32_t blocks = program.block_begin[expert + 1] - program.block_begin[expert];
    for (int32_t m = 0; m < blocks; ++m) add_block(expert, m);
  }
  for (int32_t operand = 0; dispatches && operand < program.operands; ++operand) {
    for (int32_t expert = 0; expert < program.local_experts; ++expert) {
      const int32_t blocks = program.block_begin[expert + 1] - program.block_begin[expert];
      for (int32_t m = 0; m < blocks; ++m) {
        for (int32_t part = 0; part < parts; ++part) {
          add_copy({program.push ? Stage::kReceive : Stage::kPull, expert, m,
                    program.push ? operand : operand * parts + part},
                   layout);
        }
      }
    }
  }
  if (dispatches && program.push) count_pushed_rows();
  if (dispatches) count_fetched_rows();
}

void RankCosts::add_block(int32_t expert, int32_t m) {
  const int32_t global = program_.first_expert + expert;
  const RowRange whole = rows_of_block(program_, global, m);
  for_each_source(program_, global, whole, [&](int32_t source) {
    const RowRange part = rows_from_source(program_, global, whole, source);
    block_peers_.push_back({source, part.end - part.begin});
  });
  block_begin_.push_back(static_cast<int32_t>(block_peers_.size()));
}

void RankCosts::add_copy(const Task& task, const SignalLayout& layout) {
  const RankProgram& p = program_;
  CopyWork work;
  work.peers_begin = static_cast<int32_t>(peers_.size());
  work.signals_begin = static_cast<int32_t>(signals_.size());
  const RowRange range = rows_of_dispatch(p, task);
  work.rows_out = range.padded_end - std::max(range.begin, range.end);
  const bool pulls = task.stage == Stage::kPull;
  for (int32_t row = range.begin; row < range.end; ++row) {
    if (!is_primary_row(p, row)) continue;
    int32_t filled = 0;
    for_each_filled_row(p, row, [&](int32_t) { ++filled; });
    // A pushed row lies in its place; only its copies are the owner's work.
    work.rows_out += pulls ? filled : filled - 1;
    if (!pulls && filled == 1) continue;
    ++work.rows_in;
    const int32_t source = p.rows[row].rank;
    bool found = false;
    for (std::size_t i = work.peers_begin; pulls && i < peers_.size() && !found; ++i) {
      found = peers_[i].peer == source;
      if (found) ++peers_[i].rows;
    }
    if (pulls && !found) peers_.push_back({source, 1});
  }
  for_each_counter_signal(p, task, [&](const CounterSignal& signal) {
    const int64_t counter = layout.counters[static_cast<int>(signal.space)] + signal.index;
    signals_.push_back({counter, signal.amount});
  });
  work.peers_end = static_cast<int32_t>(peers_.size());
  work.signals_end = static_cast<int32_t>(signals_.size());
  copies_.push_back(work);
}

void RankCosts::count_pushed_rows() {
  const RankProgram& p = program_;
  int32_t blocks = 0;
  for (int32_t expert = 0; expert < p.experts; ++expert) {
    pushed_begin_.push_back(blocks);
    blocks += blocks_of_rows(p.expert_rows[expert], p.tile_m);
  }
  pushed_rows_.assign(blocks, 0);
  for (int32_t token = 0; token < p.tokens; ++token) {
    for (int32_t slot = 0; slot < p.topk; ++slot) {
      const int64_t entry = static_cast<int64_t>(token) * p.topk + slot;
      const int32_t expert = p.expert_of_slot[entry];
      if (expert < 0 || !is_primary_slot(p, token, slot)) continue;
      ++pushed_rows_[pushed_begin_[expert] + (p.row_of_slot[entry] - p.segment_start[expert]) / p.tile_m];
    }
  }
}

void RankCosts::count_fetched_rows() {
  const RankProgram& p = program_;
  for (int32_t expert = p.first_expert; expert < p.first_expert + p.local_experts; ++expert) {
    const int32_t begin = p.segment_start[expert];
    for (int32_t row = begin; row < begin + p.expert_rows[expert]; ++row) {
      if (!is_primary_row(p, row)) continue;
      const std::size_t source = p.rows[row].rank;
      if (source >= fetched_.size()) fetched_.resize(source + 1);
      ++fetched_[source];
    }
  }
}

ProgramCosts::ProgramCosts(const Program& of, bool one_rank) : program(of) {
  const SignalLayout layout = signal_layout(program.rank(0));
  const int simulated = one_rank ? 1 : program.ranks();
  ranks.reserve(simulated);
  for (int rank = 0; rank < simulated; ++rank) ranks.emplace_back(program.rank(rank), layout);
}

double relayed_share(const Program& program, int ranks_of_node) {
  if (!program.rank(0).dedup) return 1.0;
  int64_t by_rank = 0, by_node = 0;
  std::vector<int32_t> ranks, nodes;
  for (int rank = 0; rank < program.ranks(); ++rank) {
    const RankProgram& p = program.rank(rank);
    for (int32_t token = 0; token < p.tokens; ++token) {
      ranks.clear(), nodes.clear();
      for (int32_t slot = 0; slot < p.topk; ++slot) {
        const int32_t expert = p.expert_of_slot[static_cast<int64_t>(token) * p.topk + slot];
        if (expert < 0) continue;
        const int32_t to = p.rank_of_expert[expert], node = to / ranks_of_node;
        if (node == rank / ranks_of_node) continue;
        if (std::find(ranks.begin(), ranks.end(), to) == ranks.end()) ranks.push_back(to);
        if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
      }
      by_rank += static_cast<int64_t>(ranks.size());
      by_node += static_cast<int64_t>(nodes.size());
    }
  }
  return by_rank == 0 ? 1.0 : static_cast<double>(by_node) / static_cast<double>(by_rank);
}

}  // namespace uniep::sim
