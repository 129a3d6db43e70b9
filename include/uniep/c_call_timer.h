#pragma once

#include <stddef.h>
#include <stdint.h>

#include "uniep/c_error.h"
#include "uniep/c_group.h"
#include "uniep/export.h"

/* Where a call's time went, without a wait (uniep/call_timer.h). Conventions: uniep/c_api.h. */

#ifdef __cplusplus
extern "C" {
#endif

/* Does not keep its group alive, and may be read after the group's end. */
typedef struct uniep_timer uniep_timer;

/* On the cuda engine it takes page-locked memory: in a job make it before, or once and for all. */
UNIEP_API uniep_status uniep_timer_create(uniep_group* group, uniep_timer** timer);
UNIEP_API void uniep_timer_destroy(uniep_timer* timer);
/* The group's next forward or backward is timed, unless it fails; one that is captured into a graph in each replay, by
 * a timer of its own. Of several timers the last one counts. Not collective. UNIEP_INVALID_ARGUMENT once the group is
 * destroyed. */
UNIEP_API uniep_status uniep_timer_start(uniep_timer* timer);

enum {
  UNIEP_TIMES_NOT_YET = 0, /* no call was timed, or the device has not finished the newest one, or is writing times */
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
  double call_ms;             /* from the first wait for a tile's inputs until the last tile's end */
  uint32_t runs;              /* 1, or how many replays of a graph were timed (modulo 2^32) */
} uniep_call_times;

/* Writes *times. Waits for nothing, for no other call of the group either. */
UNIEP_API uniep_status uniep_timer_read(const uniep_timer* timer, int32_t rank, uniep_call_times* times);

#ifdef __cplusplus
}
#endif
