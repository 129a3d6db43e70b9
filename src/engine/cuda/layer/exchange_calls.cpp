#include <fmt/format.h>

#include <algorithm>

#include "engine/cuda/driver.h"
#include "engine/cuda/exchange.h"
#include "engine/cuda/layer/cuda_engine.h"
#include "engine/cuda/layer/exchange_request.h"
#include "engine/cuda/layer/stream_capture.h"
#include "engine/cuda/profiler_range.h"
#include "uniep/error.h"

// Dispatch and combine alone (device/exchange.cu), among the group's other calls.
namespace uniep::cuda {
namespace {

constexpr int kPullParts = 4;

CUstream stream_of(Stream stream) {
  return static_cast<CUstream>(stream.handle);
}

ExchangeConfig exchange_config(const ProgramRequest& asked) {
  const CommSchedule& comm = asked.schedule.comm;
  return asked.part == ProgramPart::kDispatch ? dispatch_config(comm.chunk_bytes, comm.stages)
                                              : combine_config(comm.chunk_bytes, comm.stages);
}

void copy_word(CUdeviceptr word, uint32_t value) {
  check(driver().cuMemcpyHtoDAsync(word, &value, sizeof(value), nullptr), "setting an epoch");
  check(driver().cuCtxSynchronize(), "setting an epoch");
}

}  // namespace

ProgramRequest exchange_program(const LayerConfig& config, const Schedule& schedule, ProgramPart part, int workers) {
  const int64_t slots = std::max<int64_t>(config.shape.topk, config.numerics.combine_groups);
  if (slots > kMostCudaSlots) {
    throw Error(Status::kUnsupported, fmt::format("topk, combine_groups: {}, {}; on cuda each is at most {}",
                                                  config.shape.topk, config.numerics.combine_groups, kMostCudaSlots));
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
  if (options_.launch == uniep::Launch::kProcesses && part == ProgramPart::kDispatch &&
      schedule.dispatch.transport == DispatchTransport::kPush) {
    throw Error(Status::kUnsupported,
                "dispatch.transport: push writes into memory that only the ranks of one process reach; with a process "
                "a GPU only pull is built");
  }
  return exchange_program(config, schedule, part, options_.workers);
}

void CudaEngine::run_exchange(const ProgramRequest& asked, const Placement& placement,
                              const std::vector<CUstream>& streams, std::vector<RankBinding> bindings) {
  const BesideCapture beside;
  const ExchangeConfig config = exchange_config(asked);
  const KernelRequest kernel = cuda::exchange_request(config);
  const int bytes = exchange_shared_bytes(config);
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    queue->prepare({}, 0);
    const ScopedDevice scope(queue->device());
    queue->kernels().get(kernel, bytes);
  }
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) queue->begin(streams_of(*queue, streams));
  const std::vector<RankTarget> rank_targets = targets(streams);
  PlacedTables& tables = tables_of(*placement.state());
  const std::vector<DeviceProgram>& programs = tables.programs(asked, placement.state(), rank_targets);
  symmetric_.reserve(symmetric_need(asked, *placement.state(), programs.front().layout));
  for (std::size_t local = 0; local < bindings.size(); ++local) {
    bindings[local].rank = first_local_rank() + static_cast<int>(local);
    bindings[local].row_table = tables.tables(local).rows;
    bind_group_memory(bindings[local], local, programs[local], false, rank_targets[local].stream);
  }
  const int workers = programs.front().program.workers;
  run({asked, symmetric_, options_.launch == uniep::Launch::kThreads, options_.timeout_seconds}, bindings, programs,
      streams, [&](DeviceQueue& queue, const RankCall* calls, int ranks, CUstream stream) {
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
      });
}

void CudaEngine::set_epoch(uint32_t epoch) {
  synchronize();
  for (int rank = first_local_rank(); rank < first_local_rank() + local_ranks(); ++rank) {
    const ScopedDevice scope(device(rank));
    copy_word(reinterpret_cast<CUdeviceptr>(symmetric_.signals().epoch(rank)), epoch);
  }
}

const uint32_t* CudaEngine::counters(int rank, const SignalLayout& layout) {
  synchronize();
  const ScopedDevice scope(device(rank));
  uint32_t epoch = 0;
  check(driver().cuMemcpyDtoHAsync(&epoch, reinterpret_cast<CUdeviceptr>(symmetric_.signals().epoch(rank)),
                                   sizeof(epoch), nullptr),
        "reading an epoch");
  check(driver().cuCtxSynchronize(), "reading an epoch");
  const std::byte* const banks = counters_[static_cast<std::size_t>(rank - first_local_rank())].data();
  return reinterpret_cast<const uint32_t*>(banks) + (epoch & 1u) * layout.counter_total;
}

void CudaEngine::dispatch(const internal::DispatchCall& call) {
  const ProfilerRange range("dispatch");
  throw_noticed_failures();
  std::vector<CUstream> streams;
  std::vector<RankBinding> bindings;
  for (const DispatchArguments& arguments : call.arguments) {
    streams.push_back(stream_of(arguments.stream));
    RankBinding& binding = bindings.emplace_back();
    binding.input[0] = arguments.x;
    binding.gathered[0] = arguments.rows;
    binding.row_probs = arguments.row_probs;
  }
  run_exchange(exchange_request(call.config, call.schedule, ProgramPart::kDispatch), call.placement, streams,
               std::move(bindings));
}

void CudaEngine::combine(const internal::CombineCall& call) {
  const ProfilerRange range("combine");
  throw_noticed_failures();
  std::vector<CUstream> streams;
  std::vector<RankBinding> bindings;
  ProgramRequest asked = exchange_request(call.config, call.schedule, ProgramPart::kCombine);
  for (const CombineArguments& arguments : call.arguments) {
    streams.push_back(stream_of(arguments.stream));
    RankBinding& binding = bindings.emplace_back();
    binding.output_rows = const_cast<BFloat16*>(arguments.rows);  // only read
    binding.output = arguments.y;
    binding.row_dprobs = arguments.row_dprobs;
    binding.dprobs = arguments.dprobs;
    if (arguments.dprobs != nullptr || arguments.row_dprobs != nullptr) asked.direction = Direction::kBackward;
  }
  run_exchange(asked, call.placement, streams, std::move(bindings));
}

}  // namespace uniep::cuda
