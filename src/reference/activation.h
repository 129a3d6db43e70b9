#pragma once

#include <cmath>
#include <numbers>

#include "uniep/numerics.h"

// Activations in float64, from their formulas.
namespace uniep::reference {

struct Point {
  double value;
  double derivative;
};

// x sigmoid(alpha x).
inline Point silu(double x, double alpha) {
  const double s = 1.0 / (1.0 + std::exp(-alpha * x));
  return {x * s, s * (1.0 + alpha * x * (1.0 - s))};
}

inline Point gelu_tanh(double x) {
  const double factor = std::sqrt(2.0 / std::numbers::pi);
  const double t = std::tanh(factor * (x + 0.044715 * x * x * x));
  const double slope = factor * (1.0 + 3.0 * 0.044715 * x * x);
  return {0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope};
}

inline Point gelu_erf(double x) {
  const double distribution = 0.5 * std::erfc(-x / std::numbers::sqrt2);
  const double density = std::exp(-0.5 * x * x) / std::sqrt(2.0 * std::numbers::pi);
  return {x * distribution, distribution + x * density};
}

inline Point relu2(double x) {
  const double positive = x > 0.0 ? x : 0.0;
  return {positive * positive, 2.0 * positive};
}

// act(gate, up) and its derivatives.
struct Activated {
  double value;
  double by_gate;
  double by_up;  // not gated: 0
};

inline Activated activated(const Numerics& numerics, double gate, double up) {
  const auto gated = [&](const Point& point) {
    return Activated{point.value * up, point.derivative * up, point.value};
  };
  switch (numerics.activation) {
    case Activation::kGegluTanh:
      return gated(gelu_tanh(gate));
    case Activation::kGegluErf:
      return gated(gelu_erf(gate));
    case Activation::kRelu2:
      return {relu2(gate).value, relu2(gate).derivative, 0.0};
    case Activation::kSilu:
      return {silu(gate, 1.0).value, silu(gate, 1.0).derivative, 0.0};
    case Activation::kSwiglu:
      break;
  }
  const bool gate_clamped = numerics.gate_limit > 0 && gate > numerics.gate_limit;
  const bool up_clamped = numerics.up_limit > 0 && std::abs(up) > numerics.up_limit;
  const Point point = silu(gate_clamped ? numerics.gate_limit : gate, numerics.alpha);
  const double factor = (up_clamped ? std::copysign(numerics.up_limit, up) : up) + numerics.up_offset;
  return {point.value * factor, gate_clamped ? 0.0 : point.derivative * factor, up_clamped ? 0.0 : point.value};
}

}  // namespace uniep::reference
