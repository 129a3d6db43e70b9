#pragma once

#include <stddef.h>
#include <stdint.h>

#include "uniep/c_error.h"
#include "uniep/c_group.h"
#include "uniep/c_layer.h"
#include "uniep/export.h"

/* The tuner: other Schedules are tried while a job runs, and no result changes by a bit (uniep/tuner.h). Conventions:
 * uniep/c_api.h. */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct uniep_tuner uniep_tuner;

/* Layers that are alike: all calls of one are compared with each other. */
typedef struct uniep_tuner_layer {
  size_t size;
  const uniep_layer_config* config;
  int64_t tokens; /* the largest T of any rank, about; up to 2^40 */
  /* What the job would run without a tuner; the fields that are named stay as they are. NULL: "auto". */
  const char* forward;
  const char* backward;
} uniep_tuner_layer;

/* What a candidate's first call has shown, on inputs that are not the job's. */
typedef struct uniep_tuner_check {
  size_t size;
  int32_t equal;       /* 1: all bytes are those of the incumbent */
  double milliseconds; /* that the check took */
  /* Why it is no candidate here, or with a status that is not UNIEP_OK what failed; NULL: it is one. It stays valid
   * until the next check. */
  const char* refused;
} uniep_tuner_check;

/* The functions are called by the thread that calls the tuner, inside of its calls: check() in
 * uniep_tuner_begin_round() alone; give() and take() in uniep_tuner_create(), _step() and _begin_round() alone, which a
 * status of theirs that is not UNIEP_OK ends with that status; log() in these three and in _schedule_to_keep(),
 * _failed(), _freeze() and _destroy(). */
typedef struct uniep_tuner_options {
  size_t size;
  const uniep_tuner_layer* layers;
  int32_t layer_count;
  /* Of the processes that call the layers together, and how many these are; a process may hold all ranks of a group. 0
   * and 0: what the group is, with a process a rank its rank and ranks, else 0 and 1. Of several processes with a group
   * of one rank each the longest time of a call counts, since none waits for another; else the shortest. */
  int32_t rank;
  int32_t ranks;
  void* context;
  /* Runs a candidate and the incumbent, whole Schedules as text, once on the layer's own shapes, on inputs and into
   * outputs of its own, and compares all bytes. Collective. Needed. */
  uniep_status (*check)(void* context, int32_t layer, int32_t direction, const char* candidate, const char* incumbent,
                        uniep_tuner_check* result);
  /* With several ranks both or neither. Neither: they exchange over the group's own connection, as
   * make_tuner_exchange() of uniep/tuner.h does; then `rank` and `ranks` are the group's. give() hands `bytes` to all
   * ranks under a number that counts 0, 1, 2, ... on all alike, and does not wait; ranks may give different amounts, 1
   * MiB at most. take() calls put() once for each rank, in rank order, with what it gave under the number; it waits for
   * those that have not yet, but not for ever. */
  uniep_status (*give)(void* context, int64_t number, const void* bytes, size_t size);
  uniep_status (*take)(void* context, int64_t number, void* sink,
                       void (*put)(void* sink, const void* bytes, size_t size));
  void (*log)(void* context, const char* line); /* or NULL */
  const char* folder;                           /* where rank 0 keeps what was found and what failed; NULL: nowhere */
  const char* machine_name; /* what entries of the folder are for, beside the library; needed with a folder */
  double budget;            /* time lost to trying, as a share of the time in layers; 0: 0.005 */
  int64_t until;            /* the step after which nothing changes; 0: no such step */
  int32_t batch;            /* candidates of a round, up to 64; 0: 4 */
  int32_t job_group;        /* groups of one job that call layers of the same kind: which one this is, */
  int32_t job_groups;       /* and how many there are; 0: 1 */
} uniep_tuner_options;

/* Collective. The tuner keeps the group, and has it compile kernels in the background; it makes no calls on it, but for
 * the exchange where options leave that to the group. */
UNIEP_API uniep_status uniep_tuner_create(uniep_group* group, const uniep_tuner_options* options, uniep_tuner** tuner);
UNIEP_API void uniep_tuner_destroy(uniep_tuner* tuner);

