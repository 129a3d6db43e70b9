#pragma once

#include <algorithm>
#include <cmath>

#include "sim/machine.h"
#include "uniep/schedule.h"

// What pieces of a row cost a warp that copies them through a ring in shared memory.
namespace uniep::sim {

// Share of the time of a chunk of 4096 bytes, with a ring of three stages, that one of `bytes` takes at least: it waits
// for a stage of the ring.
inline double ring_share(const WarpCopies& copy, int stages, double bytes) {
  constexpr double kFixed = 0.8;
  return copy.ring * 3 / stages * (kFixed + (1 - kFixed) * bytes / 4096);
}

// Of the time of a chunk of 4096 bytes what one of a row's chunks takes.
inline double chunk_share(const WarpCopies& copy, const CommSchedule& comm, double row_bytes) {
  const double bytes = std::min(static_cast<double>(comm.chunk_bytes), row_bytes);
  return std::max(copy.chunk_fixed + (1 - copy.chunk_fixed) * bytes / 4096, ring_share(copy, comm.stages, bytes));
}

// us that a row which is put into its place takes from the tiles of the workers that copy, whatever the copy waits for:
// those of a warp go through its SM, those of whole SMs through the L2 of all. As much a chunk of 4096 bytes as a row,
// by layers of 2048 to 7168 columns. A slowdown below 0 takes nothing.
inline double taken_from_tiles(const MachineDescription& machine, const CommSchedule& comm, double row_bytes) {
  constexpr double kTaken = 0.5;
  const double chunks = std::ceil(row_bytes / comm.chunk_bytes);
  return kTaken * std::max(machine.slowdown.copies, 0.0) * (1 + chunks * chunk_share(machine.copy, comm, row_bytes));
}

// Share of the time of a sum's bytes that they take in pieces of `width` bytes a row: each piece costs as much as 660
// more, against pieces of 1024 columns, whose rate `sums` has. Set by layers of H 2048 to 5120 on one and two H200.
inline double sum_share(double width) {
  constexpr double kPiece = 660, kUsual = 2048;
  return (1 + kPiece / width) / (1 + kPiece / kUsual);
}

// us of a piece that a staged combine sends, of a row's `width` bytes.
inline double send_piece(const WarpCopies& copy, const CommSchedule& comm, double width) {
  const double bytes = std::min(static_cast<double>(comm.chunk_bytes), width);
  const double share = copy.send_fixed + (1 - copy.send_fixed) * bytes / 2048;
  return copy.send * std::max(share, ring_share(copy, comm.stages, bytes));
}

// Share of the time of copies that they take at this clock.
inline double copies_at(const MachineDescription& machine, bool paused, double clock_ghz) {
  const double usual = paused ? machine.clock.pause : machine.clock.limit;
  return 1 + machine.copy.clocked * (usual / clock_ghz - 1);
}

}  // namespace uniep::sim
