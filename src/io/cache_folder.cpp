#include "io/cache_folder.h"

#include <cstdlib>

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

}  // namespace uniep
