#include "engine/call_timer_state.h"
#include "engine/cuda/calls/call_memory.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/calls/lent_slices.h"
#include "engine/cuda/runtime/profiler_range.h"
#include "engine/cuda/runtime/stream.h"
#include "engine/cuda/runtime/stream_capture.h"
#include "engine/workspace.h"

// Forward: its launches, which a backward may run a part of again.
namespace uniep::cuda {

// A forward on its way: what all its steps share. Vectors have an entry a local rank.
struct CudaEngine::ForwardState {
  ForwardState(const internal::ForwardCall& given, const ProgramRequest& request, PlacedTables& placed, int first_rank)
      : call(given),
        asked(request),
        placement(*given.placement.state()),
        tables(placed),
        saved(std::make_shared<internal::SavedState>()),
        bindings(given.arguments.size()) {
    for (const ForwardArguments& arguments : call.arguments) streams.push_back(stream_of(arguments.stream));
    saved->config = call.config;
    saved->placement = call.placement;
    saved->first_rank = first_rank;
  }

  const internal::ForwardCall& call;
  ProgramRequest asked;
  const internal::PlacementState& placement;
  PlacedTables& tables;
  std::shared_ptr<internal::SavedState> saved;
  std::vector<CUstream> streams;
  std::vector<internal::MemoryBlock> workspaces;
  std::vector<RankTarget> targets;
  std::vector<RankBinding> bindings;
  std::vector<Inputs> inputs;
  const std::vector<DeviceProgram>* programs = nullptr;

  internal::MemoryRequest memory(int rank) const {
    return internal::memory_request(call.config, call.schedule, placement, rank,
                                    {.keep_saved = call.options.keep_saved});
  }
};

void CudaEngine::take_memory(ForwardState& state) const {
  for (std::size_t local = 0; local < state.streams.size(); ++local) {
    const int rank = first_local_rank() + static_cast<int>(local);
    const internal::MemoryRequest memory = state.memory(rank);
    require_countable_rows(memory.rows, rank, Direction::kForward);
    const MemoryNeed need = internal::block_sizes(memory, Direction::kForward);
    const ForwardArguments& own = state.call.arguments[local];
    state.saved->ranks.emplace_back().memory = internal::MemoryBlock(
        {own.saved_memory, "saved_memory"}, options_.allocator, need.saved_bytes, rank, own.stream);
    state.workspaces.emplace_back(internal::GivenMemory{own.workspace_memory, "workspace_memory"}, options_.allocator,
                                  need.workspace_bytes, rank, own.stream);
  }
}

void CudaEngine::make_programs(ForwardState& state) {
  begin_queueing(state.streams);
  state.targets = targets(state.streams);
  state.programs = &state.tables.programs(state.asked, state.call.placement.state(), state.targets);
  for (std::size_t local = 0; local < state.bindings.size(); ++local) {
    state.bindings[local].rank = first_local_rank() + static_cast<int>(local);
    state.bindings[local].input[0] = state.call.arguments[local].x;
  }
  state.inputs = find_inputs(state.bindings, state.programs->front(), state.call.config.shape, state.placement);
}

void CudaEngine::bind(ForwardState& state, std::size_t local) {
  const ForwardArguments& arguments = state.call.arguments[local];
  RankBinding& binding = state.bindings[local];
  const internal::MemoryRequest memory = state.memory(binding.rank);
  internal::SavedRank& kept = state.saved->ranks[local];
  const internal::MemoryBlock& workspace = state.workspaces[local];
  const int device = ranks_.devices()[local];
  CUstream stream = state.targets[local].stream;
  poison(kept.memory.data(), kept.memory.size(), device, stream);
  poison(workspace.data(), workspace.size(), device, stream);
  internal::Carver saved_carver(kept.memory.data()), carver(workspace.data());
  const internal::SavedPieces pieces = internal::carve_saved(saved_carver, carver, memory);
  const internal::WorkspacePieces work = internal::carve_forward_workspace(carver, memory);
  kept.z = pieces.z;
  kept.xg = pieces.xg;

  binding.rows = memory.rows;
  binding.gathered[0] = memory.keep_xg ? pieces.xg : work.gathered[0];
  binding.z = memory.keep_z ? pieces.z : work.z;
  binding.activation = work.activation;
  binding.output_rows = work.output_rows;
  binding.output = arguments.y;
  binding.weights = arguments.weights;
  binding.row_table = state.tables.tables(local).rows;
  binding.whole = state.tables.tables(local).whole;
  bind_group_memory(binding, local, (*state.programs)[local], records(state.call.options), stream);
}

Saved CudaEngine::forward(const internal::ForwardCall& call) {
  const ProfilerRange range("forward");
  const BesideCapture beside;
  const auto queueing = DeviceOrder::lock(gate());
  throw_noticed_failures();
  const EndsQueueing ends(*this);
  ForwardState state(call, call_request(machine(), call.config, call.schedule, Direction::kForward),
                     own_tables(*call.placement.state()), first_local_rank());
  look_for_capture(state.streams);
  before_growth(state.asked, CallKind::kForward, state.placement, [&] {
    for (std::size_t local = 0; local < call.arguments.size(); ++local) {
      const int rank = first_local_rank() + static_cast<int>(local);
      require_aligned(call.arguments[local].x, "x", rank);
      require_aligned(call.arguments[local].y, "y", rank);
      require_aligned_biases(call.arguments[local].weights, call.config.shape.experts / options_.ranks, rank);
    }
    prepare(state.asked);
    take_memory(state);  // first: an allocator may hand it out in the order of a rank's own stream
    make_programs(state);
  });
  reserve(symmetric_need(machine(), state.asked, state.placement, state.programs->front().layout,
                         copied_operands(state.inputs)),
          [&] {
            return text_of({state.asked, CallKind::kForward, state.placement});
          });
  for (std::size_t local = 0; local < state.bindings.size(); ++local) bind(state, local);
  CallBinding binding = bind_call({state.asked, CallKind::kForward, state.placement}, state.inputs);
  begin_timing(call.options);
  run(binding, state.inputs, {state.bindings, *state.programs, state.streams},
      [&](DeviceQueue& queue, const RankCall* calls, int, CUstream stream) {
        launch_all(state.asked, state.programs->front().program, queue, calls, stream);
        mark_empty(queue, state.bindings, *state.programs, state.asked.shape.hidden, stream);
        time_call(call.options, queue, stream);
      });
  if (call.options.events != nullptr) read_events(*call.options.events, *state.programs);
  return call.options.keep_saved ? Saved(state.saved) : Saved();
}

void CudaEngine::launch_all(const ProgramRequest& request, const RankProgram& program, DeviceQueue& queue,
                            const RankCall* calls, CUstream stream) const {
  for (int launch = 0; launch < program.launches; ++launch) {
    queue.launch(launch_config(request.schedule, request.numerics, request.direction, program.stages[launch]),
                 layer_launch(program, launch, queue, calls), absent_ranks_, stream);
  }
}

// Virtual ranks wait for each other, so all their CTAs run side by side.
LayerLaunch CudaEngine::layer_launch(const RankProgram& program, int launch, const DeviceQueue& queue,
                                     const RankCall* calls) const {
  const bool alone = queue.ranks().size() == 1;
  const LentSlices lent = alone ? lent_slices(program, program.stages[launch], shortest_slice_ns_) : LentSlices{};
  return {calls, launch, program.workers + lent.ctas, lent.ns};
}

}  // namespace uniep::cuda
