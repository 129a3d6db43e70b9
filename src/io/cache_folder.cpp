#include "io/cache_folder.h"

#include <sys/stat.h>

#include <cstdlib>
#include <exception>

namespace uniep {
namespace {

std::string named_folder() {
  if (const char* given = std::getenv("UNIEP_CACHE_DIR")) return given;
  if (const char* base = std::getenv("XDG_CACHE_HOME"); base != nullptr && base[0] == '/') {
    return std::string(base) + "/uniep";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && home[0] == '/') {
    return std::string(home) + "/.cache/uniep";
  }
  return {};
}

}  // namespace

std::string cache_folder() {
  std::string folder = named_folder();
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return folder;
}

void make_cache_folder(const std::filesystem::path& folder) noexcept {
  try {
    std::filesystem::path made;
    for (const std::filesystem::path& part : folder) {
      made /= part;
      ::mkdir(made.c_str(), 0755);
    }
  } catch (const std::exception&) {  // no memory
  }
}

}  // namespace uniep
