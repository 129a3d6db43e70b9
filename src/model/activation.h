#pragma once

#include "model/elementwise.h"

// What an expert does between FC1 and FC2, forward and backward: one description for the row kernels of the CPU engine
// and the epilogues of the GPU. A kernel is compiled for one kind and one place of the router's weight, so it holds no
// more than these need.
namespace uniep {

// The values of uniep::Activation, and SwiGLU with parameters.
enum class ActivationKind : int {
  kSwiglu = 0,
  kGegluTanh = 1,
  kGegluErf = 2,
  kRelu2 = 3,
  kSilu = 4,
  kShapedSwiglu = 5,
};
constexpr int kActivationKinds = 6;

UNIEP_HOST_DEVICE constexpr bool has_gate(ActivationKind kind) {
  return kind != ActivationKind::kRelu2 && kind != ActivationKind::kSilu;
}

// Of kShapedSwiglu; see uniep::Numerics. Here a limit that is none is infinite.
struct ActivationParameters {
  float alpha = 1.0f;
  float gate_limit = 0.0f;
  float up_limit = 0.0f;
  float up_offset = 0.0f;
};

struct ActivationGradient {
  float activation;  // the same bits as activate()
  float gate;        // d loss / d gate
  float up;          // d loss / d up; gated only
  float prob_term;   // this column's of d loss / d prob, as add_prob() takes it
};

// f(gate) and f'(gate).
struct CurvePoint {
  float value;
  float derivative;
};

// NaN stays.
UNIEP_HOST_DEVICE float at_most(float value, float limit) {
  return value > limit ? limit : value;
}
UNIEP_HOST_DEVICE float between(float value, float limit) {
  return at_most(value < -limit ? -limit : value, limit);
}

// x sigmoid(alpha x); its derivative is s + alpha x s (1 - s) with s = sigmoid(alpha x).
UNIEP_HOST_DEVICE CurvePoint silu_point(float x, float alpha) {
  const float s = sigmoid(mul(alpha, x));
  const float value = mul(x, s);
  return {value, fused_multiply_add(mul(alpha, value), add(1.0f, -s), s)};
}

// alpha = 1, without its products.
UNIEP_HOST_DEVICE CurvePoint silu_point(float x) {
  const float s = sigmoid(x);
  const float value = mul(x, s);
  return {value, fused_multiply_add(value, add(1.0f, -s), s)};
}

// Both gelus are 0 or x, to fp32, beyond this |x|; only the leading x goes on growing.
constexpr float kGeluRange = 10.0f;

// x (1 + tanh(u)) / 2 = x sigmoid(2 u), 2 u = 2 sqrt(2 / pi) (x + 0.044715 x^3). Relative error of the value below
// 1.5e-5 of x for x above 0, and below 1e-4 of itself for -5 < x < 0; of the derivative below 1e-4, absolute.
UNIEP_HOST_DEVICE CurvePoint gelu_tanh_point(float x) {
  const float kLinear = 1.59576912f;   // 2 sqrt(2 / pi)
  const float kCubic = 0.0713548163f;  // 0.044715 times that
  const float near = between(x, kGeluRange);
  const float square = mul(near, near);
  const float power = exp_of_minus(mul(near, fused_multiply_add(square, kCubic, kLinear)));
  const float s = reciprocal(add(1.0f, power));
  const float slope = fused_multiply_add(square, 3.0f * kCubic, kLinear);
  const float rest = mul(power, s);  // 1 - s
  return {mul(x, s), fused_multiply_add(mul(mul(near, s), rest), slope, s)};
}

// x Phi(x) with the normal distribution's Phi(x) = (1 + erf(x / sqrt(2))) / 2. For x < 0 Phi(x) = exp(-x^2 / 2) R(-x),
// R(x) = t P(t) with t = 1 / (1 + 0.3 x) and P of degree 5: relative error below 4e-6 on [0, 10] (minimax), and of
// Phi(x) below 2e-5; the derivative is Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi).
UNIEP_HOST_DEVICE CurvePoint gelu_erf_point(float x) {
  const float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
  const float near = between(x, kGeluRange);
  const float distance = near < 0.0f ? -near : near;
  const float power = exp_of_minus(mul(mul(0.5f, near), near));
  const float t = reciprocal(fused_multiply_add(0.3f, distance, 1.0f));
  float p = -0.0807460845f;
  p = fused_multiply_add(p, t, 0.227192566f);
  p = fused_multiply_add(p, t, -0.0299754962f);
  p = fused_multiply_add(p, t, 0.151419863f);
  p = fused_multiply_add(p, t, 0.11184990f);
  p = fused_multiply_add(p, t, 0.120260805f);
  const float tail = mul(mul(p, t), power);
  const float distribution = near < 0.0f ? tail : add(1.0f, -tail);
  return {mul(x, distribution), fused_multiply_add(near, mul(power, kDensity), distribution)};
}

// max(x, 0)^2.
UNIEP_HOST_DEVICE CurvePoint relu2_point(float x) {
  const float positive = x < 0.0f ? 0.0f : x;
  return {mul(positive, positive), add(positive, positive)};
}

// kWeighsZ: the router's weight multiplies z instead of the activation.
template <ActivationKind kKind, bool kWeighsZ = false>
class ExpertActivation {
 public:
  static constexpr bool kGated = has_gate(kKind);

