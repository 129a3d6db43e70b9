#include <fmt/format.h>

#include <algorithm>

#include "engine/cuda/calls/call_memory.h"
#include "engine/cuda/calls/cuda_engine.h"
#include "engine/cuda/calls/exchange_request.h"
#include "engine/cuda/kernels/exchange.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/profiler_range.h"
#include "engine/cuda/runtime/stream.h"
#include "engine/cuda/runtime/stream_capture.h"
#include "uniep/error.h"

// Dispatch and combine alone (device/kernels/exchange.cu), among the group's other calls.
namespace uniep::cuda {
namespace {

constexpr int kPullParts = 4;

}  // namespace

ExchangeConfig exchange_config(const ProgramRequest& asked) {
  const CommSchedule& comm = asked.schedule.comm;
  return asked.part == ProgramPart::kDispatch ? dispatch_config(comm.chunk_bytes, comm.stages)
                                              : combine_config(comm.chunk_bytes, comm.stages);
}

ProgramRequest exchange_program(const LayerConfig& config, const Schedule& schedule, ProgramPart part, int workers) {
  const int64_t slots = std::max<int64_t>(config.shape.topk, config.numerics.combine_groups);
  if (slots > kMaxCudaSlots) {
    throw Error(Status::kUnsupported, fmt::format("topk, combine_groups: {}, {}; on cuda each is at most {}",
                                                  config.shape.topk, config.numerics.combine_groups, kMaxCudaSlots));
  }
  ProgramRequest request;
  request.shape = config.shape;
  request.numerics = config.numerics;
  request.schedule = schedule;
  const int given = part == ProgramPart::kDispatch ? schedule.comm.dispatch_sms : schedule.comm.combine_sms;
  request.workers = given > 0 ? given + schedule.comm.reserve_sms : workers;
  request.pull_parts = kPullParts;
  request.part = part;
  return request;
}

ProgramRequest CudaEngine::exchange_request(const LayerConfig& config, const Schedule& schedule,
                                            ProgramPart part) const {
  if (in_processes() && part == ProgramPart::kDispatch && schedule.dispatch.transport == DispatchTransport::kPush) {
    refuse_push();
  }
  return exchange_program(config, schedule, part, options_.workers);
}

void CudaEngine::run_exchange(const ProgramRequest& asked, CallKind kind, const Placement& placement,
                              const std::vector<CUstream>& streams, std::vector<RankBinding> bindings) {
  const BesideCapture beside;
  const auto queueing = DeviceOrder::lock(gate());
  throw_noticed_failures();
  const EndsQueueing ends(*this);
  const ExchangeConfig config = exchange_config(asked);
  const KernelRequest kernel = cuda::exchange_request(config);
  const int bytes = exchange_shared_bytes(config);
  PlacedTables& tables = own_tables(*placement.state());
  std::vector<RankTarget> rank_targets;
  std::vector<Inputs> inputs(1);
  const std::vector<DeviceProgram>* made = nullptr;
  before_growth(asked, kind, *placement.state(), [&] {
    for (std::size_t local = 0; local < bindings.size(); ++local) {
      bindings[local].rank = first_local_rank() + static_cast<int>(local);
      const bool dispatches = asked.part == ProgramPart::kDispatch;
      require_aligned(bindings[local].input[0], "x", bindings[local].rank);
      require_aligned(dispatches ? bindings[local].gathered[0] : bindings[local].output_rows, "rows",
                      bindings[local].rank);
      require_aligned(bindings[local].output, "y", bindings[local].rank);
    }
    for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
      queue->prepare({}, 0);
      const ScopedDevice scope(queue->device());
      queue->kernels().get(kernel, bytes);
    }
    load_placer_again();
    look_for_capture(streams);
    begin_queueing(streams);
    rank_targets = targets(streams);
    made = &tables.programs(asked, placement.state(), rank_targets);
    inputs.front().addresses.resize(static_cast<std::size_t>(options_.ranks));
    if (asked.part == ProgramPart::kDispatch) {
      inputs = find_inputs(bindings, made->front(), asked.shape, *placement.state());
    }
  });
  const std::vector<DeviceProgram>& programs = *made;
  reserve(symmetric_need(machine(), asked, *placement.state(), programs.front().layout, copied_operands(inputs)), [&] {
    return text_of({asked, kind, *placement.state()});
  });
  for (std::size_t local = 0; local < bindings.size(); ++local) {
    bindings[local].row_table = tables.tables(local).rows;
    bindings[local].whole = tables.tables(local).whole;
    bind_group_memory(bindings[local], local, programs[local], false, rank_targets[local].stream);
  }
  const int workers = programs.front().program.workers;
  CallBinding binding = bind_call({asked, kind, *placement.state()}, inputs);
  run(binding, inputs, {bindings, programs, streams},
      [&](DeviceQueue& queue, const RankCall* calls, int ranks, CUstream stream) {
        if (ranks <= 0) return;
        const ScopedDevice scope(queue.device());
        LayerLaunch argument{calls, 0, workers};
        launch_kernel(queue.kernels().get(kernel, bytes),
                      {.grid_x = ranks * workers,
                       .threads = exchange_threads(config),
                       .shared_bytes = bytes,
                       .cooperative = true,
                       .stream = stream},
                      &argument, "launching an exchange");
        mark_empty(queue, bindings, programs, asked.shape.hidden, stream);
        make_dense_dprobs(queue, bindings, programs, stream);
      });
}

