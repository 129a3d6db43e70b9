#pragma once

#include <stddef.h>
#include <stdint.h>

#include "uniep/c_error.h"
#include "uniep/c_group.h"
#include "uniep/export.h"

/* The layer (uniep/layer.h, uniep/numerics.h, uniep/schedule.h). Conventions: uniep/c_api.h. */

#ifdef __cplusplus
extern "C" {
#endif

/* uniep/numerics.h says what each computes. RELU2 and SILU have no gate: there w1 and dw1 are [.., I, H]. */
enum {
  UNIEP_ACTIVATION_SWIGLU = 0,
  UNIEP_ACTIVATION_GEGLU_TANH = 1,
  UNIEP_ACTIVATION_GEGLU_ERF = 2,
  UNIEP_ACTIVATION_RELU2 = 3,
  UNIEP_ACTIVATION_SILU = 4
};
enum { UNIEP_ROUTER_WEIGHT_ACTIVATION = 0, UNIEP_ROUTER_WEIGHT_OUTPUT = 1, UNIEP_ROUTER_WEIGHT_INPUT = 2 };
/* Written as bf16, written as fp32, or added to the fp32 values that are there. */
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
  int32_t weight_gradient; /* UNIEP_WEIGHT_GRADIENT_... */
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
 * but its size. */
UNIEP_API uniep_status uniep_set_activation(uniep_layer_config* config, const char* text);

/* Schedules are text: "auto", "key=value,key=value" or flat JSON, with the fields of docs/schedule.md; what is left out
 * is filled for the layer and the group. A Schedule describes one direction. It changes no bit of a result. One that is
 * not legal is UNIEP_INVALID_ARGUMENT, and UNIEP_UNSUPPORTED where the engine has no kernel for it. */
enum { UNIEP_FORWARD = 0, UNIEP_BACKWARD = 1 };

/* Writes the whole Schedule that `schedule` stands for as JSON, with a terminating zero; *needed becomes its bytes, the
 * zero included, also where the buffer is too small (UNIEP_OVERFLOW, nothing is written). Buffer NULL and capacity 0
 * asks for the bytes only. */
UNIEP_API uniep_status uniep_schedule_resolve(const uniep_group* group, const uniep_layer_config* config,
                                              int32_t direction, const char* schedule, char* buffer, size_t capacity,
                                              size_t* needed);

/* Compiles what calls of these Schedules launch and the cache lacks, so many kernels at once (0: one a processor),
 * before the first of them would do so one by one; on cpu nothing. Not collective; loads nothing. A Schedule that the
 * engine has no kernel for is left out. UNIEP_INVALID_ARGUMENT: a Schedule is not legal. */
UNIEP_API uniep_status uniep_compile(const uniep_group* group, const uniep_layer_config* config, int32_t direction,
                                     const char* const* schedules, int32_t count, int32_t threads);

/* What `uniep tune` has found for the group's machine and ranks, as --export writes it, whatever the layer and T: of
 * `file`, or with NULL of the cache in UNIEP_CACHE_DIR (else $XDG_CACHE_HOME/uniep, else ~/.cache/uniep). Without
 * entries for given fields or another routing, and those that are not legal or have no kernel now. Not collective.
 * Buffer, capacity and *needed as above. UNIEP_IO or UNIEP_INVALID_ARGUMENT: `file` is none. */
UNIEP_API uniep_status uniep_tuned_schedules(const uniep_group* group, const char* file, char* buffer, size_t capacity,
                                             size_t* needed);

/* Where each (token, slot) pair lands. Immutable, and shared by forward and backward. */
typedef struct uniep_placement uniep_placement;

enum { UNIEP_INDEX_INT32 = 0, UNIEP_INDEX_INT64 = 1 };

/* One rank's router output. */
typedef struct uniep_routing {
  size_t size;
  int64_t tokens;       /* T, may differ from rank to rank and may be 0; then the arrays may be null */
  const void* topk_ids; /* [T, K] global expert of a slot, -1 = unused; no expert twice in a token */
  int32_t index_type;   /* UNIEP_INDEX_... */
  const float* probs;   /* [T, K], finite; an unused slot's is ignored */
  void* stream;
  /* Dense routing, with topk_ids NULL: [T, E], a byte for each expert, not 0 where the token goes to it. probs is then
   * [T, E], too, and ignored where the map is 0. A token's slots are its experts, ascending; more than K are refused.
   * uniep_backward() and uniep_combine() with such a placement write dprobs [T, E], +0 where the map is 0. */
  const uint8_t* routing_map;
} uniep_routing;

/* Fixed memory instead of memory by need, equal on all ranks; more is UNIEP_OVERFLOW. On GPUs uniep_place() then does
 * not wait for them: asking for rows does, and what is wrong with a routing is told there or by a later call. Such
 * calls may be captured into a CUDA graph. */
typedef struct uniep_capacity {
  size_t size;
  int64_t rows;   /* padded rows of any rank, at most; 0: by need */
  int64_t tokens; /* T of any rank, at most; needed with a process a rank, else 0 stands for any number */
} uniep_capacity;

/* Collective. `capacity` may be NULL: by need. Of `config` only the shape is used. Ids out of range, an expert twice in
 * a token and probs that are not finite are UNIEP_INVALID_ARGUMENT. */
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

/* Of any rank, and of a global expert. Both wait for the placement. */
UNIEP_API uniep_status uniep_placement_rank(const uniep_placement* placement, int32_t rank, uniep_rank_rows* rows);
UNIEP_API uniep_status uniep_placement_expert(const uniep_placement* placement, int64_t expert,
                                              uniep_expert_rows* rows);

/* A rank's weights, for uniep_forward() and uniep_backward() alike; El = E / W. Each is one tensor over the rank's
 * experts or, where the array of addresses is given, El tensors. Gate and up may lie apart: with w1_up (or
 * w1_up_experts) w1 (or w1_experts) is the gate alone, and both are one tensor, or both are addresses. How weights are
 * given changes no bit. */
typedef struct uniep_weights {
  size_t size;
  const void* w1;                   /* [El, 2 I, H] bf16: gate rows, then up rows; with w1_up [El, I, H] */
  const void* w2;                   /* [El, H, I] bf16 */
  const void* const* w1_experts;    /* or El tensors [2 I, H] or [I, H] */
  const void* const* w2_experts;    /* or El tensors [H, I] */
  const void* w1_up;                /* [El, I, H] bf16; NULL: w1 holds both */
  const void* const* w1_up_experts; /* or El tensors [I, H] */
  /* Biases, with bias 1, else NULL. b1 lies in one where gate and up of w1 are apart, too. uniep_backward() reads it
   * with save.z=recompute alone. */
  const void* b1;                /* [El, 2 I] bf16: gate, then up; without a gate [El, I] */
  const void* b2;                /* [El, H] bf16 */
  const void* const* b1_experts; /* or El tensors [2 I] or [I] */
  const void* const* b2_experts; /* or El tensors [H] */
} uniep_weights;

/* Where a rank's weight gradients go: bf16 or fp32, as weight_gradient says, in the shapes of uniep_weights, though not
 * necessarily in one or apart as the weights of the same call are. Every local expert gets one; zero rows give zeros.
 * On cuda gate and up apart are UNIEP_UNSUPPORTED where I is no multiple of 16 and weight gradients are in the launch
 * of dgrad FC1 (fusion=pairs, backward.wgrad=fill). */
typedef struct uniep_weight_gradients {
  size_t size;
  void* dw1;
  void* dw2;
  void* const* dw1_experts;
  void* const* dw2_experts;
  void* dw1_up;
  void* const* dw1_up_experts;
  /* With bias 1, else NULL. db1 is made with dw1, and db2 with dw2. */
  void* db1;
  void* db2;
  void* const* db1_experts;
  void* const* db2_experts;
} uniep_weight_gradients;

/* Memory that the caller has for a call and keeps. data NULL: the allocator's. Else an address on the rank's device
 * that is a multiple of UNIEP_MEMORY_ALIGNMENT, with as many bytes as a query below says, or more. Fewer are
 * UNIEP_OUT_OF_MEMORY, of which the other ranks are told; another alignment is UNIEP_INVALID_ARGUMENT; both say what is
 * needed. It is used in the order of the call's stream, and may hold anything before. */
typedef struct uniep_caller_memory {
  void* data;
  size_t bytes;
} uniep_caller_memory;
enum { UNIEP_MEMORY_ALIGNMENT = 64 };

/* What a call needs on a local rank: it asks the allocator for one block each, but for what its arguments give. */
typedef struct uniep_memory_need {
  size_t size;
  size_t saved_bytes;     /* lives in the uniep_saved that forward makes; saved_memory */
  size_t workspace_bytes; /* given back when the call is over; workspace_memory */
  size_t symmetric_bytes; /* held by the group, shared by all layers, grown when a call needs more */
  size_t pending_bytes;   /* lives in the uniep_pending that backward makes; pending_memory */
} uniep_memory_need;

/* When a backward's weight gradients are made. No choice changes a bit of any result. */
enum {
  UNIEP_WEIGHT_GRADIENTS_NOW = 0,   /* by uniep_backward() itself */
  UNIEP_WEIGHT_GRADIENTS_LATER = 1, /* by uniep_make_weight_gradients(), from the uniep_pending */
  UNIEP_WEIGHT_GRADIENTS_NONE = 2   /* never: the experts are frozen */
};

/* Writes needs[count]: of a forward that keeps something for backward (keep_saved 1) or nothing (0). */
UNIEP_API uniep_status uniep_query_forward_memory(const uniep_group* group, const uniep_layer_config* config,
                                                  const char* schedule, const uniep_placement* placement,
                                                  int32_t keep_saved, uniep_memory_need* needs, int32_t count);
/* Of a backward whose arguments have this weight_gradients and last_use. */
UNIEP_API uniep_status uniep_query_backward_memory(const uniep_group* group, const uniep_layer_config* config,
                                                   const char* schedule, const uniep_placement* placement,
                                                   int32_t weight_gradients, int32_t last_use, uniep_memory_need* needs,
                                                   int32_t count);

typedef struct uniep_forward_arguments {
  size_t size;
  const void* x; /* [T, H] bf16; may be null, as y, on a rank without tokens */
  const uniep_weights* weights;
  void* y; /* [T, H] bf16, written */
  void* stream;
  uniep_caller_memory saved_memory;     /* stays as it is until the saved state's last use (uniep_saved_attach()) */
  uniep_caller_memory workspace_memory; /* free after the call */
} uniep_forward_arguments;

/* What backward needs, one per forward call; several may be outstanding, in any order. */
typedef struct uniep_saved uniep_saved;

/* Collective. y[t] = sum over slots k of W2[e] (silu(gate) * up * prob), with [gate, up] = W1[e] x[t]; other
 * activations, biases and places of prob as `config` says. `saved` may be NULL: then nothing is kept, and no backward
 * can follow. */
UNIEP_API uniep_status uniep_forward(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                     const uniep_placement* placement, const uniep_forward_arguments* arguments,
                                     int32_t count, uniep_saved** saved);
UNIEP_API void uniep_saved_destroy(uniep_saved* saved);

/* A uniep_saved of what a forward wrote into its saved_memory, owning neither it nor the placement; just the bytes that
 * uniep_query_forward_memory() says. The forward had the same group, shape, save.xg, save.z, routing and capacity; the
 * placement may be another one of these, and the bytes may have been copied. Not collective. data NULL is legal on a
 * rank that needs no bytes. That an earlier backward with last_use has used the bytes up is not noticed. */
UNIEP_API uniep_status uniep_saved_attach(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                          const uniep_placement* placement, const uniep_caller_memory* memory,
                                          int32_t count, uniep_saved** saved);

/* FC1's output on a local rank: [padded_rows, 2 I] bf16, without a gate [padded_rows, I]; rows of padding hold no
 * meaning, and none does after a backward with last_use; null without rows and with save.z=recompute. It lives as long
 * as `saved`. */
UNIEP_API uniep_status uniep_saved_z(const uniep_saved* saved, int32_t rank, const void** z);

typedef struct uniep_backward_arguments {
  size_t size;
  const void* dy; /* [T, H] bf16; may be null, as x, dx and dprobs, on a rank without tokens */
  const void* x;  /* as in forward; needed only with save.xg=redispatch and weight gradients or save.z=recompute */
  const uniep_weights* weights;
  void* dx;                                /* [T, H] bf16, written */
  float* dprobs;                           /* [T, K], written; an unused slot's is +0; of a dense routing [T, E] */
  const uniep_weight_gradients* gradients; /* with UNIEP_WEIGHT_GRADIENTS_NOW; else ignored and may be null */
  void* stream;
  int32_t weight_gradients; /* UNIEP_WEIGHT_GRADIENTS_..., equal on all ranks */
  int32_t last_use;         /* 0 or 1, equal on all ranks: z becomes dz in its own memory, and `saved` is used up */
  uniep_caller_memory workspace_memory; /* free after the call */
  uniep_caller_memory pending_memory;   /* with UNIEP_WEIGHT_GRADIENTS_LATER: of the uniep_pending */
} uniep_backward_arguments;

/* What uniep_make_weight_gradients() needs, one per backward with UNIEP_WEIGHT_GRADIENTS_LATER. Several may be
 * outstanding, to be worked off in any order or destroyed. The `saved` may be destroyed before. A caller's
 * pending_memory, and with save.xg=keep or last_use its saved_memory, is free after the last
 * uniep_make_weight_gradients(). */
typedef struct uniep_pending uniep_pending;

/* Collective. `saved` may be used again until a call with last_use. save.xg and save.z of both directions must agree:
 * name them in both schedules or in neither. *pending becomes the work that is left with UNIEP_WEIGHT_GRADIENTS_LATER,
 * else NULL; without that time `pending` may be NULL. */
UNIEP_API uniep_status uniep_backward(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                      const uniep_saved* saved, const uniep_backward_arguments* arguments,
                                      int32_t count, uniep_pending** pending);
UNIEP_API void uniep_pending_destroy(uniep_pending* pending);

typedef struct uniep_weight_gradient_arguments {
  size_t size;
  const uniep_weight_gradients* gradients; /* both, or on all local ranks those of w1 alone or of w2 alone */
  void* stream;                            /* any; what the backward left is waited for */
  int32_t sms; /* compute units (on cuda SMs) that work on it at most, 1 to workers; 0: all */
} uniep_weight_gradient_arguments;

/* weight_gradients() of C++: makes what a backward left, with the bits of UNIEP_WEIGHT_GRADIENTS_NOW. Not collective.
 * Each gradient of a `pending` is made once: a second time is UNIEP_INVALID_ARGUMENT. Where they are added, sums are in
 * the order of the calls. */
UNIEP_API uniep_status uniep_make_weight_gradients(uniep_group* group, const uniep_pending* pending,
                                                   const uniep_weight_gradient_arguments* arguments, int32_t count);

#ifdef __cplusplus
}
#endif
