#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/cuda/calls/device_queue.h"
#include "engine/cuda/calls/rank_calls.h"
#include "engine/cuda/calls/rank_devices.h"
#include "engine/cuda/memory/block_cache.h"
#include "engine/cuda/memory/symmetric_region.h"
#include "engine/cuda/memory/tile_records.h"
#include "engine/cuda/memory/times_memory.h"
#include "engine/cuda/place/group_placer.h"
#include "engine/cuda/place/placed_tables.h"
#include "engine/engine.h"
#include "program/build.h"

namespace uniep::cuda {

// Throws Error(kInvalidArgument).
void require_aligned(const void* array, const char* name, int rank);
void require_aligned_biases(const Weights& weights, int64_t local_experts, int rank);

// One weight gradient of one rank, by the grouped GEMM's kernel.
struct WeightGradientLaunch {
  const DeviceProgram& program;
  int64_t rows = 0;
  const internal::PendingRank& operands;
  const WeightGradients& gradients;
  GemmStage stage = GemmStage::kWgradFc2;
  int sms = 0;
  const uint32_t* failed = nullptr;  // GemmArguments::failed
  CUstream stream = nullptr;
};

// The Hopper engine. With uniep::Launch::kThreads this process drives all ranks, each on its GPU or several on one;
// with kProcesses it drives one, and the others' memory is mapped.
//
// A call is queued and returns: the host waits for the device only where it must anyway. In place() by need it reads
// the counts; a call that records events, and one that needs more symmetric memory than all before, wait too. A wait
// that ran out on the device is noticed at the next of these places and whenever another call begins after the device
// has told of it, and thrown there as kTimeout; the group then refuses calls until recover().
class CudaEngine final : public internal::Engine {
 public:
  explicit CudaEngine(const GroupOptions& options);
  ~CudaEngine() override;

  EngineKind kind() const override { return EngineKind::kCuda; }
  int ranks() const override { return options_.ranks; }
  int workers() const override { return options_.workers; }
  Machine machine() const override;
  int first_local_rank() const override { return ranks_.first_local(); }
  int local_ranks() const override { return ranks_.local_count(); }
  int device(int rank) const override { return ranks_.device_of(rank); }

  Placement place(const LayerShape& shape, std::span<const Routing> routings, Capacity capacity) override;
  Saved forward(const internal::ForwardCall& call) override;
  std::shared_ptr<internal::PendingState> backward(const internal::BackwardCall& call) override;
  void weight_gradients(const internal::WeightGradientsCall& call) override;
  void dispatch(const internal::DispatchCall& call) override;
  void combine(const internal::CombineCall& call) override;
  std::vector<MemoryNeed> memory_need(const LayerConfig& config, const Schedule& schedule, const Placement& placement,
                                      const MemoryOptions& options) const override;
  Preparation prepare(const LayerConfig& config, const Schedule& schedule, const MemoryOptions& options) override;
  int spilled_bytes(const LayerConfig& config, const Schedule& schedule, const MemoryOptions& options) override;
  std::shared_ptr<internal::SymmetricBlock> allocate_symmetric(std::size_t bytes) override;
  std::shared_ptr<internal::SymmetricBlock> register_symmetric(std::span<void* const> memory,
                                                               std::size_t bytes) override;
  void synchronize() override;
  void throw_failures() override { throw_noticed_failures(); }
  GroupMemory memory(int rank) const override;
  std::shared_ptr<internal::RankTimes> timer_memory() override { return TimesMemory::take(times_memory_); }
  void recover() override;
  void trim() override;
  void begin_collective() override {
    ++call_number_;
    counted_ = true;
    exchange_ahead_ = true;
    agreed_ = false;
  }
  void give_up(const std::exception& why) noexcept override;
  void leave() noexcept override;
  void end_calls() noexcept override;
  void gather(std::span<const std::byte> own, const Room& room) override;
  std::vector<int64_t> all_gather(int64_t own) override;
  std::vector<std::vector<std::byte>> tell_all(std::span<const std::byte> own) override;
  void meet() override;

  // For tests: so many of each device's last ranks do not run.
  void leave_out(int ranks) { absent_ranks_ = ranks; }
  // For tests: lent workers leave after so long.
  void set_shortest_slice_ns(int64_t ns) { shortest_slice_ns_ = ns; }
  // For tests, after a call: as if that had been call number `epoch`.
  void set_epoch(uint32_t epoch);
  // For tests: whether `peer` has told a local rank that it makes no more calls, as one in recover() does.
  bool is_told_by(int peer, int rank);
  // For tests: the counter bank of a local rank's last call, in its device's memory.
  const uint32_t* counters(int rank, const SignalLayout& layout);

