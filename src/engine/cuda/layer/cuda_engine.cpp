#include "engine/cuda/layer/cuda_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "api/place.h"
#include "engine/cuda/driver.h"
#include "engine/cuda/engine.h"
#include "engine/cuda/layer/host_exchange.h"
#include "engine/cuda/layer/host_routing.h"
#include "engine/cuda/layer/layer_tiles.h"
#include "engine/cuda/layer/stream_capture.h"
#include "engine/cuda/profiler_range.h"
#include "engine/event_clocks.h"
#include "engine/workspace.h"

namespace uniep::cuda {
namespace {

CUstream stream_of(Stream stream) {
  return static_cast<CUstream>(stream.handle);
}

CUdeviceptr pointer(const void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

// What was given, and this machine's share for a rank where nothing was.
GroupOptions completed(GroupOptions options, const RankDevices& ranks) {
  const int most = ranks.most_workers();
  if (options.workers > most) {
    throw Error(Status::kInvalidArgument,
                fmt::format("workers: {}; a rank has at most {} SMs here", options.workers, most));
  }
  if (options.workers == 0) options.workers = most;
  return options;
}

void require_aligned(const void* array, const char* name, int rank) {
  constexpr uintptr_t kAlignment = 16;  // of bulk copies and vector stores
  if (reinterpret_cast<uintptr_t>(array) % kAlignment == 0) return;
  throw Error(Status::kInvalidArgument,
              fmt::format("{}: its address on rank {} must be a multiple of {}", name, rank, kAlignment));
}

}  // namespace

std::unique_ptr<internal::Engine> make_engine(const GroupOptions& options) {
  try {
    return std::make_unique<CudaEngine>(options);
  } catch (const Error& error) {
    throw Error(error.status(), std::string("engine cuda: ") + error.what());
  }
}

bool has_hopper_gpu() {
  try {
    if (device_count() == 0) return false;
    require_hopper(0);
    return true;
  } catch (const Error&) {
    return false;
  }
}

CudaEngine::CudaEngine(const GroupOptions& options)
    : options_(options),
      ranks_(options),
      cache_(std::make_shared<BlockCache>(ranks_.first_local(), ranks_.devices())),
      symmetric_([this](int64_t bytes) { return ranks_.make_memory(bytes); }),
      counters_(ranks_.devices().size()),
      records_(ranks_.devices().size()) {
  options_ = completed(options, ranks_);
  if (options_.allocator.allocate == nullptr) options_.allocator = cache_->allocator();
  for (const RankDevices::OfDevice& of : ranks_.by_device()) {
    queues_.push_back(std::make_unique<DeviceQueue>(of.device, of.ranks));
  }
  const int device = ranks_.devices().front();
  const ScopedDevice scope(device);
  void* reports = nullptr;
  check(driver().cuMemHostAlloc(&reports, sizeof(WaitReport) * kMostCudaRanks, CU_MEMHOSTALLOC_PORTABLE),
        "taking pinned memory");
  reports_ = {static_cast<WaitReport*>(reports), [device](WaitReport* memory) {
                const ScopedDevice of_memory(device);
                driver().cuMemFreeHost(memory);
              }};
  std::memset(reports, 0, sizeof(WaitReport) * kMostCudaRanks);
  if (options_.launch == uniep::Launch::kProcesses) symmetric_.reserve({});
}

CudaEngine::~CudaEngine() {
  queues_.clear();  // waits for their calls
  if ((broken_ || failed_rank() >= 0) && !symmetric_.empty()) symmetric_.memory().abandon();
}

Machine CudaEngine::machine() const {
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = options_.ranks;
  machine.workers = options_.workers;
  return machine;
}

// ---- What a call needs

ProgramRequest CudaEngine::request(const LayerConfig& config, const Schedule& schedule, Direction direction) const {
  require_summable(config.shape, config.numerics);
  require_instantiable(schedule, config.numerics, direction);
  if (options_.launch == uniep::Launch::kProcesses && schedule.dispatch.transport == DispatchTransport::kPush) {
    throw Error(Status::kUnsupported,
                "dispatch.transport: push writes into memory that only the ranks of one process reach; with a process "
                "a GPU only pull is built");
  }
  ProgramRequest request;
  request.shape = config.shape;
  request.numerics = config.numerics;
  request.schedule = schedule;
  request.direction = direction;
  request.workers = options_.workers;
  request.cluster = cluster_of(schedule);
  request.pull_parts = pull_parts(config.shape);
  return request;
}

SymmetricNeed CudaEngine::symmetric_need(const ProgramRequest& request, const internal::PlacementState& placement,
                                         const SignalLayout& layout) const {
  int64_t tokens = 0;
  for (const internal::RankPlacement& rank : placement.rank) tokens = std::max(tokens, rank.tokens);
  const int64_t row_bytes = request.shape.hidden * static_cast<int64_t>(sizeof(BFloat16));
  SymmetricNeed need;
  need.flags = layout.flag_total * static_cast<int64_t>(sizeof(uint32_t));
  need.slots = tokens * internal::slots_per_token(request.shape, request.numerics) * row_bytes;
  if (request.direction == Direction::kBackward) {
    need.prob_slots = tokens * request.shape.topk * static_cast<int64_t>(sizeof(float));
  }
  if (options_.launch == uniep::Launch::kProcesses) need.inputs = tokens * row_bytes;
  return need;
}

std::vector<MemoryNeed> CudaEngine::memory_need(const LayerConfig& config, const Schedule& schedule,
                                                Direction direction, const Placement& placement) const {
  const ProgramRequest asked = request(config, schedule, direction);
  const Program program(asked, placement.state());
  const SymmetricNeed symmetric =
      symmetric_need(asked, *placement.state(), signal_layout(program_on_host(program, ranks_.first_local())));
  std::vector<MemoryNeed> needs;
  for (int rank = first_local_rank(); rank < first_local_rank() + local_ranks(); ++rank) {
    MemoryNeed need =
        internal::block_sizes(internal::memory_request(config.shape, schedule, *placement.state(), rank), direction);
    need.symmetric_bytes = static_cast<std::size_t>(symmetric.total());
    needs.push_back(need);
  }
  return needs;
}

// Each local rank, its tables to be written in the order of its device's calls.
std::vector<RankTarget> CudaEngine::targets(std::span<const CUstream> streams) {
  std::vector<RankTarget> targets(ranks_.devices().size());
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    for (const int rank : queue->ranks()) {
      const auto local = static_cast<std::size_t>(rank - first_local_rank());
      const auto leader = static_cast<std::size_t>(queue->ranks().front() - first_local_rank());
      targets[local] = {rank, queue->device(), streams[leader], &queue->uploads()};
    }
  }
  return targets;
}

// Compiles and loads all kernels of a call, before anything that waits for a peer is queued.
void CudaEngine::prepare(const ProgramRequest& request) {
  const ProfilerRange range("kernels");
  std::vector<LayerKernelConfig> configs;
  for (const LaunchStages& stages : launch_stages(request.schedule, request.direction)) {
    configs.push_back(launch_config(request.schedule, request.numerics, stages));
  }
  const int workers = options_.workers - request.schedule.comm.reserve_sms;
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    queue->prepare(configs, workers * static_cast<int>(queue->ranks().size()));
  }
}

