#include "program/task_work.h"

#include <algorithm>

#include "model/elementwise.h"
#include "program/edges.h"
#include "program/token_groups.h"

namespace uniep::program {
namespace {

constexpr int64_t kElement = sizeof(BFloat16);
constexpr int64_t kProb = sizeof(float);

// One task's work while it is added up.
class Tally {
 public:
  Tally(const Program& program, const RankProgram& p, const Task& task, std::vector<Move>* moves)
      : program_(program),
        p_(p),
        task_(task),
        moves_(moves),
        hidden_(p.wgrad_fc2.rows),
        intermediate_(p.wgrad_fc2.columns),
        halves_(p.wgrad_fc1.rows / p.wgrad_fc2.columns),
        forward_(p.direction == Direction::kForward) {
    if (moves_ != nullptr) moves_->clear();
  }

  TaskWork work() {
    if (!task_.has_tile()) return {};
    switch (task_.stage) {
      case Stage::kPull:
        pull();
        break;
      case Stage::kPush:
        push();
        break;
      case Stage::kReceive:
        receive();
        break;
      case Stage::kFirstGemm:
        first_gemm();
        break;
      case Stage::kSecondGemm:
        second_gemm();
        break;
      case Stage::kWgradFc2:
      case Stage::kWgradFc1:
        weight_gradient();
        break;
      case Stage::kSend:
        send();
        break;
      case Stage::kGroupSend:
        group_send();
        break;
      case Stage::kReduce:
        reduce();
        break;
    }
    return work_;
  }

 private:
  int32_t global_expert() const { return p_.first_expert + task_.expert; }
  RowRange block() const { return rows_of_block(p_, global_expert(), task_.m); }
  int64_t chunk_columns(int32_t chunk) const { return p_.chunk_column[chunk + 1] - p_.chunk_column[chunk]; }

  // What is carried is written where it goes to; whether it is read from memory depends on the stage.
  void carry(int32_t from, int32_t to, int64_t bytes) {
    if (to == p_.rank) work_.written_bytes += bytes;
    if (moves_ == nullptr || bytes == 0) return;
    for (Move& earlier : *moves_) {
      if (earlier.from != from || earlier.to != to) continue;
      earlier.bytes += bytes;
      return;
    }
    moves_->push_back({from, to, bytes});
  }

  // Calls visit(source, rows) for every rank that has rows in a range of the task's expert.
  template <typename Visit>
  void for_each_rows_of_source(RowRange range, Visit&& visit) const {
    for (int32_t source = 0; source < p_.ranks; ++source) {
      const RowRange rows = rows_from_source(p_, global_expert(), range, source);
      if (rows.begin < rows.end) visit(source, rows);
    }
  }

  int64_t filled_rows(int32_t row) const {
    int64_t filled = 0;
    for_each_filled_row(p_, row, [&](int32_t) { ++filled; });
    return filled;
  }

  void pull() {
    work_.row_bytes = hidden_ * kElement;
    const RowRange range = rows_of_dispatch(p_, task_);
    for_each_rows_of_source(range, [&](int32_t source, RowRange rows) {
      int64_t taken = p_.dedup ? 0 : rows.end - rows.begin;
      int64_t put = taken;
      for (int32_t row = rows.begin; p_.dedup && row < rows.end; ++row) {
        if (!is_primary_row(p_, row)) continue;
        ++taken;
        put += filled_rows(row);
      }
      work_.rows_taken += taken;
      work_.rows_put += put;
      if (source == p_.rank) work_.read_bytes += taken * work_.row_bytes;
      carry(source, p_.rank, taken * work_.row_bytes);
      work_.written_bytes += (put - taken) * work_.row_bytes;
    });
    put_zeros(range);
  }

  void put_zeros(RowRange range) {
    work_.rows_put += range.padded_end - range.end;
    work_.written_bytes += (range.padded_end - range.end) * work_.row_bytes;
  }

  void push() {
    work_.row_bytes = hidden_ * kElement;
    const int32_t to = p_.rank_of_expert[task_.expert];
    const RankProgram& owner = program_.rank(to);
    const RowRange rows = rows_from_source(p_, task_.expert, rows_of_block(p_, task_.expert, task_.m), p_.rank);
    for (int32_t row = rows.begin; row < rows.end; ++row) work_.rows_taken += is_primary_row(owner, row) ? 1 : 0;
    work_.rows_put = work_.rows_taken;
    work_.read_bytes = work_.rows_taken * work_.row_bytes;
    carry(p_.rank, to, work_.read_bytes);
  }

  void receive() {
    work_.row_bytes = hidden_ * kElement;
    const RowRange range = block();
    for (int32_t row = range.begin; p_.dedup && row < range.end; ++row) {
      const int64_t others = is_primary_row(p_, row) ? filled_rows(row) - 1 : 0;
      work_.rows_taken += others > 0 ? 1 : 0;
      work_.rows_put += others;
    }
    work_.read_bytes = work_.rows_taken * work_.row_bytes;
    work_.written_bytes = work_.rows_put * work_.row_bytes;
    put_zeros(range);
  }

  void multiply(int64_t m, int64_t n, int64_t k) {
    work_.gemm = {m, n, k};
    work_.read_bytes += (m + n) * k * kElement;
  }

  void first_gemm() {
    const RowRange range = block();
    const int64_t rows = range.end - range.begin;
    const int64_t width = first_tile_columns(program_.request().schedule, program_.request().numerics, p_.direction);
    const int64_t columns = std::min(width, intermediate_ - task_.n * width);
    multiply(rows, forward_ ? halves_ * columns : columns, hidden_);
    if (forward_) {  // z and a
      work_.written_bytes = rows * (halves_ + 1) * columns * kElement;
      return;
    }
    const int64_t padded = range.padded_end - range.begin;    // a and dz are operands of the weight gradients
    work_.read_bytes += rows * halves_ * columns * kElement;  // z
    work_.written_bytes = padded * (halves_ + 1) * columns * kElement + rows * divide_up(columns, kProbColumns) * kProb;
  }

