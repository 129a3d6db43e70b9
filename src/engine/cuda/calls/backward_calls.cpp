#include <fmt/format.h>

#include <algorithm>

#include "engine/call_timer_state.h"
#include "engine/cuda/calls/bias_calls.h"
#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/call_memory.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/kernels/bias_kernels.h"
#include "engine/cuda/kernels/grouped_launch.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/profiler_range.h"
#include "engine/cuda/runtime/stream.h"
#include "engine/cuda/runtime/stream_capture.h"
#include "engine/workspace.h"
#include "model/activation_choice.h"

// Backward: the two launches that reach peers, and the weight gradients, which run in kernels of their own, behind them
// or later.
namespace uniep::cuda {
namespace {

constexpr int64_t kStoredRows = 16;

MutableExpertMatrices matrices(void* whole, void* const* experts, int64_t count) {
  if (experts == nullptr) return {whole, {}};
  return {nullptr, std::vector<void*>(experts, experts + count)};
}

bool has_addresses(const WeightGradients& gradients, GemmStage stage) {
  return (stage == GemmStage::kWgradFc1 ? gradients.dw1_experts : gradients.dw2_experts) != nullptr;
}

enum class Half { kBoth, kGate, kUp };

// What a weight gradient multiplies on one rank. Of dW1 `half` may be one of its halves.
WeightGradientOperands gemm_of(const ProgramRequest& request, const WeightGradientLaunch& launch, Half half) {
  const RankProgram& p = launch.program.program;
  const internal::PendingRank& operands = launch.operands;
  const WeightGradients& gradients = launch.gradients;
  const int hidden = static_cast<int>(request.shape.hidden), width = static_cast<int>(request.shape.intermediate);
  WeightGradientOperands gemm;
  gemm.rows = {p.local_experts, launch.rows, p.segment_start + p.first_expert, p.expert_rows + p.first_expert};
  if (launch.stage == GemmStage::kWgradFc2) {
    gemm.a = operands.dyg;
    gemm.b = operands.activation;
    gemm.m = hidden;
    gemm.n = width;
    gemm.dw = matrices(gradients.dw2, gradients.dw2_experts, p.local_experts);
  } else {
    gemm.a = operands.dz + (half == Half::kUp ? width : 0);
    const int of_z = static_cast<int>(z_columns(request.shape, request.numerics));
    gemm.a_stride = of_z;
    gemm.b = operands.xg;
    gemm.m = half == Half::kBoth ? of_z : width;
    gemm.n = hidden;
    gemm.dw = half == Half::kUp ? matrices(gradients.dw1_up, gradients.dw1_up_experts, p.local_experts)
                                : matrices(gradients.dw1, gradients.dw1_experts, p.local_experts);
  }
  return gemm;
}

void require_aligned(const WeightGradients& gradients, int64_t experts, int rank) {
  cuda::require_aligned(gradients.dw1, "dw1", rank);
  cuda::require_aligned(gradients.dw2, "dw2", rank);
  cuda::require_aligned(gradients.dw1_up, "dw1_up", rank);
  for (int64_t i = 0; i < experts; ++i) {
    if (gradients.dw1_up_experts != nullptr) cuda::require_aligned(gradients.dw1_up_experts[i], "dw1_up_experts", rank);
    if (gradients.dw1_experts != nullptr) cuda::require_aligned(gradients.dw1_experts[i], "dw1_experts", rank);
    if (gradients.dw2_experts != nullptr) cuda::require_aligned(gradients.dw2_experts[i], "dw2_experts", rank);
  }
}

// In the launch of dgrad FC1 a warp stores 16 rows of dW1 to one place.
void require_storable(const WeightGradients& gradients, int64_t intermediate, int rank) {
  if (!is_apart(gradients) || intermediate % kStoredRows == 0) return;
  throw Error(Status::kUnsupported,
              fmt::format("dw1_up: given on rank {} with intermediate {}; on cuda gate and up apart in the launch of "
                          "dgrad FC1 need a multiple of {}: set backward.wgrad=after, or give dw1 as one",
                          rank, intermediate, kStoredRows));
}

}  // namespace

// Beside what the CPU engine leaves: the calls that it was queued among, and what its rows are.
struct CudaEngine::CudaPending final : internal::PendingState, std::enable_shared_from_this<CudaPending> {
  std::vector<CUstream> streams;  // of local ranks, as all that follows
  std::vector<DeviceEvent> made;
  std::vector<DeviceProgram> programs;
  std::vector<int64_t> rows;
  std::vector<const uint32_t*> failed;  // GemmArguments::failed, of the backward
  uint64_t capture = 0;
};

void CudaEngine::prepare_biases(const Numerics& numerics) {
  if (!numerics.bias) return;
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    const ScopedDevice scope(queue->device());
    queue->kernels().get(bias_gradients_request(), 0);
  }
}

