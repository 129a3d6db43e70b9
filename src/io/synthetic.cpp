#include "io/synthetic.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "io/quote.h"
#include "uniep/error.h"

namespace uniep::io {
namespace {

static_assert(std::numeric_limits<double>::is_iec559, "the routing's weights need IEEE binary64");

constexpr double kMaxExponent = 8.0;
constexpr double kWeightOne = 0x1p40;

[[noreturn]] void throw_invalid(const std::string& message) {
  throw Error(Status::kInvalidArgument, message);
}

void require_not_negative(const char* name, int64_t value) {
  if (value < 0) throw_invalid(std::string(name) + " is " + std::to_string(value) + "; legal: 0 or more");
}

void require_positive(const char* name, int64_t value) {
  if (value < 1) throw_invalid(std::string(name) + " is " + std::to_string(value) + "; legal: 1 or more");
}

// Elements of a tensor.
void fill(SyntheticTensor tensor, const SyntheticPart& elements, float scale, BFloat16* out) {
  const auto [seed, first, count] = elements;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = synthetic_value(seed, tensor, static_cast<uint64_t>(first + i), scale);
  }
}

// floor(value * bound / 2^64): uniform below bound for a uniform 64-bit value.
uint64_t scale_below(uint64_t value, uint64_t bound) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(value) * bound) >> 64);
}

}  // namespace

void fill_tokens(SyntheticTensor tensor, const SyntheticPart& tokens, int64_t hidden, BFloat16* out) {
  if (tensor != SyntheticTensor::kX && tensor != SyntheticTensor::kDy) throw_invalid("fill_tokens fills x and dy only");
  require_not_negative("first_global_token", tokens.first);
  require_not_negative("tokens", tokens.count);
  require_positive("hidden", hidden);
  fill(tensor, {tokens.seed, tokens.first * hidden, tokens.count * hidden}, kUnitScale, out);
}

void fill_weights(SyntheticTensor tensor, const SyntheticPart& experts, const ExpertSizes& sizes, BFloat16* out) {
  const auto [hidden, intermediate, halves] = sizes;
  if (tensor != SyntheticTensor::kW1 && tensor != SyntheticTensor::kW2)
    throw_invalid("fill_weights fills w1 and w2 only");
  require_not_negative("first_global_expert", experts.first);
  require_not_negative("experts", experts.count);
  require_positive("hidden", hidden);
  require_positive("intermediate", intermediate);
  const bool first_layer = tensor == SyntheticTensor::kW1;
  const int64_t per_expert = (first_layer ? halves : 1) * hidden * intermediate;
  fill(tensor, {experts.seed, experts.first * per_expert, experts.count * per_expert},
       weight_scale(first_layer ? hidden : intermediate), out);
}

void fill_biases(SyntheticTensor tensor, const SyntheticPart& experts, int64_t columns, BFloat16* out) {
  if (tensor != SyntheticTensor::kB1 && tensor != SyntheticTensor::kB2)
    throw_invalid("fill_biases fills b1 and b2 only");
  require_not_negative("first_global_expert", experts.first);
  require_not_negative("experts", experts.count);
  require_positive("columns", columns);
  fill(tensor, {experts.seed, experts.first * columns, experts.count * columns}, kUnitScale, out);
}

void fill_probs(const SyntheticPart& tokens, int64_t topk, const int32_t* ids, float* out) {
  require_not_negative("first_global_token", tokens.first);
  require_not_negative("tokens", tokens.count);
  require_positive("topk", topk);
  for (int64_t token = 0; token < tokens.count; ++token) {
    const int32_t* slots = ids + token * topk;
    float* row = out + token * topk;
    const auto first = static_cast<uint64_t>((tokens.first + token) * topk);
    float sum = 0.0f;
    for (int64_t k = 0; k < topk; ++k) {
      row[k] = slots[k] < 0 ? 0.0f : synthetic_prob(tokens.seed, first + static_cast<uint64_t>(k));
      if (slots[k] >= 0) sum = add(sum, row[k]);
    }
    // One IEEE division a slot: correctly rounded, so the same everywhere.
    for (int64_t k = 0; k < topk; ++k) {
      if (slots[k] >= 0) row[k] = row[k] / sum;
    }
  }
}

