#include "io/synthetic.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "io/checksum.h"
#include "io/hash64.h"
#include "model/elementwise.h"
#include "support/expect_error.h"

namespace uniep::io {
namespace {

using test::expect_error;

std::vector<uint16_t> bits_of(const std::vector<BFloat16>& values) {
  std::vector<uint16_t> bits;
  for (const BFloat16 value : values) bits.push_back(value.bits);
  return bits;
}

std::vector<BFloat16> tokens_of(SyntheticTensor tensor, uint64_t seed, int64_t first, int64_t tokens, int64_t hidden) {
  std::vector<BFloat16> out(static_cast<std::size_t>(tokens * hidden));
  fill_tokens(tensor, {seed, first, tokens}, hidden, out.data());
  return out;
}

std::vector<BFloat16> weights_of(SyntheticTensor tensor, uint64_t seed, int64_t first, int64_t experts, int64_t hidden,
                                 int64_t intermediate) {
  const int64_t per_expert = (tensor == SyntheticTensor::kW1 ? 2 : 1) * hidden * intermediate;
  std::vector<BFloat16> out(static_cast<std::size_t>(experts * per_expert));
  fill_weights(tensor, {seed, first, experts}, {hidden, intermediate}, out.data());
  return out;
}

std::vector<int32_t> routing_of(const std::string& kind, uint64_t seed, int64_t first, int64_t tokens, int64_t experts,
                                int64_t topk) {
  std::vector<int32_t> ids(static_cast<std::size_t>(tokens * topk), -7);
  make_routing(parse_routing_kind(kind), {seed, first, tokens}, experts, topk, ids.data());
  return ids;
}

std::vector<float> probs_of(uint64_t seed, int64_t first, int64_t topk, const std::vector<int32_t>& ids) {
  std::vector<float> out(ids.size(), -7.0f);
  fill_probs({seed, first, static_cast<int64_t>(ids.size()) / topk}, topk, ids.data(), out.data());
  return out;
}

// The known values of docs/synthetic_data.md, found with an implementation in another language.
TEST(SyntheticKnownValues, Hash) {
  EXPECT_EQ(avalanche64(0), 0u);
  EXPECT_EQ(avalanche64(1), 0x5692161d100b05e5u);
  EXPECT_EQ(avalanche64(~uint64_t{0}), 0xb4d055fcf2cbbd7bu);
  EXPECT_EQ(synthetic_hash(1, SyntheticTensor::kX, 0), 0x6ec85f1f8547bc0cu);
  EXPECT_EQ(synthetic_hash(1, SyntheticTensor::kX, 1), 0x6cf63afcc21a470au);
  EXPECT_EQ(synthetic_hash(1, SyntheticTensor::kRouting, 0), 0xcc48a0e2d1c77be6u);
  EXPECT_EQ(synthetic_hash(12345678901234567890u, SyntheticTensor::kW2, uint64_t{1} << 40), 0xc7fb76381d77a072u);
}

TEST(SyntheticKnownValues, Tensors) {
  using Bits = std::vector<uint16_t>;
  EXPECT_EQ(bits_of(tokens_of(SyntheticTensor::kX, 1, 0, 1, 4)), (Bits{0xbe71, 0xbe85, 0x3e0e, 0x3f8e}));
  EXPECT_EQ(bits_of(tokens_of(SyntheticTensor::kDy, 1, 0, 1, 4)), (Bits{0x3f56, 0xbe39, 0x3dfc, 0xbfb4}));
  Bits w1 = bits_of(weights_of(SyntheticTensor::kW1, 1, 0, 1, 64, 32));
  w1.resize(4);
  EXPECT_EQ(w1, (Bits{0x3e11, 0x3e32, 0xbd8d, 0x3e3c}));
  Bits w2 = bits_of(weights_of(SyntheticTensor::kW2, 1, 0, 1, 64, 32));
  w2.resize(4);
  EXPECT_EQ(w2, (Bits{0xbe07, 0x3e46, 0xbedb, 0x3ec2}));
}

TEST(SyntheticKnownValues, Probs) {
  const auto bits = [](const std::vector<float>& values) {
    std::vector<uint32_t> out;
    for (const float value : values) out.push_back(bits_of_float(value));
    return out;
  };
  using Bits = std::vector<uint32_t>;
  EXPECT_EQ(bits(probs_of(1, 0, 4, {0, 1, 2, 3})), (Bits{0x3d8aa691, 0x3f12392c, 0x3e1831e8, 0x3e599625}));
  EXPECT_EQ(bits(probs_of(1, 5, 4, {7, -1, 2, 3})), (Bits{0x3e454e0d, 0, 0x3ef9b510, 0x3ea3a3ec}));
}

TEST(SyntheticKnownValues, Routing) {
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(routing_of("uniform", 1, 0, 4, 8, 3), (Ids{6, 3, 2, 3, 2, 5, 3, 1, 4, 0, 2, 7}));
  EXPECT_EQ(routing_of("zipf:1.2", 1, 0, 4, 8, 3), (Ids{3, 1, 0, 1, 0, 4, 1, 0, 3, 0, 1, 6}));
  EXPECT_EQ(routing_of("one", 1, 0, 2, 8, 3), (Ids{0, -1, -1, 0, -1, -1}));
}

TEST(SyntheticKnownValues, ZipfWeights) {
  const auto weights = [](double exponent) {
    std::vector<uint64_t> out;
    for (const int64_t expert : {0, 1, 2, 7, 127, 1023}) out.push_back(zipf_weight(expert, exponent));
    return out;
  };
  using Weights = std::vector<uint64_t>;
  const uint64_t one = uint64_t{1} << 40;
  EXPECT_EQ(weights(0), Weights(6, one));
  EXPECT_EQ(weights(0.5), (Weights{one, 777472127993, 634803334273, 388736063996, 97184015999, 34359738368}));
  EXPECT_EQ(weights(1.2), (Weights{one, 478590233455, 294207893751, 90675893177, 3254976541, 268435456}));
  EXPECT_EQ(weights(8), (Weights{one, 4294967296, 167582933, 65536, 1, 1}));
}

TEST(SyntheticKnownValues, Checksum) {
  EXPECT_EQ(mix64(0, 0), 0x48218226ff3cd4bfu);
  EXPECT_EQ(mix64(1, 0x3f80), 0x132e65272aa1f001u);
  EXPECT_EQ(mix64(uint64_t{1} << 40, 0xffffffff), 0xcc2fe8f5e63ab9dcu);
  const std::vector<BFloat16> x = tokens_of(SyntheticTensor::kX, 1, 0, 1, 4);
  EXPECT_EQ(to_hex16(checksum(x.data(), 4, 0)), "7b426fd72c72e0ab");
  const float values[] = {1.0f, -0.0f};
  EXPECT_EQ(to_hex16(checksum(values, 2, 10)), "113e50594e7f72ec");
}

TEST(Synthetic, PowersMatchTheLibrary) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponents(0.0, 8.0);
  for (int trial = 0; trial < 2000; ++trial) {
    const double exponent = trial < 9 ? trial : exponents(random);
    const auto expert = static_cast<int64_t>(random() % 2000);
    const double expected = 0x1p40 * std::pow(static_cast<double>(expert + 1), -exponent);
    const auto weight = static_cast<double>(zipf_weight(expert, exponent));
    EXPECT_GE(weight, 1.0);
    EXPECT_NEAR(weight, std::max(expected, 1.0), 1.0 + expected * 1e-13) << expert << " " << exponent;
  }
}

// However the batch is cut among ranks, each part is the same piece of the whole.
TEST(Synthetic, PartsAreTheWhole) {
  std::mt19937_64 random(23);
  for (int trial = 0; trial < 40; ++trial) {
    const uint64_t seed = random();
    const auto hidden = static_cast<int64_t>(1 + random() % 24), intermediate = static_cast<int64_t>(1 + random() % 16);
    const auto experts = static_cast<int64_t>(1 + random() % 12);
    const auto topk = static_cast<int64_t>(1 + random() % static_cast<uint64_t>(experts));
    const int64_t total = 37;
    const std::string kind = trial % 3 == 0 ? "uniform" : trial % 3 == 1 ? "zipf:1.1" : "one";
    const std::vector<BFloat16> x = tokens_of(SyntheticTensor::kX, seed, 0, total, hidden);
    const std::vector<BFloat16> w1 = weights_of(SyntheticTensor::kW1, seed, 0, experts, hidden, intermediate);
    const std::vector<BFloat16> w2 = weights_of(SyntheticTensor::kW2, seed, 0, experts, hidden, intermediate);
    const std::vector<int32_t> ids = routing_of(kind, seed, 0, total, experts, topk);
    const std::vector<float> probs = probs_of(seed, 0, topk, ids);
    std::vector<BFloat16> x_parts, w1_parts, w2_parts;
    std::vector<int32_t> ids_parts;
    std::vector<float> probs_parts;
    const auto append = [](auto& whole, const auto& part) { whole.insert(whole.end(), part.begin(), part.end()); };
    for (int64_t begin = 0; begin < total;) {
      const auto tokens = std::min<int64_t>(static_cast<int64_t>(random() % 12), total - begin);  // 0 tokens, too
      append(x_parts, tokens_of(SyntheticTensor::kX, seed, begin, tokens, hidden));
      const std::vector<int32_t> part = routing_of(kind, seed, begin, tokens, experts, topk);
      append(ids_parts, part);
      append(probs_parts, probs_of(seed, begin, topk, part));
      begin += tokens;
    }
    for (int64_t expert = 0; expert < experts; ++expert) {
      append(w1_parts, weights_of(SyntheticTensor::kW1, seed, expert, 1, hidden, intermediate));
      append(w2_parts, weights_of(SyntheticTensor::kW2, seed, expert, 1, hidden, intermediate));
    }
    EXPECT_EQ(bits_of(x_parts), bits_of(x));
    EXPECT_EQ(bits_of(w1_parts), bits_of(w1));
    EXPECT_EQ(bits_of(w2_parts), bits_of(w2));
    EXPECT_EQ(ids_parts, ids);
    EXPECT_EQ(std::memcmp(probs_parts.data(), probs.data(), probs.size() * sizeof(float)), 0);
  }
}

TEST(Synthetic, SeedsAndTensorsDiffer) {
  std::set<uint64_t> seen;
  std::size_t count = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    for (int tensor = 0; tensor < 6; ++tensor) {
      for (uint64_t index = 0; index < 500; ++index, ++count) {
        seen.insert(synthetic_hash(seed, static_cast<SyntheticTensor>(tensor), index));
      }
    }
  }
  EXPECT_EQ(seen.size(), count);
}

