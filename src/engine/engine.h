#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "engine/call_gate.h"
#include "engine/call_times.h"
#include "engine/carver.h"
#include "engine/disturbance.h"
#include "engine/legal_schedules.h"
#include "model/placement_state.h"
#include "program/rank_program.h"
#include "uniep/exchange.h"
#include "uniep/layer.h"

namespace uniep::internal {

// Memory that a call's arguments may have, and its name there.
struct GivenMemory {
  const CallerMemory& memory;
  const char* name;
};

// A block of the caller's memory; given back when the last owner goes.
class MemoryBlock {
 public:
  MemoryBlock() = default;
  // Throws Error(kOutOfMemory) that names rank and bytes.
  MemoryBlock(const Allocator& allocator, std::size_t bytes, int rank, Stream stream);
  // The caller's memory where it gives some, which is not given back, and else the allocator's. Throws
  // Error(kInvalidArgument) that names it and what is needed.
  MemoryBlock(const GivenMemory& given, const Allocator& allocator, std::size_t bytes, int rank, Stream stream);
  ~MemoryBlock();
  MemoryBlock(MemoryBlock&& other) noexcept;
  MemoryBlock& operator=(MemoryBlock&& other) noexcept;

  std::byte* data() const { return static_cast<std::byte*>(memory_); }
  std::size_t size() const { return bytes_; }
  // The block goes back in the order of this stream, the one that used it last.
  void release_on(Stream stream) { stream_ = stream; }

 private:
  Allocator allocator_;
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
  int rank_ = 0;
  Stream stream_;
};

// A block whose pieces `carve` takes out of a Carver.
template <typename Carve>
MemoryBlock carved_block(const Allocator& allocator, int rank, Stream stream, Carve&& carve) {
  Carver sizes(nullptr);
  carve(sizes);
  MemoryBlock block(allocator, sizes.used(), rank, stream);
  Carver carver(block.data());
  carve(carver);
  return block;
}

struct SavedRank {
  MemoryBlock memory;
  BFloat16* z = nullptr;
  BFloat16* xg = nullptr;  // null when it was not kept
};

struct SavedState : std::enable_shared_from_this<SavedState> {
  uint64_t owner = 0;  // the Engine::number() that it comes from
  LayerConfig config;
  Placement placement;
  int first_rank = 0;
  std::vector<SavedRank> ranks;  // local ranks
  bool used_up = false;          // by a backward with last_use, from the moment that it runs
};

// The operands of a local rank's weight gradients. Rows of padding are zero.
struct PendingRank {
  MemoryBlock memory;                    // of what does not lie in the Saved
  const BFloat16* dyg = nullptr;         // [rows, H]
  const BFloat16* activation = nullptr;  // [rows, I]
  const BFloat16* dz = nullptr;          // [rows, 2 I]
  const BFloat16* xg = nullptr;          // [rows, H]
};

struct PendingState {
  uint64_t owner = 0;  // the Engine::number() that it comes from
  LayerConfig config;
  Schedule schedule;  // of the backward
  Placement placement;
  int first_rank = 0;
  std::shared_ptr<SavedState> saved;  // where it holds xg or dz
  std::vector<PendingRank> ranks;     // local ranks
  bool dw1_done = false, dw2_done = false;
};

struct ForwardCall {
  const LayerConfig& config;
  const Schedule& schedule;
  const Placement& placement;
  std::span<const ForwardArguments> arguments;
  const CallOptions& options;
};

struct BackwardCall {
  const LayerConfig& config;
  const Schedule& schedule;
  const Saved& saved;
  std::span<const BackwardArguments> arguments;
  const CallOptions& options;
  MemoryOptions use;  // what the arguments of all local ranks say
};

// Of work whose gradients asked for here have not been made.
struct WeightGradientsCall {
  PendingState& work;
  std::span<const WeightGradientArguments> arguments;
  bool dw1 = true, dw2 = true;
};

struct DispatchCall {
  const LayerConfig& config;
  const Schedule& schedule;
  const Placement& placement;
  std::span<const DispatchArguments> arguments;
};

struct CombineCall {
  const LayerConfig& config;
  const Schedule& schedule;
  const Placement& placement;
  std::span<const CombineArguments> arguments;
};

// Memory of a SymmetricBuffer.
class SymmetricBlock {
 public:
  virtual ~SymmetricBlock() = default;
  virtual RankSpan local() const = 0;      // ranks of this process
  virtual void* data(int rank) const = 0;  // of a local rank
  virtual std::size_t bytes() const = 0;
};

// What runs Programs. Arguments have been checked by the public functions.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual EngineKind kind() const = 0;
  virtual int ranks() const = 0;
  virtual int workers() const = 0;
  virtual Machine machine() const = 0;
  virtual int first_local_rank() const = 0;
  virtual int local_ranks() const = 0;
  virtual int device(int rank) const = 0;  // the GPU of a local rank; -1 on the cpu engine
  virtual Placement place(const LayerShape& shape, std::span<const Routing> routings, Capacity capacity) = 0;
  virtual Saved forward(const ForwardCall& call) = 0;
  // Sets SavedState::used_up before a last use runs. Null unless the weight gradients come later.
  virtual std::shared_ptr<PendingState> backward(const BackwardCall& call) = 0;
  // Sets dw1_done and dw2_done before anything runs. Takes no part in the order of collective calls: no epoch, no flag.
  virtual void weight_gradients(const WeightGradientsCall& call) = 0;
  virtual void dispatch(const DispatchCall& call) = 0;
  virtual void combine(const CombineCall& call) = 0;
  virtual std::vector<MemoryNeed> memory_need(const LayerConfig& config, const Schedule& schedule,
                                              const Placement& placement, const MemoryOptions& options) const = 0;
  // What a call needs is made ready in the background, unless it is by now; asked again it says how far that is. Waits
  // for nothing and loads nothing, and may be called beside a call. An engine without kernels of its own is always
  // ready.
  virtual Preparation prepare(const LayerConfig& /*config*/, const Schedule& /*schedule*/,
                              const MemoryOptions& /*options*/) {
    return {};
  }
  // Bytes of a thread that the kernels of such calls spill for want of registers, the most of those that have run.
  virtual int spilled_bytes(const LayerConfig& /*config*/, const Schedule& /*schedule*/,
                            const MemoryOptions& /*options*/) {
    return 0;
  }
  virtual std::shared_ptr<SymmetricBlock> allocate_symmetric(std::size_t bytes) = 0;
  virtual std::shared_ptr<SymmetricBlock> register_symmetric(std::span<void* const> memory, std::size_t bytes) = 0;
  // Where the rows of a local rank's slots arrived in the call that just ended, [T, K or G, H], as they were summed;
  // null where the engine does not tell.
  virtual const BFloat16* arrived_rows(int /*rank*/) const { return nullptr; }
  // What a CallTimer's calls write, an entry a local rank.
  virtual std::shared_ptr<RankTimes> timer_memory() {
    return std::shared_ptr<RankTimes>(new RankTimes[static_cast<std::size_t>(local_ranks())]{},
                                      std::default_delete<RankTimes[]>());
  }
  virtual void synchronize() = 0;
  virtual void throw_failures() = 0;               // of calls so far, as far as they are known
  virtual GroupMemory memory(int rank) const = 0;  // of a local rank
  virtual void recover() = 0;
  virtual void trim() = 0;

