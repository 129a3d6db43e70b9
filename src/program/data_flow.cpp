#include "program/data_flow.h"

#include <fmt/format.h>

#include <algorithm>

namespace uniep::program {

namespace {

// FC2's weight gradient on rows of dy, by way of the first GEMM; what sends dprobs on their sums, by way of the second.
bool relies_on_earlier_waits(Stage stage) {
  return stage == Stage::kWgradFc2 || stage == Stage::kSend || stage == Stage::kGroupSend;
}

}  // namespace

DataFlow::DataFlow(const Program& program, const TaskGraph& graph, const CheckTampering& tampering)
    : program_(program), graph_(graph) {
  for (const int64_t rows : program.placement().padded_rows) prob_writer_.emplace_back(rows, -1);
  for (int64_t node = 0; node < static_cast<int64_t>(graph.nodes().size()); ++node) {
    const TaskGraph::Node& n = graph.nodes()[node];
    if (!n.task.has_tile()) continue;
    nodes_[{n.rank, n.task.stage, n.task.expert, n.task.m, n.task.n}] = node;
    if (n.task.stage == Stage::kPull || n.task.stage == Stage::kReceive) fill_writers(node);
    const bool returns_probs = tampering.returns_probs ? tampering.returns_probs(n.rank, n.task)
                                                       : returns_prob_gradients(program.rank(n.rank), n.task);
    if (returns_probs) fill_prob_writers(node);
  }
}

void DataFlow::fill_writers(int64_t node) {
  const TaskGraph::Node& n = graph_.nodes()[node];
  const RankProgram& p = program_.rank(n.rank);
  std::vector<int64_t>& writer = row_writer_[{n.rank, operand_of(p, n.task)}];
  writer.resize(program_.placement().padded_rows[n.rank], -1);
  const int32_t expert = p.first_expert + n.task.expert;
  if (n.task.expert < 0 || n.task.expert >= p.local_experts ||
      n.task.m >= blocks_of_rows(p.expert_rows[expert], p.tile_m)) {
    return;
  }
  const RowRange range = rows_of_dispatch(p, n.task);
  for (int32_t row = range.begin; row < range.end; ++row) {
    if (is_primary_row(p, row)) for_each_filled_row(p, row, [&](int32_t filled) { writer[filled] = node; });
  }
  for (int32_t row = range.end; row < range.padded_end; ++row) writer[row] = node;
}

void DataFlow::fill_prob_writers(int64_t node) {
  const TaskGraph::Node& n = graph_.nodes()[node];
  const RankProgram& p = program_.rank(n.rank);
  std::vector<int64_t>& writer = prob_writer_[n.rank];
  if (n.task.stage == Stage::kGroupSend) {
    for_each_row_of_tokens(p, n.task.expert, n.task.m, [&](int32_t, int32_t, int32_t row) { writer[row] = node; });
    return;
  }
  const RowRange range = rows_of_block(p, p.first_expert + n.task.expert, n.task.m);
  std::fill(writer.begin() + range.begin, writer.begin() + range.end, node);
}

// The 64-column sums that a row's dprob is made of.
void DataFlow::add_prob_sums(const RankProgram& p, const Task& task, std::vector<int64_t>& writers) const {
  if (p.direction == Direction::kForward || task.n != 0) return;
  if (task.stage == Stage::kSend) {
    add_tiles({p.rank, Stage::kFirstGemm, task.expert, task.m, 0, p.first_tiles}, writers);
    return;
  }
  for_each_row_of_tokens(p, task.expert, task.m, [&](int32_t, int32_t, int32_t row) {
    const RowSource source = p.rows[row];
    const int32_t expert =
        program_.rank(source.rank).expert_of_slot[static_cast<int64_t>(source.token) * p.topk + source.slot];
    add_tiles({p.rank, Stage::kFirstGemm, expert - p.first_expert, (row - p.segment_start[expert]) / p.tile_m, 0,
               p.first_tiles},
              writers);
  });
}

void DataFlow::add_row_writers(const RankProgram& p, int32_t operand, RowRange rows,
                               std::vector<int64_t>& writers) const {
  const auto found = row_writer_.find({p.rank, operand});
  if (found == row_writer_.end()) return;
  for (int32_t row = rows.begin; row < rows.padded_end; ++row) writers.push_back(found->second[row]);
}

void DataFlow::add_tiles(const TileRow& tiles, std::vector<int64_t>& writers) const {
  for (int32_t n = tiles.n_begin; n < tiles.n_end; ++n) {
    const auto found = nodes_.find({tiles.rank, tiles.stage, tiles.expert, tiles.m, n});
    writers.push_back(found == nodes_.end() ? -1 : found->second);
  }
}

// All rows of an expert (of an operand), and all tiles of the first GEMM over them.
void DataFlow::add_expert(const RankProgram& p, int32_t expert, int32_t operand, bool rows,
                          std::vector<int64_t>& writers) const {
  const int32_t blocks = blocks_of_rows(p.expert_rows[p.first_expert + expert], p.tile_m);
  for (int32_t m = 0; m < blocks; ++m) {
    add_tiles({p.rank, Stage::kFirstGemm, expert, m, 0, p.first_tiles}, writers);
    if (rows) add_row_writers(p, operand, rows_of_block(p, p.first_expert + expert, m), writers);
  }
}

// What a reduce tile adds up: rows or sums that their expert's rank has put into this rank's slots. With the first
// column chunk it also takes the dprobs that came with them.
void DataFlow::add_summands(const RankProgram& p, const Task& task, std::vector<int64_t>& writers) const {
  const int64_t begin = static_cast<int64_t>(task.m) * kTokenBlock * p.topk;
  const int64_t end =
      std::min<int64_t>(begin + static_cast<int64_t>(kTokenBlock) * p.topk, static_cast<int64_t>(p.tokens) * p.topk);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t entry = summed_token(p, static_cast<int32_t>(i / p.topk)) * int64_t{p.topk} + i % p.topk;
    const int32_t expert = p.expert_of_slot[entry];
    if (expert < 0) continue;
    const int owner = p.rank_of_expert[expert];
    const int32_t local = expert - program_.rank(owner).first_expert;
    const int32_t block = (p.row_of_slot[entry] - p.segment_start[expert]) / p.tile_m;
    if (p.direction == Direction::kBackward && task.n == 0) {
      writers.push_back(prob_writer_[owner][p.row_of_slot[entry]]);
    }
    if (p.combine_groups > 0) {
      const int32_t token_block = static_cast<int32_t>(entry / p.topk / kTokenBlock);
      add_tiles({owner, Stage::kGroupSend, p.rank, token_block, task.n, task.n + 1}, writers);
    } else if (p.epilogue_combine) {
      add_tiles({owner, Stage::kSecondGemm, local, block, p.chunk_tile[task.n], p.chunk_tile[task.n + 1]}, writers);
    } else {
      add_tiles({owner, Stage::kSend, local, block, task.n, task.n + 1}, writers);
    }
  }
}