// ---- Placement

Placement CudaEngine::place(const LayerShape& shape, std::span<const Routing> routings, Capacity capacity) {
  const ProfilerRange range("place");
  const BesideCapture beside;
  throw_noticed_failures();
  check_shape(shape, options_.ranks);
  if (routings.size() != static_cast<std::size_t>(local_ranks())) {
    throw Error(Status::kInvalidArgument,
                fmt::format("routings: {} given; one for each of the {} local ranks is needed", routings.size(),
                            local_ranks()));
  }
  std::vector<CUstream> streams;
  for (const Routing& routing : routings) streams.push_back(stream_of(routing.stream));
  const bool on_devices = options_.launch == uniep::Launch::kThreads && shape.experts <= kMostPlaceExperts;
  const ScopedDevice scope(ranks_.devices().front());
  if (is_captured(streams.front()) && (capacity.rows == 0 || !on_devices)) {
    throw Error(Status::kInvalidArgument,
                "capacity: 0, or a placement through the host; in a CUDA graph rows need a fixed capacity");
  }
  const auto state = on_devices ? place_on_devices(shape, routings, capacity, streams)
                                : place_through_host(shape, routings, capacity, streams);
  throw_noticed_failures();
  return Placement(state);
}

std::shared_ptr<internal::PlacementState> CudaEngine::place_on_devices(const LayerShape& shape,
                                                                       std::span<const Routing> routings,
                                                                       Capacity capacity,
                                                                       const std::vector<CUstream>& streams) {
  if (placer_ == nullptr) {
    std::vector<KernelStore*> kernels(ranks_.devices().size());
    for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
      for (const int rank : queue->ranks()) kernels[static_cast<std::size_t>(rank)] = &queue->kernels();
    }
    synchronize();
    placer_ = std::make_shared<GroupPlacer>(ranks_, kernels, cache_, options_.timeout_seconds,
                                            options_.timeout_seconds * kArrivalPatience);
  }
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) queue->begin(streams_of(*queue, streams));
  auto state = placer_->place(shape, routings, capacity, targets(streams));
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) queue->end(streams_of(*queue, streams));
  return state;
}

