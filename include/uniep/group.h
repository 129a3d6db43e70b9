#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "uniep/error.h"
#include "uniep/export.h"
#include "uniep/schedule.h"
#include "uniep/symmetric_buffer.h"

namespace uniep {

// A cudaStream_t on the cuda engine; the cpu engine finishes before a call returns and ignores it.
struct Stream {
  void* handle = nullptr;
};

// Where the library takes memory from: the caller's allocator (a framework's caching allocator, say). allocate returns
// at least `bytes` bytes aligned to `alignment` on the device of `rank`, usable in the order of `stream`, or nullptr
// when there is no memory. release's stream is the one that used the memory last, which may be another than allocate's
// (weight_gradients() on its own stream). Both may be called from the thread that calls the library, and from no
// other. On the cuda engine that thread then holds the lock that makes the calls of all Groups of the process follow
// one another: they must not call the library, nor wait for what another thread may hold around a call of a Group (so
// a binding to Python gives up the GIL around calls).
struct Allocator {
  void* (*allocate)(void* context, std::size_t bytes, std::size_t alignment, int rank, Stream stream) = nullptr;
  void (*release)(void* context, void* memory, std::size_t bytes, int rank, Stream stream) = nullptr;
  void* context = nullptr;
};

// Has the library ask `reclaim` to free what the process caches for itself on a GPU (a framework's allocator, say)
// where the driver has no memory left for symmetric memory, placements or counters, before it tries once more. Called
// on the thread that calls the library, inside of that call: it must neither throw nor call the library, and may wait
// for the device, but for nothing that an Allocator's functions may not wait for. For the whole process; null: nobody.
UNIEP_API void set_memory_reclaimer(void (*reclaim)(void* context, int device), void* context);

enum class Launch : int {
  kThreads = 0,    // this process holds all ranks
  kProcesses = 1,  // this process holds one rank (cuda only)
};

constexpr double kMaxTimeoutSeconds = 1e6;  // of each time limit: some 11 days, which GPUs' clocks can count

struct GroupOptions {
  EngineKind engine = EngineKind::kAuto;  // kAuto: cuda where there is a Hopper GPU, else cpu
  int ranks = 1;                          // W, 1 to 64
  int workers = 0;                        // compute units of a rank; 0: the engine's choice
  std::vector<int> devices;               // rank r runs on devices[r mod size]; empty: all there are (cuda)
  Launch launch = Launch::kThreads;
  // kProcesses: this process's rank. Where torchrun's environment names the group its RANK counts: give that, or 0.
  int rank = 0;
  // kProcesses: what all ranks have and no other group: 128 bytes that one rank got from make_unique_id() and gave to
  // the others. Empty: torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) names the group.
  // All ranks must be processes of one host and one user.
  std::string bootstrap;
  void* communicator = nullptr;  // kProcesses: an ncclComm_t of the group's ranks that shares a unique id, no more
  Allocator allocator;           // both functions or neither; neither: the C++ heap (cpu), the device's (cuda)
  // Bound of every wait for a peer that has begun, up to kMaxTimeoutSeconds; 0: UNIEP_TIMEOUT_S, or 60.
  double timeout_seconds = 0;
  // Bound of every wait for a peer that has not begun (cuda), likewise; 0: UNIEP_ARRIVAL_TIMEOUT_S, or 600.
  double arrival_timeout_seconds = 0;
  // cuda: y of a call whose placement has no rows, because a routing is not legal or does not fit its capacity, is NaN
  // instead of 0. For loops that only replay graphs, in which no call throws. Or UNIEP_NAN_ON_OVERFLOW=1.
  bool nan_on_overflow = false;
};

// The 128 bytes of a new GroupOptions::bootstrap, for one rank to make and to hand to the others by the caller's own
// means. Good for one group at a time, on this host. Throws Error(kDevice) where the system has no random numbers.
UNIEP_API std::string make_unique_id();

// Device memory that a Group holds between its calls (cpu: the host's), of one local rank.
struct GroupMemory {
  std::size_t symmetric_bytes = 0;  // what peers reach, without that of SymmetricBuffers
  std::size_t workspace_bytes = 0;  // what else it has taken itself; ranks on one GPU share it. Never the Allocator's
};

namespace internal {
class Engine;
}

// The ranks that run layers together. A call on a Group is collective: every rank takes part, in one order that is
// equal on all of them. A Group is not thread-safe: one call at a time. Several Groups may live side by side, each with
// its own workers and symmetric memory. On a GPU the calls of all Groups of a process run one after the other, in the
// order in which they were made, whatever their streams. With one process per GPU that order must be equal on all ranks
// that share two Groups, as for NCCL's communicators: otherwise they wait for each other until the time-out. Replays of
// graphs are outside this order: theirs is the caller's.
class UNIEP_API Group {
 public:
  // Throws Error: kInvalidArgument for illegal options, kUnsupported when the engine is not available.
  explicit Group(const GroupOptions& options);
  ~Group();
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;