 private:
  bool in_processes() const { return options_.launch == uniep::Launch::kProcesses; }
  GroupPlacer& placer();
  PlacedTables& own_tables(const internal::PlacementState& placement) const;
  std::vector<RankTarget> targets(std::span<const CUstream> streams);
  void prepare(const ProgramRequest& request);
  void load_placer_again();
  void prepare_biases(const Numerics& numerics);
  void prepare_weight_gradients(const ProgramRequest& request, GemmStage stage, bool by_address, int sms);
  void release_readers();
  void keep_failure(int rank, uint32_t* kept, CUstream stream) const;
  void launch_weight_gradient(const ProgramRequest& request, const WeightGradientLaunch& launch);

  // Forward's and backward's steps, in their order.
  struct ForwardState;
  struct BackwardState;
  struct CudaPending;
  void require_legal(const BackwardState& state) const;
  void prepare_kernels(const BackwardState& state);
  void take_memory(ForwardState& state) const;
  void take_memory(BackwardState& state) const;
  void make_programs(ForwardState& state);
  void make_programs(BackwardState& state);
  void bind(ForwardState& state, std::size_t local);
  void bind(BackwardState& state, std::size_t local);
  void recompute_z(BackwardState& state);
  void launch_all(const ProgramRequest& request, const RankProgram& program, DeviceQueue& queue, const RankCall* calls,
                  CUstream stream) const;
  LayerLaunch layer_launch(const RankProgram& program, int launch, const DeviceQueue& queue,
                           const RankCall* calls) const;
  void launch(const BackwardState& state, DeviceQueue& queue, const RankCall* calls, CUstream stream);
  void launch_weight_gradients(const BackwardState& state, const DeviceQueue& queue, const LaunchStages& stages,
                               CUstream stream);
  void launch_biases(const BackwardState& state, DeviceQueue& queue, CUstream stream);
  void launch_later_biases(const internal::WeightGradientsCall& call, std::size_t local, CUstream stream);
  void keep_for_later(BackwardState& state, CudaPending& pending);

  // `call`: for other ranks' processes, which must be in the same one.
  void reserve(const SymmetricNeed& need, const std::function<std::string()>& call);
  void agree(const std::string& call, const Problem& problem);
  // What must be the same on all ranks, but for where x lies.
  struct NamedCall {
    const ProgramRequest& request;
    CallKind kind;
    const internal::PlacementState& placement;
  };
  std::string text_of(const NamedCall& call) const;
  // In a handler of what this rank alone fails with before a call's reserve(): where the others are to grow their
  // memory there it throws on all ranks, and no rank runs the call.
  void refuse_growth(const ProgramRequest& request, CallKind kind, const internal::PlacementState& placement);
  template <typename Prepare>
  void before_growth(const ProgramRequest& request, CallKind kind, const internal::PlacementState& placement,
                     Prepare&& prepare) {
    try {
      prepare();
    } catch (...) {
      refuse_growth(request, kind, placement);
      throw;
    }
  }
  void bind_group_memory(RankBinding& binding, std::size_t local, const DeviceProgram& program, bool record,
                         CUstream stream);
  CUstream leader_of(int rank, const std::vector<CUstream>& streams) const;
  std::vector<CUstream> streams_of(const DeviceQueue& queue, const std::vector<CUstream>& streams) const;
  void look_for_capture(const std::vector<CUstream>& streams);
  void begin_queueing(const std::vector<CUstream>& streams);
  void end_queueing(const std::vector<CUstream>& streams);
  void end_failed_queueing() noexcept;
  // Where a call fails behind begin_queueing(), what it has queued comes before later calls all the same.
  class EndsQueueing {
   public:
    explicit EndsQueueing(CudaEngine& engine) : engine_(engine) {}
    ~EndsQueueing() { engine_.end_failed_queueing(); }
    EndsQueueing(const EndsQueueing&) = delete;
    EndsQueueing& operator=(const EndsQueueing&) = delete;

   private:
    CudaEngine& engine_;
  };
  // What `launch` queues is a call, and so is what it has queued when it throws: recover() waits for it.
  void queue_call(const std::vector<CUstream>& streams, const std::function<void()>& launch);

  // Where the ranks of this process find everybody's x, or dy and x again.
  struct Inputs {
    bool copied = false;
    uint32_t where = 0;  // of CallDescription
    std::shared_ptr<internal::SymmetricBlock> block;
    std::vector<const BFloat16*> addresses;  // of every rank; those of copies once there is room for them
    int64_t copies_at = 0;                   // elements into SymmetricRegion::inputs()
  };
  // Of each operand that the call dispatches.
  std::vector<Inputs> find_inputs(const std::vector<RankBinding>& bindings, const DeviceProgram& program,
                                  const LayerShape& shape, const internal::PlacementState& placement) const;
  static int copied_operands(const std::vector<Inputs>& inputs);
  Inputs find_input(const std::vector<RankBinding>& bindings, int operand, std::size_t bytes) const;
  void copy_inputs(std::vector<Inputs>& inputs, const ProgramRequest& request, const std::vector<RankBinding>& bindings,
                   const std::vector<DeviceProgram>& programs, const std::vector<CUstream>& streams);
  CallBinding bind_call(const NamedCall& call, const std::vector<Inputs>& inputs) const;

