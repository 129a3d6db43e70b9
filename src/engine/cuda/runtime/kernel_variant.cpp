#include "engine/cuda/runtime/kernel_variant.h"

#include <algorithm>
#include <deque>
#include <string_view>

#include "engine/cuda/runtime/embedded_sources.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

SourceSet shipped_sources() {
  SourceSet set;
  for (const EmbeddedSource& source : embedded_sources()) {
    set.names.push_back(source.name);
    set.texts.push_back(source.text);
  }
  return set;
}

std::size_t place_of(const SourceSet& set, const std::string& name) {
  const auto found = std::find(set.names.begin(), set.names.end(), std::string_view(name));
  if (found == set.names.end()) throw Error(Status::kInternal, "no embedded device source is named '" + name + "'");
  return static_cast<std::size_t>(found - set.names.begin());
}

const SourceSet& shipped() {
  static const SourceSet set = shipped_sources();
  return set;
}

int count(std::string_view text, std::string_view part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

struct Variant {
  std::vector<std::string> kernels;
  SourceSet set;
  std::deque<std::string> edited;  // that the set points to
};

Variant& current() {
  static Variant variant;
  return variant;
}

}  // namespace

const char* SourceSet::text_of(const std::string& name) const {
  return texts[place_of(*this, name)];
}

int occurrences(const std::string& source, const std::string& text) {
  return count(shipped().text_of(source), text);
}

void set_kernel_variant(const KernelVariant& variant) {
  Variant& own = current();
  own = {.kernels = variant.kernels, .set = shipped(), .edited = {}};
  own.set.variant = variant.name;
  own.set.options = variant.options;
  for (const SourceEdit& edit : variant.edits) {
    const std::size_t place = place_of(own.set, edit.source);
    std::string text = own.set.texts[place];
    if (const int found = count(text, edit.text); found != 1) {
      throw Error(Status::kInternal, variant.name + ": its text is " + std::to_string(found) + " times in " +
                                         edit.source + ", not once:\n" + edit.text);
    }
    text.replace(text.find(edit.text), edit.text.size(), edit.replacement);
    own.set.texts[place] = own.edited.emplace_back(std::move(text)).c_str();
  }
}

const SourceSet& sources_of_kernel(const std::string& source) {
  const Variant& variant = current();
  const bool concerned = std::find(variant.kernels.begin(), variant.kernels.end(), source) != variant.kernels.end();
  return concerned ? variant.set : shipped();
}

}  // namespace uniep::cuda
