#pragma once

#include "uniep/export.h"

/* What calls of the C API return (uniep/error.h). Conventions: uniep/c_api.h. */

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

#ifdef __cplusplus
}
#endif
