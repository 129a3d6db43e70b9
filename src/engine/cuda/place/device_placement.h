#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/symmetric_memory.h"
#include "engine/carver.h"
#include "engine/cuda/device/arguments/dense_arguments.h"
#include "engine/cuda/device/arguments/place_arguments.h"
#include "engine/cuda/kernels/place_kernels.h"
#include "engine/cuda/runtime/kernel.h"
#include "engine/cuda/runtime/side_stream.h"
#include "uniep/layer.h"

// Placement on the GPUs of a group: host side of device/kernels/place.cu and device/kernels/program_tables.cu.
namespace uniep::cuda {

// Tables whose size does not depend on the routing: all but those of carve_rows(). `tokens`: of this rank.
PlacementTables carve_placement(internal::Carver& carver, const LayerShape& shape, int ranks, int64_t tokens);
// `rows` padded rows, and an entry of row_of_source for each of `sources` slots of all ranks.
void carve_rows(internal::Carver& carver, PlacementTables& tables, int64_t rows, int64_t sources);
ProgramTables carve_program(internal::Carver& carver, const LayerShape& shape, int ranks);

// From the dprobs of a rank's slots to dense ones. The device's context must be current.
void launch_dense_dprobs(KernelStore& kernels, DenseDprobsArguments args, CUstream stream);

// What an own rank has to place, and where to.
struct RankToPlace {
  Routing routing;
  PlacementTables tables;  // `rows` may be null while only counts are made
  int64_t sources = 0;     // entries of tables.row_of_source
  // Of a dense routing, whose slots make_slots() writes here: [T, K] each.
  int32_t* slot_ids = nullptr;
  float* slot_probs = nullptr;
};

// What all ranks must be given alike; it is checked on the devices.
struct PlaceLimits {
  int64_t rows = 0;    // padded rows of a rank; 0: by need
  int64_t tokens = 0;  // of a rank; 0: any number
};

// What the host learns in `exact` mode.
struct PlacementCounts {
  std::vector<int64_t> tokens;  // [W]
  std::vector<int32_t> counts;  // [W, E]
};

// Calls are ordered alike on all ranks. Spans hold one entry an own rank, in the order of own_ranks(). Ranks that share
// a device share a launch, on the stream of the first; nothing here waits for the host but read_counts() and check().
class Placer {
 public:
  // `memory`: begins with a GroupControl. `kernels[i]`: of the device of own rank i. Compiles and loads everything that
  // will be launched. A peer's counts may take `arrival_seconds`.
  Placer(SymmetricMemory& memory, const std::vector<KernelStore*>& kernels, double wait_seconds,
         double arrival_seconds);
  ~Placer();
  Placer(const Placer&) = delete;
  Placer& operator=(const Placer&) = delete;

  static int64_t symmetric_bytes() { return sizeof(GroupControl); }

  // Throws uniep::Error where this engine can not place such a layer.
  static void require_supported(const LayerShape& shape, int ranks);

  // Where peers can not reach tables.rows (a process a GPU): they write into the memory that `inbox(own rank, peer)`
  // says is the peer's, and the placement copies from its own. None: they write into tables.rows.
  using RowInbox = std::function<RowSource*(int own_rank, int peer)>;
  void set_row_inbox(RowInbox inbox) { row_inbox_ = std::move(inbox); }

  // How the host waits for a stream, which ends; by itself it waits without looking at anything else.
  using WaitForStream = std::function<void(int device, CUstream stream)>;
  void set_wait(WaitForStream wait) { wait_for_stream_ = std::move(wait); }

  // Where an own rank's calls report that they have failed; none: nowhere.
  using CallFailed = std::function<const uint32_t*(int own_rank)>;
  void set_call_failed(CallFailed call_failed) { call_failed_ = std::move(call_failed); }

  // The number of the running call on this rank; peers' failures are told by it.
  void set_call(uint32_t number) { call_ = number; }

  // Loads what will be launched, where KernelStore::trim() has unloaded it.
  void load_again();

  // First of all, where routings are dense: their slots become the routings.
  void make_slots(const LayerShape& shape, std::span<RankToPlace> ranks);

  // Exact mode: count(); read_counts(), which throws as the cpu engine does; then memory for the rows; assign().
  void count(const LayerShape& shape, std::span<const RankToPlace> ranks);
  PlacementCounts read_counts(const LayerShape& shape, std::span<const RankToPlace> ranks);
  void assign(const LayerShape& shape, std::span<const RankToPlace> ranks);

  // Capacity mode: all of it, within limits. A routing that does not fit or is not legal gives an empty placement and
  // is thrown by check().
  void place(const LayerShape& shape, std::span<const RankToPlace> ranks, const PlaceLimits& limits);

  // Fills row_of_source.
  void invert_rows(const LayerShape& shape, std::span<const RankToPlace> ranks);

  // Fills tables (one entry an own rank) and what follows from them in calls[i].program and .layout; `calls` holds the
  // device addresses of the own ranks' RankCalls. Those of ranks that share a device follow each other.
  void build_programs(std::span<RankCall* const> calls, std::span<const ProgramTables> tables,
                      std::span<const Stream> streams);

  // Lets the host know, behind everything that the streams hold, whether a placement has failed since the last time.
  void queue_reports(std::span<const RankToPlace> ranks);
  // Whether the last reports that have come tell of a failure. Does not wait.
  bool has_noticed_failure() const;
  // Throws the failure that was noticed, and forgets it; but after a time-out every later placement is refused until
  // clear().
  void throw_noticed_failure();
  // queue_reports(), a wait for `ranks`' streams, and throw_noticed_failure() if there is one.
  void check(std::span<const RankToPlace> ranks);

  // After a time-out, between two barriers of the group: as new.
  void clear();

 private:
  struct OwnRank {
    int rank;
    int device;
    PlaceState* state = nullptr;
    int32_t* chunk_counts = nullptr;
    int32_t* chunk_tokens = nullptr;
    SideStream stream;
  };
  // The own ranks of one device, which share its launches.
  struct DeviceRanks {
    int device = 0;
    KernelStore* kernels = nullptr;
    int ctas = 0;             // a rank
    uint64_t generation = 0;  // of the kernels that are loaded:
    CUfunction place = nullptr, row_of_source = nullptr, program_tables = nullptr, slots_of_map = nullptr;
    std::vector<size_t> index;  // of own ranks
  };

  void take(const std::vector<KernelStore*>& kernels);
  void release() noexcept;
  static void load(DeviceRanks& of);
  void clear_own();
  void launch(const LayerShape& shape, std::span<const RankToPlace> ranks, uint32_t phases, const PlaceLimits& limits);
  void clear_rows(std::span<const RankToPlace> ranks);
  GroupControl* control(int own_rank, int peer) const;
  RowSource* rows_of(int own_rank, int peer, std::span<const RankToPlace> ranks) const;

  // Page-locked, so that copies from all ranks are under way together.
  struct HostMemory {
    PlaceReport report[kMaxCudaRanks];
    int32_t tokens[kMaxCudaRanks];
    int32_t counts[kMaxCudaRanks * kMaxPlaceExperts];
  };

  SymmetricMemory& memory_;
  RowInbox row_inbox_;
  WaitForStream wait_for_stream_;
  CallFailed call_failed_;
  double wait_seconds_, arrival_seconds_;
  uint32_t call_ = kReplayed;
  std::vector<OwnRank> own_;
  std::vector<DeviceRanks> devices_;
  HostMemory* host_ = nullptr;
  bool timed_out_ = false;
};

}  // namespace uniep::cuda