void CudaEngine::prepare_weight_gradients(const ProgramRequest& request, GemmStage stage, bool by_address, int sms) {
  const GemmConfig config = weight_gradient_kernel(request.schedule, request.numerics,
                                                   {stage, request.shape.experts / options_.ranks, by_address, sms});
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    const ScopedDevice scope(queue->device());
    queue->kernels().get(gemm_request(config), shared_memory_bytes(config));
  }
}

void CudaEngine::launch_weight_gradient(const ProgramRequest& request, const WeightGradientLaunch& launch) {
  const int device = ranks_.device_of(launch.program.program.rank);
  const ScopedDevice scope(device);
  const bool apart = launch.stage == GemmStage::kWgradFc1 && is_apart(launch.gradients);
  const GemmConfig config = weight_gradient_kernel(request.schedule, request.numerics,
                                                   {launch.stage, request.shape.experts / options_.ranks,
                                                    has_addresses(launch.gradients, launch.stage), launch.sms});
  for (const Half half : apart ? std::vector{Half::kGate, Half::kUp} : std::vector{Half::kBoth}) {
    WeightGradientOperands gemm = gemm_of(request, launch, half);
    gemm.failed = launch.failed;
    gemm.raster = std::max(1, request.schedule.order.raster / 2);
    for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
      if (queue->device() != device) continue;
      cuda::launch_weight_gradient(queue->kernels(), config, gemm, {launch.sms, launch.stream});
    }
  }
}

// A backward on its way: what all its steps share. Vectors have an entry a local rank.
struct CudaEngine::BackwardState {
  BackwardState(const internal::BackwardCall& given, const ProgramRequest& request, PlacedTables& placed)
      : call(given),
        asked(request),
        saved(given.saved.state()),
        placement(*saved.placement.state()),
        tables(placed),
        launches(launch_stages(request.schedule, request.direction, request.weight_gradients)),
        alone(std::any_of(launches.begin(), launches.end(), is_weight_gradients_alone)),
        operands(given.arguments.size()),
        bindings(given.arguments.size()),
        again_bindings(given.arguments.size()) {
    for (const BackwardArguments& arguments : call.arguments) streams.push_back(stream_of(arguments.stream));
  }

  const internal::BackwardCall& call;
  ProgramRequest asked;
  std::optional<ProgramRequest> again;  // FC1, before the rest
  internal::SavedState& saved;
  const internal::PlacementState& placement;
  PlacedTables& tables;
  std::vector<LaunchStages> launches;
  bool alone;  // weight gradients have launches of their own
  std::vector<CUstream> streams;
  std::vector<internal::MemoryBlock> workspaces;
  std::vector<internal::PendingRank> operands;  // of weight gradients
  std::vector<uint32_t*> failed;
  std::vector<RankTarget> targets;
  std::vector<RankBinding> bindings, again_bindings;
  std::vector<Inputs> inputs, again_inputs;
  const std::vector<DeviceProgram>* programs = nullptr;
  const std::vector<DeviceProgram>* again_programs = nullptr;

  bool later() const { return call.use.weight_gradients == WeightGradientTime::kLater; }
  internal::MemoryRequest memory(int rank) const {
    return internal::memory_request(call.config, call.schedule, placement, rank, call.use);
  }
};

