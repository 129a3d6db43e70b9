#include "verify/sums.h"

#include <algorithm>

#include "io/checksum.h"
#include "uniep/verifier.h"

namespace uniep::verify {
namespace {

template <typename Bits>
struct Layout;
template <>
struct Layout<uint16_t> {
  static constexpr uint32_t kExponent = 0x7f80, kMagnitude = 0x7fff, kNan = 0x7fc0;
};
template <>
struct Layout<uint32_t> {
  static constexpr uint32_t kExponent = 0x7f800000, kMagnitude = 0x7fffffff, kNan = 0x7fc00000;
};

template <typename Bits, typename Read>
void append_tiles(TileSums& out, int64_t rows, int64_t columns, Read&& bits_at) {
  out.tiles_of_row = (columns + kVerifiedColumns - 1) / kVerifiedColumns;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t begin = 0; begin < columns; begin += kVerifiedColumns) {
      uint64_t sum = 0;
      for (int64_t column = begin; column < std::min(begin + kVerifiedColumns, columns); ++column) {
        uint32_t bits = bits_at(row, column);
        if ((bits & Layout<Bits>::kExponent) == Layout<Bits>::kExponent) {
          ++out.not_finite;
          if ((bits & Layout<Bits>::kMagnitude) > Layout<Bits>::kExponent) bits = Layout<Bits>::kNan;
        }
        sum += io::mix64(static_cast<uint64_t>(column), bits);
      }
      out.sums.push_back(sum);
    }
  }
}

}  // namespace

const char* tensor_name(Tensor tensor) {
  constexpr const char* kNames[kTensors] = {"z",   "o", "y",  "dprobs",   "dxg",   "dx", "dw1",
                                            "dw2", "x", "dy", "topk_ids", "probs", "w1", "w2"};
  return kNames[static_cast<int>(tensor)];
}

bool is_by_expert(Tensor tensor) {
  return tensor == Tensor::kZ || tensor == Tensor::kDw1 || tensor == Tensor::kDw2 || tensor == Tensor::kW1 ||
         tensor == Tensor::kW2;
}

void TileSums::append(const BFloat16* values, int64_t rows, int64_t columns, int64_t stride) {
  append_tiles<uint16_t>(*this, rows, columns,
                         [&](int64_t row, int64_t column) -> uint32_t { return values[row * stride + column].bits; });
}

void TileSums::append(const float* values, int64_t rows, int64_t columns, int64_t stride) {
  append_tiles<uint32_t>(*this, rows, columns,
                         [&](int64_t row, int64_t column) { return bits_of_float(values[row * stride + column]); });
}

void TileSums::append_none(int64_t columns) {
  tiles_of_row = (columns + kVerifiedColumns - 1) / kVerifiedColumns;
  sums.insert(sums.end(), static_cast<std::size_t>(tiles_of_row), 0);
}

std::vector<Place> differences(const Sums& one, const Sums& other, int first_tensor, int end_tensor) {
  std::vector<Place> places;
  for (int tensor = first_tensor; tensor < end_tensor; ++tensor) {
    const std::size_t count = std::min(one.units[tensor].size(), other.units[tensor].size());
    for (std::size_t unit = 0; unit < count; ++unit) {
      const std::vector<uint64_t>&a = one.units[tensor][unit].sums, &b = other.units[tensor][unit].sums;
      for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        if (a[i] != b[i]) {
          places.push_back({static_cast<Tensor>(tensor), static_cast<int64_t>(unit), static_cast<int64_t>(i)});
        }
      }
    }
  }
  return places;
}

uint64_t sum_at(const Sums& sums, const Place& place) {
  return sums.of(place.tensor)[static_cast<std::size_t>(place.unit)].sums[static_cast<std::size_t>(place.index)];
}

}  // namespace uniep::verify
