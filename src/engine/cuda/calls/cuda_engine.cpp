#include "engine/cuda/calls/cuda_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "engine/call_timer_state.h"
#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/call_memory.h"
#include "engine/cuda/calls/engine.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/device/arguments/call_times_arguments.h"
#include "engine/cuda/device/arguments/empty_arguments.h"
#include "engine/cuda/kernels/place_kernels.h"
#include "engine/cuda/runtime/background_compiler.h"
#include "engine/cuda/runtime/driver.h"
#include "engine/cuda/runtime/kernel_cache.h"
#include "engine/cuda/runtime/nvml.h"
#include "engine/cuda/runtime/profiler_range.h"
#include "engine/cuda/runtime/stream.h"
#include "engine/cuda/runtime/stream_capture.h"
#include "engine/event_clocks.h"
#include "engine/workspace.h"
#include "program/build.h"
#include "program/buildable.h"
#include "program/recompute.h"
#include "program/schedule_fields.h"

namespace uniep::cuda {
namespace {

constexpr uint32_t kSumsDprobs = 2654435761u;  // in a fingerprint

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

// FNV-1a of all that must be equal on all ranks beside what CallDescription spells out.
uint32_t fingerprint(const ProgramRequest& request) {
  constexpr int kNoValue = -1;
  uint32_t hash = 2166136261u;
  const auto add = [&](int64_t value) { hash = (hash ^ static_cast<uint32_t>(value)) * 16777619u; };
  for (const FieldDescriptor& descriptor : field_descriptors()) {
    add(descriptor.get(request.schedule).value_or(kNoValue));
  }
  add(request.workers);
  add(static_cast<int>(request.numerics.activation));
  add(static_cast<int>(request.numerics.router_weight));
  add(request.numerics.bias ? 1 : 0);
  for (const float value :
       {request.numerics.alpha, request.numerics.gate_limit, request.numerics.up_limit, request.numerics.up_offset}) {
    add(bits_of_float(value));
  }
  add(request.numerics.combine_groups);
  add(request.redispatch ? 1 : 0);
  add(request.weight_gradients ? 1 : 0);
  return hash;
}

// Whether all ranks must say alike that a combine sums dprobs: not where some rank has neither tokens nor rows, which
// may leave its addresses out.
bool all_give_dprobs(const internal::PlacementState& placement) {
  if (placement.capacity > 0) return true;
  for (std::size_t rank = 0; rank < placement.rank.size(); ++rank) {
    if (placement.rank[rank].tokens == 0 && placement.padded_rows[rank] == 0) return false;
  }
  return true;
}

uint32_t next_group_number() {
  static std::atomic<uint32_t> groups = 0;
  return ++groups;
}

}  // namespace

void require_aligned(const void* array, const char* name, int rank) {
  constexpr uintptr_t kAlignment = 16;  // of bulk copies and vector stores
  if (reinterpret_cast<uintptr_t>(array) % kAlignment == 0) return;
  throw Error(Status::kInvalidArgument,
              fmt::format("{}: its address on rank {} must be a multiple of {}", name, rank, kAlignment));
}

void require_aligned_biases(const Weights& weights, int64_t local_experts, int rank) {
  require_aligned(weights.b1, "b1", rank);
  require_aligned(weights.b2, "b2", rank);
  for (int64_t i = 0; i < local_experts; ++i) {
    if (weights.b1_experts != nullptr) require_aligned(weights.b1_experts[i], "b1_experts", rank);
    if (weights.b2_experts != nullptr) require_aligned(weights.b2_experts[i], "b2_experts", rank);
  }
}

std::unique_ptr<internal::Engine> make_engine(const GroupOptions& options) {
  try {
    return std::make_unique<CudaEngine>(options);
  } catch (const Error& error) {
    throw Error(error.status(), std::string("engine cuda: ") + error.what());
  }
}

std::string device_label(int device) {
  return device_name(device);
}

int compute_units(int device) {
  return device_attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
}

std::string speed_label(int device) {
  const GpuState state = gpu_state(device);
  std::string text;
  if (!state.driver.empty()) text = "driver " + state.driver;
  if (state.power_limit_watts > 0) text += (text.empty() ? "" : ", ") + std::to_string(state.power_limit_watts) + " W";
  return text;
}

std::string kernels_label() {
  return "kernels " + sources_label();
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
      records_(ranks_.devices().size()),
      times_memory_(std::make_shared<TimesMemory>(ranks_.devices().front(), ranks_.devices().size())),
      side_(ranks_.devices().front()),
      group_number_(next_group_number()) {
  try {
    set_up(options);
  } catch (const std::exception&) {
    leave();  // the others have their part, and would wait for this rank
    throw;
  }
}

void CudaEngine::set_up(const GroupOptions& options) {
  options_ = completed(options, ranks_);
  if (options_.allocator.allocate == nullptr) options_.allocator = cache_->allocator();
  const int device = ranks_.devices().front();
  const ScopedDevice scope(device);
  void* reports = nullptr;
  check(driver().cuMemHostAlloc(&reports, sizeof(WaitReport) * kMaxCudaRanks, CU_MEMHOSTALLOC_PORTABLE),
        "taking pinned memory");
  reports_ = {static_cast<WaitReport*>(reports), [device](WaitReport* memory) {
                const ScopedDevice of_memory(device, std::nothrow);
                driver().cuMemFreeHost(memory);
              }};
  std::memset(reports, 0, sizeof(WaitReport) * kMaxCudaRanks);
  for (const RankDevices::OfDevice& of : ranks_.by_device()) {
    queues_.push_back(
        std::make_unique<DeviceQueue>(of.device, of.ranks, [this](const auto& over) { wait_until(over); }));
  }
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    for (const int rank : queue->ranks()) queue->order().add(symmetric_.board(rank, rank));
  }
}

CudaEngine::~CudaEngine() {
  const bool aborted = gate().closed();
  if (closing_.joinable()) closing_.join();
  if (aborted) {
    close_down();  // what is left of it
  } else {
    leave_order();
    try {
      synchronize_devices();
    } catch (const std::exception&) {
      lost_ = "a device failed";  // its queues say so again
    }
  }
  for (const Reader& reader : readers_) {
    if (!reader.for_good) driver().cuEventSynchronize(reader.over.get());
  }
  queues_.clear();
  BackgroundCompiler::of_process().drop(this);
  if (!aborted) tell_peers(kLeft);
}

Machine CudaEngine::machine() const {
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = options_.ranks;
  machine.workers = options_.workers;
  machine.processes = in_processes();
  return machine;
}

// ---- What a call needs

std::vector<MemoryNeed> CudaEngine::memory_need(const LayerConfig& config, const Schedule& schedule,
                                                const Placement& placement, const MemoryOptions& options) const {
  const std::vector<MemoryNeed> needs = cuda::memory_need(machine(), config, schedule, placement, options);
  return {needs.begin() + first_local_rank(), needs.begin() + first_local_rank() + local_ranks()};
}

// Those that are made within a capacity have their Programs made by the group that has placed.
PlacedTables& CudaEngine::own_tables(const internal::PlacementState& placement) const {
  PlacedTables& tables = tables_of(placement);
  if (placement.counts_on_devices && !tables.is_of(*cache_)) {
    throw Error(Status::kInvalidArgument,
                "placement: made within a capacity by another Group; call place() with this one");
  }
  return tables;
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
  load_placer_again();  // before a captured call says that what is loaded stays
  const std::vector<LayerKernelConfig> configs = launch_kernels(request);
  const int workers = options_.workers - program::idle_workers(request.schedule);
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    queue->prepare(configs, workers * static_cast<int>(queue->ranks().size()));
    if (capture_ != 0) queue->kernels().keep();
  }
}

