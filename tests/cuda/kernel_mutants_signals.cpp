#include "tests/cuda/kernel_mutant_tables.h"

namespace uniep::cuda::test {

// Waits, thresholds, counters and flags, and what begins and ends calls and launches.
std::vector<KernelMutant> signal_mutants() {
  return {
      {"counter-acquire", "signals/waiting.h", R"(  uint32_t seen = ptx::load_acquire_gpu(counter);
  if (seen >= wait.threshold) return true;
  for (WaitClock clock; seen < wait.threshold; seen = ptx::load_acquire_gpu(counter)) {)",
       R"(  uint32_t seen = ptx::load_relaxed_gpu(counter);
  if (seen >= wait.threshold) return true;
  for (WaitClock clock; seen < wait.threshold; seen = ptx::load_relaxed_gpu(counter)) {)",
       "a counter's reader does not acquire", "staged", 1,
       "formal: what lies behind counters is read by bulk copies, which pass L1 by and are issued behind the poll"},
      {"flag-acquire", "signals/waiting.h", R"(  uint32_t seen = ptx::load_acquire_system(flag);
  for (WaitClock clock; !flag_holds(wait.space, seen, running.epoch); seen = ptx::load_acquire_system(flag)) {)",
       R"(  uint32_t seen = ptx::load_relaxed_gpu(flag);
  for (WaitClock clock; !flag_holds(wait.space, seen, running.epoch); seen = ptx::load_relaxed_gpu(flag)) {)",
       "a flag's reader does not acquire, and looks at its own GPU only", "epilogue", 2,
       "formal: rows are read once a call, so that L1 has none of an earlier time, and the read follows the poll"},
      {"flag-epoch", "signals/waiting.h", "is_reached(seen, epoch) : seen == epoch;",
       "is_reached(seen, epoch) : seen != 0;", "a flag of any earlier call will do", "epilogue"},
      {"counter-release", "signals/waiting.h", "  ptx::add_release_gpu(counter_of(",
       "  ptx::add_relaxed_gpu(counter_of(", "a counter advances before what it counts is there", "staged", 1,
       "formal: what a counter tells of are bulk stores that were waited for, or lies behind a fence of its own"},
      {"flag-release", "signals/waiting.h",
       "  ptx::store_release_system(flag_of(running, signal.peer, signal.space, signal.index), running.epoch);",
       "  *static_cast<volatile uint32_t*>(flag_of(running, signal.peer, signal.space, signal.index)) = running.epoch;",
       "a flag is stored before what it tells of is there", "groups", 1,
       "formal: rows that a flag tells of are bulk stores that were waited for, or lie behind a fence of their own"},
      {"last-tile-order", "signals/waiting.h",
       "ptx::add_acquire_release_gpu(counter_of(running, signal.space, signal.index), signal.amount);",
       "atomicAdd(counter_of(running, signal.space, signal.index), signal.amount);",
       "the tile that stores the flags has not acquired the other tiles' rows", "epilogue", 2,
       "formal: each tile's rows are fenced for the system before its counter"},
      {"last-tile-threshold", "program/edges.h",
       "{second_counter(p.block_begin[task.expert] + task.m, chunk), static_cast<uint32_t>(tiles_in_chunk(p, chunk))};",
       "{second_counter(p.block_begin[task.expert] + task.m, chunk), "
       "static_cast<uint32_t>(tiles_in_chunk(p, chunk) - 1)};",
       "the last tile but one stores the flags", "epilogue"},
      {"flags-vote", "signals/waiting.h", "if (!__any_sync(0xffffffffu, stores_flags)) return;",
       "if (!stores_flags) return;", "only the lane that counted stores its flag", "epilogue"},
      {"first-wait-only", "signals/waiting.h", "if (holds && turn % ptx::kThreadsPerWarp == ptx::lane_index())",
       "if (holds && turn == 0 && ptx::lane_index() == 0)", "a copy waits for the first of its signals only", "push"},
      {"first-gemm-threshold", "program/edges.h", "static_cast<uint32_t>(block_rows(p, global_expert, task.m))});",
       "static_cast<uint32_t>(block_rows(p, global_expert, task.m) / 2)});", "FC1 begins with half of its rows",
       "epilogue"},
      {"second-gemm-threshold", "program/edges.h",
       "wait(CounterWait{CounterSpace::kFirstTiles, block, static_cast<uint32_t>(p.first_tiles)});",
       "wait(CounterWait{CounterSpace::kFirstTiles, block, static_cast<uint32_t>(p.first_tiles - 1)});",
       "FC2 begins before the last column tile of FC1", "epilogue"},
      {"send-threshold", "program/edges.h", R"(second_counter(block, task.n),
                       static_cast<uint32_t>(tiles_in_chunk(p, task.n))});)",
       R"(second_counter(block, task.n),
                       static_cast<uint32_t>(tiles_in_chunk(p, task.n) - 1)});)",
       "rows are sent before the last column tile of FC2", "staged"},
      {"gradient-threshold", "program/edges.h", "task.expert, static_cast<uint32_t>(blocks * p.first_tiles)});",
       "task.expert, static_cast<uint32_t>(blocks * p.first_tiles - 1)});",
       "a weight gradient begins before the last tile of dgrad FC2", "mixed-narrow"},
      {"gradient-rows-threshold", "program/edges.h",
       "static_cast<uint32_t>(round_up(p.expert_rows[global_expert], kRowAlignment))});",
       "static_cast<uint32_t>(round_up(p.expert_rows[global_expert], kRowAlignment) / 2)});",
       "FC1's weight gradient begins with half of the rows of x", "redispatch"},
      {"expert-counter", "program/edges.h",
       "if (p.direction == Direction::kBackward) count(CounterSignal{CounterSpace::kExpertFirstTiles, task.expert, "
       "1u});",
       "", "weight gradients are not told of dgrad FC2's tiles", "mixed"},
      {"lost-ticket", "program/wgrad_queues.h", "      const int64_t wgrad = counters.take(LayerQueue::kWgrads);",
       "      counters.take(LayerQueue::kWgrads);\n      const int64_t wgrad = counters.take(LayerQueue::kWgrads);",
       "a ticket of the weight gradients is taken by nobody", "mixed"},
      {"receive-wait", "program/edges.h", R"(      for_each_source(p, global_expert, task.m, [&](int32_t source) {
        wait(FlagWait{FlagSpace::kPushed, pushed_flag(p, task.n, source, block)});
      });)",
       "      static_cast<void>(block);", "nobody waits for pushed rows", "push"},
      {"pull-arrival", "program/edges.h", "for_each_source(p, global_expert, rows_of_dispatch(p, task), arrive);", "",
       "rows are pulled from ranks that have not begun the call", "queued", 2},
      {"cached-arrival", "transfer/copy_agent.h", R"(const bool all_arrived = all_lanes(missing_peer(running) < 0);
    // No later task asks its sources. So all are asked now whether they make the same call.
    if (all_arrived && !all_lanes(all_make_same_call(running, task))) return false;)",
       "constexpr bool all_arrived = true;", "one rank that has begun stands for all", "queued", 2},
      {"scheduler-arrival", "schedule/layer_scheduler.h", "if (!wait_for_arrivals(running_call(shared), tile)) break;",
       "", "FC2 writes into slots of ranks that have not begun the call", "queued", 2,
       "formal: results go to the ranks that the tile's rows were pulled from, and pulls have waited for those"},
      {"one-lane-waits", "schedule/layer_scheduler.h", "if (lane < kCtas) for_each_wait(p, tile, counters);",
       "if (lane == 0) for_each_wait(p, tile, counters);", "nobody waits for what the cluster's second CTA needs",
       "epilogue"},
      {"done-wait", "signals/finish.h", "if (!wait_for(running, no_task, FlagWait{FlagSpace::kDone, peer})) return;",
       "", "a call ends while peers are at its memory", "queued-dispatch", 2},
      {"first-agent-done", "signals/finish.h",
       "const bool last = ptx::warp_uniform(before) + 1 == static_cast<uint32_t>(ctas);",
       "const bool last = ptx::warp_uniform(before) == 0;", "a rank is done when its first CTA is", "queued-dispatch",
       2},
      {"done-order", "signals/finish.h",
       "before = ptx::add_acquire_release_gpu(counter_of(running, CounterSpace::kAgentsFinished, running.launch), 1);",
       "before = atomicAdd(counter_of(running, CounterSpace::kAgentsFinished, running.launch), 1u);",
       "the last CTA of a rank has not acquired what the others did", "queued-redispatch", 2,
       "formal: what a CTA did at peers' memory has ended when it adds, since it waited for the bytes"},
      {"counters-kept", "kernels/begin_call.cu",
       "for (int64_t i = threadIdx.x; i < call.layout.counter_total; i += blockDim.x) bank[i] = 0;",
       "static_cast<void>(bank);", "counters begin with those of an earlier call", "epilogue"},
      {"maps-acquire", "kernels/megakernel.cu", "    acquire_maps(global_call);", "",
       "tensor maps of an earlier call may be used", "epilogue", 1,
       "asked for by the memory model: here a launch finds no maps of an earlier one in the cache"},
      {"cluster-begins", "kernels/megakernel.cu", R"(  join_cta_or_cluster();

  if (warp < kFirstMathWarp) {)",
       R"(  __syncthreads();

  if (warp < kFirstMathWarp) {)",
       "a CTA uses its neighbour's barriers before they are there", "epilogue", 1,
       "timing: both CTAs of a cluster have begun before the first one has come to a barrier of the other"},
      {"cluster-ends", "kernels/megakernel.cu", "if constexpr (kLayer.gemm.cluster > 1) join_cta_or_cluster();", "",
       "a CTA leaves while its neighbour arrives at its barriers", "epilogue"},
      {"barriers-fence", "kernels/megakernel.cu", R"(  init_copy_ring(shared.copy_ring);
  ptx::fence_mbarrier_init();)",
       "  init_copy_ring(shared.copy_ring);", "new barriers are not fenced for bulk copies", "epilogue", 1,
       "equivalent: on sm_90a the fence is no instruction"},
  };
}

}  // namespace uniep::cuda::test
