#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "uniep/bfloat16.h"

// The safetensors format: the header's length (8 bytes, little endian), a JSON header, the tensors' bytes.
namespace uniep::io {

struct Tensor {
  std::string dtype;  // as the file says: "BF16", "F32", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> data;  // little endian, not aligned

  int64_t elements() const;
};

// The contents of a safetensors file. Errors are Error(kInvalidArgument) and name the file and the tensor.
class Safetensors {
 public:
  const std::string& name() const { return name_; }
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }
  const Tensor* find(std::string_view tensor) const;  // nullptr when there is none
  const Tensor& at(std::string_view tensor) const;    // Error when there is none

  // Elements [first, first + out.size()) of a tensor. As bf16: BF16 as it is, F32 rounded to nearest even. As float:
  // F32 as it is, BF16 widened. As int64: I64 as it is, I32 widened. Other dtypes are refused.
  void read(std::string_view tensor, int64_t first, std::span<BFloat16> out) const;
  void read(std::string_view tensor, int64_t first, std::span<float> out) const;
  void read(std::string_view tensor, int64_t first, std::span<int64_t> out) const;

 private:
  friend Safetensors parse_safetensors(std::span<const std::byte> bytes, const std::string& name);
  friend Safetensors open_safetensors(const std::filesystem::path& path);
  Safetensors(std::span<const std::byte> bytes, std::string name);
  const Tensor& readable(std::string_view tensor, int64_t first, std::size_t count, std::string_view wide,
                         std::string_view narrow) const;

  std::string name_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
  std::shared_ptr<const MappedFile> file_;  // keeps the mapping alive; null when the caller owns the bytes
};

// Reads an image in memory, which must outlive the result: tensors point into it. `name` stands in messages. Refuses
// whatever is not exactly as the format says: duplicate or unknown keys, data_offsets out of range, overlapping or with
// holes, sizes that do not match shape and dtype. A dtype that is not known is listed, but can not be read. Allocates a
// small multiple of the header's bytes, which really are there.
Safetensors parse_safetensors(std::span<const std::byte> bytes, const std::string& name);

// Maps the file, so that tensors of many gigabytes are read piece by piece.
Safetensors open_safetensors(const std::filesystem::path& path);

// Bytes of one element of a dtype whose size is known, else nothing.
std::optional<std::size_t> dtype_size(std::string_view dtype);

}  // namespace uniep::io