void CudaEngine::require_legal(const BackwardState& state) const {
  const internal::BackwardCall& call = state.call;
  for (std::size_t local = 0; local < call.arguments.size(); ++local) {
    const BackwardArguments& own = call.arguments[local];
    const int rank = first_local_rank() + static_cast<int>(local);
    require_aligned(own.dy, "dy", rank);
    require_aligned(own.x, "x", rank);
    require_aligned(own.dx, "dx", rank);
    require_aligned_biases(own.weights, call.config.shape.experts / options_.ranks, rank);
    if (state.asked.weight_gradients) {
      require_aligned(own.gradients, call.config.shape.experts / options_.ranks, rank);
    }
  }
  const bool filled = std::any_of(state.launches.begin(), state.launches.end(), [](const LaunchStages& stages) {
    return stages.wgrad_fc1 && !is_weight_gradients_alone(stages);
  });
  for (std::size_t local = 0; filled && local < call.arguments.size(); ++local) {
    require_storable(call.arguments[local].gradients, call.config.shape.intermediate,
                     first_local_rank() + static_cast<int>(local));
  }
}

void CudaEngine::prepare_kernels(const BackwardState& state) {
  prepare(state.asked);
  if (state.again) prepare(*state.again);
  prepare_biases(state.asked.numerics);
  if (!state.alone) return;
  for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
    for (const bool by_address : {false, true}) {
      const auto& arguments = state.call.arguments;
      const bool used = std::any_of(arguments.begin(), arguments.end(), [&](const BackwardArguments& own) {
        return has_addresses(own.gradients, stage) == by_address;
      });
      if (used) prepare_weight_gradients(state.asked, stage, by_address, options_.workers);
    }
  }
}

void CudaEngine::take_memory(BackwardState& state) const {
  for (std::size_t local = 0; local < state.streams.size(); ++local) {
    const int rank = first_local_rank() + static_cast<int>(local);
    const internal::MemoryRequest memory = state.memory(rank);
    require_countable_rows(memory.rows, rank, Direction::kBackward);
    const MemoryNeed need = internal::block_sizes(memory, Direction::kBackward);
    const BackwardArguments& own = state.call.arguments[local];
    state.workspaces.emplace_back(internal::GivenMemory{own.workspace_memory, "workspace_memory"}, options_.allocator,
                                  need.workspace_bytes, rank, own.stream);
    state.operands[local].memory = internal::MemoryBlock({own.pending_memory, "pending_memory"}, options_.allocator,
                                                         need.pending_bytes, rank, own.stream);
  }
}

void CudaEngine::make_programs(BackwardState& state) {
  begin_queueing(state.streams);
  state.targets = targets(state.streams);
  state.programs = &state.tables.programs(state.asked, state.saved.placement.state(), state.targets);
  for (std::size_t local = 0; local < state.bindings.size(); ++local) {
    state.bindings[local].rank = first_local_rank() + static_cast<int>(local);
    state.bindings[local].input[0] = state.call.arguments[local].dy;
    state.bindings[local].input[1] = state.call.arguments[local].x;
  }
  state.inputs = find_inputs(state.bindings, state.programs->front(), state.call.config.shape, state.placement);
  if (!state.again) return;
  state.again_programs = &state.tables.programs(*state.again, state.saved.placement.state(), state.targets);
  for (std::size_t local = 0; local < state.bindings.size(); ++local) {
    state.again_bindings[local].rank = state.bindings[local].rank;
    state.again_bindings[local].input[0] = state.call.arguments[local].x;
  }
  state.again_inputs =
      find_inputs(state.again_bindings, state.again_programs->front(), state.call.config.shape, state.placement);
}

// z, and where x is not kept its rows, into where backward reads them.
void CudaEngine::recompute_z(BackwardState& state) {
  for (std::size_t local = 0; local < state.bindings.size(); ++local) {
    const RankBinding& of_backward = state.bindings[local];
    RankBinding& binding = state.again_bindings[local];
    binding.rows = of_backward.rows;
    binding.gathered[0] = of_backward.gathered[1];
    binding.z = of_backward.z;
    binding.activation = of_backward.activation;
    binding.weights = of_backward.weights;
    binding.row_table = of_backward.row_table;
    binding.whole = of_backward.whole;
    bind_group_memory(binding, local, (*state.again_programs)[local], false, state.targets[local].stream);
  }
  CallBinding binding = bind_call({*state.again, CallKind::kRecompute, state.placement}, state.again_inputs);
  run(binding, state.again_inputs, {state.again_bindings, *state.again_programs, state.streams},
      [&](DeviceQueue& queue, const RankCall* calls, int, CUstream stream) {
        launch_all(*state.again, state.again_programs->front().program, queue, calls, stream);
      });
  begin_queueing(state.streams);
}