  // A collective call begins, before its arguments are checked; and if it throws, so that ranks in other processes need
  // not wait for this one.
  virtual void begin_collective() {}
  virtual void give_up(const std::exception& /*why*/) noexcept {}
  virtual void leave() noexcept {}

  // Behind the gate's close(), from any thread, once: what runs or waits inside is to end. Waits for nothing.
  virtual void end_calls() noexcept {}
  CallGate& gate() { return gate_; }
  // No other engine's of the process, before or after: an address may come again.
  uint64_t number() const { return number_; }
  LegalSchedules& legal_schedules() { return legal_schedules_; }

  // Collective where ranks are in several processes, which begin what follows together: copies what each process gives
  // to the one of rank 0, in rank order, to where room(bytes of all) says. An engine with all ranks copies `own`.
  using Room = std::function<std::byte*(std::size_t bytes)>;
  virtual void gather(std::span<const std::byte> own, const Room& room) {
    std::copy(own.begin(), own.end(), room(own.size()));
  }
  // Collective: what each process says, in rank order, to all of them. An engine with all ranks: what was given.
  virtual std::vector<int64_t> all_gather(int64_t own) { return {own}; }
  // Collective: what each process gives, in rank order, to all of them; for once without a look at GPUs: it neither
  // waits for calls nor throws what they have failed with. An engine with all ranks: what was given.
  virtual std::vector<std::vector<std::byte>> tell_all(std::span<const std::byte> own) {
    return {{own.begin(), own.end()}};
  }
  // Collective: returns when every process of the group has called it; an engine with all ranks returns at once.
  virtual void meet() {}

  // Of all later calls.
  void disturb(const Disturbance& disturbance) { disturbance_ = disturbance; }
  const Disturbance& disturbance() const { return disturbance_; }

 private:
  static uint64_t next_number() {
    static std::atomic<uint64_t> engines{0};
    return ++engines;
  }
  const uint64_t number_ = next_number();
  CallGate gate_;
  LegalSchedules legal_schedules_;
  Disturbance disturbance_;
};

}  // namespace uniep::internal
