#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "uniep/export.h"
#include "uniep/group.h"

namespace uniep {

namespace internal {
struct CallTimerState;
}

// Where a rank's time went in one call, in milliseconds; of what the call's launches do.
struct CallTimes {
  // What the GEMMs waited for rows that dispatch brings: the mean over the rank's workers of the time before their
  // first tile, if that is one of the first GEMM's (forward: FC1; backward: dgrad FC2), and before their other tiles of
  // it.
  double exposed_dispatch_ms = 0;
  // From the end of the rank's last GEMM tile until the last sum over slots ended. No GEMM of the rank hides it.
  double sum_ms = 0;
  // exposed_dispatch_ms, and of sum_ms the time until the last rows that a sum waited for had come.
  double wait_ms = 0;
  // From when the rank first waited for a tile's inputs until its last tile ended, by its GPU's clock.
  double call_ms = 0;
  // How often the call has run: 1, or the replays of the graph that it was captured into (modulo 2^32).
  uint32_t runs = 0;
};

// Times the call whose CallOptions name it, on this process's ranks; one call after the other, of one Group. The call
// waits for nothing: its kernels write down when their tiles ran, and a small kernel after them adds that up, which
// makes it longer; the group's first such call takes memory on each GPU. On the cpu engine the times are there when the
// call returns. Not thread-safe. May outlive the Group.
//
// A call that is captured into a graph is timed in each replay. is_over() is true from the end of the first one;
// times() are those of the newest that has ended, and empty in the moment in which they are written. Give it a timer of
// its own: a replay writes to it as long as the graph lives, whichever call has had it since. Its memory stays as long
// as the Group.
class UNIEP_API CallTimer {
 public:
  // Takes page-locked memory on the cuda engine: in a job make it before, or once and for all.
  explicit CallTimer(Group& group);

  // Whether the newest call that was given this timer is over on the device; false before the first. Waits for nothing.
  bool is_over() const;
  // Of a local rank. Empty unless is_over(), and where a worker ran more tiles than are kept of it (1,024 a call).
  // Throws Error(kInvalidArgument) for a rank that is not local.
  std::optional<CallTimes> times(int rank) const;

  internal::CallTimerState& state() const { return *state_; }

 private:
  std::shared_ptr<internal::CallTimerState> state_;
};

}  // namespace uniep
