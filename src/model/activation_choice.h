#pragma once

#include <string>
#include <vector>

#include "model/activation.h"
#include "uniep/numerics.h"
#include "uniep/shape.h"

namespace uniep {

// What Numerics say about the activation, as kernels take it. Numerics must be legal.
ActivationKind activation_kind(const Numerics& numerics);
ActivationParameters activation_parameters(const Numerics& numerics);

// Columns of z, and rows of an expert's W1: 2 I, or I where there is no gate.
constexpr int64_t z_columns(const LayerShape& shape, const Numerics& numerics) {
  return (is_gated(numerics.activation) ? 2 : 1) * shape.intermediate;
}

// What is wrong with the activation, its parameters and the router's weight, as "name=value: legal are ...".
std::vector<std::string> activation_violations(const Numerics& numerics);

// swiglu, geglu_tanh, geglu_erf, relu2 or silu.
const char* activation_name(Activation activation);

}  // namespace uniep
