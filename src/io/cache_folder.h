#pragma once

#include <filesystem>
#include <string>

namespace uniep {

// Where what outlives a process is kept, compiled kernels and tuned Schedules: UNIEP_CACHE_DIR, else
// $XDG_CACHE_HOME/uniep, else ~/.cache/uniep. Empty: nowhere. Without slashes at its end.
std::string cache_folder();

// Makes the folder and those above it that are missing, whatever the umask none of them writable by others: kernels are
// not taken from such a folder. What can not be made is left to the caller's first write.
void make_cache_folder(const std::filesystem::path& folder) noexcept;

}  // namespace uniep
