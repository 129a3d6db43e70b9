#include "engine/cpu/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>

#include "engine/call_timer_state.h"
#include "engine/cpu/run_call.h"
#include "engine/cpu/tile_work.h"
#include "engine/workspace.h"
#include "model/elementwise.h"
#include "model/place.h"
#include "program/recompute.h"

namespace uniep::cpu {
namespace {

// Two threads at least, so that agents meet even on a machine with one core.
int thread_count(const GroupOptions& options) {
  const int cores = std::max(2, static_cast<int>(std::thread::hardware_concurrency()));
  return std::min(options.ranks * options.workers, cores);
}

using internal::Carver;
using internal::memory_request;
using internal::MemoryRequest;
using internal::slots_per_token;

// 0 is no epoch, since a new flag holds it; 1 is left out with it, so that neighbours never share a counter bank.
uint32_t epoch_after(uint32_t epoch) {
  return epoch == 0xffffffffu ? 2 : epoch + 1;
}

template <typename T>
T moved(T pointer, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<T>>, const std::byte, std::byte>;
  return reinterpret_cast<T>(reinterpret_cast<Byte*>(pointer) + bytes);
}

// Null where there are no addresses, of a gradient that is not made.
template <typename T>
std::vector<T> expert_pointers(T whole, T const* experts, int64_t count, int64_t bytes) {
  std::vector<T> pointers(count);
  if (whole == nullptr && experts == nullptr) return pointers;
  for (int64_t expert = 0; expert < count; ++expert) {
    pointers[expert] = experts != nullptr ? experts[expert] : moved(whole, expert * bytes);
  }
  return pointers;
}

// Of matrices of two halves, `half_bytes` each: in one, or each half in its own.
template <typename T>
struct Halves {
  T gate;
  T const* gate_experts;
  T up;
  T const* up_experts;
};
template <typename T>
std::pair<std::vector<T>, std::vector<T>> half_pointers(const Halves<T>& halves, int64_t count, int64_t half_bytes) {
  const auto [gate, gate_experts, up, up_experts] = halves;
  if (up != nullptr || up_experts != nullptr) {
    return {expert_pointers(gate, gate_experts, count, half_bytes), expert_pointers(up, up_experts, count, half_bytes)};
  }
  std::vector<T> gates = expert_pointers(gate, gate_experts, count, 2 * half_bytes), ups;
  for (T half : gates) ups.push_back(half == nullptr ? nullptr : moved(half, half_bytes));
  return {std::move(gates), std::move(ups)};
}

void bind_workspace(RankBuffers& buffers, const internal::WorkspacePieces& pieces) {
  std::copy(std::begin(pieces.gathered), std::end(pieces.gathered), buffers.gathered);
  buffers.z = pieces.z;
  buffers.activation = pieces.activation;
  buffers.dz = pieces.dz;
  buffers.prob_chunks = pieces.prob_chunks;
  buffers.output_rows = pieces.output_rows;
}

void bind_weights(RankBuffers& buffers, const Weights& weights, const LayerConfig& config, int64_t local_experts) {
  const int64_t bytes = config.shape.intermediate * config.shape.hidden * static_cast<int64_t>(sizeof(BFloat16));
  if (is_gated(config.numerics.activation)) {
    std::tie(buffers.w1, buffers.w1_up) = half_pointers<const BFloat16*>(
        {weights.w1, weights.w1_experts, weights.w1_up, weights.w1_up_experts}, local_experts, bytes);
  } else {
    buffers.w1 = expert_pointers(weights.w1, weights.w1_experts, local_experts, bytes);
    buffers.w1_up.assign(buffers.w1.size(), nullptr);
  }
  buffers.w2 = expert_pointers(weights.w2, weights.w2_experts, local_experts, bytes);
  constexpr auto kElement = static_cast<int64_t>(sizeof(BFloat16));
  const int64_t columns = z_columns(config.shape, config.numerics);
  buffers.b1 = expert_pointers(weights.b1, weights.b1_experts, local_experts, columns * kElement);
  buffers.b2 = expert_pointers(weights.b2, weights.b2_experts, local_experts, config.shape.hidden * kElement);
}

void bind_gradients(RankBuffers& buffers, const WeightGradients& gradients, const LayerConfig& config,
                    int64_t local_experts) {
  const int64_t element = config.numerics.weight_gradient == WeightGradient::kBFloat16 ? 2 : 4;
  const int64_t bytes = config.shape.intermediate * config.shape.hidden * element;
  if (is_gated(config.numerics.activation)) {
    std::tie(buffers.dw1, buffers.dw1_up) = half_pointers<void*>(
        {gradients.dw1, gradients.dw1_experts, gradients.dw1_up, gradients.dw1_up_experts}, local_experts, bytes);
  } else {
    buffers.dw1 = expert_pointers(gradients.dw1, gradients.dw1_experts, local_experts, bytes);
  }
  buffers.dw2 = expert_pointers(gradients.dw2, gradients.dw2_experts, local_experts, bytes);
  const int64_t columns = z_columns(config.shape, config.numerics);
  buffers.db1 = expert_pointers(gradients.db1, gradients.db1_experts, local_experts, columns * element);
  buffers.db2 = expert_pointers(gradients.db2, gradients.db2_experts, local_experts, config.shape.hidden * element);
}

// Every rank reaches all memory of the process.
class HostBlock final : public internal::SymmetricBlock {
 public:
  HostBlock(std::vector<internal::MemoryBlock> blocks, std::size_t bytes) : blocks_(std::move(blocks)), bytes_(bytes) {
    for (const internal::MemoryBlock& block : blocks_) addresses_.push_back(block.data());
  }
  HostBlock(std::span<void* const> memory, std::size_t bytes)
      : addresses_(memory.begin(), memory.end()), bytes_(bytes) {}