TEST(Synthetic, ValuesAreUniformOfOrderOne) {
  EXPECT_EQ(uniform_value(0), -1.0f);
  EXPECT_EQ(uniform_value(~uint64_t{0}), 1.0f - 0x1p-23f);
  EXPECT_EQ(uniform_value(uint64_t{1} << 63), 0.0f);
  EXPECT_EQ(positive_value(0), 0x1p-24f);
  EXPECT_EQ(positive_value(~uint64_t{0}), 1.0f);
  const std::vector<BFloat16> x = tokens_of(SyntheticTensor::kX, 42, 1000, 500, 200);
  double sum = 0, squares = 0, neighbours = 0, above = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double value = to_float(x[i]);
    EXPECT_LE(std::abs(value), 1.75);
    sum += value;
    squares += value * value;
    if (i > 0) neighbours += value * to_float(x[i - 1]);
    if (value > 0.875) ++above;
  }
  const auto count = static_cast<double>(x.size());  // 100000: standard errors are near 0.003
  EXPECT_NEAR(sum / count, 0.0, 0.015);
  EXPECT_NEAR(squares / count, 1.75 * 1.75 / 3, 0.015);
  EXPECT_NEAR(neighbours / count, 0.0, 0.015);
  EXPECT_NEAR(above / count, 0.25, 0.007);
}

