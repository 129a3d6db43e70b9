#pragma once

#include <stddef.h>
#include <stdint.h>

#include "uniep/c_error.h"
#include "uniep/export.h"

/* The ranks that run layers together, and memory that they share (uniep/group.h, uniep/symmetric_buffer.h).
 * Conventions: uniep/c_api.h. */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct uniep_group uniep_group;

/* AUTO: cuda where a Hopper GPU is, else cpu. */
enum { UNIEP_ENGINE_AUTO = 0, UNIEP_ENGINE_CPU = 1, UNIEP_ENGINE_CUDA = 2 };
/* This process holds all ranks, or one (cuda only). */
enum { UNIEP_LAUNCH_THREADS = 0, UNIEP_LAUNCH_PROCESSES = 1 };

enum { UNIEP_UNIQUE_ID_BYTES = 128 };

/* Writes the bytes of a new uniep_group_options.unique_id, for one rank to make and to hand to the others by the
 * caller's own means. Good for one group at a time, on this host. Not a string: any byte may be zero. UNIEP_DEVICE
 * where the system has no random numbers. */
UNIEP_API uniep_status uniep_make_unique_id(char out[128]);

typedef struct uniep_group_options {
  size_t size;
  int32_t engine;         /* UNIEP_ENGINE_... */
  int32_t ranks;          /* W, 1 to 64; there is no default */
  int32_t workers;        /* compute units of a rank; 0: the engine's choice */
  int32_t device_count;   /* entries of `devices` */
  const int32_t* devices; /* rank r runs on devices[r mod device_count]; NULL and 0: all there are (cuda) */
  int32_t launch;         /* UNIEP_LAUNCH_... */
  /* UNIEP_LAUNCH_PROCESSES: this process's rank. Where torchrun's environment names the group its RANK counts: give
   * that, or 0. */
  int32_t rank;
  /* UNIEP_LAUNCH_PROCESSES: UNIEP_UNIQUE_ID_BYTES bytes that all ranks have and no other group. NULL, and no
   * communicator: torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) names the group. All
   * ranks must be processes of one host and one user. */
  const char* unique_id;
  void* communicator; /* UNIEP_LAUNCH_PROCESSES: an ncclComm_t of the ranks that shares a unique id; or NULL */
  /* The caller's allocator, both functions or neither: the C++ heap (cpu), the device's (cuda). allocate returns at
   * least `bytes` bytes aligned to `alignment` on the device of `rank`, usable in the order of `stream`, or NULL when
   * there is no room. release's `stream` is the one that used the memory last, which may be another than allocate's.
   * Both are called on the thread that calls the library, with allocator_context. They must not throw, and must work
   * until the last handle of the group is gone. On the cuda engine that thread then holds the lock that makes the calls
   * of all groups of the process follow one another: they must not call the library, nor wait for what another thread
   * may hold around a call of a group (so a binding to Python gives up the GIL around calls). */
  void* (*allocate)(void* context, size_t bytes, size_t alignment, int32_t rank, void* stream);
  void (*release)(void* context, void* memory, size_t bytes, int32_t rank, void* stream);
  void* allocator_context;
  /* Bound in seconds of every wait for a peer that has begun, up to 1e6; 0: UNIEP_TIMEOUT_S, or 60. */
  double timeout_seconds;
  /* cuda: bound of every wait for a peer that has not begun, likewise; 0: UNIEP_ARRIVAL_TIMEOUT_S, or 600. */
  double arrival_timeout_seconds;
  /* 0 or 1. cuda: y of a call whose placement has no rows, because a routing is not legal or does not fit its capacity,
   * is NaN instead of 0. Or UNIEP_NAN_ON_OVERFLOW=1. */
  int32_t nan_on_overflow;
} uniep_group_options;

