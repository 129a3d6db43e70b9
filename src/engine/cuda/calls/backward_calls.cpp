#include <fmt/format.h>

#include <algorithm>

#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/kernels/grouped_launch.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/profiler_range.h"
#include "engine/cuda/runtime/stream_capture.h"
#include "engine/workspace.h"

// Backward: the two launches that reach peers, and the weight gradients, which run in kernels of their own, behind them
// or later.
namespace uniep::cuda {
namespace {

constexpr int64_t kStoredRows = 16;

CUstream stream_of(Stream stream) {
  return static_cast<CUstream>(stream.handle);
}

MutableExpertMatrices matrices(void* whole, void* const* experts, int64_t count) {
  if (experts == nullptr) return {whole, {}};
  return {nullptr, std::vector<void*>(experts, experts + count)};
}

bool has_addresses(const WeightGradients& gradients, GemmStage stage) {
  return (stage == GemmStage::kWgradFc1 ? gradients.dw1_experts : gradients.dw2_experts) != nullptr;
}

enum class Half { kBoth, kGate, kUp };

// What a weight gradient multiplies on one rank. Of dW1 `half` may be one of its halves.
WeightGradientProduct product_of(const ProgramRequest& request, const DeviceProgram& program, int64_t rows,
                                 const internal::PendingRank& operands, const WeightGradients& gradients,
                                 GemmStage stage, Half half) {
  const RankProgram& p = program.program;
  const int hidden = static_cast<int>(request.shape.hidden), width = static_cast<int>(request.shape.intermediate);
  WeightGradientProduct product;
  product.rows = {p.local_experts, rows, p.segment_start + p.first_expert, p.expert_rows + p.first_expert};
  if (stage == GemmStage::kWgradFc2) {
    product.a = operands.dyg;
    product.b = operands.activation;
    product.m = hidden;
    product.n = width;
    product.dw = matrices(gradients.dw2, gradients.dw2_experts, p.local_experts);
  } else {
    product.a = operands.dz + (half == Half::kUp ? width : 0);
    product.a_stride = 2 * width;
    product.b = operands.xg;
    product.m = half == Half::kBoth ? 2 * width : width;
    product.n = hidden;
    product.dw = half == Half::kUp ? matrices(gradients.dw1_up, gradients.dw1_up_experts, p.local_experts)
                                   : matrices(gradients.dw1, gradients.dw1_experts, p.local_experts);
  }
  return product;
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

// Beside what the CPU engine leaves: the calls that it was queued among, and what its rows are.
struct CudaPending final : internal::PendingState, std::enable_shared_from_this<CudaPending> {
  std::vector<CUstream> streams;  // of local ranks, as all that follows
  std::vector<DeviceEvent> made;
  std::vector<DeviceProgram> programs;
  std::vector<int64_t> rows;
  std::vector<const uint32_t*> failed;  // GemmArguments::failed, of the backward
  uint64_t capture = 0;
};

}  // namespace

void CudaEngine::prepare_weight_gradients(const ProgramRequest& request, GemmStage stage, bool by_address, int sms) {
  const GemmConfig config = weight_gradient_kernel(request.schedule, request.numerics, stage,
                                                   request.shape.experts / options_.ranks, by_address, sms);
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    const ScopedDevice scope(queue->device());
    queue->kernels().get(gemm_request(config), shared_memory_bytes(config));
  }
}

void CudaEngine::launch_weight_gradient(const ProgramRequest& request, const DeviceProgram& program, int64_t rows,
                                        const internal::PendingRank& operands, const WeightGradients& gradients,
                                        GemmStage stage, int sms, const uint32_t* failed, CUstream stream) {
  const ScopedDevice scope(ranks_.device_of(program.program.rank));
  const bool apart = stage == GemmStage::kWgradFc1 && is_apart(gradients);
  const int raster = std::max(1, request.schedule.order.raster / 2);
  const GemmConfig config =
      weight_gradient_kernel(request.schedule, request.numerics, stage, request.shape.experts / options_.ranks,
                             has_addresses(gradients, stage), sms);
  for (const Half half : apart ? std::vector{Half::kGate, Half::kUp} : std::vector{Half::kBoth}) {
    WeightGradientProduct product = product_of(request, program, rows, operands, gradients, stage, half);
    product.failed = failed;
    for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
      if (queue->device() != ranks_.device_of(program.program.rank)) continue;
      cuda::launch_weight_gradient(queue->kernels(), config, product, raster, sms, stream);
    }
  }
}

