#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "model/elementwise.h"
#include "reference/compare.h"
#include "uniep/error.h"

// How far a tensor is from the reference, and when that is too far.
namespace uniep::reference {
namespace {

using Doubles = std::vector<double>;

BFloat16 nearest_bfloat16(double value) {
  return to_bfloat16(static_cast<float>(value));
}

TEST(ReferenceCompare, MeasuresBothErrors) {
  const Doubles reference = {3, 4, 0, 5};  // two rows of norm 5: root mean square 5, Frobenius sqrt(50)
  const std::vector<float> got = {3, 4, 0, 5.01f};
  const Comparison comparison = compare(got, reference, 2);
  EXPECT_NEAR(comparison.error, 0.01 / std::sqrt(50.0), 1e-7);
  EXPECT_NEAR(comparison.worst_row, 0.01 / 5, 1e-7);
  EXPECT_TRUE(comparison.passed) << comparison.message;
  EXPECT_EQ(comparison.limit, 8e-3);
  EXPECT_EQ(comparison.worst_row_limit, 3e-2);
}

TEST(ReferenceCompare, EachLimitFailsOnItsOwn) {
  const Doubles ones(1000, 1.0);
  std::vector<float> all_off(1000, 1.0079f);
  EXPECT_TRUE(compare(all_off, ones, 10).passed);
  all_off.assign(1000, 1.0081f);
  EXPECT_FALSE(compare(all_off, ones, 10).passed);

  std::vector<float> one_row_off(1000, 1.0f);  // error 0.04 * sqrt(10 / 1000) = 0.004
  std::fill_n(one_row_off.begin() + 730, 10, 1.04f);
  const Comparison comparison = compare(one_row_off, ones, 10);
  EXPECT_LT(comparison.error, comparison.limit);
  EXPECT_FALSE(comparison.passed);
  EXPECT_NE(comparison.message.find("row 73"), std::string::npos) << comparison.message;
}

TEST(ReferenceCompare, CatchesValuesThatAreNotFinite) {
  const Doubles reference(40, 1.0);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    std::vector<float> got(40, 1.0f);
    got[33] = bad;
    const Comparison comparison = compare(got, reference, 4);
    EXPECT_FALSE(comparison.passed);
    EXPECT_FALSE(comparison.error < comparison.limit);
    EXPECT_NE(comparison.message.find("row 8 "), std::string::npos) << comparison.message;
    std::vector<BFloat16> narrow(40, nearest_bfloat16(1));
    narrow[33].bits = static_cast<unsigned short>(std::bit_cast<uint32_t>(bad) >> 16);
    EXPECT_FALSE(compare(narrow, reference, 4).passed);
  }
}

TEST(ReferenceCompare, ZeroRowsMustBeZero) {
  Doubles reference(40, 1.0);
  std::fill_n(reference.begin() + 12, 4, 0.0);
  std::vector<float> got(reference.begin(), reference.end());
  got[13] = -0.0f;
  EXPECT_TRUE(compare(got, reference, 4).passed);
  got[13] = 1e-40f;  // a subnormal: far below both limits
  const Comparison comparison = compare(got, reference, 4);
  EXPECT_LT(comparison.error, 1e-12);
  EXPECT_FALSE(comparison.passed);
  EXPECT_NE(comparison.message.find("row 3 "), std::string::npos) << comparison.message;

  const Doubles nothing(8, 0.0);
  EXPECT_TRUE(compare(std::vector<float>(8, 0.0f), nothing, 4).passed);
  EXPECT_FALSE(compare(std::vector<float>(8, 1e-3f), nothing, 4).passed);
}

TEST(ReferenceCompare, EmptyPassesAndWrongSizesAreRefused) {
  const Comparison comparison = compare(std::vector<float>(), Doubles(), 4);
  EXPECT_TRUE(comparison.passed);
  EXPECT_EQ(comparison.error, 0);
  EXPECT_EQ(comparison.worst_row, 0);
  EXPECT_THROW(compare(std::vector<float>(4), Doubles(8), 4), Error);
  EXPECT_THROW(compare(std::vector<float>(6), Doubles(6), 4), Error);
}

TEST(ReferenceCompare, PartsGiveWhatTheWholeGives) {
  std::mt19937_64 random(9);
  std::normal_distribution<double> normal;
  Doubles reference(600);
  for (double& value : reference) value = normal(random);
  std::vector<BFloat16> got;
  for (const double value : reference) got.push_back(nearest_bfloat16(value));
  Comparer comparer(6);
  for (size_t begin = 0; begin < 600; begin += 60) {
    comparer.add(std::span<const BFloat16>(got).subspan(begin, 60),
                 std::span<const double>(reference).subspan(begin, 60));
  }
  const Comparison whole = compare(got, reference, 6);
  EXPECT_EQ(comparer.result().error, whole.error);
  EXPECT_EQ(comparer.result().worst_row, whole.worst_row);
  EXPECT_GT(whole.error, 1e-4);
  EXPECT_TRUE(whole.passed);
}

}  // namespace
}  // namespace uniep::reference
