#pragma once

#include <vector>

#include "program/build.h"
#include "program/order.h"

// What a task does, in numbers: what it multiplies, what it reads and writes in its rank's memory, and what it carries
// from which rank to which. Every byte counts once where it is read and once where it is written.
namespace uniep::program {

// An m x k matrix times a k x n one. Rows of padding do not count.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  int64_t operations() const { return 2 * m * n * k; }
  bool operator==(const Gemm&) const = default;
};

struct TaskWork {
  Gemm gemm;                  // all zero: the stage multiplies nothing
  int64_t read_bytes = 0;     // of the rank's own memory
  int64_t written_bytes = 0;  // of the rank's own memory
  // Copies and sums: rows of so many bytes each (of a column chunk, where there are several) that are taken and put. A
  // pull with deduplication takes a row once and puts it wherever its token needs it. Rows of zeros count as put.
  int64_t rows_taken = 0, rows_put = 0;
  int64_t row_bytes = 0;
  bool operator==(const TaskWork&) const = default;
};

// Bytes that go from one rank's memory to another's; `from` and `to` are the same where a token's expert is on its
// rank.
struct Move {
  int32_t from, to;
  int64_t bytes;
  bool operator==(const Move&) const = default;
};

// What a task of program.rank(...), or of a part of it, does. `moves`, if given, then holds what the task carries from
// where tokens are to where experts are, or back: at most one Move for each pair of ranks. A position without a tile
// does nothing.
TaskWork task_work(const Program& program, const RankProgram& p, const Task& task, std::vector<Move>* moves = nullptr);

// The moves of all tasks of a list, [from][to].
using ByteMatrix = std::vector<std::vector<int64_t>>;
void add_moves(const Program& program, const RankProgram& p, int launch, ListKind list, ByteMatrix& bytes);

}  // namespace uniep::program