const uint32_t* CudaEngine::counters(int rank, const SignalLayout& layout) {
  synchronize();
  uint32_t epoch = 0;
  SideStream(device(rank)).read(&epoch, symmetric_.signals().epoch(rank), sizeof(epoch));
  const std::byte* const banks = counters_[static_cast<std::size_t>(rank - first_local_rank())].data();
  return reinterpret_cast<const uint32_t*>(banks) + (epoch & 1u) * layout.counter_total;
}

void CudaEngine::dispatch(const internal::DispatchCall& call) {
  const ProfilerRange range("dispatch");
  std::vector<CUstream> streams;
  std::vector<RankBinding> bindings;
  for (const DispatchArguments& arguments : call.arguments) {
    streams.push_back(stream_of(arguments.stream));
    RankBinding& binding = bindings.emplace_back();
    binding.input[0] = arguments.x;
    binding.gathered[0] = arguments.rows;
    binding.row_probs = arguments.row_probs;
  }
  run_exchange(exchange_request(call.config, call.schedule, ProgramPart::kDispatch), CallKind::kDispatch,
               call.placement, streams, std::move(bindings));
}

void CudaEngine::combine(const internal::CombineCall& call) {
  const ProfilerRange range("combine");
  std::vector<CUstream> streams;
  std::vector<RankBinding> bindings;
  ProgramRequest asked = exchange_request(call.config, call.schedule, ProgramPart::kCombine);
  for (const CombineArguments& arguments : call.arguments) {
    const int rank = first_local_rank() + static_cast<int>(bindings.size());
    streams.push_back(stream_of(arguments.stream));
    RankBinding& binding = bindings.emplace_back();
    binding.output_rows = const_cast<BFloat16*>(arguments.rows);  // only read
    binding.output = arguments.y;
    binding.prob_chunks = const_cast<float*>(arguments.row_dprobs);  // read only
    binding.prob_chunk_count = arguments.row_dprobs != nullptr ? 1 : 0;
    (call.placement.dense(rank) ? binding.dense_dprobs : binding.dprobs) = arguments.dprobs;
    if (arguments.dprobs != nullptr || arguments.row_dprobs != nullptr) asked.direction = Direction::kBackward;
  }
  run_exchange(asked, CallKind::kCombine, call.placement, streams, std::move(bindings));
}

}  // namespace uniep::cuda
