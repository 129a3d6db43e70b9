#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace uniep::tune {

// Of at least one value.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 != 0) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

struct Interval {
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
};

// Where the median of what the values are drawn from lies, surely to `deviations` standard deviations. Delayed calls do
// not move it: of n values its ends are those about deviations * sqrt(n) / 2 places from the middle, whatever their
// distribution. Without an end where there are too few values.
inline Interval median_interval(std::vector<double> values, double deviations) {
  std::sort(values.begin(), values.end());
  const auto count = static_cast<double>(values.size());
  const auto upper = static_cast<std::size_t>(std::ceil(count / 2 + deviations / 2 * std::sqrt(count)));
  if (upper >= values.size()) return {};
  return {values[values.size() - 1 - upper], values[upper]};
}

}  // namespace uniep::tune
