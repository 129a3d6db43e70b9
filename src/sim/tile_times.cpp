#include "sim/tile_times.h"

#include <algorithm>
#include <cmath>

#include "program/edges.h"
#include "program/order.h"
#include "sim/operand_wait.h"
#include "sim/warp_pieces.h"

namespace uniep::sim {
namespace {

// What the schedule does to all tiles of the row GEMMs.
double slowdown(const Schedule& schedule, const RankProgram& p, const Slowdowns& slow, State state) {
  bool both = false;
  for (int launch = 0; launch < p.launches; ++launch) {
    both |= p.stages[launch].first_gemm && p.stages[launch].second_gemm;
  }
  const bool mixed = p.mixed && both && gemm_waves(p) > 1;
  double factor = 1;
  if (mixed && p.dynamic) factor *= 1 + slow.mixed_queues;
  if (mixed && !p.dynamic) factor *= 1 + (state == State::kPaused ? slow.mixed_list_pause : slow.mixed_list);
  if (p.raster <= 4) {
    factor *= 1 + slow.raster_4;
  } else if (p.raster <= 8 && !mixed) {
    factor *= 1 + slow.raster_8;
  }
  if (p.cluster == 1) factor *= 1 + slow.cluster_1;
  if (schedule.queue == QueueKind::kStatic) factor *= 1 + slow.static_queue;
  if (schedule.fusion != Fusion::kNone) factor *= 1 + slow.fused;
  return factor;
}

// Of the workers those that run tiles.
double busy_share(const RankProgram& p, double workers) {
  int32_t most = 0;
  for (int launch = 0; launch < p.launches; ++launch) {
    const program::Participants who = program::participants_of(p, launch, ListKind::kCompute);
    most = std::max(most, who.end - who.begin);
  }
  return most / workers;
}

}  // namespace

TileTimes::TileTimes(const ProgramRequest& request, const RankProgram& p, const MachineDescription& machine,
                     State state, double clock_ghz) {
  const bool forward = request.direction == Direction::kForward;
  const Schedule& schedule = request.schedule;
  const GemmStage stages[2] = {forward ? GemmStage::kFc1 : GemmStage::kDgradFc2,
                               forward ? GemmStage::kFc2 : GemmStage::kDgradFc1};
  const int64_t hidden = request.shape.hidden, intermediate = request.shape.intermediate;
  const int64_t depth[2] = {hidden, forward ? intermediate : p.wgrad_fc1.rows};
  us_of_cycle = 1e-3 / clock_ghz;
  const double task = schedule.queue == QueueKind::kStatic ? machine.time.task_static : machine.time.task_dynamic;
  const OperandPath path(machine, busy_share(p, machine.class_of(Work::kFc1).count), clock_ghz);
  double tile[2], late[2];
  for (int i = 0; i < 2; ++i) {
    const TileShape shape = schedule.tile_of(stages[i]);
    const Work work = work_of(stages[i]);
    const double per_k =
        machine.tile_cycles(work, p.tile_m, shape.n, 1) - machine.tile_cycles(work, p.tile_m, shape.n, 0);
    const OperandWait wait({static_cast<double>(p.tile_m), static_cast<double>(shape.n), static_cast<double>(depth[i]),
                            per_k, p.cluster, shape.stages});
    const double waits = wait.cycles(path);
    tile[i] = (machine.tile_cycles(work, p.tile_m, shape.n, depth[i]) + waits) * us_of_cycle + task;
    const double works = 1 - waits * us_of_cycle / tile[i];
    (i == 0 ? load_first_ : load_second_) = works + machine.clock.waiting * (1 - works);
    // Short tiles store their results in as large a part of the next one.
    const double blocks = std::min(1.0, static_cast<double>(depth[i]) / 2048) * machine.time.late_blocks;
    late[i] = blocks * 64 * per_k * us_of_cycle;
  }
  const double slow = slowdown(schedule, p, machine.slowdown, state);
  first = tile[0];
  second = tile[1];
  slow_first = slow_second = slow;
  late_first = late[0];
  late_second = late[1];
  row_bytes = 2 * hidden;
  chunks_of_row = (row_bytes + schedule.comm.chunk_bytes - 1) / schedule.comm.chunk_bytes;
  warp_chunk = chunk_share(machine.copy, schedule.comm, static_cast<double>(row_bytes));
  taken_from_tiles = sim::taken_from_tiles(machine, schedule.comm, static_cast<double>(row_bytes));
  copy_clock = copies_at(machine, state == State::kPaused, clock_ghz);
  own_copy_class = !machine.class_of(Work::kFc1).work.has(Work::kDispatch);
  copy_workers = machine.class_of(Work::kDispatch).count / machine.class_of(Work::kFc1).count;

  const auto wgrad = [&](GemmStage stage, double& per_k, double& fixed) {
    const TileShape shape = schedule.tile_of(stage);
    fixed = machine.tile_cycles(work_of(stage), shape.m, shape.n, 0) * us_of_cycle + task;
    per_k = (machine.tile_cycles(work_of(stage), shape.m, shape.n, 1) * us_of_cycle + task - fixed) * slow;
  };
  wgrad(GemmStage::kWgradFc2, wgrad_per_k_fc2_, wgrad_fixed_fc2_);
  wgrad(GemmStage::kWgradFc1, wgrad_per_k_fc1_, wgrad_fixed_fc1_);
  wgrad_extra_ =
      request.numerics.weight_gradient == WeightGradient::kBFloat16 ? 0 : machine.weight_gradient.fp32 * us_of_cycle;
}

double TileTimes::gemm(const RankProgram& p, const Task& task) const {
  switch (task.stage) {
    case Stage::kFirstGemm:
      return first;
    case Stage::kSecondGemm:
      return second;
    case Stage::kWgradFc2:
      return p.expert_rows[p.first_expert + task.expert] * wgrad_per_k_fc2_ + wgrad_fixed_fc2_ + wgrad_extra_;
    default:
      return p.expert_rows[p.first_expert + task.expert] * wgrad_per_k_fc1_ + wgrad_fixed_fc1_ + wgrad_extra_;
  }
}

double TileTimes::load(const Task& task) const {
  return task.stage == Stage::kFirstGemm ? load_first_ : task.stage == Stage::kSecondGemm ? load_second_ : 1.0;
}

double TileTimes::late_store(const Task& task) const {
  return task.stage == Stage::kFirstGemm ? late_first : late_second;
}

int64_t TileTimes::output_columns(const RankProgram& p, const Task& task) const {
  const int32_t chunk = chunk_of_tile(p, task.n);
  const int32_t begin = p.chunk_column[chunk] + (task.n - p.chunk_tile[chunk]) * p.second_tile_n;
  return std::min(p.second_tile_n, p.chunk_column[chunk + 1] - begin);
}

}  // namespace uniep::sim
