#include "program/checker.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "program/data_flow.h"
#include "program/task_graph.h"

namespace uniep::program {
namespace {

// Counts how often each piece of work is done, against how often it must be.
class Coverage {
 public:
  Coverage(const Program& program, std::vector<std::string>& problems) : program_(program), problems_(problems) {}

  void check(const TaskGraph& graph) {
    for (int rank = 0; rank < program_.ranks(); ++rank) expect_tiles(program_.rank(rank));
    for (const TaskGraph::Node& node : graph.nodes()) visit(node);
    for (const auto& [key, count] : tiles_) {
      if (count != 0) tell("rank {} {} (expert {}, m {}, n {}) is done {} times", key, 1 - count);
    }
    for (int rank = 0; rank < program_.ranks(); ++rank) check_rows(rank);
  }

 private:
  using Key = std::tuple<int, Stage, int32_t, int32_t, int32_t>;

  void tell(const char* format, const Key& key, int64_t count) {
    if (problems_.size() >= kMaxProblems) return;
    problems_.push_back(fmt::format(fmt::runtime(format), std::get<0>(key),
                                    stage_name(std::get<1>(key), program_.request().direction), std::get<2>(key),
                                    std::get<3>(key), std::get<4>(key), count));
  }

  void expect(const RankProgram& p, Stage stage, int32_t expert, int32_t m_count, int32_t n_count) {
    for (int32_t m = 0; m < m_count; ++m) {
      for (int32_t n = 0; n < n_count; ++n) tiles_[{p.rank, stage, expert, m, n}] += 1;
    }
  }

  // The grid of every stage, written down without the functions of order.h.
  void expect_tiles(const RankProgram& p) {
    const bool wgrad = p.direction == Direction::kBackward && program_.request().weight_gradients;
    const bool whole = program_.request().part == ProgramPart::kLayer;
    for (int32_t expert = 0; expert < p.local_experts; ++expert) {
      const int32_t rows = p.expert_rows[p.first_expert + expert];
      const int32_t blocks = static_cast<int32_t>(divide_up(rows, p.tile_m));
      expect(p, Stage::kFirstGemm, expert, blocks, p.first_tiles);
      if (p.push) {
        expect(p, Stage::kReceive, expert, blocks, p.operands);
      } else {
        expect(p, Stage::kPull, expert, blocks, p.operands * p.pull_parts);
      }
      if (!whole) continue;
      expect(p, Stage::kSecondGemm, expert, blocks, p.chunk_tile[p.chunks]);
      if (!p.epilogue_combine && p.combine_groups == 0) expect(p, Stage::kSend, expert, blocks, p.chunks);
      if (wgrad) {
        expect(p, Stage::kWgradFc2, expert, p.wgrad_fc2.m_tiles(), p.wgrad_fc2.n_tiles());
        expect(p, Stage::kWgradFc1, expert, p.wgrad_fc1.m_tiles(), p.wgrad_fc1.n_tiles());
      }
    }
    if (p.push) expect_pushes(p);
    if (!whole) return;
    expect(p, Stage::kReduce, -1, static_cast<int32_t>(divide_up(p.tokens, kTokenBlock)), p.chunks);
    for (int destination = 0; p.combine_groups > 0 && destination < p.ranks; ++destination) {
      const int32_t blocks = static_cast<int32_t>(divide_up(p.tokens_of_rank[destination], kTokenBlock));
      expect(p, Stage::kGroupSend, destination, blocks, p.chunks);
    }
  }

  void expect_pushes(const RankProgram& p) {
    std::map<std::pair<int32_t, int32_t>, bool> blocks;
    for (int64_t entry = 0; entry < static_cast<int64_t>(p.tokens) * p.topk; ++entry) {
      const int32_t expert = p.expert_of_slot[entry];
      if (expert >= 0) blocks[{expert, (p.row_of_slot[entry] - p.segment_start[expert]) / p.tile_m}] = true;
    }
    for (const auto& [block, unused] : blocks) {
      for (int32_t operand = 0; operand < p.operands; ++operand) {
        tiles_[{p.rank, Stage::kPush, block.first, block.second, operand}] += 1;
      }
    }
  }

  void visit(const TaskGraph::Node& node) {
    if (!node.task.has_tile()) return;
    tiles_[{node.rank, node.task.stage, node.task.expert, node.task.m, node.task.n}] -= 1;
    const RankProgram& p = program_.rank(node.rank);
    if (node.task.stage == Stage::kPull || node.task.stage == Stage::kReceive) fill_rows(p, node.task);
  }

  // Rows that the tile's copies fill (under push: rows that its source's copies or its own fill).
  void fill_rows(const RankProgram& p, const Task& task) {
    std::vector<int32_t>& filled = rows_[{p.rank, operand_of(p, task)}];
    filled.resize(program_.placement().padded_rows[p.rank], 0);
    const RowRange range = rows_of_dispatch(p, task);
    for (int32_t row = range.begin; row < range.end; ++row) {
      if (is_primary_row(p, row)) for_each_filled_row(p, row, [&](int32_t target) { ++filled[target]; });
    }
    for (int32_t row = range.end; row < range.padded_end; ++row) ++filled[row];
  }

  void check_rows(int rank) {
    const RankProgram& p = program_.rank(rank);
    for (int32_t operand = 0; operand < p.operands; ++operand) {
      std::vector<int32_t>& filled = rows_[{rank, operand}];
      filled.resize(program_.placement().padded_rows[rank], 0);
      for (std::size_t row = 0; row < filled.size() && problems_.size() < kMaxProblems; ++row) {
        if (filled[row] != 1) {
          problems_.push_back(
              fmt::format("rank {} row {} of operand {} is filled {} times", rank, row, operand, filled[row]));
        }
      }
    }
    check_columns(p);
  }

  void check_columns(const RankProgram& p) {
    int64_t covered = 0;
    for (int32_t chunk = 0; chunk < p.chunks; ++chunk) {
      const int32_t width = p.chunk_column[chunk + 1] - p.chunk_column[chunk];
      const int64_t reach = static_cast<int64_t>(tiles_in_chunk(p, chunk)) * p.second_tile_n;
      if (width <= 0 || width % 8 != 0 || reach < width || reach - p.second_tile_n >= width) {
        problems_.push_back(fmt::format("rank {} column chunk {} of {} columns has {} tiles", p.rank, chunk, width,
                                        tiles_in_chunk(p, chunk)));
      }
      covered += width;
    }
    if (covered != program_.placement().shape.hidden) {
      problems_.push_back(fmt::format("rank {} column chunks cover {} columns", p.rank, covered));
    }
  }

  const Program& program_;
  std::vector<std::string>& problems_;
  std::map<Key, int64_t> tiles_;
  std::map<std::pair<int, int>, std::vector<int32_t>> rows_;
};

}  // namespace

CheckReport check_program(const Program& program, const CheckTampering& tampering) {
  TaskGraph graph(program, tampering);
  graph.add_queue_edges();
  graph.add_wait_edges();
  CheckReport report;
  report.problems = graph.problems();
  Coverage(program, report.problems).check(graph);
  DataFlow(program, graph, tampering).check(report.problems, kMaxProblems);
  const std::vector<int64_t> stuck = graph.stuck();
  if (!stuck.empty()) {
    report.problems.push_back(
        fmt::format("deadlock: {} tasks can never run, among them {}", stuck.size(), graph.describe(stuck.front())));
  }
  report.ok = report.problems.empty();
  report.tasks = static_cast<int64_t>(graph.nodes().size());
  report.edges = graph.edge_count();
  return report;
}

}  // namespace uniep::program