TEST(Synthetic, WeightScaleIsAboutOneOverTheSquareRoot) {
  for (int64_t fan_in = 1; fan_in < 20000; ++fan_in) {
    const double deviation = weight_scale(fan_in) / 1.75 * std::sqrt(static_cast<double>(fan_in));
    EXPECT_GE(deviation, 1.0);
    EXPECT_LT(deviation, 2.0);
  }
  EXPECT_EQ(weight_scale(7168), 1.75f / 64);
}

TEST(Synthetic, ProbsArePositiveAndSumToOne) {
  std::mt19937_64 random(31);
  for (const int64_t topk : {1, 2, 8, 11}) {
    std::vector<int32_t> ids(static_cast<std::size_t>(200 * topk));
    for (int32_t& id : ids) id = random() % 4 == 0 ? -1 : 3;
    const std::vector<float> probs = probs_of(9, 77, topk, ids);
    for (std::size_t token = 0; token < 200; ++token) {
      double sum = 0;
      bool used = false;
      for (std::size_t i = token * static_cast<std::size_t>(topk); i < (token + 1) * static_cast<std::size_t>(topk);
           ++i) {
        if (ids[i] < 0) {
          EXPECT_EQ(bits_of_float(probs[i]), 0u);
        } else {
          EXPECT_GT(probs[i], 0.0f);
          used = true;
        }
        sum += probs[i];
      }
      EXPECT_NEAR(sum, used ? 1.0 : 0.0, 1e-6);
    }
  }
}

