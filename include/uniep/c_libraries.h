#pragma once

#include "uniep/c_error.h"
#include "uniep/export.h"
#include "uniep/version.h"

/* The library that runs, and those that it opens (uniep/libraries.h). Conventions: uniep/c_api.h. */

#ifdef __cplusplus
extern "C" {
#endif

/* UNIEP_VERSION and UNIEP_VERSION_STRING of the headers that the library was built with. The text is never null, and
 * lives as long as the library. */
UNIEP_API int uniep_version(void);
UNIEP_API const char* uniep_version_string(void);

/* The file that this process opens as "nccl" or "nvrtc" at first use; without it they are searched for by name. Behind
 * the first use another file is UNIEP_INVALID_ARGUMENT. UNIEP_LIBNCCL and UNIEP_LIBNVRTC in the environment go before.
 * A file that can not be opened is UNIEP_UNSUPPORTED of the call that needs it. */
UNIEP_API uniep_status uniep_use_library(const char* library, const char* path);

#ifdef __cplusplus
}
#endif
