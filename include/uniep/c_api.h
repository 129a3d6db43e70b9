#pragma once

#include <stddef.h>
#include <stdint.h>

#include "uniep/export.h"
#include "uniep/version.h"

/* The layer for C, and for every language that can call C. Plain C99; the meaning of each call is that of the C++ call
 * of the same name in uniep/layer.h, uniep/exchange.h and uniep/group.h, and the results are the same bits.
 *
 * Errors. Every call that can fail returns a uniep_status and leaves what it was to write alone, except that a handle
 * to be made is set to NULL; uniep_last_error() says why, in one line. A null pointer is UNIEP_INVALID_ARGUMENT, except
 * where a field says that it may be null. No C++ exception leaves a call.
 *
 * Structures. The first field, `size`, is the caller's sizeof of the structure, and a field that is zero has its
 * default; so write
 *     uniep_routing routing = {.size = sizeof(uniep_routing), .tokens = 128};
 * Later versions only add fields at the end, so that a program built with an older header keeps running, and one built
 * with a newer header is refused (UNIEP_UNSUPPORTED) only where it sets a field that the library does not know. In an
 * array of structures all have the same size.
 *
 * Memory. Arrays are row-major and dense, lie on the device of their rank, and stay valid until the rank's stream has
 * passed the call (cpu engine: until the call returns). "bf16" is 16 bits a value, whatever type the caller gives it.
 * Handles may be destroyed in any order. Calls on one group come one at a time, from any thread. */