  internal::RankSpan local() const override { return {0, static_cast<int>(addresses_.size())}; }
  void* data(int rank) const override { return addresses_.at(static_cast<std::size_t>(rank)); }
  std::size_t bytes() const override { return bytes_; }

 private:
  std::vector<internal::MemoryBlock> blocks_;
  std::vector<void*> addresses_;
  std::size_t bytes_;
};

}  // namespace

CpuEngine::CpuEngine(const GroupOptions& options)
    : options_(options),
      kernels_(&kernels(best_instruction_set())),
      threads_(thread_count(options)),
      signals_(options.ranks),
      symmetric_(options.ranks) {
  gate().set_release([this] { release_symmetric(); });
}

Machine CpuEngine::machine() const {
  Machine machine;
  machine.engine = EngineKind::kCpu;
  machine.ranks = options_.ranks;
  machine.workers = options_.workers;
  return machine;
}

std::shared_ptr<internal::SymmetricBlock> CpuEngine::allocate_symmetric(std::size_t bytes) {
  std::vector<internal::MemoryBlock> blocks;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    blocks.emplace_back(options_.allocator, bytes, rank, Stream{});
    std::memset(blocks.back().data(), 0, bytes);
  }
  return std::make_shared<HostBlock>(std::move(blocks), bytes);
}

std::shared_ptr<internal::SymmetricBlock> CpuEngine::register_symmetric(std::span<void* const> memory,
                                                                        std::size_t bytes) {
  return std::make_shared<HostBlock>(memory, bytes);
}

Placement CpuEngine::place(const LayerShape& shape, std::span<const Routing> routings, Capacity capacity) {
  return Placement(place_on_host(shape, options_.ranks, routings, capacity));
}

std::vector<MemoryNeed> CpuEngine::memory_need(const LayerConfig& config, const Schedule& schedule,
                                               const Placement& placement, const MemoryOptions& options) const {
  std::vector<MemoryNeed> needs;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    MemoryNeed need =
        internal::block_sizes(memory_request(config, schedule, *placement.state(), rank, options), options.direction);
    const int64_t tokens = placement.tokens(rank);
    need.symmetric_bytes =
        tokens * slots_per_token(config.shape, config.numerics) * config.shape.hidden * sizeof(BFloat16) +
        tokens * config.shape.topk * sizeof(float) + signals_[rank].bytes();
    needs.push_back(need);
  }
  return needs;
}

