#pragma once

#include <span>
#include <string>
#include <vector>

// For tests: kernels that are compiled from sources with other text, or with more options. Nothing in the library makes
// a variant, and nothing from outside of the process does. The key of a variant's kernel in the cache has its name and
// its sources, so that no other run takes it.
namespace uniep::cuda {

struct SourceEdit {
  std::string source;  // as #include names it
  std::string text;    // what is there once
  std::string replacement;
};

struct KernelVariant {
  std::string name;
  std::vector<std::string> kernels;  // the sources of those that it concerns; all others stay as they are
  std::vector<SourceEdit> edits;
  std::vector<std::string> options;  // beside common_options()
};

// For the whole process, before its first kernel. Throws uniep::Error (kInternal) where an edit's text is not in its
// source exactly once.
void set_kernel_variant(const KernelVariant& variant);

// How often `text` is in an embedded source. Throws uniep::Error (kInternal) where there is no such source.
int occurrences(const std::string& source, const std::string& text);

// What a kernel is compiled from.
struct SourceSet {
  std::string variant;  // empty: as the library is shipped
  std::vector<const char*> names, texts;
  std::vector<std::string> options;

  // Throws uniep::Error (kInternal) where there is no such source.
  const char* text_of(const std::string& name) const;
};
const SourceSet& sources_of_kernel(const std::string& source);

}  // namespace uniep::cuda
