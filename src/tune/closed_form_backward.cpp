#include <algorithm>
#include <cmath>

#include "tune/closed_form_terms.h"

namespace uniep::tune {
namespace {

// What the forms leave open, fitted to simulated backward layers and to those of tests/data/measured_layers.json.
constexpr double kBackwardFill = 21;             // us from the first rows to full speed
constexpr double kBackwardDrain = 12;            // us of results under way when the last tile is done
constexpr double kBackwardLaunchesApart = 33;    // us more when each stage is a launch
constexpr double kBackwardDispatchAlone = 0.93;  // of its time beside tiles
constexpr double kLateRows = 0.25;               // of the time in which rows come later than tiles could take them
constexpr double kLastTiles = 0.33;              // of a tile: workers that have none left while others run their last
constexpr double kBackwardSumsBeside = 0.6;  // the share of sums that are complete before the last tile, in one chunk
constexpr double kFirstSums = 0.67;    // of the time until all results are there: when the first sums are, in one chunk
constexpr double kUnevenSends = 0.5;   // of a send: what the last sender is behind the mean
constexpr double kAfterXAgain = 0.25;  // of the weight gradients: those that are left when x is there again

}  // namespace

MemoryTimes backward_memory(const Problem& problem) {
  const RankLoad& load = problem.load;
  const double hidden = static_cast<double>(problem.shape.hidden);
  const double intermediate = static_cast<double>(problem.shape.intermediate);
  const double z = problem.halves * intermediate;
  const double fc2 = load.active_experts * hidden * intermediate, fc1 = fc2 * problem.halves;
  // Of experts without rows zeros are written, but where gradients are added to others.
  const double dw2 = (problem.adds_gradients ? load.active_experts : load.local_experts) * hidden * intermediate *
                     (problem.fp32_gradients ? 2 : 1) * (problem.adds_gradients ? 2 : 1);
  const double dw1 = dw2 * problem.halves;
  const auto us = [&](double elements) { return us_of_bytes(elements * kElement, problem.machine->memory.bandwidth); };
  MemoryTimes times;
  // dy and its rows, dz, a and weights; weights and dx; rows of x, dz, a and dy, and weights' gradients.
  times.first = us((load.tokens + load.rows) * hidden + load.rows * (z + intermediate) + fc2);
  times.second = us(load.tokens * hidden + fc1);
  times.gradients = us(load.rows * (2 * hidden + z + intermediate) + dw2 + dw1);
  // What one part writes and another reads may stay in L2; z is read all the same.
  times.all = us(2 * (load.tokens + load.rows) * hidden + load.rows * (2 * z + intermediate) + fc1 + fc2 + dw1 + dw2);
  return times;
}

void add_weight_gradients(const Problem& problem, const Schedule& schedule, GemmPart& part) {
  const sim::MachineDescription& machine = *problem.machine;
  const RankLoad& load = problem.load;
  const double hidden = static_cast<double>(problem.shape.hidden);
  const double intermediate = static_cast<double>(problem.shape.intermediate);
  const double extra = problem.fp32_gradients ? machine.weight_gradient.fp32 : 0;
  part.fills = part.fused && schedule.wgrad != WgradOrder::kAfter;
  const auto add = [&](GemmStage stage, double rows, double columns) {
    const TileShape tile = schedule.tile_of(stage);
    const sim::Work work = sim::work_of(stage);
    const double fixed = machine.tile_cycles(work, tile.m, tile.n, 0);
    const double per_k = (machine.tile_cycles(work, tile.m, tile.n, 1) - fixed) * part.slowdown;
    const double tiles = std::ceil(rows / tile.m) * std::ceil(columns / tile.n);
    part.gradient_cycles += tiles * (per_k * load.rows + load.local_experts * (fixed + extra));
  };
  add(GemmStage::kWgradFc2, hidden, intermediate);
  add(GemmStage::kWgradFc1, intermediate * problem.halves, hidden);
  if (schedule.save_z == SaveZ::kKeep) return;
  TileShape tile;  // not this Schedule's, but what forward would take
  tile.n = 256;
  part.again_tiles = load.blocks * std::ceil(intermediate * problem.halves / tile.n);
  part.again_tile = machine.tile_cycles(sim::Work::kFc1, 128, tile.n, hidden);
  part.again_wait = operand_wait(problem, GemmStage::kFc1, tile, problem.shape.hidden);
}

namespace {

// Copies and sums at one clock. Times are in us.
struct Work {
  double available = 0, computing = 0;     // workers
  double kept = 0;                         // of those available, that are not lent
  double at_clock = 1;                     // share of their time that copies take
  double copy = 0, copies = 0, alone = 0;  // rows of one operand, of all, and of all with nothing beside
  double send = 0, send_task = 0;          // of a staged combine
  bool sends_after = false;                // its senders are the computing workers, once they have no more tiles
  double sum_beside = 0, sum_after = 0;    // KB/us
};

Work work_of_parts(const Problem& problem, const Parts& parts, double clock) {
  const DispatchPart& dispatch = *parts.dispatch;
  const CombinePart& combine = *parts.combine;
  const double all = problem.workers;
  Work work;
  work.available = all - parts.reserved;
  work.computing = work.available - combine.workers;
  work.at_clock = copies_at(problem, clock);
  const double by_agents = dispatch.copy / (dispatch.by_warps ? work.available : dispatch.workers) * work.at_clock;
  work.copy = std::max(by_agents, dispatch.link);
  work.copies = work.copy * dispatch.operands;
  work.alone = std::max(kBackwardDispatchAlone * by_agents, dispatch.link) * dispatch.operands;
  work.kept = work.available - parts.lent;
  work.send = combine.send / (combine.senders > 0 ? combine.senders : work.computing - parts.lent) * work.at_clock;
  work.send_task = combine.send_task * work.at_clock;
  work.sends_after = combine.staged && !combine.by_warps && combine.senders == 0;
  work.sum_beside = combine.sum_beside * (dispatch.by_warps ? work.kept / all : 1);
  work.sum_after = combine.own_summers ? work.sum_beside : problem.machine->sums.alone * work.kept / all;
  return work;
}

GroupedTimes grouped_times(const Work& work) {
  return {.send = work.send, .send_task = work.send_task, .sum_beside = work.sum_beside, .sum_after = work.sum_after};
}

struct GemmTimes {
  double first = 0, second = 0, gradients = 0;
  double first_tail = 0, second_tail = 0;  // until the last of their tiles is done
};

// A launch a stage.
double apart(const Problem& problem, const Parts& parts, const Work& work, const GemmTimes& gemms) {
  const CombinePart& combine = *parts.combine;
  const sim::Times& time = problem.machine->time;
  const MemoryTimes& memory = problem.memory;
  const double sent = combine.staged ? std::max(work.send + kUnevenSends * work.send_task, combine.link) : 0;
  const double second = std::max({gemms.second + gemms.second_tail, combine.staged ? 0 : combine.link, memory.second});
  const GroupedEnd end =
      combine.groups ? grouped_end(combine, grouped_times(work)) : GroupedEnd{sent, combine.sum / work.sum_after};
  return problem.begin + work.alone + std::max(gemms.first + gemms.first_tail, memory.first) + second + end.there +
         end.left + std::max(gemms.gradients, memory.gradients) + time.end + 5 * time.launch + kBackwardLaunchesApart;
}

// A call of its own before the others: FC1, which takes `gemm` us, and the dispatch of x beside it where no rows are
// kept.
double first_gemm_again(const Problem& problem, const Parts& parts, const Work& work, double gemm) {
  const DispatchPart& dispatch = *parts.dispatch;
  const sim::Times& time = problem.machine->time;
  const double blocks = std::max(problem.load.blocks, 1.0);
  const double tiles = blocks * std::ceil(static_cast<double>(problem.shape.intermediate * problem.halves) / 256);
  const double tail = kLastTiles * gemm / tiles * work.available;
  if (dispatch.again == 0) return problem.begin + gemm + tail + time.end;
  const double copies = dispatch.again / work.available * work.at_clock;
  const double copy = std::max(copies, dispatch.link), alone = std::max(kBackwardDispatchAlone * copies, dispatch.link);
  if (!parts.gemm->fused) return problem.begin + alone + gemm + tail + time.launch + time.end;
  const double slowed = dispatch.again_taken / work.available;
  return problem.begin + dispatch.again_first * work.at_clock + kBackwardFill + std::max(gemm + slowed, copy) + tail +
         time.end;
}

// When a part of the call ends, from its begin on, in which the second GEMM and all that follows in its launch run.
struct Second {
  double end = 0;
  bool by_links = false;
};

// `copied`: until when the agents that copy are at x again.
Second second_part(const Parts& parts, const Work& work, const GemmTimes& gemms, double tiles, double copied) {
  const CombinePart& combine = *parts.combine;
  if (combine.groups) {
    GroupedTimes times = grouped_times(work);
    times.second = times.second_end = gemms.second;
    times.tiles = tiles;
    times.copied = copied;
    const GroupedEnd end = grouped_end(combine, times);
    return {std::max(tiles, end.there) + end.left, end.there > tiles};
  }
  const double last = 1.0 / combine.chunks;
  const bool by_chunks = combine.chunks > 1;
  double there = std::max(gemms.second, combine.staged ? 0 : combine.link);  // until the last results are
  if (work.sends_after) {
    there = tiles + std::max(work.send, combine.link);
  } else if (combine.staged) {
    const double begun = combine.by_warps ? copied : 0;
    there = std::max(gemms.second + work.send_task,
                     begun + std::max(work.send + kUnevenSends * work.send_task, combine.link));
  }
  const double begun = std::max(there * (by_chunks ? last : kFirstSums), copied);
  const double before = std::min(combine.sum * (by_chunks ? 1 - last : kBackwardSumsBeside),
                                 work.sum_beside * std::max(0.0, there - begun));
  const double beside =
      std::min(combine.sum - before, work.sum_beside * std::max(0.0, tiles - std::max(there, copied)));
  Second second;
  second.end = std::max(tiles, there) + (combine.sum - before - beside) / work.sum_after;
  second.by_links = there > tiles;
  return second;
}

}  // namespace

Estimate estimate_backward(const Problem& problem, const Parts& parts, int rounds) {
  const GemmPart& gemm = *parts.gemm;
  const DispatchPart& dispatch = *parts.dispatch;
  const sim::MachineDescription& machine = *problem.machine;
  const MemoryTimes& memory = problem.memory;
  const sim::Times& time = machine.time;

  Estimate result;
  result.clock = machine.clock.limit * 1.03;
  for (int round = 0; round < rounds; ++round) {
    const Work work = work_of_parts(problem, parts, result.clock);
    const double tile_us = kMicrosecondsPerCycle / result.clock, us_of_cycle = tile_us / work.computing;
    const RowGemms both = row_gemms(problem, gemm, *parts.combine, work.computing, result.clock);
    const double of_gradients = gemm.fills ? work.computing : work.computing - parts.lent;
    const GemmTimes gemms = {both.first, both.second, gemm.gradient_cycles * tile_us / of_gradients,
                             kLastTiles * both.first_tile, kLastTiles * both.second_tile};
    result.limits = "gemm";
    if (!gemm.fused) {
      result.us = apart(problem, parts, work, gemms);
    } else {
      const double filling = gemm.fills ? gemms.gradients : 0;
      // x again is in the second launch, where warps copy.
      const bool later = !gemm.one_launch && dispatch.by_warps && dispatch.operands > 1;
      const double in_first = gemm.one_launch || later ? work.copy : work.copies;
      const double beside = std::min(later ? work.copy : work.copies,
                                     gemm.one_launch ? gemms.first + gemms.second + filling : gemms.first);
      const double share = dispatch.by_warps ? 0 : dispatch.workers / work.computing;
      const double taken = dispatch.taken / work.computing;  // by an operand
      const double slowed_first = taken + share * beside / (gemm.one_launch ? dispatch.operands : 1);
      const double slowed = taken * dispatch.operands + share * beside;
      // Rows come later than tiles could take them; slower tiles would not make that better.
      const double early = std::min(work.copy * dispatch.early, work.copy);
      const double ramp = kLateRows * std::max(0.0, early * 0.5 - gemm.wide_cycles * us_of_cycle * 0.25);
      const double rows = in_first + gemms.first_tail;
      const double first = std::max({gemms.first + slowed_first + ramp, rows, memory.first});
      if (first == rows) result.limits = "rows";

      double carried = memory.second + (gemm.fills ? memory.gradients : 0);
      if (gemm.one_launch) carried -= first + kBackwardFill - memory.first;
      double tiles = std::max(gemms.second + filling + slowed - slowed_first, carried);
      if (!gemm.fills) tiles += gemms.second_tail;
      const double copied = gemm.one_launch ? std::max(0.0, work.copies - first - kBackwardFill)
                            : later         ? work.copy
                                            : 0;
      if (gemm.fills && copied > 0) tiles = std::max(tiles, copied + kAfterXAgain * gemms.gradients);
      const Second second = second_part(parts, work, gemms, tiles, copied);
      if (second.by_links) result.limits = "links";
      result.us = problem.begin + dispatch.first * (dispatch.by_warps ? work.at_clock : 1) + kBackwardFill + first +
                  second.end + kBackwardDrain + time.end;
      if (!gemm.one_launch) result.us += gemms.first_tail + time.launch;
      if (!gemm.fills) result.us += time.launch + std::max(gemms.gradients, memory.gradients);
    }
    const double waits = gemm.again_wait.cycles(operand_path(problem, work.available, result.clock));
    const double again = gemm.again_tiles * (gemm.again_tile + waits) * tile_us / work.available;
    if (again > 0) result.us += first_gemm_again(problem, parts, work, again);
    if (round + 1 == rounds) break;
    const double loads = both.loads * gemm.slowdown + gemms.gradients + again;
    result.clock = clock_of(problem, std::min(1.0, loads / result.us) * work.computing / problem.workers, result.us);
  }
  return result;
}

}  // namespace uniep::tune
