#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "uniep/bfloat16.h"

namespace uniep::reference {

// How far an engine's tensor is from the float64 reference. The limits are the contract's, never looser.
struct Comparison {
  double error = 0;      // |got - reference| / |reference|, Frobenius norms over the tensor
  double worst_row = 0;  // largest |got - reference| of a row, over the root mean square norm of the reference's rows;
                         // rows that are zero (experts without tokens) are left out of that mean, and must be zero
  double limit = 8e-3;
  double worst_row_limit = 3e-2;
  bool passed = true;
  std::string message;  // why it failed, with the row; empty when it passed
};

// Compares a tensor that comes in parts. Beside the two limits: every value must be finite, and a row whose reference
// is all zeros must be zero (of either sign). A value that is not finite, or any difference from a reference of norm
// zero, makes both numbers infinite. A tensor without values passes with error 0.
class Comparer {
 public:
  // `columns`: values of a row.
  explicit Comparer(int64_t columns) : columns_(columns) {}

  // Appends whole rows; both spans are of one size. Throws Error(kInvalidArgument) otherwise.
  void add(std::span<const BFloat16> got, std::span<const double> reference);
  void add(std::span<const float> got, std::span<const double> reference);

  Comparison result() const;

 private:
  template <typename T>
  void add_rows(std::span<const T> got, std::span<const double> reference);
  void fail(const std::string& what);

  int64_t columns_;
  int64_t rows_ = 0;
  int64_t counted_rows_ = 0;  // with a reference that is not zero
  int64_t worst_index_ = 0;
  double difference_squared_ = 0;
  double reference_squared_ = 0;
  double worst_squared_ = 0;
  bool finite_ = true;
  std::string failure_;  // the first
};

Comparison compare(std::span<const BFloat16> got, std::span<const double> reference, int64_t columns);
Comparison compare(std::span<const float> got, std::span<const double> reference, int64_t columns);

}  // namespace uniep::reference
