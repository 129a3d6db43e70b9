#pragma once

#include <memory>
#include <vector>

#include "engine/cpu/call.h"
#include "engine/cpu/worker_threads.h"
#include "engine/engine.h"

namespace uniep::internal {
struct WorkspacePieces;
}

namespace uniep::cpu {

// The embedded engine: all ranks in one process, each with workers that stand for the SMs of a GPU.
class CpuEngine : public internal::Engine {
 public:
  explicit CpuEngine(const GroupOptions& options);

  EngineKind kind() const override { return EngineKind::kCpu; }
  int ranks() const override { return options_.ranks; }
  int workers() const override { return options_.workers; }
  Machine machine() const override;
  int first_local_rank() const override { return 0; }
  int local_ranks() const override { return options_.ranks; }
  int device(int /*rank*/) const override { return -1; }

  Placement place(const LayerShape& shape, std::span<const Routing> routings, Capacity capacity) override;
  Saved forward(const internal::ForwardCall& call) override;
  std::shared_ptr<internal::PendingState> backward(const internal::BackwardCall& call) override;
  void weight_gradients(const internal::WeightGradientsCall& call) override;
  void dispatch(const internal::DispatchCall& call) override;
  void combine(const internal::CombineCall& call) override;
  std::vector<MemoryNeed> memory_need(const LayerConfig& config, const Schedule& schedule, const Placement& placement,
                                      const MemoryOptions& options) const override;
  std::shared_ptr<internal::SymmetricBlock> allocate_symmetric(std::size_t bytes) override;
  std::shared_ptr<internal::SymmetricBlock> register_symmetric(std::span<void* const> memory,
                                                               std::size_t bytes) override;
  const BFloat16* arrived_rows(int rank) const override { return symmetric_[rank].slots.get(); }
  void synchronize() override {}  // a call has ended when it returns
  void throw_failures() override;
  GroupMemory memory(int rank) const override;
  void recover() override;
  void trim() override { release_symmetric(); }

  int threads() const { return threads_.count(); }

  // What the Program of a call is built from.
  ProgramRequest request(const LayerConfig& config, const Schedule& schedule, Direction direction,
                         bool redispatch) const;

  // For tests: faults to plant, the epoch of the next call, the instruction set of the kernels.
  void plant(Fault fault) { fault_ = fault; }
  void plant(BitFault* fault) { bit_fault_ = fault; }
  void set_next_epoch(uint32_t epoch);
  void set_instruction_set(InstructionSet set) { kernels_ = &kernels(set); }

 private:
  // Memory that peers reach, held by the group and shared by all layers: a rank's slots and the dprobs on their way.
  struct Symmetric {
    std::unique_ptr<BFloat16[]> slots;
    std::unique_ptr<float[]> prob_slots;
    int64_t slot_elements = 0;
    int64_t prob_elements = 0;
  };

  std::unique_ptr<Call> begin_call(const Program& program);
  void finish_call(Call& call, const CallOptions& options);
  void recompute_z(const internal::BackwardCall& call, const std::vector<internal::WorkspacePieces>& all_pieces);
  void reserve_symmetric(Call& call);
  void release_symmetric() noexcept;
  void poison(void* memory, std::size_t bytes) const;

  GroupOptions options_;
  const Kernels* kernels_;
  WorkerThreads threads_;
  WakeUp wake_up_;
  std::vector<RankSignals> signals_;
  std::vector<Symmetric> symmetric_;
  uint32_t next_epoch_ = 1;
  bool broken_ = false;
  Fault fault_ = Fault::kNone;
  BitFault* bit_fault_ = nullptr;
};

}  // namespace uniep::cpu