#ifdef __cplusplus
extern "C" {
#endif

/* The values of uniep::Status. */
typedef enum uniep_status {
  UNIEP_OK = 0,
  UNIEP_INVALID_ARGUMENT = 1, /* bad usage or input: refused before anything ran */
  UNIEP_UNSUPPORTED = 2,      /* legal, but this build, engine or machine can not do it */
  UNIEP_OVERFLOW = 3,         /* a fixed capacity was too small; nothing was dropped silently */
  UNIEP_TIMEOUT = 4,          /* a bounded wait ran out; uniep_group_recover() makes the group usable again */
  UNIEP_IO = 5,               /* a file could not be read or written */
  UNIEP_OUT_OF_MEMORY = 6,    /* the caller's allocator or a device had no room */
  UNIEP_DEVICE = 7,           /* a CUDA, NVRTC or NCCL call failed */
  UNIEP_INTERNAL = 8          /* a broken invariant of the library itself */
} uniep_status;

/* The words of a status, "unknown" for any other number. Never null. */
UNIEP_API const char* uniep_status_name(int status);

/* Why the latest failing call of this thread failed; "" when none has. Successful calls leave it alone. Valid until the
 * next call that fails on this thread. A message over 4 KiB ends in "...". */
UNIEP_API const char* uniep_last_error(void);

/* The version of the library that runs: UNIEP_VERSION and UNIEP_VERSION_STRING of the headers it was built with. */
UNIEP_API int uniep_version(void);
UNIEP_API const char* uniep_version_string(void);

/* The file that this process opens as "nccl" or "nvrtc" at first use; without it they are searched for by name. Behind
 * the first use another file is UNIEP_INVALID_ARGUMENT. UNIEP_LIBNCCL and UNIEP_LIBNVRTC in the environment go before.
 */
UNIEP_API uniep_status uniep_use_library(const char* library, const char* path);

/* ---- Group: the ranks that run layers together ---- */

typedef struct uniep_group uniep_group;

enum { UNIEP_ENGINE_AUTO = 0, UNIEP_ENGINE_CPU = 1, UNIEP_ENGINE_CUDA = 2 };
enum { UNIEP_LAUNCH_THREADS = 0, UNIEP_LAUNCH_PROCESSES = 1 };

enum { UNIEP_UNIQUE_ID_BYTES = 128 };

/* The bytes of a new uniep_group_options.unique_id, for one rank to make and to hand to the others by the caller's own
 * means. Good for one group at a time, on this host. Not a string: any byte may be zero. */
UNIEP_API uniep_status uniep_make_unique_id(char out[128]);

typedef struct uniep_group_options {
  size_t size;
  int32_t engine;  /* UNIEP_ENGINE_... */
  int32_t ranks;   /* W, 1 to 64; there is no default */
  int32_t workers; /* compute units of a rank; 0: the engine's choice */
  /* Bound of every wait for a peer that has begun, up to 1e6; 0: UNIEP_TIMEOUT_S, or 60. */
  double timeout_seconds;
  /* The caller's allocator, both functions or neither. allocate returns at least `bytes` bytes aligned to `alignment`
   * on the device of `rank`, usable in the order of `stream`, or NULL when there is no room. release's `stream` is the
   * one that used the memory last, which may be another than allocate's. Both are called on the thread that calls the
   * library. They must not throw, and must work until the last handle of the group is gone. */
  void* (*allocate)(void* context, size_t bytes, size_t alignment, int32_t rank, void* stream);
  void (*release)(void* context, void* memory, size_t bytes, int32_t rank, void* stream);
  void* allocator_context;
  int32_t launch; /* UNIEP_LAUNCH_...: this process holds all ranks, or one (cuda only) */
  int32_t rank;   /* UNIEP_LAUNCH_PROCESSES: this process's rank */
  /* UNIEP_LAUNCH_PROCESSES: UNIEP_UNIQUE_ID_BYTES bytes that all ranks have and no other group. NULL, and no
   * communicator: torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) names the group. All
   * ranks must be processes of one host and one user. */
  const char* unique_id;
  void* communicator;     /* UNIEP_LAUNCH_PROCESSES: an ncclComm_t of the ranks that shares a unique id; or NULL */
  const int32_t* devices; /* rank r runs on devices[r mod device_count]; NULL and 0: all there are (cuda) */
  int32_t device_count;
  /* UNIEP_LAUNCH_PROCESSES: bound of every wait for a peer that has not begun, up to 1e6; 0: UNIEP_ARRIVAL_TIMEOUT_S,
   * or 600. */
  double arrival_timeout_seconds;
  /* 0 or 1. cuda: y of a call whose placement has no rows, because a routing is not legal or does not fit its capacity,
   * is NaN instead of 0. Or UNIEP_NAN_ON_OVERFLOW=1. */
  int32_t nan_on_overflow;
} uniep_group_options;

UNIEP_API uniep_status uniep_group_create(const uniep_group_options* options, uniep_group** group);
/* NULL is nothing to destroy. */
UNIEP_API void uniep_group_destroy(uniep_group* group);
/* Waits until the group's calls are over; tells of one that failed half-way. On the cpu engine they are. */
UNIEP_API uniep_status uniep_group_synchronize(uniep_group* group);
/* Tells of a call so far that is known to have failed half-way, as the next call would; waits for none. */
UNIEP_API uniep_status uniep_group_check(uniep_group* group);
/* After UNIEP_TIMEOUT the group refuses every call until this one. */
UNIEP_API uniep_status uniep_group_recover(uniep_group* group);
/* Tells the other ranks that this one makes no more calls: what they wait for of it ends at once, in an error that
 * names this rank. The end of the group's last handle does so, too. Does not wait. NULL is nobody to leave. */
UNIEP_API void uniep_group_leave(uniep_group* group);
/* Ends the group on this rank, from any thread, and waits for nothing: calls inside of the group and later ones are
 * UNIEP_TIMEOUT, and its symmetric memory goes (uniep/group.h). All handles are still to be destroyed, this one not
 * before the call returns. NULL is nobody to abort. */
UNIEP_API void uniep_group_abort(uniep_group* group);
/* Gives back what the group keeps for later calls alone: cached blocks and loaded kernels. Not collective. */
UNIEP_API uniep_status uniep_group_trim(uniep_group* group);

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

/* ---- Symmetric memory: an x in it is read there by the other ranks, without a copy (uniep/symmetric_buffer.h) ---- */

typedef struct uniep_symmetric_buffer uniep_symmetric_buffer;

/* Collective. Zeroed memory that all ranks reach, of the same size on each. */
UNIEP_API uniep_status uniep_symmetric_allocate(uniep_group* group, size_t bytes, uniep_symmetric_buffer** buffer);
/* Collective. The same of memory that the caller has and keeps: one address a local rank. */
UNIEP_API uniep_status uniep_symmetric_register(uniep_group* group, void* const* memory, int32_t count, size_t bytes,
                                                uniep_symmetric_buffer** buffer);
/* Where a local rank has it. */
UNIEP_API uniep_status uniep_symmetric_data(const uniep_symmetric_buffer* buffer, int32_t rank, void** data);
/* Not while a call that reads it is running. NULL is nothing to destroy. */
UNIEP_API void uniep_symmetric_destroy(uniep_symmetric_buffer* buffer);

/* ---- The layer ---- */

/* uniep/numerics.h says what each computes. RELU2 and SILU have no gate: there w1 and dw1 are [.., I, H]. */
enum {
  UNIEP_ACTIVATION_SWIGLU = 0,
  UNIEP_ACTIVATION_GEGLU_TANH = 1,
  UNIEP_ACTIVATION_GEGLU_ERF = 2,
  UNIEP_ACTIVATION_RELU2 = 3,
  UNIEP_ACTIVATION_SILU = 4
};
enum { UNIEP_ROUTER_WEIGHT_ACTIVATION = 0, UNIEP_ROUTER_WEIGHT_OUTPUT = 1, UNIEP_ROUTER_WEIGHT_INPUT = 2 };
enum { UNIEP_WEIGHT_GRADIENT_BF16 = 0, UNIEP_WEIGHT_GRADIENT_FP32 = 1, UNIEP_WEIGHT_GRADIENT_MAIN_GRAD = 2 };

/* Shape and numerics, equal on all ranks. */
typedef struct uniep_layer_config {
  size_t size;
  int64_t hidden;          /* H, a multiple of 8 */
  int64_t intermediate;    /* I, a multiple of 8 */
  int64_t experts;         /* E, over all ranks; a multiple of W; rank r holds [r E / W, (r + 1) E / W) */
  int64_t topk;            /* K, slots per token, 1 to E */
  int32_t activation;      /* UNIEP_ACTIVATION_... */
  int32_t router_weight;   /* UNIEP_ROUTER_WEIGHT_... */
  int32_t weight_gradient; /* UNIEP_WEIGHT_GRADIENT_...: written as bf16, as fp32, or added to fp32 */
  int64_t combine_groups;  /* 0: one sum over the slots; G > 0: see uniep/numerics.h */
  /* Of UNIEP_ACTIVATION_SWIGLU: gate' sigmoid(alpha gate') (up' + up_offset). All 0: silu(gate) up. */
  float alpha;      /* above 0; 0: 1 */
  float gate_limit; /* gate' is at most this; 0: no limit */
  float up_limit;   /* up' is between -up_limit and this; 0: no limit */
  float up_offset;
  int32_t bias; /* 0 or 1: experts have b1 and b2 (uniep/numerics.h) */
} uniep_layer_config;

/* Sets activation, alpha, the limits and up_offset from a text: swiglu, geglu_tanh, geglu_erf, relu2, silu, or SwiGLU
 * with parameters, as swiglu:alpha=1.702,limit=7,up_offset=1 (uniep/numerics.h). Nothing else of config is looked at
 * but its size, which must reach to up_offset. */
UNIEP_API uniep_status uniep_set_activation(uniep_layer_config* config, const char* text);

/* Schedules are text: "auto", "key=value,key=value" or flat JSON, with the fields of docs/schedule.md; what is left out
 * is filled for the layer and the group. A Schedule describes one direction. It changes no bit of a result. */
enum { UNIEP_FORWARD = 0, UNIEP_BACKWARD = 1 };

/* Writes the whole Schedule that `schedule` stands for as JSON, with a terminating zero; *needed becomes its bytes, the
 * zero included, also where the buffer is too small (UNIEP_OVERFLOW, nothing is written). Buffer NULL and capacity 0
 * asks for the bytes only. */
UNIEP_API uniep_status uniep_schedule_resolve(const uniep_group* group, const uniep_layer_config* config,
                                              int32_t direction, const char* schedule, char* buffer, size_t capacity,
                                              size_t* needed);

/* What `uniep tune` has found for the group's machine and ranks, as --export writes it, whatever the layer and T: of
 * `file`, or with NULL of the cache in UNIEP_CACHE_DIR (else $XDG_CACHE_HOME/uniep, else ~/.cache/uniep). Without
 * entries for given fields or another routing, and those that are not legal now. Not collective. Buffer, capacity and
 * *needed as above. UNIEP_IO or UNIEP_INVALID_ARGUMENT: `file` is none. */
UNIEP_API uniep_status uniep_tuned_schedules(const uniep_group* group, const char* file, char* buffer, size_t capacity,
                                             size_t* needed);

/* ---- Placement: where each (token, slot) pair lands ---- */

typedef struct uniep_placement uniep_placement;

enum { UNIEP_INDEX_INT32 = 0, UNIEP_INDEX_INT64 = 1 };

/* One rank's router output. */
typedef struct uniep_routing {
  size_t size;
  int64_t tokens;       /* T, may differ from rank to rank and may be 0; then the arrays may be null */
  const void* topk_ids; /* [T, K] global expert of a slot, -1 = unused; no expert twice in a token */
  int32_t index_type;   /* UNIEP_INDEX_... */
  const float* probs;   /* [T, K], finite; an unused slot's is ignored */
  void* stream;         /* cudaStream_t; the cpu engine ignores it */
  /* Dense routing, with topk_ids NULL: [T, E], a byte for each expert, not 0 where the token goes to it. probs is then
   * [T, E], too, and ignored where the map is 0. A token's slots are its experts, ascending; more than K are refused.
   * uniep_backward() and uniep_combine() with such a placement write dprobs [T, E], +0 where the map is 0. */
  const uint8_t* routing_map;
} uniep_routing;

/* Fixed memory instead of memory by need, equal on all ranks; more is UNIEP_OVERFLOW. */
typedef struct uniep_capacity {
  size_t size;
  int64_t rows;   /* padded rows of any rank, at most; 0: by need */
  int64_t tokens; /* T of any rank, at most; needed with a process a rank, else 0 stands for any number */
} uniep_capacity;

/* Collective. `capacity` may be NULL: by need. Of `config` only the shape is used. */
UNIEP_API uniep_status uniep_place(uniep_group* group, const uniep_layer_config* config, const uniep_routing* routings,
                                   int32_t count, const uniep_capacity* capacity, uniep_placement** placement);
UNIEP_API void uniep_placement_destroy(uniep_placement* placement);

typedef struct uniep_rank_rows {
  size_t size;
  int64_t tokens;      /* T of the rank */
  int64_t rows;        /* routed rows that the rank's experts receive */
  int64_t padded_rows; /* with every expert padded to a multiple of 128 */
} uniep_rank_rows;

typedef struct uniep_expert_rows {
  size_t size;
  int64_t rows;      /* routed rows of the expert */
  int64_t first_row; /* where its rows begin on its rank */
} uniep_expert_rows;

UNIEP_API uniep_status uniep_placement_rank(const uniep_placement* placement, int32_t rank, uniep_rank_rows* rows);
UNIEP_API uniep_status uniep_placement_expert(const uniep_placement* placement, int64_t expert,
                                              uniep_expert_rows* rows);

/* What a call needs, one entry per local rank: it asks the allocator for it, but for what its arguments give. */
typedef struct uniep_memory_need {
  size_t size;
  size_t saved_bytes;     /* lives in the uniep_saved that forward makes; saved_memory */
  size_t workspace_bytes; /* given back when the call is over; workspace_memory */
  size_t symmetric_bytes; /* held by the group, shared by all layers, grown when a call needs more */
  size_t pending_bytes;   /* lives in the uniep_pending that a backward with UNIEP_WEIGHT_GRADIENTS_LATER makes */
} uniep_memory_need;

/* The caller's own memory for a call. Arguments have pairs of fields for it, `..._memory` and `..._bytes`. NULL: the
 * allocator's. Else an address on the rank's device that is a multiple of UNIEP_MEMORY_ALIGNMENT, with as many bytes as
 * uniep_query_memory() says, or more. Fewer bytes are UNIEP_OUT_OF_MEMORY, of which the other ranks are told; another
 * alignment is UNIEP_INVALID_ARGUMENT; both say what is needed. It is written and read in the order of the call's
 * stream, is never given back, and may hold anything before. */
enum { UNIEP_MEMORY_ALIGNMENT = 64 };

UNIEP_API uniep_status uniep_query_memory(const uniep_group* group, const uniep_layer_config* config, int32_t direction,
                                          const char* schedule, const uniep_placement* placement,
                                          uniep_memory_need* needs, int32_t count);

/* The same of a forward that keeps something for backward (keep_saved 1, as uniep_query_memory() says) or nothing (0).
 */
UNIEP_API uniep_status uniep_query_forward_memory(const uniep_group* group, const uniep_layer_config* config,
                                                  const char* schedule, const uniep_placement* placement,
                                                  int32_t keep_saved, uniep_memory_need* needs, int32_t count);

/* When a backward's weight gradients are made. No choice changes a bit of any result. */
enum {
  UNIEP_WEIGHT_GRADIENTS_NOW = 0,   /* by the backward itself */
  UNIEP_WEIGHT_GRADIENTS_LATER = 1, /* by uniep_weight_gradients(), from what uniep_backward_pending() leaves */
  UNIEP_WEIGHT_GRADIENTS_NONE = 2   /* never: the experts are frozen */
};

/* The same of a backward whose arguments say these; uniep_query_memory() is told 0 and 0. */
UNIEP_API uniep_status uniep_query_backward_memory(const uniep_group* group, const uniep_layer_config* config,
                                                   const char* schedule, const uniep_placement* placement,
                                                   int32_t weight_gradients, int32_t last_use, uniep_memory_need* needs,
                                                   int32_t count);

/* ---- Forward and backward; El = E / W ---- */

/* What backward needs, one per forward call. */
typedef struct uniep_saved uniep_saved;

/* Weights are one tensor over the rank's experts or, where the array of addresses is given, El tensors. Gate and up may
 * lie apart: with w1_up (or w1_up_experts) w1 (or w1_experts) is the gate alone, and both are one tensor, or both are
 * addresses. x and y may be null on a rank without tokens. */
typedef struct uniep_forward_arguments {
  size_t size;
  const void* x;                 /* [T, H] bf16 */
  const void* w1;                /* [El, 2 I, H] bf16: gate rows, then up rows */
  const void* w2;                /* [El, H, I] bf16 */
  const void* const* w1_experts; /* or El tensors [2 I, H] */
  const void* const* w2_experts; /* or El tensors [H, I] */
  void* y;                       /* [T, H] bf16, written */
  void* stream;
  /* What backward needs, or NULL; see uniep_saved_attach(). This or a workspace that is too small is
   * UNIEP_OUT_OF_MEMORY, of which the other ranks are told. */
  void* saved_memory;
  size_t saved_bytes;
  void* workspace_memory; /* free behind the call, or NULL */
  size_t workspace_bytes;
  const void* w1_up;                /* [El, I, H] bf16, and w1 [El, I, H]; NULL: w1 holds both */
  const void* const* w1_up_experts; /* or El tensors [I, H], and w1_experts the same */
  /* These four with bias 1, else NULL. */
  const void* b1;                /* [El, 2 I] bf16: gate, then up; without a gate [El, I] */
  const void* b2;                /* [El, H] bf16 */
  const void* const* b1_experts; /* or El tensors [2 I] or [I] */
  const void* const* b2_experts; /* or El tensors [H] */
} uniep_forward_arguments;

/* Collective. y[t] = sum over slots k of W2[e] (silu(gate) * up * prob), with [gate, up] = W1[e] x[t]. `saved` may be
 * NULL: then nothing is kept (uniep_query_forward_memory() with keep_saved 0), and no backward can follow. */
UNIEP_API uniep_status uniep_forward(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                     const uniep_placement* placement, const uniep_forward_arguments* arguments,
                                     int32_t count, uniep_saved** saved);
UNIEP_API void uniep_saved_destroy(uniep_saved* saved);

/* A uniep_saved of what a forward wrote into its saved_memory, one address and size a local rank, owning neither it nor
 * the placement; just the bytes that uniep_query_forward_memory() says. The forward had the same group, shape, save.xg,
 * save.z, routing and capacity; the placement may be another one of these, and the bytes may have been copied. Not
 * collective. NULL is legal on a rank that needs no bytes. That an earlier backward with last_use has used the bytes up
 * is not noticed. */
UNIEP_API uniep_status uniep_saved_attach(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                          const uniep_placement* placement, void* const* memory, const size_t* bytes,
                                          int32_t count, uniep_saved** saved);

/* FC1's output on a local rank: [padded_rows, 2 I] bf16, rows of padding hold no meaning, and none does after a
 * backward with last_use; null without rows and with save.z=recompute. It lives as long as `saved`. */
UNIEP_API uniep_status uniep_saved_z(const uniep_saved* saved, int32_t rank, const void** z);

/* Gradients of weights are one tensor over the rank's experts or El addresses, gate and up in one or apart, as the
 * weights are; bf16 or fp32 as weight_gradient says. On cuda gate and up apart are UNIEP_UNSUPPORTED where I is no
 * multiple of 16 and weight gradients are in the launch of dgrad FC1 (fusion=pairs, backward.wgrad=fill). */
typedef struct uniep_backward_arguments {
  size_t size;
  const void* dy; /* [T, H] bf16 */
  const void* x;  /* as in forward; needed only with save.xg=redispatch and weight gradients or save.z=recompute */
  const void* w1;
  const void* w2;
  const void* const* w1_experts;
  const void* const* w2_experts;
  void* dx;      /* [T, H] bf16, written */
  float* dprobs; /* [T, K], written; an unused slot's is +0; of a dense routing [T, E] */
  void* dw1;     /* this and the next three: with UNIEP_WEIGHT_GRADIENTS_NOW only, else ignored */
  void* dw2;
  void* const* dw1_experts;
  void* const* dw2_experts;
  void* stream;
  int32_t weight_gradients; /* UNIEP_WEIGHT_GRADIENTS_..., equal on all ranks */
  int32_t last_use;         /* 0 or 1, equal on all ranks: z becomes dz in its own memory, and `saved` is used up */
  void* workspace_memory;   /* free behind the call, or NULL */
  size_t workspace_bytes;
  void* pending_memory; /* with UNIEP_WEIGHT_GRADIENTS_LATER: of the uniep_pending, or NULL */
  size_t pending_bytes;
  const void* w1_up; /* as in forward */
  const void* const* w1_up_experts;
  void* dw1_up; /* [El, I, H], and dw1 [El, I, H]; NULL: dw1 holds both */
  void* const* dw1_up_experts;
  const void* b2; /* with bias 1, as in forward */
  const void* const* b2_experts;
  void* db1; /* these four as biases are and of dw1's type; with bias 1 and UNIEP_WEIGHT_GRADIENTS_NOW */
  void* db2;
  void* const* db1_experts;
  void* const* db2_experts;
  const void* b1; /* with bias 1 and save.z=recompute, as in forward */
  const void* const* b1_experts;
} uniep_backward_arguments;

/* Collective. `saved` may be used again until a call with last_use. save.xg and save.z of both directions must agree:
 * name them in both schedules or in neither. UNIEP_WEIGHT_GRADIENTS_LATER is UNIEP_INVALID_ARGUMENT here. */
UNIEP_API uniep_status uniep_backward(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                      const uniep_saved* saved, const uniep_backward_arguments* arguments,
                                      int32_t count);

/* What uniep_weight_gradients() needs, one per backward with UNIEP_WEIGHT_GRADIENTS_LATER. Several may be outstanding,
 * to be worked off in any order or destroyed. The `saved` may be destroyed before. A caller's pending_memory, and with
 * save.xg=keep or last_use its saved_memory, is free behind the last uniep_weight_gradients(). */
typedef struct uniep_pending uniep_pending;

/* Collective. uniep_backward() at any of the three times; *pending becomes NULL unless that is later. */
UNIEP_API uniep_status uniep_backward_pending(uniep_group* group, const uniep_layer_config* config,
                                              const char* schedule, const uniep_saved* saved,
                                              const uniep_backward_arguments* arguments, int32_t count,
                                              uniep_pending** pending);
/* NULL is nothing to destroy. */
UNIEP_API void uniep_pending_destroy(uniep_pending* pending);

/* Both gradients, or on all local ranks dw1 alone or dw2 alone: then the addresses of the other are null. */
typedef struct uniep_weight_gradient_arguments {
  size_t size;
  void* dw1;
  void* dw2;
  void* const* dw1_experts;
  void* const* dw2_experts;
  void* stream; /* any; what the backward left is waited for */
  int32_t sms;  /* compute units that work on it at most, 1 to workers; 0: all */
  void* dw1_up; /* as in uniep_backward_arguments */
  void* const* dw1_up_experts;
  void* db1; /* with bias 1: made with dw1, and db2 with dw2 */
  void* db2;
  void* const* db1_experts;
  void* const* db2_experts;
} uniep_weight_gradient_arguments;

/* Makes the weight gradients that a backward left, with the bits of UNIEP_WEIGHT_GRADIENTS_NOW. Not collective. Each
 * gradient of a `pending` is made once: a second time is UNIEP_INVALID_ARGUMENT. Sums in main_grad are in the order of
 * the calls. */
UNIEP_API uniep_status uniep_weight_gradients(uniep_group* group, const uniep_pending* pending,
                                              const uniep_weight_gradient_arguments* arguments, int32_t count);

/* ---- Dispatch and combine alone, for those who bring their own GEMM ---- */

/* The schedule is one of UNIEP_FORWARD; its open fields become what is fastest for the exchange alone. */

/* Arrays may be null on a rank without tokens or rows. */
typedef struct uniep_dispatch_arguments {
  size_t size;
  const void* x;    /* [T, H] bf16 */
  void* rows;       /* [padded_rows, H] bf16, written: every row's copy of its token, padding as zero */
  float* row_probs; /* [padded_rows], written: each row's prob, 0 for padding; or NULL */
  void* stream;
} uniep_dispatch_arguments;

/* Collective. */
UNIEP_API uniep_status uniep_dispatch(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                      const uniep_placement* placement, const uniep_dispatch_arguments* arguments,
                                      int32_t count);

typedef struct uniep_combine_arguments {
  size_t size;
  const void* rows;        /* [padded_rows, H] bf16 */
  void* y;                 /* [T, H] bf16, written: the sum of a token's rows, as combine_groups says */
  const float* row_dprobs; /* [padded_rows], or NULL on all ranks */
  float* dprobs; /* [T, K], written with row_dprobs: each slot's, +0 for an unused one; of a dense routing [T, E] */
  void* stream;
} uniep_combine_arguments;

/* Collective. */
UNIEP_API uniep_status uniep_combine(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                     const uniep_placement* placement, const uniep_combine_arguments* arguments,
                                     int32_t count);

/* ---- Timelines ---- */

/* From here to uniep_trace_end() the group keeps when every tile of its forwards and backwards runs, on the local
 * ranks. Such a call waits for the device, and can not be captured into a graph. Not collective: each process may trace
 * or not. What an earlier uniep_trace_begin() has kept is dropped. */
UNIEP_API uniep_status uniep_trace_begin(uniep_group* group);
/* Writes the calls that ended well, one after the other, as a timeline for Perfetto, chrome://tracing and `uniep
 * trace`. Nothing is kept any more, also where the file can not be written (UNIEP_IO). */
UNIEP_API uniep_status uniep_trace_end(uniep_group* group, const char* path);

/* ---- Times: where a call's time went, without a wait ---- */

/* uniep::CallTimer. It does not keep its group alive, and may be read after the group's end. */
typedef struct uniep_timer uniep_timer;

/* On the cuda engine it takes page-locked memory: in a job make it before, or once and for all. */
UNIEP_API uniep_status uniep_timer_create(uniep_group* group, uniep_timer** timer);
UNIEP_API void uniep_timer_destroy(uniep_timer* timer);
/* The group's next forward or backward is timed, unless it is captured into a graph or fails. Of several timers the
 * last one counts. Not collective. */
UNIEP_API uniep_status uniep_timer_start(uniep_timer* timer);

enum {
  UNIEP_TIMES_NOT_YET = 0, /* no call was timed, or the device has not finished the newest one */
  UNIEP_TIMES_KNOWN = 1,
  UNIEP_TIMES_LOST = 2 /* it is over; a worker ran more than the 1,024 tiles that are kept of it */
};

/* Of a local rank in the newest call that was timed; milliseconds, as uniep::CallTimes has them. 0 unless known. */
typedef struct uniep_call_times {
  size_t size;
  int32_t state;              /* UNIEP_TIMES_... */
  double exposed_dispatch_ms; /* what the first GEMM waited for rows: the mean over workers */
  double sum_ms;              /* from the last GEMM tile's end until the last sum's */
  double wait_ms;             /* exposed_dispatch_ms, and of sum_ms what sums waited for rows */
} uniep_call_times;

/* Waits for nothing, for no other call of the group either. */
UNIEP_API uniep_status uniep_timer_read(const uniep_timer* timer, int32_t rank, uniep_call_times* times);

/* ---- Verifier: a GPU that computes wrongly is found (uniep/verifier.h). Groups with all ranks in this process ---- */

typedef struct uniep_verifier uniep_verifier;

typedef struct uniep_verifier_options {
  size_t size;
  int64_t every;             /* steps from one check to the next, at least; 0: 100 */
  double budget;             /* of the time of all steps that checks may take; 0: 0.001; 1 or more: no bound */
  const char* folder;        /* where a finding's inputs are written; NULL: nowhere */
  uint64_t seed;             /* of the order of experts and Schedules; 0: 1 */
  const char* const* layers; /* names of those that are checked; NULL: all */
  int32_t layer_count;
} uniep_verifier_options;

/* The values of uniep::FindingKind. */
enum {
  UNIEP_FINDING_WRONG_RANK = 0,
  UNIEP_FINDING_UNDECIDED = 1,
  UNIEP_FINDING_CHANGED_MEMORY = 2,
  UNIEP_FINDING_CHANGED_INPUTS = 3,
  UNIEP_FINDING_REPLAYED = 4,
  UNIEP_FINDING_NOT_FINITE = 5,
  UNIEP_FINDING_OWN_BUG = 6
};

/* Texts are valid until the next uniep_verifier_end_step(). */
typedef struct uniep_finding {
  size_t size;
  int32_t kind;      /* UNIEP_FINDING_... */
  int32_t direction; /* UNIEP_FORWARD, UNIEP_BACKWARD */
  int32_t rank;      /* -1: none, or not known */
  int64_t expert;    /* global; -1: none */
  int64_t row, column, tiles;
  const char* layer;
  const char* tensor;
  const char* file;    /* "": none */
  const char* message; /* one line that says all of this */
} uniep_finding;

/* `options` may be NULL: the defaults. The verifier keeps the group. */
UNIEP_API uniep_status uniep_verifier_create(uniep_group* group, const uniep_verifier_options* options,
                                             uniep_verifier** verifier);
/* NULL is nothing to destroy. */
UNIEP_API void uniep_verifier_destroy(uniep_verifier* verifier);
/* Directly behind uniep_forward(), with what it was given; `saved` may be NULL. Where the call is the one to check, the
 * arrays stay as they are until uniep_verifier_end_step(). */
UNIEP_API uniep_status uniep_verifier_after_forward(uniep_verifier* verifier, const char* layer,
                                                    const uniep_layer_config* config, const char* schedule,
                                                    const uniep_routing* routings,
                                                    const uniep_forward_arguments* arguments, int32_t count,
                                                    const uniep_saved* saved);
/* Before uniep_backward() with UNIEP_WEIGHT_GRADIENT_MAIN_GRAD. */
UNIEP_API uniep_status uniep_verifier_before_backward(uniep_verifier* verifier, const char* layer,
                                                      const uniep_layer_config* config,
                                                      const uniep_backward_arguments* arguments, int32_t count);
/* Directly behind uniep_backward(); x has to be there. */
UNIEP_API uniep_status uniep_verifier_after_backward(uniep_verifier* verifier, const char* layer,
                                                     const uniep_layer_config* config, const char* schedule,
                                                     const uniep_routing* routings,
                                                     const uniep_backward_arguments* arguments, int32_t count);
/* Ends a step, and makes the check that is due. *findings: how many there are. */
UNIEP_API uniep_status uniep_verifier_end_step(uniep_verifier* verifier, int32_t* findings);
/* Of the latest step: index 0 to findings - 1. */
UNIEP_API uniep_status uniep_verifier_finding(const uniep_verifier* verifier, int32_t index, uniep_finding* finding);

#ifdef __cplusplus
}
#endif

#include "uniep/c_tuner.h"
