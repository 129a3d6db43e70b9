#pragma once

#include <memory>
#include <vector>

#include "model/placement_state.h"
#include "program/rank_program.h"

namespace uniep::program {

// A Program is a layer's, or its rows' way to their experts or back alone, in one launch; or what backward runs again
// of a forward with save.z = recompute: FC1, and before it the dispatch of x unless its rows are there.
enum class ProgramPart { kLayer, kDispatch, kCombine, kRecompute };

// What decides a Program beside the Placement.
struct ProgramRequest {
  LayerShape shape;
  Numerics numerics;
  Schedule schedule;  // legal for this shape and machine
  Direction direction = Direction::kForward;
  bool redispatch = false;  // backward, kRecompute: x must travel again, since forward did not keep xg
  int workers = 1;
  int cluster = 1;     // workers that share weight tiles; divides the workers of every kind
  int pull_parts = 1;  // tiles that a row block is pulled in
  ProgramPart part = ProgramPart::kLayer;
  bool weight_gradients = true;  // backward: made by this Program, not later or never
};

// The Program of all ranks with the tables that it points to. Keeps the placement alive.
class Program {
 public:
  Program(const ProgramRequest& request, std::shared_ptr<const internal::PlacementState> placement);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  const ProgramRequest& request() const { return request_; }
  const internal::PlacementState& placement() const { return *placement_; }
  const std::shared_ptr<const internal::PlacementState>& shared_placement() const { return placement_; }
  int ranks() const { return placement_->ranks; }
  const RankProgram& rank(int rank) const { return ranks_[rank]; }

 private:
  struct RankTables {
#define UNIEP_TABLE(type, name, entries) std::vector<type> name;
    UNIEP_SCHEDULE_TABLES(UNIEP_TABLE)
    UNIEP_RANK_TABLES(UNIEP_TABLE)
#undef UNIEP_TABLE
  };

  void build_shared_tables();
  void build_rank(int rank);

  ProgramRequest request_;
  std::shared_ptr<const internal::PlacementState> placement_;
  RankTables shared_;  // those that are equal on all ranks
  std::vector<SlotTables> slots_of_rank_;
  std::vector<RankTables> tables_;
  std::vector<RankProgram> ranks_;
};

// Whether the workers of every kind that a schedule names come in whole clusters.
bool comes_in_clusters(const Schedule& schedule, int workers, int cluster);

// Reserved workers that are not lent.
int idle_workers(const Schedule& schedule);

// A layer's Program without its other stages. The combine's rows are ready when it begins.
RankProgram part_of(const RankProgram& layer, ProgramPart part);

// The launches of a direction under a schedule, in order.
std::vector<LaunchStages> launch_stages(const Schedule& schedule, Direction direction, bool weight_gradients = true);

std::vector<LaunchStages> launch_stages(const ProgramRequest& request);

// Bounds of the second GEMM's column chunks: multiples of 8 columns, empty chunks skipped.
std::vector<int32_t> column_chunk_bounds(int64_t columns, int chunks);

// Column tiles of the first GEMM are counted in columns of I: with a gate, fc1's tile is half gate and half up columns.
int first_tile_columns(const Schedule& schedule, const Numerics& numerics, Direction direction);

}  // namespace uniep::program