  // Queues the launches of a call on one device, of so many of its ranks.
  using LaunchAll = std::function<void(DeviceQueue& queue, const RankCall* calls, int ranks, CUstream stream)>;
  struct CallRanks {  // the local ones
    const std::vector<RankBinding>& bindings;
    const std::vector<DeviceProgram>& programs;
    const std::vector<CUstream>& streams;
  };
  void run(CallBinding& call, std::vector<Inputs>& inputs, const CallRanks& ranks, const LaunchAll& launch);
  void begin(DeviceQueue& queue, const CallBinding& call, RankCall* calls, const CallRanks& ranks, CUstream stream);
  ProgramRequest exchange_request(const LayerConfig& config, const Schedule& schedule, ProgramPart part) const;
  void run_exchange(const ProgramRequest& asked, CallKind kind, const Placement& placement,
                    const std::vector<CUstream>& streams, std::vector<RankBinding> bindings);
  // The next three behind a call's launches on one device. mark_empty: GroupOptions::nan_on_overflow.
  void mark_empty(DeviceQueue& queue, const std::vector<RankBinding>& bindings,
                  const std::vector<DeviceProgram>& programs, int64_t hidden, CUstream stream) const;
  void make_dense_dprobs(DeviceQueue& queue, const std::vector<RankBinding>& bindings,
                         const std::vector<DeviceProgram>& programs, CUstream stream) const;
  void time_call(const CallOptions& options, DeviceQueue& queue, CUstream stream) const;
  void begin_timing(const CallOptions& options);
  static bool records(const CallOptions& options) { return options.events != nullptr || options.timer != nullptr; }
  void read_events(std::vector<TileEvent>& events, const std::vector<DeviceProgram>& programs);
  void poison(void* memory, std::size_t bytes, int device, CUstream stream) const;
  int failed_rank() const;  // of the local ones, whose wait ran out since recover(); -1: none
  void throw_noticed_failures();
  std::string details(const WaitReport& report);
  void set_up(const GroupOptions& options);
  void wait_until(const std::function<bool()>& over);
  void synchronize_devices();
  void synchronize_replays();
  void settle();
  void tell_peers(uint32_t given_up) noexcept;
  void leave_order() noexcept;
  void close_down() noexcept;

  // Weight gradients in a stream that calls do not wait for: what they read must not be used again before they are
  // over.
  struct Reader {
    std::shared_ptr<const internal::PendingState> work;
    DeviceEvent over;
    // Where `over` was not recorded: launches have failed, or a graph runs them whenever it is replayed.
    bool for_good = true;

    bool is_over() const { return !for_good && over.is_over(); }
  };

  GroupOptions options_;
  RankDevices ranks_;
  std::shared_ptr<BlockCache> cache_;
  std::vector<std::unique_ptr<DeviceQueue>> queues_;  // one a device, its ranks following each other
  SymmetricRegion symmetric_;
  std::shared_ptr<GroupPlacer> placer_;        // made by the first place()
  std::vector<DeviceBlock> counters_;          // of local ranks
  std::vector<TileRecords> records_;           // of local ranks
  std::shared_ptr<TimesMemory> times_memory_;  // of CallTimers
  std::vector<DeviceBlock> kept_;              // what captured calls point to
  std::vector<std::shared_ptr<internal::RankTimes>> kept_times_;
  std::vector<std::weak_ptr<internal::SymmetricBlock>> buffers_;
  std::vector<std::shared_ptr<internal::SymmetricBlock>> kept_buffers_;
  uint32_t next_buffer_ = 1;
  // Of local ranks, page-locked: copied there behind every call.
  std::unique_ptr<WaitReport[], std::function<void(WaitReport*)>> reports_;
  std::list<Reader> readers_;
  SideStream side_;
  const uint32_t group_number_;  // of this process's
  uint32_t call_number_ = 0;
  std::atomic<unsigned> calls_given_up_ = 0;
  bool counted_ = false;  // the running call has that number; captured ones have none, and each rank may capture alone
  std::vector<CUstream> begun_;  // streams of the running call, from begin_queueing() until queue_call()
  uint64_t capture_ = 0;         // that the running call goes into
  bool ever_captured_ = false;
  std::string lost_;  // why the ranks can not go on together
  int absent_ranks_ = 0;
  int64_t shortest_slice_ns_ = 0;
  bool broken_ = false;
  bool exchange_ahead_ = false;  // of hosts, in the running call, of which the others may be in by now
  bool agreed_ = false;          // that the running call fails, on all ranks
  std::thread closing_;          // after an abort
};

}  // namespace uniep::cuda
