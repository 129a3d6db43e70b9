#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "uniep/bfloat16.h"

// Checksums by tile: what a call read and wrote, small enough to keep.
namespace uniep::verify {

enum class Tensor : int { kZ, kRows, kY, kDprobs, kDxRows, kDx, kDw1, kDw2, kX, kDy, kIds, kProbs, kW1, kW2 };
inline constexpr int kTensors = 14;
inline constexpr int kFirstInput = static_cast<int>(Tensor::kX);
const char* tensor_name(Tensor tensor);
// Of one expert in each unit; else of one rank.
bool is_by_expert(Tensor tensor);

// A tensor's tiles: a row and kVerifiedColumns columns each.
struct TileSums {
  std::vector<uint64_t> sums;  // [rows, tiles of a row]; empty: not known
  int64_t tiles_of_row = 0;
  int64_t not_finite = 0;  // elements

  // Adds the tiles of `rows` rows that lie `stride` elements apart. All NaNs are alike.
  void append(const BFloat16* values, int64_t rows, int64_t columns, int64_t stride);
  void append(const float* values, int64_t rows, int64_t columns, int64_t stride);
  // A row that nobody writes, such as that of an unused slot.
  void append_none(int64_t columns);
};

// One run of a layer: what is known of it, by rank or by expert.
struct Sums {
  std::array<std::vector<TileSums>, kTensors> units;
  std::vector<int> host;           // [E] the rank that computed the expert's rows
  std::vector<int> gradient_host;  // [E] the rank that made its weight gradients

  std::vector<TileSums>& of(Tensor tensor) { return units[static_cast<int>(tensor)]; }
  const std::vector<TileSums>& of(Tensor tensor) const { return units[static_cast<int>(tensor)]; }
};

struct Place {
  Tensor tensor;
  int64_t unit;   // rank or expert
  int64_t index;  // in TileSums::sums
};
// The tiles that both know and that differ, tensors in their order.
std::vector<Place> differences(const Sums& one, const Sums& other, int first_tensor, int end_tensor);
uint64_t sum_at(const Sums& sums, const Place& place);

}  // namespace uniep::verify
