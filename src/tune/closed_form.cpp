#include "tune/closed_form.h"

#include <algorithm>
#include <cmath>

#include "program/build.h"
#include "program/buildable.h"
#include "program/recompute.h"
#include "sim/warp_pieces.h"
#include "tune/closed_form_terms.h"

namespace uniep::tune {
namespace {

constexpr double kTileRows = 128;

// What the forms leave open, fitted to tests/data/measured_layers.json.
constexpr double kFill = 25;            // us from the first rows to full speed
constexpr double kDrain = 14;           // us of results under way when the last tile is done
constexpr double kLaunchesApart = 30;   // us more when each stage is a launch
constexpr double kDispatchAlone = 0.8;  // of its time beside tiles
constexpr double kSumsBeside = 0.6;     // the share of sums that are complete before the last tile, in one chunk
constexpr double kTimeForSums = 0.25;   // the share of the call in which they are
constexpr double kWaveStall = 0.25;     // of a tile: what each further phased wave costs
constexpr double kFirstByWorkers = 20;  // us until rows come where whole workers copy

template <typename Rows, typename Rate>
double slowest_level(const Problem& problem, Rows&& rows, Rate&& rate) {
  double slowest = 0;
  const sim::MachineDescription& machine = *problem.machine;
  for (std::size_t level = 0; level < problem.load.levels.size(); ++level) {
    const int reach = std::min(machine.links[level].ranks, problem.ranks);
    const double bytes = rows(problem.load.levels[level]) * row_bytes(problem);
    slowest = std::max(slowest, us_of_bytes(bytes, rate(machine.link_rate(static_cast<int>(level), reach))));
  }
  return slowest;
}

double raster_slowdown(const sim::Slowdowns& slowdown, int raster, bool mixed) {
  if (raster <= 4) return slowdown.raster_4;
  return raster <= 8 && !mixed ? slowdown.raster_8 : 0;
}

// x and y, the rows and z, which backward reads, and the weights.
MemoryTimes forward_memory(const Problem& problem) {
  const RankLoad& load = problem.load;
  const double hidden = static_cast<double>(problem.shape.hidden);
  const double intermediate = static_cast<double>(problem.shape.intermediate);
  const double elements = (2 * load.tokens + load.rows) * hidden + load.rows * problem.halves * intermediate +
                          load.active_experts * (problem.halves + 1) * hidden * intermediate;
  return {.all = us_of_bytes(elements * kElement, problem.machine->memory.bandwidth)};
}

// Of the longest task of a staged combine: a block of an expert's rows, or with groups of tokens' rows here.
double rows_of_send(const Problem& problem) {
  const RankLoad& load = problem.load;
  if (problem.groups) return load.rows / std::max(load.tokens * problem.ranks, 1.0) * program::kTokenBlock;
  return std::min(kTileRows, load.rows / std::max(load.local_experts, 1.0));
}

double sum_bytes(const Problem& problem) {
  return (problem.load.summands + problem.load.tokens) * row_bytes(problem);
}

GemmStage first_stage(const Problem& problem) {
  return problem.direction == Direction::kForward ? GemmStage::kFc1 : GemmStage::kDgradFc2;
}
GemmStage second_stage(const Problem& problem) {
  return problem.direction == Direction::kForward ? GemmStage::kFc2 : GemmStage::kDgradFc1;
}

// Columns of the first GEMM's output, and products along which the second one sums.
double first_columns(const Problem& problem) {
  const double intermediate = static_cast<double>(problem.shape.intermediate);
  return problem.direction == Direction::kForward ? intermediate * problem.halves : intermediate;
}
int64_t second_depth(const Problem& problem) {
  return problem.shape.intermediate * (problem.direction == Direction::kForward ? 1 : problem.halves);
}

}  // namespace

sim::OperandWait operand_wait(const Problem& problem, GemmStage stage, const TileShape& tile, int64_t depth) {
  const sim::MachineDescription& machine = *problem.machine;
  const sim::Work work = sim::work_of(stage);
  const double per_k =
      machine.tile_cycles(work, kTileRows, tile.n, 1) - machine.tile_cycles(work, kTileRows, tile.n, 0);
  return sim::OperandWait(
      {kTileRows, static_cast<double>(tile.n), static_cast<double>(depth), per_k, tile.cluster, tile.stages});
}

sim::OperandPath operand_path(const Problem& problem, double computing, double clock) {
  return {*problem.machine, computing / problem.workers, clock};
}

double copies_at(const Problem& problem, double clock) {
  return sim::copies_at(*problem.machine, problem.state == State::kPaused, clock);
}

RowGemms row_gemms(const Problem& problem, const GemmPart& gemm, const CombinePart& combine, double computing,
                   double clock) {
  const sim::OperandPath path = operand_path(problem, computing, clock);
  const double first_wait = gemm.first_wait.cycles(path), second_wait = gemm.second_wait.cycles(path);
  const double tile_us = kMicrosecondsPerCycle / clock, loads = problem.machine->clock.waiting;
  const double first = gemm.first_tiles * tile_us / computing;
  const double second = problem.load.blocks * combine.tiles * tile_us / computing;
  RowGemms both;
  both.first_tile = (gemm.first_tile + first_wait) * tile_us;
  both.second_tile = (gemm.second_tile + second_wait) * tile_us;
  both.first = first * (gemm.first_tile + first_wait) * gemm.slowdown;
  both.second = second * (gemm.second_tile + second_wait) * gemm.slowdown;
  both.loads = first * (gemm.first_tile + loads * first_wait) + second * (gemm.second_tile + loads * second_wait);
  return both;
}

double clock_of(const Problem& problem, double load, double us) {
  return sim::clock_of(problem.machine->clock, {.state = problem.state}, load, us, problem.ranks > 1);
}

Problem make_problem(const ModelledCall& call, const RankLoad& load, const sim::MachineDescription& machine) {
  const LayerShape& shape = call.layer.shape;
  const Numerics& numerics = call.layer.numerics;
  Problem problem;
  problem.shape = shape;
  problem.direction = call.direction;
  problem.halves = is_gated(numerics.activation) ? 2 : 1;
  problem.fp32_gradients = numerics.weight_gradient != WeightGradient::kBFloat16;
  problem.adds_gradients = numerics.weight_gradient == WeightGradient::kMainGrad;
  problem.groups = numerics.combine_groups > 0;
  problem.ranks = call.ranks;
  problem.begin = machine.begin_us(call.ranks);
  problem.load = load;
  problem.machine = &machine;
  problem.state = call.state;
  problem.workers = machine.class_of(sim::work_of(first_stage(problem))).count;
  problem.memory = call.direction == Direction::kForward ? forward_memory(problem) : backward_memory(problem);
  return problem;
}

GemmPart gemm_part(const Problem& problem, const Schedule& schedule) {
  const sim::MachineDescription& machine = *problem.machine;
  const sim::Slowdowns& slow = machine.slowdown;
  const TileShape first = schedule.tile_of(first_stage(problem)), second = schedule.tile_of(second_stage(problem));
  const sim::Work first_work = sim::work_of(first_stage(problem)), second_work = sim::work_of(second_stage(problem));
  const double experts = problem.load.local_experts;
  GemmPart part;
  part.fused = schedule.fusion != Fusion::kNone;
  part.one_launch = schedule.fusion == Fusion::kLayer;
  const double by_wave = std::min<double>(schedule.order.experts_per_wave, experts);
  part.waves = part.one_launch ? std::ceil(experts / by_wave) : 1;
  if (schedule.order.blocks_per_wave > 0) {
    part.waves = std::max(experts, std::ceil(problem.load.blocks / schedule.order.blocks_per_wave));
  }
  part.mixed = part.one_launch && schedule.order.interleave == Interleave::kMixed && part.waves > 1;
  const bool is_static = schedule.queue == QueueKind::kStatic;
  double factor = 1;
  if (part.mixed && is_static) {
    factor *= 1 + (problem.state == State::kSustained ? slow.mixed_list : slow.mixed_list_pause);
  } else if (part.mixed) {
    factor *= 1 + slow.mixed_queues;
  }
  factor *= 1 + raster_slowdown(slow, schedule.order.raster, part.mixed);
  if (first.cluster == 1) factor *= 1 + slow.cluster_1;
  if (is_static) factor *= 1 + slow.static_queue;
  if (part.fused) factor *= 1 + slow.fused;
  part.slowdown = factor;
  const double columns = first_columns(problem);
  part.first_tile = machine.tile_cycles(first_work, 128, first.n, problem.shape.hidden);
  part.first_tiles = problem.load.blocks * std::ceil(columns / first.n);
  part.first_wait = operand_wait(problem, first_stage(problem), first, problem.shape.hidden);
  part.wide_cycles =
      problem.load.blocks * std::ceil(columns / 256) * machine.tile_cycles(first_work, 128, 256, problem.shape.hidden);
  part.second_tile = machine.tile_cycles(second_work, 128, second.n, second_depth(problem));
  part.second_wait = operand_wait(problem, second_stage(problem), second, second_depth(problem));
  part.columns = second.n;
  if (problem.direction == Direction::kBackward) add_weight_gradients(problem, schedule, part);
  return part;
}

DispatchPart dispatch_part(const Problem& problem, const Schedule& schedule) {
  const sim::MachineDescription& machine = *problem.machine;
  const RankLoad& load = problem.load;
  const sim::WarpCopies& copy = machine.copy;
  const bool push = schedule.dispatch.transport == DispatchTransport::kPush;
  const double taken = schedule.dispatch.dedup ? load.rows_once : load.rows;
  const double parts = pull_parts(problem.shape), tasks = load.blocks * parts;
  const double bytes = row_bytes(problem);
  DispatchPart part;
  part.by_warps = schedule.comm.where == CommWhere::kWarps;
  const bool backward = problem.direction == Direction::kBackward;
  part.operands = backward && dispatches_x_again(schedule, true) ? 2 : 1;
  if (backward && schedule.save_z == SaveZ::kRecompute && schedule.save_xg == SaveXg::kRedispatch) {
    Schedule forward = schedule;
    forward.comm = CommSchedule{};
    forward.save_z = SaveZ::kKeep;
    const DispatchPart of_x = dispatch_part(problem, forward);
    part.again = of_x.copy;
    part.again_first = of_x.first;
    part.again_taken = of_x.taken;
  }
  part.early = taken > 0 ? load.rows / taken : 1;
  if (part.by_warps) {
    const double scale = sim::chunk_share(copy, schedule.comm, bytes);
    const double pieces = std::ceil(bytes / schedule.comm.chunk_bytes);
    const double task = copy.task + (push ? copy.push : 0);
    double remote = 0;  // of the rows that are taken
    for (const LevelRows& rows : load.levels) {
      if (!push) remote += schedule.dispatch.dedup ? rows.dispatched_once : rows.dispatched;
    }
    const double in = copy.chunk_in + (taken > 0 ? copy.chunk_remote * remote / taken : 0);
    part.copy = tasks * task + scale * pieces * (in * taken + copy.chunk_out * load.rows);
    part.first = copy.alone * (copy.task + scale * pieces * (kTileRows / parts) * (in + copy.chunk_out * part.early));
  } else {
    const sim::PortCopies& port = machine.port;
    part.workers = schedule.comm.dispatch_sms;
    part.copy = (taken * port.in + load.rows * port.out) * bytes * 1e-6 * (1 + port.overhead) +
                tasks * (copy.task / 2 + (push ? copy.push : 0)) / port.warps;
    part.first = kFirstByWorkers;
    if (const int relays = schedule.comm.relay_sms; relays > 0) {
      // Either kind has a share of its own: rows that cross, once, and those that are put beside.
      const double us = bytes * 1e-6 * (1 + port.overhead), beside = load.rows - taken;
      const double pushed = taken * (port.in + port.out) * us + tasks * (copy.task / 2 + copy.push) / port.warps;
      const double relayed =
          (std::min(taken, beside) * port.in + beside * port.out) * us + tasks * (copy.task / 2) / port.warps;
      part.workers = schedule.comm.dispatch_sms + relays;
      part.copy = part.workers * std::max(pushed / schedule.comm.dispatch_sms, relayed / relays);
    }
  }
  part.taken = load.rows * sim::taken_from_tiles(machine, schedule.comm, bytes);
  const bool once = schedule.dispatch.dedup;
  part.link = slowest_level(
      problem, [&](const LevelRows& rows) { return once ? rows.dispatched_once : rows.dispatched; },
      [&](const sim::LinkRate& rate) { return push ? rate.write : rate.read; });
  return part;
}

CombinePart combine_part(const Problem& problem, const Schedule& schedule) {
  const sim::MachineDescription& machine = *problem.machine;
  CombinePart part;
  part.staged = schedule.combine.transport == CombineTransport::kStaged;
  part.groups = problem.groups;
  part.workers = schedule.comm.combine_sms + schedule.comm.reduce_sms;
  const std::vector<int32_t> bounds = column_chunk_bounds(problem.shape.hidden, schedule.combine.column_chunks);
  part.chunks = static_cast<int>(bounds.size()) - 1;
  const int width = schedule.tile_of(second_stage(problem)).n;
  double row_send = 0;  // us of a row, sent by chunks
  double sum_share = 0;
  for (int chunk = 0; chunk < part.chunks; ++chunk) {
    const int columns = bounds[chunk + 1] - bounds[chunk];
    part.tiles += std::ceil(static_cast<double>(columns) / width);
    const double bytes = columns * kElement;
    row_send += std::ceil(bytes / schedule.comm.chunk_bytes) * sim::send_piece(machine.copy, schedule.comm, bytes);
    sum_share += sim::sum_share(bytes) * columns / static_cast<double>(problem.shape.hidden);
  }
  const auto returned = [](const LevelRows& rows) { return rows.returned; };
  part.link = slowest_level(problem, returned, [](const sim::LinkRate& rate) { return rate.write; });
  part.link_both = slowest_level(problem, returned, [](const sim::LinkRate& rate) { return rate.both; });
  part.by_warps = schedule.comm.where == CommWhere::kWarps;
  part.own_summers = !part.by_warps && schedule.comm.reduce_sms > 0;
  part.senders = schedule.comm.combine_sms;
  if (part.staged && part.by_warps) {
    part.send = problem.load.rows * row_send;
    part.send_task = rows_of_send(problem) * row_send / part.chunks;
  }
  if (part.staged && !part.by_warps) {
    const sim::PortCopies& port = machine.port;
    const double sent = problem.load.rows > 0 ? problem.load.results / problem.load.rows : 1;
    part.send = problem.load.rows * row_bytes(problem) * (port.in + sent * port.out) * 1e-6 * (1 + port.overhead);
  }
  if (problem.groups) part.send = grouped_send(problem, part.chunks, part.send);
  part.sum = sum_bytes(problem) * sum_share * 1e-3;
  const double all = problem.workers;
  part.sum_beside = part.by_warps ? machine.sums.beside : machine.sums.alone * schedule.comm.reduce_sms / all;
  return part;
}

Estimate estimate(const Problem& problem, const Parts& parts, int rounds) {
  if (problem.direction == Direction::kBackward) return estimate_backward(problem, parts, rounds);
  const GemmPart& gemm = *parts.gemm;
  const DispatchPart& dispatch = *parts.dispatch;
  const CombinePart& combine = *parts.combine;
  const sim::MachineDescription& machine = *problem.machine;
  const sim::Times& time = machine.time;
  const double all = problem.workers, available = all - parts.reserved, computing = available - combine.workers;
  const double copiers = dispatch.by_warps ? available : dispatch.workers;
  const double kept = available - parts.lent;
  const double senders = combine.senders > 0 ? combine.senders : computing - parts.lent;
  const double result_link = combine.staged ? 0 : combine.link;
  const double sum_beside = combine.sum_beside * (dispatch.by_warps ? kept / all : 1);
  const double sum_after = machine.sums.alone * kept / all;

  Estimate result;
  result.clock = machine.clock.limit * 1.03;
  for (int round = 0; round < rounds; ++round) {
    const double us_of_cycle = kMicrosecondsPerCycle / (result.clock * computing);
    const RowGemms gemms = row_gemms(problem, gemm, combine, computing, result.clock);
    const double first = gemms.first, second = gemms.second, both = first + second;
    const double at_clock = copies_at(problem, result.clock);
    const double copies = dispatch.copy / copiers * at_clock, copy = std::max(copies, dispatch.link);
    const double send = combine.send / senders * at_clock;
    const double sent = std::max(send, combine.staged ? combine.link : 0);
    GroupedTimes grouped{
        .send = send, .send_task = combine.send_task * at_clock, .sum_beside = sum_beside, .sum_after = sum_after};
    if (!gemm.fused) {
      const GroupedEnd end = combine.groups ? grouped_end(combine, grouped) : GroupedEnd{sent, combine.sum / sum_after};
      result.limits = "gemm";
      result.us = problem.begin + std::max(kDispatchAlone * copies, dispatch.link) +
                  std::max(first + std::max(second, result_link), problem.memory.all) + end.there + end.left +
                  time.end + 3 * time.launch + kLaunchesApart;
    } else {
      const double slowed = dispatch.taken / computing + (dispatch.by_warps ? 0 : copy * dispatch.workers / computing);
      const double share = 1 / gemm.waves;
      const double stalls = gemm.mixed ? 0 : kWaveStall * gemms.first_tile * (gemm.waves - 1);
      const double work = both + slowed + stalls;
      double links = 0, rows = 0;
      if (gemm.mixed) {
        links = dispatch.link * combine.link_both / std::max(combine.link, 1e-9) + combine.link_both;
        if (combine.link <= 0 || combine.groups) links = dispatch.link;  // sums of groups come after the dispatch
        // Behind the first GEMM come the last wave, and the column chunks after the first.
        rows = std::max(first, copy) + std::max(second, result_link) * (1 - (1 - share) / combine.chunks);
      } else {
        rows = std::max(first, copy) + std::max(second, result_link) + stalls;
      }
      double body = std::max({work, links, rows, problem.memory.all});
      result.limits = body == work ? "gemm" : (body == links ? "links" : (body == rows ? "rows" : "memory"));
      // Computing workers that copy send when their tiles are done.
      const bool sends_after = !combine.by_warps && combine.senders == 0;
      if (combine.staged && !combine.groups) body = std::max(body, (sends_after ? body : copy) + sent);
      // Rows come later than tiles could take them; slower tiles would not make that better.
      const double ramp =
          body == links
              ? 0
              : std::max(0.0, std::min(copy * dispatch.early, copy) * 0.5 - gemm.wide_cycles * us_of_cycle * 0.25) *
                    0.5;
      const double last = 1.0 / combine.chunks;
      const bool by_chunks = combine.chunks > 1;
      const double can = combine.sum * (by_chunks ? 1 - last : kSumsBeside);
      const double window = by_chunks ? body * second / both * (1 - last) : body * kTimeForSums;
      const double summed =
          std::min(can, sum_beside * std::min(window, std::max(0.0, body - copy - (combine.by_warps ? sent : 0))));
      double left = (combine.sum - summed) / sum_after;
      if (combine.groups) {
        grouped.second = second;
        grouped.second_end = grouped.tiles = body;
        grouped.copied = copy;
        const GroupedEnd end = grouped_end(combine, grouped);
        left = end.left;
        body = end.there;
      }
      const double begin = problem.begin + dispatch.first * (dispatch.by_warps ? at_clock : 1) + kFill;
      result.us = begin + body + ramp + left + time.end + kDrain + (gemm.one_launch ? 0 : time.launch);
    }
    if (round + 1 == rounds) break;
    result.clock = clock_of(problem, std::min(1.0, gemms.loads / result.us) * computing / all, result.us);
  }
  return result;
}

Estimate estimate(const Problem& problem, const Schedule& schedule) {
  const GemmPart gemm = gemm_part(problem, schedule);
  const DispatchPart dispatch = dispatch_part(problem, schedule);
  const CombinePart combine = combine_part(problem, schedule);
  const double idle = program::idle_workers(schedule), lent = schedule.comm.reserve_sms - idle;
  return estimate(problem, {&gemm, &dispatch, &combine, idle, lent});
}

double Bound::us() const {
  return std::max({gemms, links, memory, path});
}

const char* Bound::limits() const {
  const double most = us();
  if (most == gemms) return "gemm";
  if (most == links) return "links";
  return most == memory ? "memory" : "begin and end";
}

namespace {

// Cycles of a product of two numbers by the best tile that is for a stage, without what a tile costs beside.
double cycles_per_product(const Problem& problem, std::initializer_list<sim::Work> stages) {
  double best = 0;
  for (const sim::TileCost& tile : problem.machine->tiles) {
    if (std::none_of(stages.begin(), stages.end(), [&](sim::Work work) { return tile.work.has(work); })) continue;
    const double cycles = tile.cycles_per_k / (static_cast<double>(tile.rows) * tile.columns);
    best = best == 0 ? cycles : std::min(best, cycles);
  }
  const sim::Slowdowns& slow = problem.machine->slowdown;
  for (const double share : {slow.mixed_list, slow.mixed_list_pause, slow.mixed_queues, slow.raster_8, slow.raster_4,
                             slow.cluster_1, slow.static_queue, slow.fused}) {
    best *= 1 + std::min(share, 0.0);  // a gain, as of tiles that find their operands in L2
  }
  return best;
}

}  // namespace

Bound lower_bound(const Problem& problem) {
  const sim::MachineDescription& machine = *problem.machine;
  const RankLoad& load = problem.load;
  const double hidden = static_cast<double>(problem.shape.hidden);
  const double intermediate = static_cast<double>(problem.shape.intermediate);
  const sim::Work first = sim::work_of(first_stage(problem)), second = sim::work_of(second_stage(problem));
  Bound bound;
  double each = cycles_per_product(problem, {first, second});
  if (problem.direction == Direction::kBackward) {
    each += cycles_per_product(problem, {sim::Work::kWgradFc2, sim::Work::kWgradFc1});
  }
  const double cycles = (problem.halves + 1) * load.rows * hidden * intermediate * each / problem.workers;
  double clock = machine.clock.highest;
  for (int round = 0; round < 4 && cycles > 0; ++round) {
    bound.gemms = cycles * kMicrosecondsPerCycle / clock;
    clock = clock_of(problem, 1, bound.gemms);
  }
  const auto best_rate = [](const sim::LinkRate& rate) { return std::max({rate.read, rate.write, rate.both}); };
  const double in = slowest_level(
      problem, [](const LevelRows& rows) { return rows.dispatched_once + rows.received; }, best_rate);
  const double out = slowest_level(
      problem, [](const LevelRows& rows) { return rows.returned + rows.sent_once; }, best_rate);
  bound.links = std::max(in, out);
  bound.memory = problem.memory.all;
  const double tile = machine.tile_cycles(first, 128, 128, problem.shape.hidden) +
                      machine.tile_cycles(second, 128, 128, second_depth(problem));
  bound.path = problem.begin + machine.time.end;
  if (load.rows > 0) bound.path += tile * kMicrosecondsPerCycle / machine.clock.highest;
  return bound;
}

}  // namespace uniep::tune