  int ranks() const;
  int workers() const;  // compute units of a rank
  EngineKind engine() const;
  Machine machine() const;  // what schedules for this group are validated against
  // The ranks that this process holds: [first_local_rank(), first_local_rank() + local_ranks()).
  int first_local_rank() const;
  int local_ranks() const;
  int device(int rank) const;  // the GPU of a local rank; -1 on the cpu engine

  // Collective. Zeroed memory that all ranks reach, of the same size on each.
  SymmetricBuffer allocate_symmetric(std::size_t bytes);
  // Collective. The same of memory that the caller has and keeps, one address per local rank: with one process per GPU,
  // memory that the driver can share (of another SymmetricBuffer, ncclMemAlloc, or cuMemCreate with a file descriptor);
  // memory of cudaMalloc is refused on all ranks: Error(kInvalidArgument).
  SymmetricBuffer register_symmetric(std::span<void* const> memory, std::size_t bytes);

  // Tells the other ranks that this one makes no more calls: what they wait for of it ends at once, in an error that
  // names this rank. So does the end of a Group, and an exception that leaves a collective call. Does not wait.
  void leave() noexcept;

  // Ends the group on this rank, at once and for good, for one whose peers may be gone. From any thread, also while
  // others are inside its calls, which then end in Error(kTimeout) as later ones do; it waits for nothing. Symmetric
  // memory goes when the last of them has left and the rank's GPU has ended their kernels, in the background; that of
  // SymmetricBuffers with these. The other ranks are notified as by leave(). No graph with calls of this group may be
  // replayed any more. What calls write is unknown then; Saved states may still be dropped, and the Group ended.
  void abort() noexcept;

  // Frees what the group keeps only for later calls: cached blocks, on the cpu engine symmetric memory too, and
  // on a GPU the loaded kernels that all groups of this process share, but for those that captured graphs may launch.
  // Waits for the rank's GPUs. Not collective. Later calls take and load again what they need, with the same results.
  void trim();

  // Waits until the group's calls are over; on GPUs, once any was captured into a CUDA graph, until all work of its
  // devices is, in whatever stream: replays may be under way there. So does recover(). Then nothing may be captured on
  // them meanwhile. Throws Error(kTimeout) if a call failed half-way, or other streams' work is not over within
  // arrival_timeout_seconds; other calls throw the first, too, but notice it only when they begin.
  void synchronize();

  // Throws what a call so far is known to have failed with half-way, as the next call would. Waits for none.
  void check();

  // Of a local rank.
  GroupMemory memory(int rank) const;

  // After Error(kTimeout) the group refuses every call until recover(), which agrees on a new generation. Saved states
  // of earlier calls stay valid.
  void recover();

  internal::Engine& implementation() const { return *engine_; }

 private:
  std::unique_ptr<internal::Engine> engine_;
};

}  // namespace uniep