std::shared_ptr<internal::PendingState> CudaEngine::backward(const internal::BackwardCall& call) {
  const ProfilerRange range("backward");
  const BesideCapture beside;
  const auto queueing = DeviceOrder::lock();
  throw_noticed_failures();
  const ProgramRequest asked = request(call.config, call.schedule, Direction::kBackward, call.use);
  internal::SavedState& saved = call.saved.state();
  const internal::PlacementState& placement = *saved.placement.state();
  PlacedTables& tables = tables_of(placement);
  const int64_t local_experts = call.config.shape.experts / options_.ranks;
  const bool later = call.use.weight_gradients == WeightGradientTime::kLater;
  const std::vector<LaunchStages> launches = launch_stages(asked.schedule, asked.direction, asked.weight_gradients);
  const bool alone = std::any_of(launches.begin(), launches.end(), is_weight_gradients_alone);
  std::vector<CUstream> streams;
  for (const BackwardArguments& arguments : call.arguments) streams.push_back(stream_of(arguments.stream));
  std::shared_ptr<CudaPending> pending;
  std::vector<internal::MemoryBlock> workspaces;
  std::vector<internal::PendingRank> operands(streams.size());
  std::vector<uint32_t*> failed;
  std::vector<RankTarget> rank_targets;
  std::vector<RankBinding> bindings(call.arguments.size());
  std::vector<Inputs> inputs;
  const std::vector<DeviceProgram>* made = nullptr;
  before_growth(asked, CallKind::kBackward, placement, [&] {
    for (std::size_t local = 0; local < call.arguments.size(); ++local) {
      const BackwardArguments& own = call.arguments[local];
      const int rank = first_local_rank() + static_cast<int>(local);
      require_aligned(own.dy, "dy", rank);
      require_aligned(own.x, "x", rank);
      require_aligned(own.dx, "dx", rank);
      if (asked.weight_gradients) require_aligned(own.gradients, local_experts, rank);
    }
    const bool filled = std::any_of(launches.begin(), launches.end(), [](const LaunchStages& stages) {
      return stages.wgrad_fc1 && !is_weight_gradients_alone(stages);
    });
    for (std::size_t local = 0; filled && local < call.arguments.size(); ++local) {
      require_storable(call.arguments[local].gradients, call.config.shape.intermediate,
                       first_local_rank() + static_cast<int>(local));
    }
    prepare(asked);
    for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
      if (!alone) break;
      for (const bool by_address : {false, true}) {
        const bool used = std::any_of(call.arguments.begin(), call.arguments.end(), [&](const BackwardArguments& own) {
          return has_addresses(own.gradients, stage) == by_address;
        });
        if (used) prepare_weight_gradients(asked, stage, by_address, options_.workers);
      }
    }
    look_for_capture(streams);
    if (later) pending = std::make_shared<CudaPending>();
    for (std::size_t local = 0; local < streams.size(); ++local) {
      const int rank = first_local_rank() + static_cast<int>(local);
      const internal::MemoryRequest memory =
          internal::memory_request(call.config, call.schedule, placement, rank, call.use);
      require_countable_rows(memory.rows, rank, Direction::kBackward);
      const MemoryNeed need = internal::block_sizes(memory, Direction::kBackward);
      const BackwardArguments& own = call.arguments[local];
      workspaces.emplace_back(own.workspace_memory, "workspace_memory", options_.allocator, need.workspace_bytes, rank,
                              own.stream);
      operands[local].memory = internal::MemoryBlock(own.pending_memory, "pending_memory", options_.allocator,
                                                     need.pending_bytes, rank, own.stream);
    }
    begin_queueing(streams);
    rank_targets = targets(streams);
    made = &tables.programs(asked, saved.placement.state(), rank_targets);
    for (std::size_t local = 0; local < bindings.size(); ++local) {
      bindings[local].rank = first_local_rank() + static_cast<int>(local);
      bindings[local].input[0] = call.arguments[local].dy;
      bindings[local].input[1] = call.arguments[local].x;
    }
    inputs = find_inputs(bindings, made->front(), call.config.shape, placement);
  });
  const std::vector<DeviceProgram>& programs = *made;
  reserve(symmetric_need(asked, placement, programs.front().layout, copied_operands(inputs)),
          [&] { return text_of(asked, CallKind::kBackward); });
  for (std::size_t local = 0; local < bindings.size(); ++local) {
    const BackwardArguments& arguments = call.arguments[local];
    RankBinding& binding = bindings[local];
    const internal::MemoryRequest memory =
        internal::memory_request(call.config, call.schedule, placement, binding.rank, call.use);
    internal::MemoryBlock& left = operands[local].memory;
    poison(workspaces[local].data(), workspaces[local].size(), ranks_.devices()[local], rank_targets[local].stream);
    poison(left.data(), left.size(), ranks_.devices()[local], rank_targets[local].stream);
    internal::Carver carver(workspaces[local].data()), left_carver(left.data());
    const internal::WorkspacePieces work = internal::carve_backward(carver, left_carver, memory, saved.ranks[local]);
    operands[local].dyg = work.gathered[0];
    operands[local].activation = work.activation;
    operands[local].dz = work.dz;
    operands[local].xg = work.gathered[1];
    failed.push_back(work.failed);

    binding.rows = memory.rows;
    binding.gathered[0] = work.gathered[0];
    binding.gathered[1] = work.gathered[1];
    binding.z = saved.ranks[local].z;
    binding.activation = work.activation;
    binding.dz = work.dz;
    binding.prob_chunks = work.prob_chunks;
    binding.prob_chunk_count = static_cast<int32_t>(divide_up(call.config.shape.intermediate, kProbChunkColumns));
    binding.output_rows = work.output_rows;
    binding.output = arguments.dx;
    (saved.placement.dense(binding.rank) ? binding.dense_dprobs : binding.dprobs) = arguments.dprobs;
    binding.weights = arguments.weights;
    if (asked.weight_gradients && !alone) binding.gradients = arguments.gradients;
    binding.row_table = tables.tables(local).rows;
    binding.whole = tables.tables(local).whole;
    bind_group_memory(binding, local, programs[local], call.options.events != nullptr, rank_targets[local].stream);
  }
  CallBinding binding = bind_call(asked, CallKind::kBackward, inputs);
  run(binding, inputs, bindings, programs, streams,
      [&](DeviceQueue& queue, const RankCall* calls, int, CUstream stream) {
        saved.used_up |= call.use.last_use;
        const RankProgram& program = programs.front().program;
        for (int launch = 0; launch < program.launches; ++launch) {
          const LaunchStages& stages = program.stages[launch];
          if (!is_weight_gradients_alone(stages)) {
            queue.launch(launch_config(asked.schedule, asked.numerics, asked.direction, stages),
                         {calls, launch, program.workers}, absent_ranks_, stream);
            continue;
          }
          for (const int rank : queue.ranks()) {
            const auto local = static_cast<std::size_t>(rank - first_local_rank());
            for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
              if (!(stage == GemmStage::kWgradFc2 ? stages.wgrad_fc2 : stages.wgrad_fc1)) continue;
              launch_weight_gradient(asked, programs[local], bindings[local].rows, operands[local],
                                     call.arguments[local].gradients, stage, program.workers,
                                     &symmetric_.signals().report(rank)->failed, stream);
            }
          }
        }
        make_dense_dprobs(queue, bindings, programs, stream);
        for (const int rank : queue.ranks()) {
          if (later) keep_failure(rank, failed[static_cast<std::size_t>(rank - first_local_rank())], stream);
        }
      });
  for (std::size_t local = 0; local < streams.size(); ++local) {
    saved.ranks[local].memory.release_on(call.arguments[local].stream);
  }
  if (call.options.events != nullptr) read_events(*call.options.events, programs);
  if (!later) return nullptr;

  const bool in_saved = call.schedule.save_xg == SaveXg::kKeep || call.use.last_use;
  pending->owner = this;
  pending->streams = streams;
  pending->capture = capture_;
  pending->failed.assign(failed.begin(), failed.end());
  pending->config = call.config;
  pending->schedule = call.schedule;
  pending->placement = saved.placement;
  pending->first_rank = first_local_rank();
  if (in_saved) pending->saved = saved.shared_from_this();
  pending->programs = programs;
  pending->made = std::vector<DeviceEvent>(operands.size());
  for (std::size_t local = 0; local < operands.size(); ++local) {
    pending->rows.push_back(bindings[local].rows);
    pending->made[local].record(ranks_.devices()[local], streams[local]);
  }
  pending->ranks = std::move(operands);
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

