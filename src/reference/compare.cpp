#include "reference/compare.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>

#include "uniep/error.h"

namespace uniep::reference {
namespace {

double value_of(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
double value_of(float value) {
  return value;
}

// 0 / 0 is no difference at all; anything else over 0 is infinitely far.
double ratio(double difference, double norm) {
  return difference == 0 ? 0.0 : difference / norm;
}

std::string above(const char* what, double value, double limit) {
  std::ostringstream text;
  text << what << " " << value << " is above " << limit;
  return text.str();
}

}  // namespace

void Comparer::fail(const std::string& what) {
  if (failure_.empty()) failure_ = "row " + std::to_string(rows_) + " " + what;
}

template <typename T>
void Comparer::add_rows(std::span<const T> got, std::span<const double> reference) {
  if (got.size() != reference.size() || columns_ < 1 || got.size() % static_cast<size_t>(columns_) != 0) {
    throw Error(Status::kInvalidArgument, "compare: got holds " + std::to_string(got.size()) + " values; legal are " +
                                              std::to_string(reference.size()) + ", in whole rows of " +
                                              std::to_string(columns_));
  }
  for (size_t begin = 0; begin < got.size(); begin += static_cast<size_t>(columns_), ++rows_) {
    double difference_squared = 0;
    double reference_squared = 0;
    bool finite = true;
    bool got_zero = true;
    bool reference_zero = true;
    for (size_t i = begin; i < begin + static_cast<size_t>(columns_); ++i) {
      const double value = value_of(got[i]);
      finite = finite && std::isfinite(value) && std::isfinite(reference[i]);
      got_zero = got_zero && value == 0;
      reference_zero = reference_zero && reference[i] == 0;
      difference_squared += (value - reference[i]) * (value - reference[i]);
      reference_squared += reference[i] * reference[i];
    }
    if (!finite) {
      finite_ = false;
      fail("holds a value that is not finite");
      continue;
    }
    counted_rows_ += reference_zero ? 0 : 1;
    if (reference_zero && !got_zero) fail("is not zero, but its reference is");
    difference_squared_ += difference_squared;
    reference_squared_ += reference_squared;
    if (difference_squared > worst_squared_) {
      worst_squared_ = difference_squared;
      worst_index_ = rows_;
    }
  }
}

void Comparer::add(std::span<const BFloat16> got, std::span<const double> reference) {
  add_rows(got, reference);
}
void Comparer::add(std::span<const float> got, std::span<const double> reference) {
  add_rows(got, reference);
}

Comparison Comparer::result() const {
  Comparison comparison;
  comparison.message = failure_;
  if (!finite_) {
    comparison.error = comparison.worst_row = std::numeric_limits<double>::infinity();
  } else {
    comparison.error = ratio(std::sqrt(difference_squared_), std::sqrt(reference_squared_));
    const double root_mean_square =
        std::sqrt(reference_squared_ / static_cast<double>(std::max<int64_t>(counted_rows_, 1)));
    comparison.worst_row = ratio(std::sqrt(worst_squared_), root_mean_square);
  }
  if (comparison.message.empty() && !(comparison.error <= comparison.limit)) {
    comparison.message = above("error", comparison.error, comparison.limit);
  }
  if (comparison.message.empty() && !(comparison.worst_row <= comparison.worst_row_limit)) {
    comparison.message = above(("row " + std::to_string(worst_index_) + ": worst_row").c_str(), comparison.worst_row,
                               comparison.worst_row_limit);
  }
  comparison.passed = comparison.message.empty();
  return comparison;
}

Comparison compare(std::span<const BFloat16> got, std::span<const double> reference, int64_t columns) {
  Comparer comparer(columns);
  comparer.add(got, reference);
  return comparer.result();
}

Comparison compare(std::span<const float> got, std::span<const double> reference, int64_t columns) {
  Comparer comparer(columns);
  comparer.add(got, reference);
  return comparer.result();
}

}  // namespace uniep::reference
