#pragma once

#include <string_view>
#include <vector>

namespace uniep::cuda {

// A device source or header as the run-time compiler sees it; `name` is what #include names.
struct EmbeddedSource {
  const char* name;
  const char* text;
};

const std::vector<EmbeddedSource>& embedded_sources();

}  // namespace uniep::cuda
