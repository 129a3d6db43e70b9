#pragma once

#include <vector>

#include "uniep/layer.h"

namespace uniep::test {

// The routed experts of a model, from its published configuration.
struct Model {
  const char* name;
  LayerShape shape;
  const char* activation = "swiglu";
  RouterWeight router_weight = RouterWeight::kOutput;
  bool bias = false;
  bool is_limit = false;  // no model, but what the sizes may be

  LayerConfig config() const {
    LayerConfig config{shape, {}};
    set_activation(config.numerics, activation);
    config.numerics.router_weight = router_weight;
    config.numerics.bias = bias;
    return config;
  }
};

inline const std::vector<Model>& models() {
  constexpr const char* kGptOss = "swiglu:alpha=1.702,limit=7,up_offset=1";
  static const std::vector<Model> all = {
      {"DeepSeek-V2-Lite", {2048, 1408, 64, 6}},
      {"DeepSeek-V3", {7168, 2048, 256, 8}},
      {"Gemma 4 26B-A4B", {2816, 704, 128, 8}, "geglu_tanh"},
      {"GLM-4.5", {5120, 1536, 160, 8}},
      {"GLM-4.5-Air", {4096, 1408, 128, 8}},
      {"gpt-oss-20b", {2880, 2880, 32, 4}, kGptOss, RouterWeight::kOutput, true},
      {"gpt-oss-120b", {2880, 2880, 128, 4}, kGptOss, RouterWeight::kOutput, true},
      {"Hunyuan-A13B", {4096, 3072, 64, 8}},
      {"Kimi-K2", {7168, 2048, 384, 8}},
      {"Llama 4 Maverick", {5120, 8192, 128, 1}, "swiglu", RouterWeight::kInput},
      {"Llama 4 Scout", {5120, 8192, 16, 1}, "swiglu", RouterWeight::kInput},
      {"MiniMax-M2", {3072, 1536, 256, 8}},
      {"Mixtral 8x22B", {6144, 16384, 8, 2}},
      {"Nemotron 3 Nano", {2688, 1856, 128, 6}, "relu2"},
      {"Nemotron 3 Super", {1024, 2688, 512, 22}, "relu2"},  // H: of the latent space that experts see
      {"Qwen3-30B-A3B", {2048, 768, 128, 8}},
      {"Qwen3-235B-A22B", {4096, 1536, 128, 8}},
      {"Qwen3-Next-80B-A3B", {2048, 512, 512, 10}},
      {"many experts and slots", {1032, 776, 1024, 32}, "silu", RouterWeight::kActivation, true, true},
      {"few columns", {8, 8, 8, 8}, "geglu_erf", RouterWeight::kActivation, false, true},
  };
  return all;
}

}  // namespace uniep::test