// With a process a GPU, and for more experts than the placement kernel holds.
std::shared_ptr<internal::PlacementState> CudaEngine::place_through_host(const LayerShape& shape,
                                                                         std::span<const Routing> routings,
                                                                         Capacity capacity,
                                                                         const std::vector<CUstream>& streams) {
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    queue->follow_earlier_calls(streams[static_cast<std::size_t>(queue->ranks().front() - first_local_rank())]);
  }
  std::vector<HostRouting> copies = read_routings(shape, routings, ranks_.devices(), first_local_rank());
  if (options_.launch == uniep::Launch::kProcesses) copies = share_routings(symmetric_, shape, copies.front());
  std::vector<Routing> all;
  for (const HostRouting& copy : copies) all.push_back(copy.view());
  std::shared_ptr<internal::PlacementState> state = place_on_host(shape, options_.ranks, all, capacity);
  state->engine_tables = std::make_shared<PlacedTables>(*state, cache_, targets(streams));
  return state;
}

void CudaEngine::gather(std::span<const std::byte> own, const Room& room) {
  if (options_.launch == uniep::Launch::kThreads) return Engine::gather(own, room);
  synchronize();
  const std::vector<int64_t> sizes = share_sizes(symmetric_, static_cast<int64_t>(own.size()));
  const int64_t bytes = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  share_bytes(symmetric_, own, sizes, first_local_rank() == 0 ? room(static_cast<std::size_t>(bytes)) : nullptr);
}

std::vector<int64_t> CudaEngine::share(int64_t own) {
  if (options_.launch == uniep::Launch::kThreads) return Engine::share(own);
  synchronize();
  return share_sizes(symmetric_, own);
}

void CudaEngine::meet() {
  if (options_.launch == uniep::Launch::kThreads) return;
  synchronize();
  symmetric_.memory().barrier();
}

// ---- Calls

void CudaEngine::poison(void* memory, std::size_t bytes, int device, CUstream stream) const {
  if (options_.disturbance.shuffle_seed == 0 || bytes == 0) return;
  const ScopedDevice scope(device);
  check(driver().cuMemsetD8Async(pointer(memory), 0xff, bytes, stream), "poisoning memory");  // NaN, bf16 and fp32
}

void CudaEngine::bind_group_memory(RankBinding& binding, std::size_t local, const DeviceProgram& program, bool record,
                                   CUstream stream) {
  const int device = ranks_.devices()[local];
  const std::size_t bytes = 2 * static_cast<std::size_t>(program.layout.counter_total) * sizeof(uint32_t);
  if (counters_[local].size() < bytes) {
    synchronize();
    counters_[local] = DeviceBlock();
    counters_[local] = DeviceBlock(device, bytes + bytes / 2, "counters");
  }
  binding.counters = reinterpret_cast<uint32_t*>(counters_[local].data());
  if (!record) return;
  records_[local].reserve(device, options_.workers);
  records_[local].clear(stream);
  binding.records = records_[local].records();
  binding.record_counts = records_[local].counts();
  binding.record_capacity = TileRecords::kCapacity;
}

