#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "uniep/shape.h"

namespace uniep::cli {

// The MoE layers of published models, as their configurations give them.
struct NamedShape {
  const char* name;
  LayerShape shape;
};
const std::vector<NamedShape>& named_shapes();

// A name of named_shapes() or four numbers H,I,E,K. Throws Error(kInvalidArgument) that names the option.
LayerShape parse_shape(std::string_view option, std::string_view text);

// "deepseek-v3, kimi-k2, ..."
std::string shape_names();

}  // namespace uniep::cli