TEST(Routing, ExpertsOfATokenDiffer) {
  std::mt19937_64 random(3);
  for (const std::string kind : {"uniform", "zipf:0.3", "zipf:1", "zipf:8"}) {
    for (int trial = 0; trial < 10; ++trial) {
      const auto experts = static_cast<int64_t>(1 + random() % 300);
      const auto topk = trial == 0 ? experts : static_cast<int64_t>(1 + random() % static_cast<uint64_t>(experts));
      const std::vector<int32_t> ids = routing_of(kind, random(), 5, 20, experts, topk);
      for (std::size_t token = 0; token < 20; ++token) {
        std::set<int32_t> row(ids.begin() + static_cast<int64_t>(token) * topk,
                              ids.begin() + static_cast<int64_t>(token + 1) * topk);
        EXPECT_EQ(row.size(), static_cast<std::size_t>(topk));
        EXPECT_GE(*row.begin(), 0);
        EXPECT_LT(*row.rbegin(), experts);
      }
    }
  }
  EXPECT_EQ(routing_of("zipf:0", 4, 0, 100, 16, 4), routing_of("uniform", 4, 0, 100, 16, 4));
}

// The first slot follows P(e) ~ (e + 1)^-S; the second is drawn among the others in the same proportions.
TEST(Routing, FollowsTheDistribution) {
  constexpr int64_t kExperts = 6, kTokens = 60000;
  for (const double exponent : {0.0, 0.7, 1.5, 3.0}) {
    const std::vector<int32_t> ids = routing_of("zipf:" + std::to_string(exponent), 99, 0, kTokens, kExperts, 2);
    double weight[kExperts], total = 0;
    for (int64_t e = 0; e < kExperts; ++e) total += weight[e] = std::pow(static_cast<double>(e + 1), -exponent);
    double first[kExperts] = {}, second[kExperts] = {};
    for (std::size_t i = 0; i < ids.size(); i += 2) {
      ++first[ids[i]];
      ++second[ids[i + 1]];
    }
    for (int64_t e = 0; e < kExperts; ++e) {
      double expected = 0;
      for (int64_t other = 0; other < kExperts; ++other) {
        if (other != e) expected += weight[other] / total * weight[e] / (total - weight[other]);
      }
      EXPECT_NEAR(first[e] / kTokens, weight[e] / total, 0.009) << exponent << " " << e;
      EXPECT_NEAR(second[e] / kTokens, expected, 0.009) << exponent << " " << e;
    }
  }
}

TEST(Routing, ParsesItsText) {
  EXPECT_EQ(parse_routing_kind("uniform").pattern, RoutingPattern::kUniform);
  EXPECT_EQ(parse_routing_kind("one").pattern, RoutingPattern::kOne);
  for (const auto& [text, exponent] : {std::pair("zipf:0", 0.0),
                                       {"zipf:1.2", 1.2},
                                       {"zipf:8", 8.0},
                                       {"zipf:.5", 0.5},
                                       {"zipf:5e-1", 0.5},
                                       {"zipf:8.0", 8.0}}) {
    const RoutingKind kind = parse_routing_kind(text);
    EXPECT_EQ(kind.pattern, RoutingPattern::kZipf);
    EXPECT_EQ(kind.exponent, exponent);
    EXPECT_EQ(parse_routing_kind(to_string(kind)).exponent, exponent);
  }
  for (const std::string text : {"uniform", "one", "zipf:1.2"}) EXPECT_EQ(to_string(parse_routing_kind(text)), text);
  for (const std::string text : {"", "Uniform", "uniform ", "two", "zipf", "file.npy", "a\nb"}) {
    expect_error(Status::kInvalidArgument, "is not known; legal: uniform, zipf:S, one",
                 [&] { parse_routing_kind(text); });
  }
  for (const std::string number : {"", "x", "1.2x", " 1", "1 ", "+1", "-1", "8.0001", "nan", "inf", "1e999", "1,2"}) {
    expect_error(Status::kInvalidArgument, "S is '" + number + "'; legal: a number from 0 to 8",
                 [&] { parse_routing_kind("zipf:" + number); });
  }
}

