#pragma once

#include "engine/cuda/device/shared_memory/layer_storage.h"
#include "engine/cuda/device/signals/tickets.h"
#include "program/wgrad_queues.h"

namespace uniep::cuda {

// Columns of a tile of the first GEMM: FC1's tile has as many gate as up columns, where there is a gate.
template <LayerKernelConfig kLayer>
constexpr int32_t kFirstWidth = kHasGateAndUp<kLayer> ? kLayer.gemm.tile_n / 2 : first_gemm(kLayer).tile_n;

UNIEP_DEVICE bool is_wgrad(Stage stage) {
  return stage == Stage::kWgradFc2 || stage == Stage::kWgradFc1;
}

template <LayerKernelConfig kLayer>
UNIEP_DEVICE LayerTask wgrad_record_of(const RankCall& call, const uniep::Task& tile, bool shared_b, bool store) {
  const RankProgram& p = call.program;
  const bool of_w1 = tile.stage == Stage::kWgradFc1;
  const WgradGrid& grid = of_w1 ? p.wgrad_fc1 : p.wgrad_fc2;
  const int32_t expert = p.first_expert + tile.expert;
  const int32_t rows = grid.rows - tile.m * kTileM, columns = grid.columns - tile.n * kLayer.gemm.tile_n;
  LayerTask task;
  task.row = tile.m * kTileM;
  task.m_block = static_cast<uint16_t>(p.segment_start[expert] / kRowAlignment);
  task.expert = static_cast<uint16_t>(tile.expert);
  task.column_eighth = static_cast<uint16_t>(tile.n * (kLayer.gemm.tile_n / 8));
  task.k_blocks = static_cast<uint16_t>((p.expert_rows[expert] + kTileK - 1) / kTileK);
  task.columns_eighth = static_cast<uint8_t>((columns < kLayer.gemm.tile_n ? columns : kLayer.gemm.tile_n) / 8);
  task.chunk = 0;
  task.valid_rows = static_cast<uint8_t>(rows < kTileM ? rows : kTileM);
  task.flags = static_cast<uint8_t>(LayerTask::kWgrad | (shared_b ? LayerTask::kSharedB : 0) |
                                    (store ? LayerTask::kStore : 0) | (of_w1 ? LayerTask::kSecond : 0));
  return task;
}

// The record of a tile. `tile` exists.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE LayerTask record_of(const RankCall& call, const uniep::Task& tile, bool shared_b, bool store) {
  const RankProgram& p = call.program;
  if constexpr (kLayer.filled != FilledGradients::kNone) {
    if (is_wgrad(tile.stage)) return wgrad_record_of<kLayer>(call, tile, shared_b, store);
  }
  const bool second = tile.stage == Stage::kSecondGemm;
  const int32_t chunk = second ? chunk_of_tile(p, tile.n) : 0;
  const int32_t width = second ? kLayer.gemm.tile_n : kFirstWidth<kLayer>;
  const int32_t column = second ? p.chunk_column[chunk] + (tile.n - p.chunk_tile[chunk]) * width : tile.n * width;
  const int32_t columns = (second ? p.chunk_column[chunk + 1] : static_cast<int32_t>(call.intermediate)) - column;
  // dgrad FC1 goes along gate and up.
  constexpr int32_t kHalves = kLayer.gemms == LayerGemms::kForward || !kLayer.gemm.expert.gated() ? 1 : 2;
  const int32_t k = static_cast<int32_t>(second ? kHalves * call.intermediate : call.hidden);
  const int32_t k_blocks = (k + kTileK - 1) / kTileK;
  const int32_t min_blocks = second ? interleaved_blocks(kLayer.gemm) : interleaved_blocks(first_gemm(kLayer));
  const RowRange rows = rows_of_block(p, p.first_expert + tile.expert, tile.m);
  LayerTask task;
  task.row = rows.begin;
  task.m_block = static_cast<uint16_t>(tile.m);
  task.expert = static_cast<uint16_t>(tile.expert);
  task.column_eighth = static_cast<uint16_t>(column / 8);
  task.k_blocks = static_cast<uint16_t>(k_blocks < min_blocks ? min_blocks : k_blocks);
  task.columns_eighth = static_cast<uint8_t>((columns < width ? columns : width) / 8);
  task.chunk = static_cast<uint8_t>(chunk);
  task.valid_rows = static_cast<uint8_t>(rows.end - rows.begin);
  task.flags = static_cast<uint8_t>((shared_b ? LayerTask::kSharedB : 0) | (store ? LayerTask::kStore : 0) |
                                    (second ? LayerTask::kSecond : 0));
  return task;
}