  UNIEP_HOST_DEVICE constexpr explicit ExpertActivation(const ActivationParameters& parameters = {})
      : parameters_(parameters) {}

  // a, products from left to right.
  UNIEP_HOST_DEVICE float activate(float gate, float up, float prob) const {
    if constexpr (kWeighsZ) {
      return unweighted(point(shaped_gate(mul(prob, gate))), shaped_up(mul(prob, up)));
    } else {
      return mul(unweighted(point(shaped_gate(gate)), shaped_up(up)), prob);
    }
  }

  // For an incoming d loss / d a.
  UNIEP_HOST_DEVICE ActivationGradient gradient(float gate, float up, float prob, float activation_gradient) const {
    const float own_gate = kWeighsZ ? mul(prob, gate) : gate;
    const float own_up = kWeighsZ ? mul(prob, up) : up;
    const float factor = shaped_up(own_up);
    const CurvePoint curve = point(shaped_gate(own_gate));
    const float weighted = kWeighsZ ? activation_gradient : mul(prob, activation_gradient);
    ActivationGradient gradient{};
    const float value = unweighted(curve, factor);
    gradient.activation = kWeighsZ ? value : mul(value, prob);
    gradient.prob_term = value;
    gradient.gate = mul(kGated ? mul(weighted, factor) : weighted, curve.derivative);
    if constexpr (kGated) gradient.up = mul(weighted, curve.value);
    if constexpr (kKind == ActivationKind::kShapedSwiglu) {
      gradient.gate = own_gate > parameters_.gate_limit ? 0.0f : gradient.gate;
      gradient.up = own_up > parameters_.up_limit || own_up < -parameters_.up_limit ? 0.0f : gradient.up;
    }
    if constexpr (kWeighsZ) {
      gradient.prob_term = mul(gradient.gate, gate);
      if constexpr (kGated) gradient.prob_term = fused_multiply_add(gradient.up, up, gradient.prob_term);
      gradient.gate = mul(gradient.gate, prob);
      gradient.up = mul(gradient.up, prob);
    }
    return gradient;
  }

  // A partial sum of d loss / d prob, and a column more: d loss / d a times act(gate, up); where the weight multiplies
  // z the term is whole.
  UNIEP_HOST_DEVICE static float add_prob(float partial, float activation_gradient, float term) {
    return kWeighsZ ? add(partial, term) : add_prob_term(partial, activation_gradient, term);
  }

 private:
  UNIEP_HOST_DEVICE CurvePoint point(float gate) const {
    if constexpr (kKind == ActivationKind::kShapedSwiglu) {
      return silu_point(gate, parameters_.alpha);
    } else if constexpr (kKind == ActivationKind::kGegluTanh) {
      return gelu_tanh_point(gate);
    } else if constexpr (kKind == ActivationKind::kGegluErf) {
      return gelu_erf_point(gate);
    } else if constexpr (kKind == ActivationKind::kRelu2) {
      return relu2_point(gate);
    } else {
      return silu_point(gate);
    }
  }
  UNIEP_HOST_DEVICE float shaped_gate(float gate) const {
    return kKind == ActivationKind::kShapedSwiglu ? at_most(gate, parameters_.gate_limit) : gate;
  }
  UNIEP_HOST_DEVICE float shaped_up(float up) const {
    if constexpr (kKind == ActivationKind::kShapedSwiglu) {
      return add(between(up, parameters_.up_limit), parameters_.up_offset);
    } else {
      return up;
    }
  }
  UNIEP_HOST_DEVICE static float unweighted(const CurvePoint& curve, float factor) {
    return kGated ? mul(curve.value, factor) : curve.value;
  }

  ActivationParameters parameters_;
};

// The plain SwiGLU by name, for oracles.
UNIEP_HOST_DEVICE float swiglu(float gate, float up, float prob) {
  return ExpertActivation<ActivationKind::kSwiglu>().activate(gate, up, prob);
}
UNIEP_HOST_DEVICE ActivationGradient swiglu_gradient(float gate, float up, float prob, float activation_gradient) {
  return ExpertActivation<ActivationKind::kSwiglu>().gradient(gate, up, prob, activation_gradient);
}

}  // namespace uniep