void CudaEngine::bind(BackwardState& state, std::size_t local) {
  const internal::BackwardCall& call = state.call;
  const BackwardArguments& arguments = call.arguments[local];
  RankBinding& binding = state.bindings[local];
  internal::PendingRank& operands = state.operands[local];
  const internal::MemoryRequest memory = state.memory(binding.rank);
  const internal::MemoryBlock& workspace = state.workspaces[local];
  const int device = ranks_.devices()[local];
  CUstream stream = state.targets[local].stream;
  poison(workspace.data(), workspace.size(), device, stream);
  poison(operands.memory.data(), operands.memory.size(), device, stream);
  internal::Carver carver(workspace.data()), left_carver(operands.memory.data());
  const internal::WorkspacePieces work =
      internal::carve_backward(carver, left_carver, memory, state.saved.ranks[local]);
  operands.dyg = work.gathered[0];
  operands.activation = work.activation;
  operands.dz = work.dz;
  operands.xg = work.gathered[1];
  state.failed.push_back(work.failed);

  binding.rows = memory.rows;
  binding.gathered[0] = work.gathered[0];
  binding.gathered[1] = work.gathered[1];
  binding.z = work.z;
  binding.activation = work.activation;
  binding.dz = work.dz;
  binding.prob_chunks = work.prob_chunks;
  binding.prob_chunk_count = static_cast<int32_t>(memory.prob_terms);
  binding.output_rows = work.output_rows;
  binding.output = arguments.dx;
  (state.saved.placement.dense(binding.rank) ? binding.dense_dprobs : binding.dprobs) = arguments.dprobs;
  binding.weights = arguments.weights;
  if (state.asked.weight_gradients && !state.alone) binding.gradients = arguments.gradients;
  binding.row_table = state.tables.tables(local).rows;
  binding.whole = state.tables.tables(local).whole;
}

void CudaEngine::launch_weight_gradients(const BackwardState& state, const DeviceQueue& queue,
                                         const LaunchStages& stages, CUstream stream) {
  for (const int rank : queue.ranks()) {
    const auto local = static_cast<std::size_t>(rank - first_local_rank());
    for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
      if (!(stage == GemmStage::kWgradFc2 ? stages.wgrad_fc2 : stages.wgrad_fc1)) continue;
      launch_weight_gradient(state.asked, {.program = (*state.programs)[local],
                                           .rows = state.bindings[local].rows,
                                           .operands = state.operands[local],
                                           .gradients = state.call.arguments[local].gradients,
                                           .stage = stage,
                                           .sms = kept_workers(state.programs->front().program),
                                           .failed = &symmetric_.signals().report(rank)->failed,
                                           .stream = stream});
    }
  }
}

// Behind dgrad FC2, when rows of dy are there and dz is made.
void CudaEngine::launch_biases(const BackwardState& state, DeviceQueue& queue, CUstream stream) {
  if (!state.asked.numerics.bias) return;
  const ScopedDevice scope(queue.device());
  for (const int rank : queue.ranks()) {
    const auto local = static_cast<std::size_t>(rank - first_local_rank());
    const BackwardArguments& arguments = state.call.arguments[local];
    cuda::launch_biases(queue.kernels(), {.program = (*state.programs)[local].program,
                                          .config = state.call.config,
                                          .operands = state.operands[local],
                                          .gradients = state.asked.weight_gradients ? &arguments.gradients : nullptr,
                                          .weights = &arguments.weights,
                                          .prob_chunks = state.bindings[local].prob_chunks,
                                          .prob_stride = state.bindings[local].rows,
                                          .failed = &symmetric_.signals().report(rank)->failed,
                                          .stream = stream});
  }
}