void CpuEngine::set_next_epoch(uint32_t epoch) {
  next_epoch_ = epoch;
  for (RankSignals& signals : signals_) signals.clear_all();
}

void CpuEngine::throw_failures() {
  if (broken_) {
    throw Error(Status::kTimeout, "group: an earlier call failed half-way; call Group::recover() before the next one");
  }
}

GroupMemory CpuEngine::memory(int rank) const {
  const Symmetric& own = symmetric_[rank];
  GroupMemory memory;
  memory.symmetric_bytes =
      own.slot_elements * sizeof(BFloat16) + own.prob_elements * sizeof(float) + signals_[rank].bytes();
  return memory;
}

// New flags hold no epoch, so what a later call takes is as good as what was there.
void CpuEngine::release_symmetric() noexcept {
  for (RankSignals& signals : signals_) signals = RankSignals();
  for (Symmetric& own : symmetric_) own = Symmetric();
}

void CpuEngine::recover() {
  for (RankSignals& signals : signals_) signals.clear_all();
  broken_ = false;
}

void CpuEngine::poison(void* memory, std::size_t bytes) const {
  if (disturbance().shuffle_seed != 0 && bytes > 0) std::memset(memory, 0xff, bytes);  // NaN, bf16 and fp32 alike
}

void CpuEngine::reserve_symmetric(Call& call) {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    Symmetric& own = symmetric_[rank];
    const int64_t tokens = call.program.rank(rank).tokens;
    const int64_t slots = tokens * call.slot_count * call.shape.hidden, probs = tokens * call.shape.topk;
    if (slots > own.slot_elements) {
      own.slots = std::make_unique_for_overwrite<BFloat16[]>(slots);
      own.slot_elements = slots;
    }
    if (probs > own.prob_elements) {
      own.prob_slots = std::make_unique_for_overwrite<float[]>(probs);
      own.prob_elements = probs;
    }
    poison(own.slots.get(), own.slot_elements * sizeof(BFloat16));
    poison(own.prob_slots.get(), own.prob_elements * sizeof(float));
    call.ranks[rank].slots = own.slots.get();
    call.ranks[rank].prob_slots = own.prob_slots.get();
  }
}

// A disturbed run also tries the orders of a machine with clusters and with finer pulls than this one needs.
ProgramRequest CpuEngine::request(const LayerConfig& config, const Schedule& schedule, Direction direction,
                                  bool redispatch) const {
  ProgramRequest request{config.shape, config.numerics, schedule, direction, redispatch, options_.workers};
  const uint64_t seed = disturbance().shuffle_seed;
  if (seed == 0) return request;
  if (seed % 2 == 0 && comes_in_clusters(schedule, options_.workers, 2)) request.cluster = 2;
  request.pull_parts = 1 << seed / 2 % 6;
  return request;
}

std::unique_ptr<Call> CpuEngine::begin_call(const Program& program) {
  threads_.require_own_process();
  throw_failures();
  auto call = std::make_unique<Call>(program, *kernels_, signals_, wake_up_, gate().closed());
  call->epoch = next_epoch_;
  call->slot_count = slots_per_token(call->shape, call->numerics);
  call->disturbance = disturbance();
  call->fault = fault_;
  call->bit_fault = bit_fault_;
  call->timeout_seconds = options_.timeout_seconds;
  for (RankSignals& signals : signals_) {
    signals.reserve(call->layout);
    signals.clear_bank(epoch_after(next_epoch_));
  }
  reserve_symmetric(*call);
  return call;
}

