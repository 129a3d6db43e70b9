#pragma once

#include "program/build.h"
#include "sim/machine.h"
#include "sim/simulate.h"

namespace uniep::sim {

// Microseconds and bytes of a Program's tasks on a machine at one clock.
struct TileTimes {
  TileTimes(const ProgramRequest& request, const RankProgram& p, const MachineDescription& machine, State state,
            double clock_ghz);

  double gemm(const RankProgram& p, const Task& task) const;  // without what may slow it down
  double load(const Task& task) const;        // the share of that in which the tile is a load (Clock::waiting counts)
  double late_store(const Task& task) const;  // of the tile before, while this one runs
  int64_t output_columns(const RankProgram& p, const Task& task) const;

  double first, second;            // a tile of the two row GEMMs
  double slow_first, slow_second;  // the share by which they take longer under this schedule
  double us_of_cycle;
  double taken_from_tiles;  // us a row that is copied
  double warp_chunk;        // share of the time of a chunk of 4096 bytes that one of the schedule's takes
  double copy_clock;        // share of the time of copies, at this clock
  int64_t chunks_of_row;    // that a row of H columns is copied in
  int64_t row_bytes;
  double copy_workers;  // workers that copy for each of those that compute; 1 unless they are of another class
  bool own_copy_class;
  double late_first, late_second;

 private:
  double load_first_ = 1, load_second_ = 1;
  double wgrad_extra_, wgrad_per_k_fc2_, wgrad_fixed_fc2_, wgrad_per_k_fc1_, wgrad_fixed_fc1_;
};

}  // namespace uniep::sim