void CudaEngine::launch(const BackwardState& state, DeviceQueue& queue, const RankCall* calls, CUstream stream) {
  const RankProgram& program = state.programs->front().program;
  for (int launch = 0; launch < program.launches; ++launch) {
    const LaunchStages& stages = program.stages[launch];
    if (is_weight_gradients_alone(stages)) {
      launch_weight_gradients(state, queue, stages, stream);
    } else {
      queue.launch(launch_config(state.asked.schedule, state.asked.numerics, state.asked.direction, stages),
                   layer_launch(program, launch, queue, calls), absent_ranks_, stream);
    }
    if (stages.first_gemm) launch_biases(state, queue, stream);
  }
  make_dense_dprobs(queue, state.bindings, *state.programs, stream);
  for (const int rank : queue.ranks()) {
    if (state.later()) keep_failure(rank, state.failed[static_cast<std::size_t>(rank - first_local_rank())], stream);
  }
}

void CudaEngine::keep_for_later(BackwardState& state, CudaPending& pending) {
  const internal::BackwardCall& call = state.call;
  pending.streams = state.streams;
  pending.capture = capture_;
  pending.failed.assign(state.failed.begin(), state.failed.end());
  pending.config = call.config;
  pending.schedule = call.schedule;
  pending.placement = state.saved.placement;
  pending.first_rank = first_local_rank();
  const bool in_saved = call.schedule.save_xg == SaveXg::kKeep || call.use.last_use;
  if (in_saved) pending.saved = state.saved.shared_from_this();
  pending.programs = *state.programs;
  pending.made = std::vector<DeviceEvent>(state.operands.size());
  for (std::size_t local = 0; local < state.operands.size(); ++local) {
    pending.rows.push_back(state.bindings[local].rows);
    pending.made[local].record(ranks_.devices()[local], state.streams[local]);
  }
  pending.ranks = std::move(state.operands);
}

std::shared_ptr<internal::PendingState> CudaEngine::backward(const internal::BackwardCall& call) {
  const ProfilerRange range("backward");
  const BesideCapture beside;
  const auto queueing = DeviceOrder::lock(gate());
  throw_noticed_failures();
  const EndsQueueing ends(*this);
  BackwardState state(call, call_request(machine(), call.config, call.schedule, Direction::kBackward, call.use),
                      own_tables(*call.saved.state().placement.state()));
  state.again = recompute_request(machine(), call.config, call.schedule);
  std::shared_ptr<CudaPending> pending;
  before_growth(state.asked, CallKind::kBackward, state.placement, [&] {
    require_legal(state);
    prepare_kernels(state);
    look_for_capture(state.streams);
    if (state.later()) pending = std::make_shared<CudaPending>();
    take_memory(state);
    make_programs(state);
  });
  SymmetricNeed need = symmetric_need(machine(), state.asked, state.placement, state.programs->front().layout,
                                      copied_operands(state.inputs));
  if (state.again) {
    need = most_of(need, symmetric_need(machine(), *state.again, state.placement, state.again_programs->front().layout,
                                        copied_operands(state.again_inputs)));
  }
  reserve(need, [&] { return text_of({state.asked, CallKind::kBackward, state.placement}); });
  for (std::size_t local = 0; local < state.bindings.size(); ++local) bind(state, local);
  if (state.again) recompute_z(state);
  for (std::size_t local = 0; local < state.bindings.size(); ++local) {
    bind_group_memory(state.bindings[local], local, (*state.programs)[local], records(call.options),
                      state.targets[local].stream);
  }
  CallBinding binding = bind_call({state.asked, CallKind::kBackward, state.placement}, state.inputs);
  begin_timing(call.options);
  run(binding, state.inputs, {state.bindings, *state.programs, state.streams},
      [&](DeviceQueue& queue, const RankCall* calls, int, CUstream stream) {
        state.saved.used_up |= call.use.last_use;
        launch(state, queue, calls, stream);
        time_call(call.options, queue, stream);
      });
  for (std::size_t local = 0; local < state.streams.size(); ++local) {
    state.saved.ranks[local].memory.release_on(call.arguments[local].stream);
  }
  if (call.options.events != nullptr) read_events(*call.options.events, *state.programs);
  if (pending != nullptr) keep_for_later(state, *pending);
  return pending;
}

