#include "cli/shapes.h"

#include <limits>

#include "cli/options.h"

namespace uniep::cli {

const std::vector<NamedShape>& named_shapes() {
  static const std::vector<NamedShape> kShapes = {
      {"deepseek-v3", {7168, 2048, 256, 8}},
      {"deepseek-v2-lite", {2048, 1408, 64, 6}},
      {"kimi-k2", {7168, 2048, 384, 8}},
      {"qwen3-30b-a3b", {2048, 768, 128, 8}},
      {"qwen3-235b-a22b", {4096, 1536, 128, 8}},
      {"mixtral-8x7b", {4096, 14336, 8, 2}},
      {"moonlight-16b-a3b", {2048, 1408, 64, 6}},
      {"gpt-oss-120b", {2880, 2880, 128, 4}},
      {"gpt-oss-20b", {2880, 2880, 32, 4}},
      {"glm-4.5", {5120, 1536, 160, 8}},
      {"dsv3", {7168, 2048, 256, 8}},
      {"qwen3-30b", {2048, 768, 128, 8}},
      {"qwen3-235b", {4096, 1536, 128, 8}},
      {"mixtral", {4096, 14336, 8, 2}},
  };
  return kShapes;
}

std::string shape_names() {
  std::string names;
  for (const NamedShape& named : named_shapes()) names += (names.empty() ? "" : ", ") + std::string(named.name);
  return names;
}

LayerShape parse_shape(std::string_view option, std::string_view text) {
  for (const NamedShape& named : named_shapes()) {
    if (text == named.name) return named.shape;
  }
  const std::string legal = "H,I,E,K in whole numbers from 1, or one of " + shape_names();
  if (text.find_first_not_of("0123456789,") != std::string_view::npos) refuse_value(option, text, legal);
  const std::vector<int64_t> sizes = parse_integers(option, text, 1, std::numeric_limits<int64_t>::max());
  if (sizes.size() != 4) refuse_value(option, text, legal);
  return {sizes[0], sizes[1], sizes[2], sizes[3]};
}

}  // namespace uniep::cli
