#include "engine/cuda/runtime/dynamic_library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "uniep/error.h"
#include "uniep/libraries.h"

namespace uniep {
namespace {

// Which file of a library a caller has named, and which one was opened.
struct Choice {
  const char* library;
  std::string named = {};
  std::optional<std::string> opened = {};  // empty: none could be
};

std::mutex choices_mutex;
Choice choices[] = {{"nccl"}, {"nvrtc"}};

Choice& choice_of(std::string_view library) {
  for (Choice& choice : choices) {
    if (library == choice.library) return choice;
  }
  throw Error(Status::kInvalidArgument, fmt::format("library: '{}'; legal are nccl and nvrtc", library));
}

std::string file_of(void* handle) {
  const link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code none;
  return a == b || std::filesystem::equivalent(a, b, none);
}

}  // namespace

void use_library(const std::string& library, const std::string& path) {
  const std::lock_guard lock(choices_mutex);
  Choice& choice = choice_of(library);
  if (path.empty()) throw Error(Status::kInvalidArgument, "path: empty; must be that of a shared library");
  if (choice.opened.has_value() && path != choice.named && !same_file(*choice.opened, path)) {
    throw Error(Status::kInvalidArgument,
                fmt::format("path: '{}' for {}, which is in use from {}; legal is a path before the first use, or that "
                            "file",
                            path, library, choice.opened->empty() ? "no file, since none was found" : *choice.opened));
  }
  choice.named = path;
}

namespace cuda {

DynamicLibrary::DynamicLibrary(const char* purpose, const char* variable, std::initializer_list<const char*> names,
                               const char* library)
    : purpose_(purpose) {
  const std::lock_guard lock(choices_mutex);
  Choice* const choice = library == nullptr ? nullptr : &choice_of(library);
  const char* const given = std::getenv(variable);
  std::vector<std::string> candidates(names.begin(), names.end());
  if (given != nullptr && given[0] != '\0') {
    candidates = {given};
  } else if (choice != nullptr && !choice->named.empty()) {
    candidates = {choice->named};
  }
  for (const std::string& name : candidates) {
    handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) break;
    const char* const reason = dlerror();
    error_ += (error_.empty() ? "" : "; ") + std::string(reason != nullptr ? reason : name);
  }
  if (choice != nullptr) choice->opened = handle_ == nullptr ? "" : file_of(handle_);
}

void* DynamicLibrary::find(const char* symbol) const {
  if (handle_ == nullptr) {
    throw Error(Status::kUnsupported, purpose_ + " is not available on this machine: " + error_);
  }
  void* address = dlsym(handle_, symbol);
  if (address == nullptr) {
    throw Error(Status::kUnsupported, purpose_ + " is too old: it has no function " + symbol);
  }
  return address;
}

}  // namespace cuda
}  // namespace uniep