// The tile that a record stands for.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE uniep::Task tile_of(const RankProgram& p, const LayerTask& task) {
  const bool second = task.has(LayerTask::kSecond);
  if (task.has(LayerTask::kWgrad)) {
    return {second ? Stage::kWgradFc1 : Stage::kWgradFc2, task.expert, task.row / kTileM,
            task.column() / kLayer.gemm.tile_n};
  }
  const int32_t n = second
                        ? p.chunk_tile[task.chunk] + (task.column() - p.chunk_column[task.chunk]) / kLayer.gemm.tile_n
                        : task.column() / kFirstWidth<kLayer>;
  return {second ? Stage::kSecondGemm : Stage::kFirstGemm, task.expert, task.m_block, n};
}

// A whole warp: until all peers have arrived. That lasts for the call, so the tiles need not ask for it one by one.
UNIEP_DEVICE bool wait_for_arrivals(const RunningCall& running, const uniep::Task& tile) {
  bool holds = true;
  for (int32_t peer = static_cast<int32_t>(ptx::lane_index()); peer < running.call.program.ranks && holds; peer += 32) {
    holds = wait_for(running, tile, FlagWait{FlagSpace::kArrive, peer});
  }
  return all_lanes(holds);
}

struct CountersOnly {
  const RunningCall& running;
  const uniep::Task& tile;
  bool holds = true;

  UNIEP_DEVICE void operator()(const CounterWait& wait) { holds = holds && wait_for(running, tile, wait); }
  UNIEP_DEVICE void operator()(const FlagWait& /*arrival*/) {}
};

struct GemmTicketCounters {
  const RunningCall& running;

  UNIEP_DEVICE int64_t taken(GemmQueue queue) const {
    return ptx::load_relaxed_gpu(counter_of(running, CounterSpace::kTickets, ticket_counter(running.launch, queue)));
  }
  UNIEP_DEVICE int64_t take(GemmQueue queue) const {
    return take_ticket(running, ticket_counter(running.launch, queue));
  }
};

// The next tile of a queue of one GEMM for this warp's lane, a CTA each. False when the queues are at their end.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE bool next_in_gemm_queues(const RunningCall& running, ComputeList& list, int32_t cta, uniep::Task& tile) {
  constexpr int32_t kCtas = kLayer.gemm.cluster;
  const RankProgram& p = running.call.program;
  GemmTicket ticket{};
  if (ptx::lane_index() == 0) {
    ticket = take_gemm_ticket(p, list.queues, list.walk, GemmTicketCounters{running});
  }
  if (!__any_sync(0xffffffffu, ticket.found)) return false;
  const bool second = __any_sync(0xffffffffu, ticket.segment.stage == Stage::kSecondGemm);
  const int32_t chunk = static_cast<int32_t>(ptx::warp_uniform(static_cast<uint32_t>(ticket.segment.chunk)));
  const int64_t index = ptx::warp_uniform(static_cast<uint32_t>(ticket.index));
  if (ptx::lane_index() < kCtas) {
    const Stage stage = second ? Stage::kSecondGemm : Stage::kFirstGemm;
    tile = row_gemm_task(p, of_all_experts(p, stage, chunk), index * kCtas + cta);
  }
  return true;
}

struct LayerTicketCounters {
  const RunningCall& running;

  UNIEP_DEVICE int64_t taken(LayerQueue queue) const {
    return ptx::load_relaxed_gpu(counter_of(running, CounterSpace::kTickets, ticket_counter(running.launch, queue)));
  }
  UNIEP_DEVICE int64_t take(LayerQueue queue) const {
    return take_ticket(running, ticket_counter(running.launch, queue));
  }
};

// The same where weight gradients go beside the dgrads; false at the end.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE bool next_in_wgrad_queues(LayerStorage<kLayer>& shared, int32_t cta, uniep::Task& tile) {
  const RunningCall running = running_call(shared);
  const RankProgram& p = running.call.program;
  MixedList<true>& mixed = shared.mixed;
  LayerTicket ticket{};
  if (ptx::lane_index() == 0) {
    ticket = take_layer_ticket(p, running.launch, mixed.queues, mixed.walk, LayerTicketCounters{running});
  }
  const auto of_lane_0 = [](auto value) { return ptx::warp_uniform(static_cast<uint32_t>(value)); };
  const LayerTicket dealt{static_cast<LayerQueue>(of_lane_0(ticket.queue)),
                          static_cast<int32_t>(of_lane_0(ticket.chunk)), of_lane_0(ticket.index)};
  if (dealt.queue == LayerQueue::kNone) return false;
  if (ptx::lane_index() < kLayer.gemm.cluster) {
    tile = task_of_ticket(p, mixed.queues, dealt, cta, mixed.cursors[cta]);
  }
  return true;
}

