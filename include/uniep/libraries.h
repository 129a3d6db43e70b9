#pragma once

#include <string>

#include "uniep/export.h"

// NCCL and NVRTC are opened at run time, by their names. A process that has its own says here which file it is.
namespace uniep {

// `library`: "nccl" or "nvrtc". Of the whole process, and for its first use: after that the same file is legal and
// another one is Error(kInvalidArgument), as an empty path is. UNIEP_LIBNCCL and UNIEP_LIBNVRTC in the environment go
// before it. A file that cannot be opened is an Error(kUnsupported) of the call that needs it.
UNIEP_API void use_library(const std::string& library, const std::string& path);

}  // namespace uniep