void CpuEngine::finish_call(Call& call, const CallOptions& options) {
  broken_ = true;  // until the call is known to be over on all ranks
  std::vector<TileEvent> own_events;
  std::vector<TileEvent>* const events =
      options.events == nullptr && options.timer != nullptr ? &own_events : options.events;
  run_call(call, threads_, events);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    for (int peer = 0; peer < options_.ranks; ++peer) {
      const uint32_t done = signals_[rank].flag(call.layout, FlagSpace::kDone, peer).load(std::memory_order_acquire);
      if (done != call.epoch) {
        throw Error(Status::kInternal, fmt::format("rank {} returned before rank {} was done with it", rank, peer));
      }
    }
  }
  broken_ = false;
  next_epoch_ = epoch_after(next_epoch_);
  if (options.timer == nullptr) return;
  internal::CallTimerState& times = options.timer->state();
  times.begin();
  for (int rank = 0; rank < options_.ranks; ++rank) times.write(rank, internal::rank_times(*events, rank));
}

Saved CpuEngine::forward(const internal::ForwardCall& call) {
  const bool keep_xg = call.schedule.save_xg == SaveXg::kKeep;
  const Program program(request(call.config, call.schedule, Direction::kForward, false), call.placement.state());
  const std::unique_ptr<Call> running = begin_call(program);
  auto saved = std::make_shared<internal::SavedState>();
  saved->config = call.config;
  saved->placement = call.placement;
  std::vector<internal::MemoryBlock> workspaces;
  const MemoryOptions use{.keep_saved = call.options.keep_saved};
  const std::vector<MemoryNeed> needs = memory_need(call.config, call.schedule, call.placement, use);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const ForwardArguments& arguments = call.arguments[rank];
    const MemoryRequest request = memory_request(call.config, call.schedule, *call.placement.state(), rank, use);
    internal::SavedRank& kept = saved->ranks.emplace_back();
    kept.memory = internal::MemoryBlock({arguments.saved_memory, "saved_memory"}, options_.allocator,
                                        needs[rank].saved_bytes, rank, arguments.stream);
    workspaces.emplace_back(internal::GivenMemory{arguments.workspace_memory, "workspace_memory"}, options_.allocator,
                            needs[rank].workspace_bytes, rank, arguments.stream);
    poison(kept.memory.data(), kept.memory.size());
    poison(workspaces.back().data(), workspaces.back().size());
    Carver saved_carver(kept.memory.data()), carver(workspaces.back().data());
    const internal::SavedPieces pieces = internal::carve_saved(saved_carver, carver, request);
    kept.z = pieces.z;
    kept.xg = pieces.xg;

    RankBuffers& buffers = running->ranks[rank];
    bind_workspace(buffers, internal::carve_forward_workspace(carver, request));
    if (keep_xg) buffers.gathered[0] = pieces.xg;
    if (request.keep_z) buffers.z = pieces.z;
    buffers.input[0] = arguments.x;
    buffers.output = arguments.y;
    bind_weights(buffers, arguments.weights, call.config, program.rank(rank).local_experts);
  }
  finish_call(*running, call.options);
  return call.options.keep_saved ? Saved(saved) : Saved();
}