Saved CudaEngine::forward(const internal::ForwardCall& call) {
  const ProfilerRange range("forward");
  const BesideCapture beside;
  throw_noticed_failures();
  const ProgramRequest asked = request(call.config, call.schedule, Direction::kForward);
  const internal::PlacementState& placement = *call.placement.state();
  PlacedTables& tables = tables_of(placement);
  for (std::size_t local = 0; local < call.arguments.size(); ++local) {
    const int rank = first_local_rank() + static_cast<int>(local);
    require_aligned(call.arguments[local].x, "x", rank);
    require_aligned(call.arguments[local].y, "y", rank);
  }
  prepare(asked);

  // Memory first: an allocator may hand it out in the order of a rank's own stream.
  auto saved = std::make_shared<internal::SavedState>();
  saved->config = call.config;
  saved->placement = call.placement;
  saved->first_rank = first_local_rank();
  std::vector<internal::MemoryBlock> workspaces;
  std::vector<CUstream> streams;
  for (const ForwardArguments& arguments : call.arguments) {
    const int rank = first_local_rank() + static_cast<int>(streams.size());
    const MemoryNeed need = internal::block_sizes(
        internal::memory_request(call.config.shape, call.schedule, placement, rank), Direction::kForward);
    saved->ranks.emplace_back().memory =
        internal::MemoryBlock(options_.allocator, need.saved_bytes, rank, arguments.stream);
    workspaces.emplace_back(options_.allocator, need.workspace_bytes, rank, arguments.stream);
    streams.push_back(stream_of(arguments.stream));
  }
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) queue->begin(streams_of(*queue, streams));
  const std::vector<RankTarget> rank_targets = targets(streams);
  const std::vector<DeviceProgram>& programs = tables.programs(asked, call.placement.state(), rank_targets);
  symmetric_.reserve(symmetric_need(asked, placement, programs.front().layout));

  std::vector<RankBinding> bindings(call.arguments.size());
  for (std::size_t local = 0; local < bindings.size(); ++local) {
    const ForwardArguments& arguments = call.arguments[local];
    const int rank = first_local_rank() + static_cast<int>(local), device = ranks_.devices()[local];
    const internal::MemoryRequest memory = internal::memory_request(call.config.shape, call.schedule, placement, rank);
    internal::SavedRank& kept = saved->ranks[local];
    poison(kept.memory.data(), kept.memory.size(), device, rank_targets[local].stream);
    poison(workspaces[local].data(), workspaces[local].size(), device, rank_targets[local].stream);
    internal::Carver saved_carver(kept.memory.data()), carver(workspaces[local].data());
    const internal::SavedPieces pieces = internal::carve_saved(saved_carver, memory);
    const internal::WorkspacePieces work = internal::carve_workspace(carver, memory, Direction::kForward);
    kept.z = pieces.z;
    kept.xg = pieces.xg;

    RankBinding& binding = bindings[local];
    binding.rank = rank;
    binding.rows = memory.rows;
    binding.input[0] = arguments.x;
    binding.gathered[0] = memory.keep_xg ? pieces.xg : work.gathered[0];
    binding.z = pieces.z;
    binding.activation = work.activation;
    binding.output_rows = work.output_rows;
    binding.output = arguments.y;
    binding.weights = arguments.weights;
    binding.row_table = tables.tables(local).rows;
    bind_group_memory(binding, local, programs[local], call.options.events != nullptr, rank_targets[local].stream);
  }
  const RankProgram& program = programs.front().program;
  run({asked, symmetric_, options_.launch == uniep::Launch::kThreads, options_.timeout_seconds}, bindings, programs,
      streams, [&](DeviceQueue& queue, const RankCall* calls, int, CUstream stream) {
        for (int launch = 0; launch < program.launches; ++launch) {
          queue.launch(launch_config(asked.schedule, asked.numerics, program.stages[launch]),
                       {calls, launch, program.workers}, absent_ranks_, stream);
        }
      });
  if (call.options.events != nullptr) read_events(*call.options.events, programs);
  return Saved(saved);
}

void CudaEngine::backward(const internal::BackwardCall& call) {
  require_instantiable(call.schedule, call.config.numerics, Direction::kBackward);
}

std::vector<CUstream> CudaEngine::streams_of(const DeviceQueue& queue, const std::vector<CUstream>& streams) const {
  std::vector<CUstream> own;
  for (const int rank : queue.ranks()) own.push_back(streams[static_cast<std::size_t>(rank - first_local_rank())]);
  return own;
}