std::vector<int64_t> DataFlow::writers_of(const TaskGraph::Node& reader) const {
  const RankProgram& p = program_.rank(reader.rank);
  const Task& task = reader.task;
  std::vector<int64_t> writers;
  if (!task.has_tile()) return writers;
  switch (task.stage) {
    case Stage::kPull:
    case Stage::kPush:
      break;  // they read the caller's arrays
    case Stage::kReceive:
      for (int32_t source = 0; source < p.ranks; ++source) {
        const RowRange part = rows_from_source(p, p.first_expert + task.expert,
                                               rows_of_block(p, p.first_expert + task.expert, task.m), source);
        if (part.begin < part.end) {
          add_tiles({source, Stage::kPush, p.first_expert + task.expert, task.m, task.n, task.n + 1}, writers);
        }
      }
      break;
    case Stage::kFirstGemm:
      add_row_writers(p, 0, rows_of_block(p, p.first_expert + task.expert, task.m), writers);
      break;
    case Stage::kSecondGemm:
      add_tiles({p.rank, Stage::kFirstGemm, task.expert, task.m, 0, p.first_tiles}, writers);
      break;
    case Stage::kWgradFc2:
      add_expert(p, task.expert, 0, true, writers);
      break;
    case Stage::kWgradFc1:
      add_expert(p, task.expert, 1, p.operands == 2, writers);
      break;
    case Stage::kSend:
      add_tiles({p.rank, Stage::kSecondGemm, task.expert, task.m, p.chunk_tile[task.n], p.chunk_tile[task.n + 1]},
                writers);
      add_prob_sums(p, task, writers);
      break;
    case Stage::kGroupSend:
      for_each_row_of_tokens(p, task.expert, task.m, [&](int32_t, int32_t, int32_t row) {
        const RowSource source = p.rows[row];
        const int32_t expert =
            program_.rank(source.rank).expert_of_slot[static_cast<int64_t>(source.token) * p.topk + source.slot];
        add_tiles({p.rank, Stage::kSecondGemm, expert - p.first_expert, (row - p.segment_start[expert]) / p.tile_m,
                   p.chunk_tile[task.n], p.chunk_tile[task.n + 1]},
                  writers);
      });
      add_prob_sums(p, task, writers);
      break;
    case Stage::kReduce:
      add_summands(p, task, writers);
      break;
  }
  std::sort(writers.begin(), writers.end());
  writers.erase(std::unique(writers.begin(), writers.end()), writers.end());
  return writers;
}

// What the awaited tasks have waited for themselves.
const std::vector<int64_t>& DataFlow::awaited_before(const std::vector<int64_t>& awaited) {
  if (awaited == last_awaited_) return last_before_;
  last_awaited_ = awaited;
  last_before_.clear();
  for (const int64_t node : awaited) {
    const std::vector<int64_t> before = graph_.awaited_by(node);
    last_before_.insert(last_before_.end(), before.begin(), before.end());
  }
  std::sort(last_before_.begin(), last_before_.end());
  last_before_.erase(std::unique(last_before_.begin(), last_before_.end()), last_before_.end());
  return last_before_;
}

void DataFlow::check(std::vector<std::string>& problems, std::size_t most) {
  std::map<std::pair<int, Stage>, int64_t> readers, seen;
  for (const TaskGraph::Node& n : graph_.nodes()) ++readers[{n.rank, n.task.stage}];
  for (int64_t node = 0; node < static_cast<int64_t>(graph_.nodes().size()) && problems.size() < most; ++node) {
    const TaskGraph::Node& n = graph_.nodes()[node];
    const int64_t stride = divide_up(readers[{n.rank, n.task.stage}], kReadersChecked);
    if (seen[{n.rank, n.task.stage}]++ % stride != 0) continue;
    const std::vector<int64_t> awaited = graph_.awaited_by(node);
    for (const int64_t writer : writers_of(n)) {
      if (writer >= 0 && std::binary_search(awaited.begin(), awaited.end(), writer)) continue;
      if (writer >= 0 && relies_on_earlier_waits(n.task.stage)) {
        const std::vector<int64_t>& before = awaited_before(awaited);
        if (std::binary_search(before.begin(), before.end(), writer)) continue;
      }
      problems.push_back(fmt::format("{} reads what {} writes but does not wait for it", graph_.describe(node),
                                     writer < 0 ? "nobody" : graph_.describe(writer)));
      break;
    }
  }
}

}  // namespace uniep::program