/* One call. The text is valid as long as the tuner lives. */
typedef struct uniep_tuner_call {
  size_t size;
  const char* schedule;
  uint64_t number;
  int32_t layer;
  int32_t direction;
  int32_t timed;        /* uniep_tuner_measured() is waited for; of other calls that did not fail nothing is taken */
  int32_t of_candidate; /* 0: of what the job runs meanwhile */
} uniep_tuner_call;

/* What the next call of a layer runs under. All ranks make the same calls in the same order. */
UNIEP_API uniep_status uniep_tuner_schedule(uniep_tuner* tuner, int32_t layer, int32_t direction,
                                            uniep_tuner_call* call);
/* For a call that is captured into a graph and keeps its Schedule. Not counted. */
UNIEP_API uniep_status uniep_tuner_schedule_to_keep(uniep_tuner* tuner, int32_t layer, int32_t direction,
                                                    const char** schedule);
/* The time of a call on this process's ranks, up to the end of the step after its own; routed rows of the busiest rank
 * and in the mean over ranks, 0 where the host does not know them. A call that nobody reports counts as hung. */
UNIEP_API uniep_status uniep_tuner_measured(uniep_tuner* tuner, const uniep_tuner_call* call, double milliseconds,
                                            double busiest_rows, double mean_rows);
/* It ended in an error, timed or not. The candidate is out on all ranks, two steps later; an incumbent is out for good,
 * and the one before it is back, unless it is what the layer was given. */
UNIEP_API uniep_status uniep_tuner_failed(uniep_tuner* tuner, const uniep_tuner_call* call, const char* reason);
/* It has no time, by no fault of its Schedule: it returned an earlier call's error, say, or was not made. Its pair is
 * lost, whatever other ranks say of the call, and nothing else. Nor does an incumbent go out for what failed on other
 * ranks in the same step, who may have waited for this one. */
UNIEP_API uniep_status uniep_tuner_not_measured(uniep_tuner* tuner, const uniep_tuner_call* call);
/* Collective: a step ends. Never loads or compiles anything. After an error the tuner is frozen. */
UNIEP_API uniep_status uniep_tuner_step(uniep_tuner* tuner);
/* Collective: picks the next candidates and checks each, where there are any to be checked. Call it where the device is
 * idle: it loads kernels, by way of the check. Those that are not compiled yet are compiled in the background. */
UNIEP_API uniep_status uniep_tuner_begin_round(uniep_tuner* tuner);
/* From here on the incumbents stay. Collective. */
UNIEP_API uniep_status uniep_tuner_freeze(uniep_tuner* tuner);

typedef struct uniep_tuner_state {
  size_t size;
  int64_t steps; /* that have ended */
  int32_t frozen;
  int32_t wants_round; /* whether begin_round() has something to do; equal on all ranks */
  int32_t decisions;
  double layers_milliseconds; /* of all calls */
  double lost_milliseconds;   /* by candidates that were slower, and by their checks */
  int64_t tried_calls;        /* that ran under a candidate */
} uniep_tuner_state;

UNIEP_API uniep_status uniep_tuner_describe(const uniep_tuner* tuner, uniep_tuner_state* state);
/* What runs now. The text is valid as long as the tuner lives. */
UNIEP_API uniep_status uniep_tuner_incumbent(uniep_tuner* tuner, int32_t layer, int32_t direction,
                                             const char** schedule);

/* A line of the log. Texts are valid until the next call of the tuner. */
typedef struct uniep_tuner_decision {
  size_t size;
  int64_t step;
  int32_t layer;
  int32_t direction;
  int32_t pairs;
  double ratio;        /* its time over the incumbent's, the median of pairs; 0: none was measured */
  const char* verdict; /* "taken", "slower", "failed", "wrong", "refused" */
  const char* schedule;
  const char* reason;
} uniep_tuner_decision;

/* Index 0 to decisions - 1. */
UNIEP_API uniep_status uniep_tuner_get_decision(uniep_tuner* tuner, int32_t index, uniep_tuner_decision* decision);

/* What this group has measured, as bytes for the job's other groups; *needed as in uniep_schedule_resolve(). */
UNIEP_API uniep_status uniep_tuner_results(const uniep_tuner* tuner, void* buffer, size_t capacity, size_t* needed);
/* What another group has measured. Bytes that are no result are UNIEP_INVALID_ARGUMENT. */
UNIEP_API uniep_status uniep_tuner_add_results(uniep_tuner* tuner, const void* bytes, size_t size);

#ifdef __cplusplus
}
#endif