// Peers in other processes read a copy of x.
void CudaEngine::share_input(const CallBinding& call, const RankBinding& binding, int64_t tokens, CUstream stream) {
  if (tokens == 0 || binding.input[0] == nullptr) return;
  check(driver().cuMemcpyDtoDAsync(pointer(symmetric_.inputs(binding.rank, binding.rank)), pointer(binding.input[0]),
                                   static_cast<std::size_t>(tokens * call.request.shape.hidden) * sizeof(BFloat16),
                                   stream),
        "copying x to where peers reach it");
}

void CudaEngine::run(const CallBinding& call, const std::vector<RankBinding>& bindings,
                     const std::vector<DeviceProgram>& programs, const std::vector<CUstream>& streams,
                     const LaunchAll& launch) {
  std::vector<const RankCall*> calls;
  std::vector<RankCall*> rank_calls(bindings.size());
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    std::vector<std::size_t> locals;
    for (const int rank : queue->ranks()) locals.push_back(static_cast<std::size_t>(rank - first_local_rank()));
    CUstream stream = streams[locals.front()];
    const ScopedDevice scope(queue->device());
    if (!call.peers_in_process) share_input(call, bindings.front(), programs.front().program.tokens, stream);
    std::byte* const memory = queue->call_memory(call_image_bytes(call, bindings, locals), stream);
    const std::vector<std::byte> image = call_image(call, bindings, locals, programs, memory);
    queue->upload_call(memory, image, stream);
    calls.push_back(reinterpret_cast<const RankCall*>(memory));
    for (std::size_t i = 0; i < locals.size(); ++i) rank_calls[locals[i]] = reinterpret_cast<RankCall*>(memory) + i;
  }
  if (programs.front().made_on_device) placer_->build_programs(rank_calls, programs, streams);
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    DeviceQueue& queue = *queues_[i];
    const std::vector<CUstream> own_streams = streams_of(queue, streams);
    CUstream stream = own_streams.front();
    queue.launch_begin(calls[i], absent_ranks_, stream);
    launch(queue, calls[i], static_cast<int>(queue.ranks().size()) - absent_ranks_, stream);
    const ScopedDevice scope(queue.device());
    for (const int rank : queue.ranks()) {
      check(driver().cuMemcpyDtoHAsync(&reports_[rank - first_local_rank()], pointer(symmetric_.signals().report(rank)),
                                       sizeof(WaitReport), stream),
            "queueing the report of a call");
    }
    queue.end(own_streams);
  }
}

void CudaEngine::read_events(std::vector<TileEvent>& events, const std::vector<DeviceProgram>& programs) {
  synchronize();
  events.clear();
  for (std::size_t local = 0; local < programs.size(); ++local) {
    const RankProgram& program = programs[local].program;
    records_[local].append_to(events, program.rank, program.first_expert, program.direction);
  }
  std::vector<int> clocks(static_cast<std::size_t>(options_.ranks));  // a GPU has one, whichever ranks it stands for
  for (std::size_t local = 0; local < programs.size(); ++local) {
    clocks[static_cast<std::size_t>(first_local_rank()) + local] = ranks_.devices()[local];
  }
  internal::bring_clocks_together(events, clocks);
}

// ---- Failures

int CudaEngine::failed_rank() const {
  for (int local = 0; local < ranks_.local_count(); ++local) {
    const volatile uint32_t& failed = reports_[local].failed;
    if (failed != 0) return local;
  }
  return -1;
}

void CudaEngine::throw_noticed_failures() {
  if (broken_) {
    throw Error(Status::kTimeout, "group: an earlier call failed half-way; call Group::recover() before the next one");
  }
  if (placer_ != nullptr) placer_->throw_noticed_failure();
  const int failed = failed_rank();
  if (failed < 0) return;
  synchronize_devices();  // so that the whole report has come
  broken_ = true;
  throw Error(Status::kTimeout, describe(reports_[failed]) + "; recover() makes the group usable again");
}

void CudaEngine::synchronize() {
  synchronize_devices();
  throw_noticed_failures();
}

void CudaEngine::synchronize_devices() {
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) queue->synchronize();
}

void CudaEngine::recover() {
  synchronize_devices();
  if (!symmetric_.empty()) symmetric_.signals().recover();
  if (placer_ != nullptr) placer_->clear();
  std::memset(reports_.get(), 0, sizeof(WaitReport) * kMostCudaRanks);
  broken_ = false;
}

}  // namespace uniep::cuda