TEST(Synthetic, RefusesBadArguments) {
  BFloat16 value[64];
  int32_t ids[8];
  float probs[8];
  const auto invalid = [](const std::string& text, auto&& call) { expect_error(Status::kInvalidArgument, text, call); };
  invalid("x and dy only", [&] { fill_tokens(SyntheticTensor::kW1, {1, 0, 1}, 8, value); });
  invalid("w1 and w2 only", [&] { fill_weights(SyntheticTensor::kX, {1, 0, 1}, {8, 8}, value); });
  invalid("tokens is -1", [&] { fill_tokens(SyntheticTensor::kX, {1, 0, -1}, 8, value); });
  invalid("hidden is 0", [&] { fill_tokens(SyntheticTensor::kX, {1, 0, 1}, 0, value); });
  invalid("first_global_token is -3", [&] { fill_tokens(SyntheticTensor::kX, {1, -3, 1}, 8, value); });
  invalid("experts is -1", [&] { fill_weights(SyntheticTensor::kW1, {1, 0, -1}, {8, 8}, value); });
  invalid("topk is 0", [&] { fill_probs({1, 0, 1}, 0, ids, probs); });
  invalid("topk is 0", [&] { make_routing({}, {1, 0, 1}, 4, 0, ids); });
  invalid("topk is 5; legal: 1 to the number of experts, 4", [&] { make_routing({}, {1, 0, 1}, 4, 5, ids); });
  invalid("experts is 0", [&] { make_routing({}, {1, 0, 1}, 0, 1, ids); });
  invalid("experts is 1048577", [&] { make_routing({}, {1, 0, 1}, (1 << 20) + 1, 1, ids); });
  invalid("the routing's S is", [&] { make_routing({RoutingPattern::kZipf, 9.0}, {1, 0, 1}, 4, 1, ids); });
  invalid("the routing's S is", [&] { make_routing({RoutingPattern::kZipf, std::nan("")}, {1, 0, 1}, 4, 1, ids); });
}

TEST(Checksum, PartsAddUpInAnyOrder) {
  std::mt19937_64 random(41);
  std::vector<BFloat16> bf16(1000);
  std::vector<float> fp32(1000);
  for (BFloat16& value : bf16) value.bits = static_cast<uint16_t>(random());
  for (float& value : fp32) value = float_from_bits(static_cast<uint32_t>(random()));
  const uint64_t first = uint64_t{1} << 50;
  for (int trial = 0; trial < 50; ++trial) {
    const auto a = static_cast<int64_t>(random() % 1001), b = static_cast<int64_t>(random() % 1001);
    const int64_t low = std::min(a, b), high = std::max(a, b);
    const auto parts = [&](const auto* values) {
      return checksum(values + high, 1000 - high, first + static_cast<uint64_t>(high)) + checksum(values, low, first) +
             checksum(values + low, high - low, first + static_cast<uint64_t>(low));
    };
    EXPECT_EQ(parts(bf16.data()), checksum(bf16.data(), 1000, first));
    EXPECT_EQ(parts(fp32.data()), checksum(fp32.data(), 1000, first));
  }
  EXPECT_EQ(checksum(static_cast<const float*>(nullptr), 0, 5), 0u);
}

TEST(Checksum, SeesEveryBitAndEveryMove) {
  std::mt19937_64 random(43);
  std::vector<float> values(64);
  for (float& value : values) value = float_from_bits(static_cast<uint32_t>(random()));
  const uint64_t whole = checksum(values.data(), 64, 0);
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (int bit = 0; bit < 32; ++bit) {
      std::vector<float> other = values;
      other[i] = float_from_bits(bits_of_float(values[i]) ^ (uint32_t{1} << bit));
      EXPECT_NE(checksum(other.data(), 64, 0), whole);
    }
    std::vector<float> swapped = values;
    std::swap(swapped[i], swapped[(i + 1) % 64]);
    EXPECT_NE(checksum(swapped.data(), 64, 0), whole);
  }
  EXPECT_NE(checksum(values.data(), 64, 1), whole);
  const float zeros[] = {0.0f, -0.0f};
  EXPECT_NE(checksum(zeros, 1, 0), checksum(zeros + 1, 1, 0));
}

TEST(Checksum, PrintsSixteenDigits) {
  EXPECT_EQ(to_hex16(0), "0000000000000000");
  EXPECT_EQ(to_hex16(0x0123456789abcdef), "0123456789abcdef");
  EXPECT_EQ(to_hex16(~uint64_t{0}), "ffffffffffffffff");
}

}  // namespace
}  // namespace uniep::io
