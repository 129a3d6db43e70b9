#pragma once

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "program/task_graph.h"

namespace uniep::program {

// Whether every tile waits for the tiles that write what it reads. Who writes what is worked out here from the sizes
// and the row tables alone, not from the functions of edges.h, so that a wait which is missing there is noticed.
// Some stages rely on what the tiles that they wait for have waited for themselves: a signal also promises all that was
// acquired before it.
class DataFlow {
 public:
  DataFlow(const Program& program, const TaskGraph& graph, const CheckTampering& tampering);

  // Adds what is wrong to `problems`, up to `most` entries. Of each rank and stage, at most kReadersChecked tiles are
  // looked at, spread evenly: all of them on small shapes.
  void check(std::vector<std::string>& problems, std::size_t most);

 private:
  struct TileRow {  // of a rank, side by side
    int rank;
    Stage stage;
    int32_t expert, m;
    int32_t n_begin, n_end;
  };
  using Key = std::tuple<int, Stage, int32_t, int32_t, int32_t>;
  static constexpr int64_t kReadersChecked = 2000;

  void fill_writers(int64_t node);
  void fill_prob_writers(int64_t node);
  void add_prob_sums(const RankProgram& p, const Task& task, std::vector<int64_t>& writers) const;
  std::vector<int64_t> writers_of(const TaskGraph::Node& reader) const;
  void add_row_writers(const RankProgram& p, int32_t operand, RowRange rows, std::vector<int64_t>& writers) const;
  void add_tiles(const TileRow& tiles, std::vector<int64_t>& writers) const;
  void add_expert(const RankProgram& p, int32_t expert, int32_t operand, bool rows,
                  std::vector<int64_t>& writers) const;
  void add_summands(const RankProgram& p, const Task& task, std::vector<int64_t>& writers) const;
  const std::vector<int64_t>& awaited_before(const std::vector<int64_t>& awaited);

  const Program& program_;
  const TaskGraph& graph_;
  std::map<Key, int64_t> nodes_;
  std::map<std::pair<int, int>, std::vector<int64_t>> row_writer_;  // (rank, operand) -> the node that completes a row
  std::vector<std::vector<int64_t>> prob_writer_;                   // [rank][row] the node that returns the row's dprob
  std::vector<int64_t> last_awaited_, last_before_;  // of awaited_before: tiles of one expert wait for the same
};

}  // namespace uniep::program
