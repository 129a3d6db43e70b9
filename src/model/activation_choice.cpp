#include "model/activation_choice.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "model/refuse.h"

namespace uniep {
namespace {

constexpr std::array<const char*, 5> kActivations = {"swiglu", "geglu_tanh", "geglu_erf", "relu2", "silu"};
constexpr std::array<const char*, 3> kRouterWeights = {"activation", "output", "input"};
constexpr const char* kLegal =
    "swiglu, geglu_tanh, geglu_erf, relu2, silu, and swiglu:alpha=A,limit=L,gate_limit=L,up_limit=L,up_offset=B with "
    "any of these";

static_assert(static_cast<int>(ActivationKind::kSwiglu) == static_cast<int>(Activation::kSwiglu) &&
                  static_cast<int>(ActivationKind::kGegluTanh) == static_cast<int>(Activation::kGegluTanh) &&
                  static_cast<int>(ActivationKind::kGegluErf) == static_cast<int>(Activation::kGegluErf) &&
                  static_cast<int>(ActivationKind::kRelu2) == static_cast<int>(Activation::kRelu2) &&
                  static_cast<int>(ActivationKind::kSilu) == static_cast<int>(Activation::kSilu),
              "a kind is an activation, but for SwiGLU with parameters");

bool has_parameters(const Numerics& numerics) {
  const Numerics plain;
  return numerics.alpha != plain.alpha || numerics.gate_limit != plain.gate_limit ||
         numerics.up_limit != plain.up_limit || numerics.up_offset != plain.up_offset;
}

float parse_parameter(const std::string& name, const std::string& text) {
  float value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end || !std::isfinite(value)) {
    refuse(fmt::format("activation: {} is '{}'; must be a finite number", name, text));
  }
  return value;
}

void set_parameter(Numerics& numerics, const std::string& text, const std::string& field) {
  const std::size_t equals = field.find('=');
  const std::string name = field.substr(0, equals);
  if (equals == std::string::npos) refuse(fmt::format("activation: '{}'; legal are {}", text, kLegal));
  const float value = parse_parameter(name, field.substr(equals + 1));
  if (name == "alpha") {
    numerics.alpha = value;
  } else if (name == "gate_limit") {
    numerics.gate_limit = value;
  } else if (name == "up_limit") {
    numerics.up_limit = value;
  } else if (name == "limit") {
    numerics.gate_limit = numerics.up_limit = value;
  } else if (name == "up_offset") {
    numerics.up_offset = value;
  } else {
    refuse(fmt::format("activation: '{}' has no parameter {}; legal are {}", text, name, kLegal));
  }
}

}  // namespace

ActivationKind activation_kind(const Numerics& numerics) {
  if (numerics.activation == Activation::kSwiglu && has_parameters(numerics)) return ActivationKind::kShapedSwiglu;
  return static_cast<ActivationKind>(numerics.activation);
}

ActivationParameters activation_parameters(const Numerics& numerics) {
  ActivationParameters made;
  made.alpha = numerics.alpha;
  made.gate_limit = made.up_limit = std::numeric_limits<float>::infinity();
  if (numerics.gate_limit > 0) made.gate_limit = numerics.gate_limit;
  if (numerics.up_limit > 0) made.up_limit = numerics.up_limit;
  made.up_offset = numerics.up_offset;
  return made;
}

const char* activation_name(Activation activation) {
  return kActivations.at(static_cast<std::size_t>(activation));
}

std::vector<std::string> activation_violations(const Numerics& numerics) {
  std::vector<std::string> violations;
  const auto require = [&](bool holds, const char* name, auto value, const char* legal) {
    if (!holds) violations.push_back(fmt::format("{}={}: {}", name, value, legal));
  };
  const int activation = static_cast<int>(numerics.activation), weight = static_cast<int>(numerics.router_weight);
  const bool known = activation >= 0 && activation < static_cast<int>(kActivations.size());
  require(known, "activation", activation,
          "legal are swiglu (0), geglu_tanh (1), geglu_erf (2), relu2 (3) and silu (4)");
  require(weight >= 0 && weight < static_cast<int>(kRouterWeights.size()), "router_weight", weight,
          "legal are activation (0), output (1) and input (2)");
  require(std::isfinite(numerics.alpha) && numerics.alpha > 0, "alpha", numerics.alpha, "legal is a number above 0");
  const char* const limit = "legal are 0 (no limit) and numbers above 0";
  require(std::isfinite(numerics.gate_limit) && numerics.gate_limit >= 0, "gate_limit", numerics.gate_limit, limit);
  require(std::isfinite(numerics.up_limit) && numerics.up_limit >= 0, "up_limit", numerics.up_limit, limit);
  require(std::isfinite(numerics.up_offset), "up_offset", numerics.up_offset, "legal is a finite number");
  if (known && violations.empty() && numerics.activation != Activation::kSwiglu && has_parameters(numerics)) {
    violations.push_back(fmt::format("activation={}: takes no alpha, limit or offset; only swiglu does",
                                     activation_name(numerics.activation)));
  }
  return violations;
}

std::string activation_text(const Numerics& numerics) {
  std::string text = activation_name(numerics.activation);
  const Numerics plain;
  char separator = ':';
  const auto add = [&](const char* name, float value, float usual) {
    if (value == usual) return;
    text += fmt::format("{}{}={}", std::exchange(separator, ','), name, value);
  };
  add("alpha", numerics.alpha, plain.alpha);
  const bool same_limits = numerics.gate_limit == numerics.up_limit;
  if (same_limits) add("limit", numerics.gate_limit, plain.gate_limit);
  if (!same_limits) add("gate_limit", numerics.gate_limit, plain.gate_limit);
  if (!same_limits) add("up_limit", numerics.up_limit, plain.up_limit);
  add("up_offset", numerics.up_offset, plain.up_offset);
  return text;
}

void set_activation(Numerics& numerics, const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  Numerics set = numerics;
  const Numerics plain;
  set.alpha = plain.alpha;
  set.gate_limit = plain.gate_limit;
  set.up_limit = plain.up_limit;
  set.up_offset = plain.up_offset;
  bool found = false;
  for (std::size_t i = 0; i < kActivations.size(); ++i) {
    if (name != kActivations[i]) continue;
    set.activation = static_cast<Activation>(i);
    found = true;
  }
  if (!found) refuse(fmt::format("activation: '{}'; legal are {}", text, kLegal));
  std::set<std::string> given;
  for (std::size_t begin = colon; begin != std::string::npos;) {
    const std::size_t end = text.find(',', begin + 1);
    const std::string field = text.substr(begin + 1, end == std::string::npos ? end : end - begin - 1);
    set_parameter(set, text, field);
    const std::string parameter = field.substr(0, field.find('='));
    if (!given.insert(parameter).second) {
      refuse(fmt::format("activation: '{}' gives {} twice; legal is once", text, parameter));
    }
    begin = end;
  }
  const std::vector<std::string> violations = activation_violations(set);
  if (!violations.empty()) refuse(violations.front());
  numerics = set;
}

std::string router_weight_text(RouterWeight router_weight) {
  return kRouterWeights.at(static_cast<std::size_t>(router_weight));
}

RouterWeight router_weight_from(const std::string& text) {
  for (std::size_t i = 0; i < kRouterWeights.size(); ++i) {
    if (text == kRouterWeights[i]) return static_cast<RouterWeight>(i);
  }
  refuse(fmt::format("router_weight: '{}'; legal are activation, output and input", text));
}

}  // namespace uniep