void CudaEngine::look_for_capture(const std::vector<CUstream>& streams) {
  const ScopedDevice scope(ranks_.devices().front());
  capture_ = capture_of(streams.front());
  if (capture_ != 0 && std::exchange(counted_, false)) --call_number_;
  for (CUstream stream : streams) {
    if (capture_of(stream) == capture_) continue;
    throw Error(Status::kInvalidArgument,
                "stream: some ranks' streams are captured into a CUDA graph and others' are not, or into another one");
  }
  ever_captured_ |= capture_ != 0;
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    if (capture_ != 0) queue->kernels().keep();
  }
  cache_->set_capture(capture_);
}

// Puts a call behind all others on its devices, and behind what its streams hold.
void CudaEngine::begin_queueing(const std::vector<CUstream>& streams) {
  release_readers();
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) queue->begin(streams_of(*queue, streams));
  begun_ = streams;
}

void CudaEngine::end_failed_queueing() noexcept {
  if (begun_.empty()) return;
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    try {
      queue->end(streams_of(*queue, begun_));
    } catch (const std::exception&) {  // of a device that has failed
    }
  }
  begun_.clear();
}

void CudaEngine::end_queueing(const std::vector<CUstream>& streams) {
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) queue->end(streams_of(*queue, streams));
}

void CudaEngine::queue_call(const std::vector<CUstream>& streams, const std::function<void()>& launch) {
  const EndsQueueing ends(*this);
  launch();
  end_queueing(streams);
  begun_.clear();
}

