#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <variant>
#include <vector>

// NumPy's .npy format: the versions 1.0, 2.0 and 3.0 of little-endian int32, int64 and float32 arrays in C order.
namespace uniep::io {

struct NpyArray {
  std::vector<int64_t> shape;  // empty: a scalar, one value
  std::variant<std::vector<int32_t>, std::vector<int64_t>, std::vector<float>> values;
};

// Reads a whole .npy image; `name` stands in messages. Anything wrong, unsupported or left over throws
// Error(kInvalidArgument). Allocates no more than the image has bytes, whatever its header says.
NpyArray parse_npy(std::span<const std::byte> bytes, const std::string& name);

NpyArray read_npy(const std::filesystem::path& path);

// Writes version 1.0. The shape must have as many elements as there are values.
void write_npy(const std::filesystem::path& path, const NpyArray& array);

}  // namespace uniep::io
