#pragma once

#include "uniep/c_error.h"
#include "uniep/c_group.h"
#include "uniep/export.h"

/* Timelines of calls. Conventions: uniep/c_api.h. */

#ifdef __cplusplus
extern "C" {
#endif

/* From here to uniep_trace_end() the group keeps when every tile of its forwards and backwards runs, on the local
 * ranks. Such a call waits for the device, and can not be captured into a graph. Not collective: each process may trace
 * or not. What an earlier uniep_trace_begin() has kept is dropped. */
UNIEP_API uniep_status uniep_trace_begin(uniep_group* group);
/* Writes the calls that ended well, one after the other, as a timeline for Perfetto, chrome://tracing and `uniep
 * trace`. Nothing is kept any more, also where the file can not be written (UNIEP_IO). Without a begin:
 * UNIEP_INVALID_ARGUMENT. */
UNIEP_API uniep_status uniep_trace_end(uniep_group* group, const char* path);

#ifdef __cplusplus
}
#endif
