#pragma once

#include <initializer_list>
#include <string>

namespace uniep::cuda {

// A shared library that is opened at run time and stays open.
class DynamicLibrary {
 public:
  // Opens what `variable` names, if it is set in the environment; else what use_library() was told for `library`, if
  // anything; else the first name that exists.
  DynamicLibrary(const char* purpose, const char* variable, std::initializer_list<const char*> names,
                 const char* library = nullptr);

  // Throws uniep::Error (kUnsupported) when the library or the symbol is missing.
  template <typename Function>
  void bind(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(find(symbol));
  }

 private:
  void* find(const char* symbol) const;

  std::string purpose_;
  std::string error_;
  void* handle_ = nullptr;
};

}  // namespace uniep::cuda
