#pragma once

#include <stddef.h>
#include <stdint.h>

#include "uniep/c_error.h"
#include "uniep/c_group.h"
#include "uniep/c_layer.h"
#include "uniep/export.h"

/* Dispatch and combine alone, for those who bring their own GEMM: rows to their experts and back, on a placement
 * (uniep/exchange.h). Both are collective and queued as uniep_forward() is, and fail as it does. The schedule is one of
 * UNIEP_FORWARD; its open fields become what is fastest for the exchange alone. R = padded_rows of uniep_rank_rows, or
 * the placement's capacity. Arrays may be null on a rank without tokens or rows. Conventions: uniep/c_api.h. */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct uniep_dispatch_arguments {
  size_t size;
  const void* x;    /* [T, H] bf16 */
  void* rows;       /* [R, H] bf16, written: every row's copy of its token, padding as zero */
  float* row_probs; /* [R], written: each row's prob, 0 for padding; or NULL */
  void* stream;
} uniep_dispatch_arguments;

UNIEP_API uniep_status uniep_dispatch(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                      const uniep_placement* placement, const uniep_dispatch_arguments* arguments,
                                      int32_t count);

typedef struct uniep_combine_arguments {
  size_t size;
  const void* rows; /* [R, H] bf16 */
  void* y;          /* [T, H] bf16, written: the sum of a token's rows, as combine_groups says */
  /* [R], or NULL on all ranks; by need a rank without tokens and rows may give neither this nor dprobs. */
  const float* row_dprobs;
  float* dprobs; /* [T, K], written with row_dprobs: each slot's, +0 for an unused one; of a dense routing [T, E] */
  void* stream;
} uniep_combine_arguments;

UNIEP_API uniep_status uniep_combine(uniep_group* group, const uniep_layer_config* config, const char* schedule,
                                     const uniep_placement* placement, const uniep_combine_arguments* arguments,
                                     int32_t count);

#ifdef __cplusplus
}
#endif