// What the kernels of later weight gradients look at, since the report is the next calls' by then.
void CudaEngine::keep_failure(int rank, uint32_t* kept, CUstream stream) const {
  const ScopedDevice scope(ranks_.device_of(rank));
  const auto source = reinterpret_cast<CUdeviceptr>(&symmetric_.signals().report(rank)->failed);
  check(driver().cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(kept), source, sizeof(*kept), stream),
        "keeping whether a backward failed");
}

void CudaEngine::release_readers() {
  std::erase_if(readers_, [](const Reader& reader) { return reader.is_over(); });
}

void CudaEngine::launch_later_biases(const internal::WeightGradientsCall& call, std::size_t local, CUstream stream) {
  auto& work = static_cast<CudaPending&>(call.work);
  if (!work.config.numerics.bias) return;
  const ScopedDevice scope(ranks_.devices()[local]);
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    if (queue->device() != ranks_.devices()[local]) continue;
    cuda::launch_biases(queue->kernels(), {.program = work.programs[local].program,
                                           .config = work.config,
                                           .operands = work.ranks[local],
                                           .gradients = &call.arguments[local].gradients,
                                           .db1 = call.dw1,
                                           .db2 = call.dw2,
                                           .failed = work.failed[local],
                                           .stream = stream});
  }
}

// In the streams of the backward the gradients are among the group's calls, whose memory is used again in their order.
// In any other stream nothing follows them: what they read is kept until they are over.
void CudaEngine::weight_gradients(const internal::WeightGradientsCall& call) {
  const ProfilerRange range("weight gradients");
  const BesideCapture beside;
  const auto queueing = DeviceOrder::lock(gate());
  throw_noticed_failures();
  auto& work = static_cast<CudaPending&>(call.work);
  const ProgramRequest asked = call_request(machine(), work.config, work.schedule, Direction::kBackward);
  std::vector<GemmStage> stages;
  if (call.dw2) stages.push_back(GemmStage::kWgradFc2);
  if (call.dw1) stages.push_back(GemmStage::kWgradFc1);
  std::vector<CUstream> streams;
  std::vector<int> sms;
  for (const WeightGradientArguments& arguments : call.arguments) {
    const auto local = static_cast<int>(streams.size());
    require_aligned(arguments.gradients, work.config.shape.experts / options_.ranks, first_local_rank() + local);
    streams.push_back(stream_of(arguments.stream));
    sms.push_back(arguments.sms == 0 ? options_.workers : arguments.sms);
    for (const GemmStage stage : stages) {
      prepare_weight_gradients(asked, stage, has_addresses(arguments.gradients, stage), sms.back());
    }
  }
  prepare_biases(asked.numerics);
  counted_ = false;  // not a call that ranks make together
  look_for_capture(streams);
  if (capture_ != work.capture) {
    throw Error(Status::kInvalidArgument,
                "stream: weight gradients and their backward are captured into one CUDA graph, or neither is");
  }
  const bool among_calls = streams == work.streams;
  if (among_calls) begin_queueing(streams);
  work.dw1_done |= call.dw1;
  work.dw2_done |= call.dw2;
  const auto launch = [&] {
    for (std::size_t local = 0; local < work.ranks.size(); ++local) {
      const int rank = first_local_rank() + static_cast<int>(local), device = ranks_.devices()[local];
      CUstream stream = among_calls ? leader_of(rank, streams) : streams[local];
      Reader* reader = nullptr;
      if (!among_calls) {
        const ScopedDevice scope(device);
        check(driver().cuStreamWaitEvent(stream, work.made[local].get(), 0), "cuStreamWaitEvent");
        reader = &readers_.emplace_back();
        reader->work = work.shared_from_this();
      }
      for (const GemmStage stage : stages) {
        launch_weight_gradient(asked, {.program = work.programs[local],
                                       .rows = work.rows[local],
                                       .operands = work.ranks[local],
                                       .gradients = call.arguments[local].gradients,
                                       .stage = stage,
                                       .sms = sms[local],
                                       .failed = work.failed[local],
                                       .stream = stream});
      }
      launch_later_biases(call, local, stream);
      if (reader == nullptr || capture_ != 0) continue;
      reader->over.record(device, stream);
      reader->for_good = false;
    }
  };
  among_calls ? queue_call(streams, launch) : launch();
}

}  // namespace uniep::cuda
