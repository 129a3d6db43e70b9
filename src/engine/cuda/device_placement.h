#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/symmetric_memory.h"
#include "engine/carver.h"
#include "engine/cuda/device/place_arguments.h"
#include "engine/cuda/kernel.h"
#include "uniep/layer.h"

// Placement on the GPUs of a group: host side of device/place.cu and device/program_tables.cu.
namespace uniep::cuda {

// Tables whose size does not depend on the routing: all but `rows` and `row_of_source`. `tokens`: of this rank.
PlacementTables carve_placement(internal::Carver& carver, const LayerShape& shape, int ranks, int64_t tokens);
ProgramTables carve_program(internal::Carver& carver, const LayerShape& shape, int ranks);

KernelRequest place_request();
KernelRequest row_of_source_request();
KernelRequest program_tables_request();

// What an own rank has to place, and where to.
struct RankToPlace {
  Routing routing;
  PlacementTables tables;  // `rows` may be null while only counts are made
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
  // `memory`: symmetric_bytes() for the exchange of counts. `kernels[i]`: of the device of own rank i. Compiles and
  // loads everything that will be launched. A peer's counts may take `arrival_seconds`.
  Placer(SymmetricMemory& memory, const std::vector<KernelStore*>& kernels, double wait_seconds,
         double arrival_seconds);
  ~Placer();
  Placer(const Placer&) = delete;
  Placer& operator=(const Placer&) = delete;

  static int64_t symmetric_bytes() { return sizeof(PlaceExchange); }

  // Throws uniep::Error where this engine can not place such a layer.
  static void require_supported(const LayerShape& shape, int ranks);

  // Where peers can not reach tables.rows (a process a GPU): they write rows into this memory, and the placement copies
  // from it. Null: they write into tables.rows.
  void set_row_inbox(SymmetricMemory* inbox) { row_inbox_ = inbox; }

  // Exact mode: count(); read_counts(), which throws as the cpu engine does; then memory for the rows; assign().
  void count(const LayerShape& shape, std::span<const RankToPlace> ranks);
  PlacementCounts read_counts(const LayerShape& shape, std::span<const RankToPlace> ranks);
  void assign(const LayerShape& shape, std::span<const RankToPlace> ranks);

  // Capacity mode: all of it, within `capacity` padded rows a rank. A routing that does not fit or is not legal gives
  // an empty placement and is thrown by check().
  void place(const LayerShape& shape, std::span<const RankToPlace> ranks, int64_t capacity);

  // Fills row_of_source, which holds `entries` numbers (sum of T times K, or more).
  void invert_rows(const LayerShape& shape, std::span<const RankToPlace> ranks, int64_t entries);

  // Fills tables (one entry an own rank) and what follows from them in calls[i].program and .layout; `calls` holds the
  // device addresses of the own ranks' RankCalls. Those of ranks that share a device follow each other.
  void build_programs(std::span<RankCall* const> calls, std::span<const ProgramTables> tables,
                      std::span<const Stream> streams);

  // Lets the host know, behind everything that the streams hold, whether a placement has failed since the last time.
  void queue_reports(std::span<const RankToPlace> ranks);
  // Whether the last reports that have come tell of a failure. Does not wait.
  bool has_noticed_failure() const;
  // Waits for all own devices, throws the failure that was noticed, and forgets it; but after a time-out every later
  // placement is refused until clear().
  [[noreturn]] void throw_noticed_failure();
  // queue_reports(), a wait for `ranks`' streams, and throw_noticed_failure() if there is one.
  void check(std::span<const RankToPlace> ranks);

  // After a time-out, between two barriers of the group: as new.
  void clear();

 private:
  struct OwnRank {
    int rank = 0;
    int device = 0;
    PlaceState* state = nullptr;
    int32_t* chunk_counts = nullptr;
    int32_t* chunk_tokens = nullptr;
  };
  // The own ranks of one device, which share its launches.
  struct DeviceRanks {
    int device = 0;
    KernelStore* kernels = nullptr;
    int ctas = 0;               // a rank
    std::vector<size_t> index;  // of own ranks
  };

  void launch(const LayerShape& shape, std::span<const RankToPlace> ranks, uint32_t phases, int64_t row_limit);
  PlaceExchange* exchange(int own_rank, int peer) const;
  RowSource* rows_of(int own_rank, int peer, std::span<const RankToPlace> ranks) const;

  // Page-locked, so that copies from all ranks are under way together.
  struct HostMemory {
    PlaceReport report[kMostCudaRanks];
    int32_t tokens[kMostCudaRanks];
    int32_t counts[kMostCudaRanks * kMostPlaceExperts];
  };

  SymmetricMemory& memory_;
  SymmetricMemory* row_inbox_ = nullptr;
  double wait_seconds_, arrival_seconds_;
  std::vector<OwnRank> own_;
  std::vector<DeviceRanks> devices_;
  HostMemory* host_ = nullptr;
  bool timed_out_ = false;
};

}  // namespace uniep::cuda