  void second_gemm() {
    const RowRange range = block();
    const int32_t chunk = chunk_of_tile(p_, task_.n);
    const int64_t before = static_cast<int64_t>(task_.n - p_.chunk_tile[chunk]) * p_.second_tile_n;
    const int64_t columns = std::min<int64_t>(p_.second_tile_n, chunk_columns(chunk) - before);
    multiply(range.end - range.begin, columns, forward_ ? intermediate_ : halves_ * intermediate_);
    if (!p_.epilogue_combine) {
      work_.written_bytes = work_.gemm.m * columns * kElement;
      return;
    }
    for_each_rows_of_source(range, [&](int32_t source, RowRange rows) {
      carry(p_.rank, source, (rows.end - rows.begin) * columns * kElement);
    });
    return_prob_gradients();
  }

  void weight_gradient() {
    const bool fc2 = task_.stage == Stage::kWgradFc2;
    const WgradGrid& grid = fc2 ? p_.wgrad_fc2 : p_.wgrad_fc1;
    const int64_t m = std::min<int64_t>(grid.tile_m, grid.rows - int64_t{task_.m} * grid.tile_m);
    const int64_t n = std::min<int64_t>(grid.tile_n, grid.columns - int64_t{task_.n} * grid.tile_n);
    multiply(m, n, p_.expert_rows[global_expert()]);
    const WeightGradient mode = program_.request().numerics.weight_gradient;
    const int64_t bytes = m * n * (mode == WeightGradient::kBFloat16 ? kElement : int64_t{sizeof(float)});
    work_.written_bytes = bytes;
    if (mode == WeightGradient::kMainGrad) work_.read_bytes += bytes;
  }

  void send() {
    work_.row_bytes = chunk_columns(task_.n) * kElement;
    for_each_rows_of_source(block(), [&](int32_t source, RowRange rows) {
      work_.rows_taken += rows.end - rows.begin;
      carry(p_.rank, source, (rows.end - rows.begin) * work_.row_bytes);
    });
    work_.rows_put = work_.rows_taken;
    work_.read_bytes = work_.rows_taken * work_.row_bytes;
    return_prob_gradients();
  }

  void group_send() {
    work_.row_bytes = chunk_columns(task_.n) * kElement;
    TokenGroups groups(p_.experts, p_.combine_groups);
    for_each_row_of_tokens(p_, task_.expert, task_.m, [&](int32_t token, int32_t, int32_t row) {
      ++work_.rows_taken;
      work_.rows_put += groups.is_first(token, p_.first_expert + local_expert_holding(p_, row));
    });
    carry(p_.rank, task_.expert, work_.rows_put * work_.row_bytes);
    work_.read_bytes = work_.rows_taken * work_.row_bytes;
    return_prob_gradients();
  }

  void return_prob_gradients() {
    if (!returns_prob_gradients(p_, task_)) return;
    const int64_t partial_sums = divide_up(intermediate_, kProbColumns);
    const auto of_rows = [&](int32_t to, int64_t rows) {
      work_.read_bytes += rows * partial_sums * kProb;
      carry(p_.rank, to, rows * kProb);
    };
    if (task_.stage == Stage::kGroupSend) {
      of_rows(task_.expert, work_.rows_taken);
    } else {
      for_each_rows_of_source(block(), [&](int32_t source, RowRange rows) { of_rows(source, rows.end - rows.begin); });
    }
  }

  void reduce() {
    work_.row_bytes = chunk_columns(task_.n) * kElement;
    const int32_t begin = task_.m * kTokenBlock;
    const int32_t end = std::min(begin + kTokenBlock, p_.tokens);
    int64_t slots = 0;
    TokenGroups groups(p_.experts, p_.combine_groups);
    for (int32_t position = begin; position < end; ++position) {
      const int32_t token = summed_token(p_, position);
      const int32_t* const experts = p_.expert_of_slot + int64_t{token} * p_.topk;
      for (int32_t slot = 0; slot < p_.topk; ++slot) {
        if (experts[slot] < 0) continue;
        ++slots;
        work_.rows_taken += groups.is_first(token, experts[slot]);
      }
    }
    work_.rows_put = end - begin;
    work_.read_bytes = work_.rows_taken * work_.row_bytes;
    work_.written_bytes = work_.rows_put * work_.row_bytes;
    if (forward_ || task_.n != 0) return;
    work_.read_bytes += slots * kProb;
    work_.written_bytes += (end - begin) * int64_t{p_.topk} * kProb;
  }

  const Program& program_;
  const RankProgram& p_;
  const Task& task_;
  std::vector<Move>* moves_;
  const int64_t hidden_, intermediate_, halves_;  // halves of z: 2, or 1 where there is no gate
  const bool forward_;
  TaskWork work_;
};

}  // namespace

TaskWork task_work(const Program& program, const RankProgram& p, const Task& task, std::vector<Move>* moves) {
  return Tally(program, p, task, moves).work();
}

void add_moves(const Program& program, const RankProgram& p, int launch, ListKind list, ByteMatrix& bytes) {
  std::vector<Move> moves;
  const int64_t length = list_length(p, launch, list);
  ListCursor cursor;
  for (int64_t position = 0; position < length; ++position) {
    task_work(program, p, list_task(p, launch, list, position, cursor), &moves);
    for (const Move& move : moves) bytes[move.from][move.to] += move.bytes;
  }
}

}  // namespace uniep::program