std::shared_ptr<internal::PendingState> CpuEngine::backward(const internal::BackwardCall& call) {
  internal::SavedState& saved = call.saved.state();
  const WeightGradientTime time = call.use.weight_gradients;
  const bool keep_xg = call.schedule.save_xg == SaveXg::kKeep;
  throw_failures();
  std::shared_ptr<internal::PendingState> pending;
  if (time == WeightGradientTime::kLater) {
    pending = std::make_shared<internal::PendingState>();
    pending->config = call.config;
    pending->schedule = call.schedule;
    pending->placement = saved.placement;
    if (keep_xg || call.use.last_use) pending->saved = saved.shared_from_this();
  }
  std::vector<internal::MemoryBlock> workspaces;
  std::vector<internal::WorkspacePieces> all_pieces;
  const std::vector<MemoryNeed> needs = memory_need(call.config, call.schedule, saved.placement, call.use);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const BackwardArguments& arguments = call.arguments[rank];
    const MemoryRequest request = memory_request(call.config, call.schedule, *saved.placement.state(), rank, call.use);
    workspaces.emplace_back(internal::GivenMemory{arguments.workspace_memory, "workspace_memory"}, options_.allocator,
                            needs[rank].workspace_bytes, rank, arguments.stream);
    internal::MemoryBlock left({arguments.pending_memory, "pending_memory"}, options_.allocator,
                               needs[rank].pending_bytes, rank, arguments.stream);
    poison(workspaces.back().data(), workspaces.back().size());
    poison(left.data(), left.size());
    Carver carver(workspaces.back().data()), left_carver(left.data());
    const internal::WorkspacePieces pieces =
        all_pieces.emplace_back(internal::carve_backward(carver, left_carver, request, saved.ranks[rank]));
    if (pending != nullptr) {
      pending->ranks.push_back({std::move(left), pieces.gathered[0], pieces.activation, pieces.dz, pieces.gathered[1]});
    }
  }
  if (call.schedule.save_z == SaveZ::kRecompute) recompute_z(call, all_pieces);

  ProgramRequest wanted = request(call.config, call.schedule, Direction::kBackward,
                                  dispatches_x_again(call.schedule, time != WeightGradientTime::kNone));
  wanted.weight_gradients = time == WeightGradientTime::kNow;
  const Program program(wanted, saved.placement.state());
  const std::unique_ptr<Call> running = begin_call(program);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const BackwardArguments& arguments = call.arguments[rank];
    const internal::WorkspacePieces& pieces = all_pieces[rank];
    RankBuffers& buffers = running->ranks[rank];
    bind_workspace(buffers, pieces);
    buffers.prob_stride = memory_request(call.config, call.schedule, *saved.placement.state(), rank, call.use).rows;
    buffers.xg = pieces.gathered[1];
    buffers.input[0] = arguments.dy;
    buffers.input[1] = arguments.x;
    buffers.output = arguments.dx;
    buffers.dprobs = arguments.dprobs;
    buffers.dense_dprobs = saved.placement.dense(rank);
    bind_weights(buffers, arguments.weights, call.config, program.rank(rank).local_experts);
    if (wanted.weight_gradients) {
      bind_gradients(buffers, arguments.gradients, call.config, program.rank(rank).local_experts);
    }
  }
  if (call.use.last_use) saved.used_up = true;
  finish_call(*running, call.options);
  return pending;
}

// z, and where x is not kept its rows, into where backward reads them.
void CpuEngine::recompute_z(const internal::BackwardCall& call,
                            const std::vector<internal::WorkspacePieces>& all_pieces) {
  const LayerConfig& config = call.config;
  const Schedule schedule = recompute_schedule(
      call.schedule,
      {.direction = Direction::kBackward, .shape = config.shape, .numerics = config.numerics, .machine = machine()});
  ProgramRequest wanted = request(config, schedule, Direction::kForward, call.schedule.save_xg == SaveXg::kRedispatch);
  wanted.part = ProgramPart::kRecompute;
  const Program program(wanted, call.saved.placement().state());
  const std::unique_ptr<Call> running = begin_call(program);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const internal::WorkspacePieces& pieces = all_pieces[rank];
    RankBuffers& buffers = running->ranks[rank];
    buffers.input[0] = call.arguments[rank].x;
    buffers.gathered[0] = pieces.gathered[1];
    buffers.z = pieces.z;
    buffers.activation = pieces.activation;
    bind_weights(buffers, call.arguments[rank].weights, config, program.rank(rank).local_experts);
  }
  finish_call(*running, {});
}