// The next position of the compute list, behind its queues, for this warp's lane; past its end when there is none.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE int64_t next_position(const RunningCall& running, const ComputeList& list, int32_t cta, int32_t index) {
  if (!running.call.program.dynamic) {
    return static_position(running.call.program, list.walkers, running.worker + cta, index);
  }
  uint32_t ticket = 0;
  if (ptx::lane_index() == 0) ticket = take_ticket(running, ticket_counter(running.launch, ListKind::kCompute));
  return list.begin + static_cast<int64_t>(ptx::warp_uniform(ticket)) * kLayer.gemm.cluster + cta;
}

// The next tile for this warp's lane, a CTA each; it may not exist. False when there is none for any.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE bool next_tile(LayerStorage<kLayer>& shared, int32_t cta, int32_t index, uniep::Task& tile) {
  ComputeList& list = shared.compute;
  if constexpr (kLayer.mixed) return next_in_wgrad_queues(shared, cta, tile);
  if (list.in_gemm_queues) {
    if (next_in_gemm_queues<kLayer>(running_call(shared), list, cta, tile)) return true;
    __syncwarp();
    if (ptx::lane_index() == 0) list.in_gemm_queues = false;
    __syncwarp();
  }
  const int64_t position = next_position<kLayer>(running_call(shared), list, cta, index);
  if (__any_sync(0xffffffffu, position >= list.length)) return false;
  if (ptx::lane_index() < kLayer.gemm.cluster) {
    tile = list_task(shared.call.program, shared.launch, ListKind::kCompute, position, list.cursors[cta]);
  }
  return true;
}

// Where dgrad FC1 follows dgrad FC2: the last tile of that ends by itself, beside no other tile's mainloop. So this
// record comes before anything is waited for that may wait for this very tile, and it comes once, also where a cluster
// has no tile of dgrad FC2.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE LayerTask turn_record() {
  LayerTask turn{};
  turn.k_blocks = first_gemm(kLayer).tile_n / kProbColumns;
  turn.flags = LayerTask::kTurn;
  return turn;
}

// One warp of a cluster: decides what its CTAs do next, one task ahead of the first CTA's loader, and waits until they
// can: a lane for each CTA. Neither CTA begins a tile of B that the other can not begin too. No other role evaluates
// order.
template <LayerKernelConfig kLayer>
UNIEP_DEVICE void run_layer_scheduler(LayerStorage<kLayer>& shared) {
  constexpr int32_t kCtas = kLayer.gemm.cluster;
  const RankProgram& p = shared.call.program;
  const int32_t lane = static_cast<int32_t>(ptx::lane_index());
  const int32_t cta = lane % kCtas;
  TaskCursor<typename LayerStorage<kLayer>::Tasks, kCtas> ring(shared.tasks);
  constexpr bool kTurns = kLayer.gemms == LayerGemms::kGradients;
  [[maybe_unused]] bool turned = false;
  // A worker that does not walk the list takes no ticket of it.
  for (int32_t index = 0; shared.compute.length > 0; ++index) {
    if (index > 0) ptx::mbarrier_wait(shared.deal, (index - 1) & 1, "next task to deal");
    uniep::Task tile{};
    if (!next_tile<kLayer>(shared, cta, index, tile)) break;
    __syncwarp();
    if constexpr (kTurns) {
      if (!turned && __any_sync(0xffffffffu, lane == 0 && tile.stage != Stage::kFirstGemm)) {
        if (lane < kCtas) ring.publish(turn_record<kLayer>(), cta);
        turned = true;
        __syncwarp();
      }
    }
    const int32_t other_m = __shfl_xor_sync(0xffffffffu, tile.m, kCtas - 1);
    const int32_t other_n = __shfl_xor_sync(0xffffffffu, tile.n, kCtas - 1);
    const bool store = tile.has_tile();
    const bool shared_b = kCtas == 2 && tile.n == other_n;
    if (!store) {
      tile.m = other_m;
      tile.n = other_n;
    }
    const bool second = __any_sync(0xffffffffu, lane == 0 && tile.stage == Stage::kSecondGemm);
    if (kLayer.combine == CombineKind::kEpilogue && second && !shared.compute.all_arrived) {
      if (!wait_for_arrivals(running_call(shared), tile)) break;
      shared.compute.all_arrived = true;
    }
    const RunningCall running = running_call(shared);
    CountersOnly counters{running, tile};
    if (lane < kCtas) for_each_wait(p, tile, counters);
    if (!all_lanes(counters.holds)) break;
    disturb(running, DisturbedAt::kTile);
    if (lane < kCtas) ring.publish(record_of<kLayer>(shared.call, tile, shared_b, store), cta);
    __syncwarp();
  }
  if constexpr (kTurns) {
    if (!turned && lane < kCtas) ring.publish(turn_record<kLayer>(), cta);
  }
  LayerTask end{};
  end.flags = LayerTask::kEnd;
  if (lane < kCtas) ring.publish(end, cta);
}

}  // namespace uniep::cuda