RoutingKind parse_routing_kind(std::string_view text) {
  if (text == "uniform") return {RoutingPattern::kUniform, 0.0};
  if (text == "one") return {RoutingPattern::kOne, 0.0};
  constexpr std::string_view kZipfPrefix = "zipf:";
  if (!text.starts_with(kZipfPrefix))
    throw_invalid("routing " + quote_text(text) + " is not known; legal: uniform, zipf:S, one");
  const std::string_view number = text.substr(kZipfPrefix.size());
  double exponent = -1.0;
  const auto result = std::from_chars(number.data(), number.data() + number.size(), exponent);
  const bool whole = result.ec == std::errc() && result.ptr == number.data() + number.size();
  // Written so that a NaN fails, too.
  if (!whole || !(exponent >= 0.0 && exponent <= kMaxExponent)) {
    throw_invalid("routing " + quote_text(text) + ": S is " + quote_text(number) + "; legal: a number from 0 to 8");
  }
  return {RoutingPattern::kZipf, exponent};
}

std::string to_string(const RoutingKind& kind) {
  if (kind.pattern == RoutingPattern::kUniform) return "uniform";
  if (kind.pattern == RoutingPattern::kOne) return "one";
  char digits[32];
  const auto result = std::to_chars(digits, digits + sizeof digits, kind.exponent);
  return "zipf:" + std::string(digits, result.ptr);
}

uint64_t zipf_weight(int64_t expert, double exponent) {
  const auto base = static_cast<double>(expert + 1);
  double power = 1.0;
  double rest = exponent;
  for (; rest >= 1.0; rest -= 1.0) power *= base;
  // The fraction's binary digits select square roots of square roots: base^(1/2), base^(1/4), ...
  double root = base;
  double digit = 1.0;
  for (int i = 0; i < 52 && rest > 0.0; ++i) {
    root = std::sqrt(root);
    digit *= 0.5;
    if (rest >= digit) {
      power *= root;
      rest -= digit;
    }
  }
  return std::max<uint64_t>(1, static_cast<uint64_t>(kWeightOne / power));
}

void make_routing(const RoutingKind& kind, const SyntheticPart& tokens, int64_t experts, int64_t topk, int32_t* ids) {
  require_not_negative("first_global_token", tokens.first);
  require_not_negative("tokens", tokens.count);
  if (experts < 1 || experts > kMaxRoutingExperts) {
    throw_invalid("experts is " + std::to_string(experts) + "; legal: 1 to " + std::to_string(kMaxRoutingExperts));
  }
  if (topk < 1 || topk > experts) {
    throw_invalid("topk is " + std::to_string(topk) + "; legal: 1 to the number of experts, " +
                  std::to_string(experts));
  }
  if (kind.pattern == RoutingPattern::kOne) {
    std::fill(ids, ids + tokens.count * topk, -1);
    for (int64_t token = 0; token < tokens.count; ++token) ids[token * topk] = 0;
    return;
  }
  const double exponent = kind.pattern == RoutingPattern::kZipf ? kind.exponent : 0.0;
  if (!(exponent >= 0.0 && exponent <= kMaxExponent)) {
    throw_invalid("the routing's S is " + std::to_string(exponent) + "; legal: a number from 0 to 8");
  }
  std::vector<uint64_t> weights(static_cast<std::size_t>(experts));
  uint64_t total = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    weights[static_cast<std::size_t>(expert)] = zipf_weight(expert, exponent);
    total += weights[static_cast<std::size_t>(expert)];
  }
  std::vector<uint64_t> taken(static_cast<std::size_t>(topk));
  for (int64_t token = 0; token < tokens.count; ++token) {
    int32_t* slots = ids + token * topk;
    const auto first = static_cast<uint64_t>((tokens.first + token) * topk);
    uint64_t left = total;
    for (std::size_t k = 0; k < taken.size(); ++k) {
      uint64_t target = scale_below(synthetic_hash(tokens.seed, SyntheticTensor::kRouting, first + k), left);
      std::size_t expert = 0;
      for (; target >= weights[expert]; ++expert) target -= weights[expert];
      slots[k] = static_cast<int32_t>(expert);
      left -= weights[expert];
      taken[k] = std::exchange(weights[expert], 0);
    }
    for (std::size_t k = 0; k < taken.size(); ++k) weights[static_cast<std::size_t>(slots[k])] = taken[k];
  }
}

}  // namespace uniep::io
