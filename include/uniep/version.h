#pragma once

// The library's version. UNIEP_VERSION compares as one number: major * 10000 + minor * 100 + patch.
#define UNIEP_VERSION_MAJOR 0
#define UNIEP_VERSION_MINOR 1
#define UNIEP_VERSION_PATCH 0
#define UNIEP_VERSION (UNIEP_VERSION_MAJOR * 10000 + UNIEP_VERSION_MINOR * 100 + UNIEP_VERSION_PATCH)
#define UNIEP_VERSION_STRING "0.1.0"