// ---- Placement

GroupPlacer& CudaEngine::placer() {
  if (placer_ != nullptr) return *placer_;
  std::vector<KernelStore*> kernels(ranks_.devices().size());
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    for (const int rank : queue->ranks()) {
      kernels[static_cast<std::size_t>(rank - first_local_rank())] = &queue->kernels();
    }
  }
  synchronize_devices();
  placer_ = std::make_shared<GroupPlacer>(
      symmetric_, kernels, cache_, GroupPlacer::Limits{options_.timeout_seconds, options_.arrival_timeout_seconds},
      in_processes());
  if (in_processes()) {
    placer_->set_wait([this](int device, CUstream stream) {
      wait_until([&] {
        const ScopedDevice scope(device);
        const CUresult result = driver().cuStreamQuery(stream);
        if (result != CUDA_ERROR_NOT_READY) check(result, "placement");
        return result == CUDA_SUCCESS;
      });
      // A kernel names the first rank that it was told to wait for no more.
      if (!lost_.empty()) throw_noticed_failures();
    });
  }
  return *placer_;
}

// It makes the Programs of placements within a capacity. A trim() has unloaded its kernels, too.
void CudaEngine::load_placer_again() {
  if (placer_ != nullptr) placer_->load_again();
}

Placement CudaEngine::place(const LayerShape& shape, std::span<const Routing> routings, Capacity capacity) {
  const ProfilerRange range("place");
  const BesideCapture beside;
  const auto queueing = DeviceOrder::lock(gate());
  throw_noticed_failures();
  if (routings.size() != static_cast<std::size_t>(local_ranks())) {
    throw Error(Status::kInvalidArgument,
                fmt::format("routings: {} given; one for each of the {} local ranks is needed", routings.size(),
                            local_ranks()));
  }
  std::vector<CUstream> streams;
  for (const Routing& routing : routings) streams.push_back(stream_of(routing.stream));
  GroupPlacer& own = placer();
  own.load_again();
  look_for_capture(streams);
  const EndsQueueing ends(*this);
  begin_queueing(streams);
  if (capture_ != 0 && capacity.rows == 0) {
    throw Error(Status::kInvalidArgument, "capacity.rows: 0; in a CUDA graph rows need a fixed capacity");
  }
  const std::vector<RankTarget> rank_targets = targets(streams);
  const uint32_t number = capture_ != 0 ? kReplayed : call_number_;
  const auto call_name = [&] {
    return fmt::format("call {}, place of {} experts, top-k {}", call_number_, shape.experts, shape.topk);
  };
  std::shared_ptr<internal::PlacementState> state;
  queue_call(streams, [&] {
    const auto reserve_rows = [&](const SymmetricNeed& need) {
      throw_noticed_failures();  // behind a call that failed meanwhile counts are none
      reserve(need, call_name);
    };
    state = own.place({shape, routings, capacity, rank_targets, number, reserve_rows});
  });
  throw_noticed_failures();
  tables_of(*state).set_ask([asked = std::weak_ptr(placer_)] {
    const auto queued = DeviceOrder::lock();
    if (const std::shared_ptr<GroupPlacer> of_group = asked.lock()) of_group->throw_noticed_failure();
  });
  return Placement(std::move(state));
}

// ---- Calls

void CudaEngine::poison(void* memory, std::size_t bytes, int device, CUstream stream) const {
  if (disturbance().shuffle_seed == 0 || bytes == 0) return;
  const ScopedDevice scope(device);
  check(driver().cuMemsetD8Async(device_pointer(memory), 0xff, bytes, stream),
        "poisoning memory");  // NaN, bf16 and fp32
}

