#pragma once

#include <string>

#include "uniep/export.h"

namespace uniep {

// Which library this is: its version and its kernels' sources, in which builds of one version may differ: "uniep 0.1.0,
// kernels 1f3870be". Processes that call a layer together need the same.
UNIEP_API std::string library_label();

// NCCL and NVRTC are opened at run time, by their names. A process that has its own says here which file it is.
// `library`: "nccl" or "nvrtc". Of the whole process, and for its first use: after that the same file is legal and
// another one is Error(kInvalidArgument), as an empty path is. UNIEP_LIBNCCL and UNIEP_LIBNVRTC in the environment go
// before it. A file that cannot be opened is an Error(kUnsupported) of the call that needs it.
UNIEP_API void use_library(const std::string& library, const std::string& path);

}  // namespace uniep