// In the streams of the backward the gradients are among the group's calls, whose memory is used again in their order.
// In any other stream nothing follows them: what they read is kept until they are over.
void CudaEngine::weight_gradients(const internal::WeightGradientsCall& call) {
  const ProfilerRange range("weight gradients");
  const BesideCapture beside;
  const auto queueing = DeviceOrder::lock();
  throw_noticed_failures();
  auto& work = static_cast<CudaPending&>(call.work);
  const ProgramRequest asked = request(work.config, work.schedule, Direction::kBackward);
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
  look_for_capture(streams);
  if (capture_ != work.capture) {
    throw Error(Status::kInvalidArgument,
                "stream: weight gradients and their backward are captured into one CUDA graph, or neither is");
  }
  const bool among_calls = streams == work.streams;
  if (among_calls) begin_queueing(streams);
  work.dw1_done |= call.dw1;
  work.dw2_done |= call.dw2;
  for (std::size_t local = 0; local < work.ranks.size(); ++local) {
    const int rank = first_local_rank() + static_cast<int>(local), device = ranks_.devices()[local];
    CUstream stream = among_calls ? leader_of(rank, streams) : streams[local];
    if (!among_calls) {
      const ScopedDevice scope(device);
      check(driver().cuStreamWaitEvent(stream, work.made[local].get(), 0), "cuStreamWaitEvent");
    }
    for (const GemmStage stage : stages) {
      launch_weight_gradient(asked, work.programs[local], work.rows[local], work.ranks[local],
                             call.arguments[local].gradients, stage, sms[local], work.failed[local], stream);
    }
    if (among_calls) continue;
    Reader& reader = readers_.emplace_back();
    reader.work = work.shared_from_this();
    reader.captured = capture_ != 0;
    if (!reader.captured) reader.over.record(device, stream);
  }
  if (among_calls) end_queueing(streams);
}

}  // namespace uniep::cuda