void CudaEngine::bind_group_memory(RankBinding& binding, std::size_t local, const DeviceProgram& program, bool record,
                                   CUstream stream) {
  const int device = ranks_.devices()[local];
  const std::size_t bytes = 2 * static_cast<std::size_t>(program.layout.counter_total) * sizeof(uint32_t);
  if (counters_[local].size() < bytes) {
    synchronize_devices();
    if (ever_captured_) kept_.push_back(std::move(counters_[local]));
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

std::vector<CUstream> CudaEngine::streams_of(const DeviceQueue& queue, const std::vector<CUstream>& streams) const {
  std::vector<CUstream> own;
  for (const int rank : queue.ranks()) own.push_back(streams[static_cast<std::size_t>(rank - first_local_rank())]);
  return own;
}

// The stream that a rank's device runs a call in.
CUstream CudaEngine::leader_of(int rank, const std::vector<CUstream>& streams) const {
  for (const RankDevices::OfDevice& of : ranks_.by_device()) {
    if (of.device == ranks_.device_of(rank))
      return streams[static_cast<std::size_t>(of.ranks.front() - first_local_rank())];
  }
  return nullptr;
}

CallBinding CudaEngine::bind_call(const NamedCall& call, const std::vector<Inputs>& inputs) const {
  const ProgramRequest& request = call.request;
  CallBinding binding{request, symmetric_, {}, {}, options_.timeout_seconds, options_.arrival_timeout_seconds};
  binding.description.number = capture_ != 0 ? kReplayed : call_number_;
  binding.description.kind = call.kind;
  binding.description.hidden = static_cast<int32_t>(request.shape.hidden);
  binding.description.intermediate = static_cast<int32_t>(request.shape.intermediate);
  binding.description.experts = static_cast<int32_t>(request.shape.experts);
  binding.description.topk = static_cast<int32_t>(request.shape.topk);
  binding.description.schedule = (fingerprint(request) ^ tables_of(call.placement).number()) * 16777619u;
  const bool sums_dprobs = call.kind == CallKind::kCombine && request.direction == Direction::kBackward;
  if (sums_dprobs && all_give_dprobs(call.placement)) binding.description.schedule ^= kSumsDprobs;
  for (const Inputs& operand : inputs) binding.description.input = binding.description.input * 31 + operand.where;
  return binding;
}

void CudaEngine::begin(DeviceQueue& queue, const CallBinding& call, RankCall* calls, const CallRanks& ranks,
                       CUstream stream) {
  BeginArguments arguments{};
  arguments.calls = calls;
  std::copy_n(ranks.programs.front().program.stages, kMaxLaunches, arguments.stages);
  arguments.description = call.description;
  arguments.running = {group_number_, call_number_};
  for (std::size_t i = 0; i < queue.ranks().size(); ++i) {
    arguments.whole[i] = ranks.bindings[static_cast<std::size_t>(queue.ranks()[i] - first_local_rank())].whole;
  }
  queue.order().with_boards([&](const std::vector<CallBoard*>& boards) {
    // Another group may be gone when a graph is replayed.
    const std::size_t noted = capture_ != 0 ? 0 : std::min<std::size_t>(boards.size(), kMaxNotedGroups);
    arguments.groups = static_cast<int32_t>(noted);
    std::copy_n(boards.begin(), noted, arguments.boards);
    queue.launch_begin(arguments, absent_ranks_, stream);
  });
}

void CudaEngine::run(CallBinding& call, std::vector<Inputs>& inputs, const CallRanks& ranks, const LaunchAll& launch) {
  const std::vector<RankBinding>& bindings = ranks.bindings;
  const std::vector<DeviceProgram>& programs = ranks.programs;
  const std::vector<CUstream>& streams = ranks.streams;
  copy_inputs(inputs, call.request, bindings, programs, streams);
  for (std::size_t operand = 0; operand < inputs.size(); ++operand) call.inputs[operand] = inputs[operand].addresses;
  std::vector<RankCall*> calls;
  std::vector<RankCall*> rank_calls(bindings.size());
  for (const std::unique_ptr<DeviceQueue>& queue : queues_) {
    std::vector<std::size_t> locals;
    for (const int rank : queue->ranks()) locals.push_back(static_cast<std::size_t>(rank - first_local_rank()));
    CUstream stream = streams[locals.front()];
    const ScopedDevice scope(queue->device());
    std::byte* const memory = queue->call_memory(call_image_bytes(call, bindings, locals), stream);
    const std::vector<std::byte> image = call_image(call, bindings, locals, programs, memory);
    queue->uploads().copy(memory, image.data(), image.size(), stream);
    calls.push_back(reinterpret_cast<RankCall*>(memory));
    for (std::size_t i = 0; i < locals.size(); ++i) rank_calls[locals[i]] = reinterpret_cast<RankCall*>(memory) + i;
  }
  bool begun = false;
  const auto launch_call = [&] {
    if (programs.front().made_on_device) placer_->build_programs(rank_calls, programs, streams);
    for (std::size_t i = 0; i < queues_.size(); ++i) {
      DeviceQueue& queue = *queues_[i];
      CUstream stream = streams_of(queue, streams).front();
      begin(queue, call, calls[i], ranks, stream);
      begun = true;
      launch(queue, calls[i], static_cast<int>(queue.ranks().size()) - absent_ranks_, stream);
      const ScopedDevice scope(queue.device());
      for (const int rank : queue.ranks()) {
        check(driver().cuMemcpyDtoHAsync(&reports_[rank - first_local_rank()],
                                         device_pointer(symmetric_.signals().report(rank)), sizeof(WaitReport), stream),
              "queueing the report of a call");
      }
    }
  };
  try {
    queue_call(streams, launch_call);
  } catch (...) {
    broken_ |= begun;  // some kernels wait for others that do not come
    throw;
  }
}

void CudaEngine::make_dense_dprobs(DeviceQueue& queue, const std::vector<RankBinding>& bindings,
                                   const std::vector<DeviceProgram>& programs, CUstream stream) const {
  const ScopedDevice scope(queue.device());
  for (const int rank : queue.ranks()) {
    const auto local = static_cast<std::size_t>(rank - first_local_rank());
    if (bindings[local].dense_dprobs == nullptr) continue;
    const RankProgram& p = programs[local].program;
    launch_dense_dprobs(queue.kernels(),
                        {p.expert_of_slot, symmetric_.prob_slots(rank, rank), bindings[local].dense_dprobs, p.tokens,
                         p.experts, p.topk},
                        stream);
  }
}

void CudaEngine::mark_empty(DeviceQueue& queue, const std::vector<RankBinding>& bindings,
                            const std::vector<DeviceProgram>& programs, int64_t hidden, CUstream stream) const {
  if (!options_.nan_on_overflow) return;
  EmptyArguments arguments{};
  int ranks = 0;
  for (const int rank : queue.ranks()) {
    const auto local = static_cast<std::size_t>(rank - first_local_rank());
    const RankBinding& binding = bindings[local];
    if (binding.whole == nullptr || binding.output == nullptr) continue;
    arguments.rank[ranks++] = {binding.whole, binding.output, programs[local].program.tokens * hidden};
  }
  if (ranks == 0) return;
  const ScopedDevice scope(queue.device());
  launch_kernel(queue.kernels().get(empty_nan_request(), 0),
                {.grid_x = kEmptyBlocks, .grid_y = ranks, .threads = kEmptyThreads, .stream = stream}, &arguments,
                "NaN where a placement has no rows");
}

void CudaEngine::begin_timing(const CallOptions& options) {
  if (options.timer == nullptr) return;
  if (capture_ != 0) kept_times_.push_back(options.timer->state().ranks);
  options.timer->state().begin();
}

void CudaEngine::time_call(const CallOptions& options, DeviceQueue& queue, CUstream stream) const {
  if (options.timer == nullptr) return;
  const internal::CallTimerState& timer = options.timer->state();
  const ScopedDevice scope(queue.device());
  for (const int rank : queue.ranks()) {
    const auto local = static_cast<std::size_t>(rank - first_local_rank());
    CallTimesArguments args{records_[local].records(),
                            records_[local].counts(),
                            2 * static_cast<uint32_t>(options_.workers),
                            TileRecords::kCapacity,
                            timer.call,
                            timer.ranks.get() + local};
    launch_kernel(queue.kernels().get(call_times_request(), 0),
                  {.grid_x = 1, .threads = kCallTimesThreads, .stream = stream}, &args, "call times");
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

}  // namespace uniep::cuda
