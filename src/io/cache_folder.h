#pragma once

#include <string>

namespace uniep {

// Where what outlives a process is kept, compiled kernels and tuned Schedules: UNIEP_CACHE_DIR, else
// $XDG_CACHE_HOME/uniep, else ~/.cache/uniep. Empty: nowhere. Without slashes at its end.
std::string cache_folder();

}  // namespace uniep