/* Collective with UNIEP_LAUNCH_PROCESSES. UNIEP_UNSUPPORTED where the engine is not there. */
UNIEP_API uniep_status uniep_group_create(const uniep_group_options* options, uniep_group** group);
UNIEP_API void uniep_group_destroy(uniep_group* group);
/* Waits until the group's calls are over; tells of one that failed half-way. On the cpu engine they are. */
UNIEP_API uniep_status uniep_group_synchronize(uniep_group* group);
/* Tells of a call so far that is known to have failed half-way, as the next call would; waits for none. */
UNIEP_API uniep_status uniep_group_check(uniep_group* group);
/* Collective. After UNIEP_TIMEOUT the group refuses every call until this one. Saved states stay valid. */
UNIEP_API uniep_status uniep_group_recover(uniep_group* group);
/* Tells the other ranks that this one makes no more calls: what they wait for of it ends at once, in an error that
 * names this rank. The end of the group's last handle does so, too. Does not wait. NULL is nobody to leave. */
UNIEP_API void uniep_group_leave(uniep_group* group);
/* Ends the group on this rank, from any thread, and waits for nothing: calls inside of the group and later ones are
 * UNIEP_TIMEOUT, and its symmetric memory goes (uniep/group.h). All handles are still to be destroyed, this one not
 * before the call returns. NULL is nobody to abort. */
UNIEP_API void uniep_group_abort(uniep_group* group);
/* Gives back what the group keeps for later calls alone: cached blocks and loaded kernels. Waits for the rank's GPUs.
 * Not collective. */
UNIEP_API uniep_status uniep_group_trim(uniep_group* group);

/* For the whole process: has the library ask `reclaim` to free what the process caches for itself on a GPU (a
 * framework's allocator, say) where the driver has no memory left, before it tries once more. Called on the thread that
 * calls the library, inside of that call; it must not call the library, nor wait for what an allocator may not wait
 * for. NULL: nobody. */
UNIEP_API void uniep_set_memory_reclaimer(void (*reclaim)(void* context, int32_t device), void* context);

typedef struct uniep_group_info {
  size_t size;
  int32_t engine; /* what UNIEP_ENGINE_AUTO became */
  int32_t ranks;
  int32_t workers;
  int32_t first_local_rank; /* this process holds [first_local_rank, first_local_rank + local_ranks) */
  int32_t local_ranks;      /* entries of every array of arguments */
} uniep_group_info;

UNIEP_API uniep_status uniep_group_describe(const uniep_group* group, uniep_group_info* info);
/* The GPU of a local rank; -1 on the cpu engine. */
UNIEP_API uniep_status uniep_group_device(const uniep_group* group, int32_t rank, int32_t* device);

/* Device memory that a group holds between its calls (cpu engine: the host's), of one local rank. */
typedef struct uniep_group_bytes {
  size_t size;
  size_t symmetric_bytes; /* what peers reach, without that of uniep_symmetric_buffers */
  size_t workspace_bytes; /* what else it has taken itself; ranks that share a GPU share it. Never the caller's */
} uniep_group_bytes;

UNIEP_API uniep_status uniep_group_memory(const uniep_group* group, int32_t rank, uniep_group_bytes* bytes);

/* Memory of every rank that the kernels of all ranks reach: an x in it is read there by the other ranks, without a
 * copy. All ranks of a call give an x at the same offset of the same buffer, or none does. */
typedef struct uniep_symmetric_buffer uniep_symmetric_buffer;

/* Collective. `bytes` of zeroed memory, as many on each rank. */
UNIEP_API uniep_status uniep_symmetric_allocate(uniep_group* group, size_t bytes, uniep_symmetric_buffer** buffer);
/* Collective. The same of memory that the caller has and keeps, one address a local rank: with a process a GPU, memory
 * that the driver can share, which that of cudaMalloc is not (UNIEP_INVALID_ARGUMENT on all ranks). */
UNIEP_API uniep_status uniep_symmetric_register(uniep_group* group, void* const* memory, int32_t count, size_t bytes,
                                                uniep_symmetric_buffer** buffer);
/* Where a local rank has it. */
UNIEP_API uniep_status uniep_symmetric_data(const uniep_symmetric_buffer* buffer, int32_t rank, void** data);
/* Not while a call that reads it is running. */
UNIEP_API void uniep_symmetric_destroy(uniep_symmetric_buffer* buffer);

#ifdef __cplusplus
}
#endif
