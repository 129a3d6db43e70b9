#pragma once

#include <filesystem>
#include <string_view>

namespace uniep::cli {

// Bytes of memory that this process may still take: what the machine has available, or its control group allows.
double available_memory_bytes();

// What the control group in a folder (cgroup v2) allows: its limit less what is in use, of which the page cache is not
// part, since the system gives it back. Infinite where there is no limit.
double control_group_bytes(const std::filesystem::path& folder);

// Throws Error(kOutOfMemory) when `bytes` are more than that. The system would lend the memory and then kill the
// process for using it, so large sizes are refused before they are asked for.
void require_memory(double bytes, std::string_view what);

}  // namespace uniep::cli
