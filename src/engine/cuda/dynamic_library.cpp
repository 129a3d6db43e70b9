#include "engine/cuda/dynamic_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "uniep/error.h"

namespace uniep::cuda {

DynamicLibrary::DynamicLibrary(const char* purpose, const char* variable, std::initializer_list<const char*> names)
    : purpose_(purpose) {
  const auto try_open = [&](const char* name) {
    handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
      const char* reason = dlerror();
      error_ += std::string(error_.empty() ? "" : "; ") + (reason != nullptr ? reason : name);
    }
    return handle_ != nullptr;
  };
  const char* given = std::getenv(variable);
  if (given != nullptr && given[0] != '\0') {
    try_open(given);
    return;
  }
  for (const char* name : names) {
    if (try_open(name)) return;
  }
}

void* DynamicLibrary::find_or_null(const char* symbol) const {
  return handle_ == nullptr ? nullptr : dlsym(handle_, symbol);
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

}  // namespace uniep::cuda