// The tiles of a Program's weight-gradient stages, which wait for nothing here. A rank's unit u takes each units-th
// tile from the u-th on.
void CpuEngine::weight_gradients(const internal::WeightGradientsCall& call) {
  threads_.require_own_process();
  internal::PendingState& work = call.work;
  const Program program(request(work.config, work.schedule, Direction::kBackward, false), work.placement.state());
  Call running(program, *kernels_, signals_, wake_up_, gate().closed());
  for (int rank = 0; rank < options_.ranks; ++rank) {
    internal::PendingRank& left = work.ranks[rank];
    const WeightGradientArguments& arguments = call.arguments[rank];
    RankBuffers& buffers = running.ranks[rank];
    buffers.gathered[0] = const_cast<BFloat16*>(left.dyg);  // only read, as all of them
    buffers.activation = const_cast<BFloat16*>(left.activation);
    buffers.dz = const_cast<BFloat16*>(left.dz);
    buffers.xg = left.xg;
    bind_gradients(buffers, arguments.gradients, work.config, program.rank(rank).local_experts);
    left.memory.release_on(arguments.stream);
    if (work.saved != nullptr) work.saved->ranks[rank].memory.release_on(arguments.stream);
  }
  work.dw1_done |= call.dw1;
  work.dw2_done |= call.dw2;

  const auto run_unit = [&](int rank, int unit, int units, AgentScratch& scratch) {
    const RankProgram& p = program.rank(rank);
    for (const Stage stage : {Stage::kWgradFc2, Stage::kWgradFc1}) {
      if (!(stage == Stage::kWgradFc2 ? call.dw2 : call.dw1)) continue;
      const Segment all{stage, {0, p.local_experts}, 0};
      for (int64_t index = unit; index < segment_length(p, all); index += units) {
        if (running.aborted.load(std::memory_order_relaxed)) internal::CallGate::throw_closed();
        const Task task = segment_task(p, all, index);
        if (task.has_tile()) run_wgrad_tile(running, p, task, scratch);
      }
    }
  };
  threads_.run([&](int thread) {
    try {
      AgentScratch scratch;
      for (int rank = 0; rank < options_.ranks; ++rank) {
        const int sms = call.arguments[rank].sms, units = sms == 0 ? options_.workers : sms;
        for (int unit = 0; unit < units; ++unit) {
          const int64_t worker = static_cast<int64_t>(rank) * options_.workers + unit;
          if (thread_of_agent(disturbance(), worker, AgentRole::kCompute, threads_.count()) != thread) continue;
          run_unit(rank, unit, units, scratch);
        }
      }
    } catch (...) {
      running.fail(std::current_exception());
    }
  });
  if (running.failure != nullptr) std::rethrow_exception(running.failure);
}

void CpuEngine::dispatch(const internal::DispatchCall& call) {
  ProgramRequest wanted = request(call.config, call.schedule, Direction::kForward, false);
  wanted.part = ProgramPart::kDispatch;
  const internal::PlacementState& placement = *call.placement.state();
  const Program program(wanted, call.placement.state());
  const std::unique_ptr<Call> running = begin_call(program);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const DispatchArguments& arguments = call.arguments[rank];
    running->ranks[rank].input[0] = arguments.x;
    running->ranks[rank].gathered[0] = arguments.rows;
    if (arguments.row_probs == nullptr) continue;
    const std::vector<RowSource>& rows = placement.rank[rank].rows;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      arguments.row_probs[row] = rows[row].rank < 0 ? 0.0f : rows[row].prob;
    }
  }
  finish_call(*running, {});
}

void CpuEngine::combine(const internal::CombineCall& call) {
  const bool with_dprobs =
      !call.arguments.empty() &&
      std::any_of(call.arguments.begin(), call.arguments.end(), [](const auto& own) { return own.dprobs != nullptr; });
  LayerConfig config = call.config;
  config.shape.intermediate = kProbColumns;  // a row's dprob is one sum,
  config.numerics.bias = false;              // and no term of it a bias's
  ProgramRequest wanted =
      request(config, call.schedule, with_dprobs ? Direction::kBackward : Direction::kForward, false);
  wanted.part = ProgramPart::kCombine;
  const Program program(wanted, call.placement.state());
  const std::unique_ptr<Call> running = begin_call(program);
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const CombineArguments& arguments = call.arguments[rank];
    RankBuffers& buffers = running->ranks[rank];
    buffers.output_rows = const_cast<BFloat16*>(arguments.rows);  // only read
    buffers.output = arguments.y;
    buffers.prob_chunks = const_cast<float*>(arguments.row_dprobs);  // one chunk
    buffers.dprobs = arguments.dprobs;
    buffers.dense_dprobs = call.placement.dense(rank);
  }
  finish_call(*running, {});
}

}  // namespace uniep::cpu
