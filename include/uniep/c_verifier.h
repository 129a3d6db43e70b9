#pragma once

#include <stddef.h>
#include <stdint.h>

#include "uniep/c_error.h"
#include "uniep/c_group.h"
#include "uniep/c_layer.h"
#include "uniep/export.h"

/* The verifier: a GPU that computes wrongly is found (uniep/verifier.h). Conventions: uniep/c_api.h. */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct uniep_verifier uniep_verifier;

typedef struct uniep_verifier_options {
  size_t size;
  int64_t every;             /* steps from one check to the next, at least; 0: 100 */
  double budget;             /* of the time of all steps that checks may take; 0: 0.001; 1 or more: no bound */
  const char* const* layers; /* names of those that are checked; NULL and 0: all */
  int32_t layer_count;
  const char* folder; /* where a finding's inputs are written; NULL: nowhere */
  uint64_t seed;      /* of the order of layers, experts and Schedules; 0: 1 */
} uniep_verifier_options;

/* The values of uniep::FindingKind. */
enum {
  UNIEP_FINDING_WRONG_RANK = 0,     /* `rank` computed wrongly: two other runs agree against it */
  UNIEP_FINDING_UNDECIDED = 1,      /* one of several ranks did; the message names them */
  UNIEP_FINDING_CHANGED_MEMORY = 2, /* a few tiles of one input changed in the memory of `rank` after the call */
  UNIEP_FINDING_CHANGED_INPUTS = 3, /* inputs were written after the call: no verdict */
  UNIEP_FINDING_REPLAYED = 4,       /* inputs and results were, as by a replay of a graph: no verdict */
  UNIEP_FINDING_NOT_FINITE = 5,     /* a result holds NaN or infinities, the same ones in all runs: no rank is wrong */
  UNIEP_FINDING_OWN_BUG = 6         /* the runs disagree on all ranks, or by Schedule: a fault of the library */
};

/* Texts are valid until the next uniep_verifier_end_step(), and never null. */
typedef struct uniep_finding {
  size_t size;
  int32_t kind;        /* UNIEP_FINDING_... */
  int32_t direction;   /* UNIEP_FORWARD, UNIEP_BACKWARD */
  int32_t rank;        /* -1: none, or not known */
  int64_t expert;      /* global; -1: none */
  int64_t row;         /* of the first wrong tile: one row of the tensor, */
  int64_t column;      /* and 128 columns from this one on */
  int64_t tiles;       /* that differ */
  const char* layer;   /* as uniep_verifier_after_forward() was given it */
  const char* tensor;  /* "y", "z", "o" (an expert's rows on their way back), "dx", "dprobs", "dw1", "dw2", ... */
  const char* file;    /* the inputs, for `uniep run --tensors`; "": none */
  const char* message; /* one line that says all of this */
} uniep_finding;

/* `options` may be NULL: the defaults. Of a group with all ranks in this process, which the verifier keeps alive; else
 * UNIEP_UNSUPPORTED. It is told of all calls, of its group alone. */
UNIEP_API uniep_status uniep_verifier_create(uniep_group* group, const uniep_verifier_options* options,
                                             uniep_verifier** verifier);
UNIEP_API void uniep_verifier_destroy(uniep_verifier* verifier);
/* Directly after uniep_forward(), with what it was given; `saved` may be NULL. Where the call is the one to check, all
 * arrays, those of addresses too, stay as they are until uniep_verifier_end_step(). */
UNIEP_API uniep_status uniep_verifier_after_forward(uniep_verifier* verifier, const char* layer,
                                                    const uniep_layer_config* config, const char* schedule,
                                                    const uniep_routing* routings,
                                                    const uniep_forward_arguments* arguments, int32_t count,
                                                    const uniep_saved* saved);
/* Before uniep_backward() with UNIEP_WEIGHT_GRADIENT_MAIN_GRAD: keeps what one expert's gradients hold. Without it they
 * are not compared. */
UNIEP_API uniep_status uniep_verifier_before_backward(uniep_verifier* verifier, const char* layer,
                                                      const uniep_layer_config* config,
                                                      const uniep_backward_arguments* arguments, int32_t count);
/* Directly after uniep_backward(); x has to be there. Weight gradients that it did not make itself are not compared.
 */
UNIEP_API uniep_status uniep_verifier_after_backward(uniep_verifier* verifier, const char* layer,
                                                     const uniep_layer_config* config, const char* schedule,
                                                     const uniep_routing* routings,
                                                     const uniep_backward_arguments* arguments, int32_t count);
/* Ends a step, while arrays and weights are still those of the step, and makes the check that is due. *findings: how
 * many there are. Fails as the calls of the layer do, but for lack of memory, which skips the check. */
UNIEP_API uniep_status uniep_verifier_end_step(uniep_verifier* verifier, int32_t* findings);
/* Writes one of the latest step: index 0 to findings - 1. */
UNIEP_API uniep_status uniep_verifier_finding(const uniep_verifier* verifier, int32_t index, uniep_finding* finding);

#ifdef __cplusplus
}
#endif
