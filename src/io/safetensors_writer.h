#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/file.h"

namespace uniep::io {

struct TensorSpec {
  std::string name;
  std::string dtype;  // one of known size: "BF16", "F32", "I32", "I64", ...
  std::vector<int64_t> shape;
};

// Writes a safetensors file as a stream: all tensors are announced first, then their bytes follow in that order, in
// pieces of any size. The file appears with commit(); without it nothing is left. The data begin at a multiple of 8
// bytes; a reader finds a tensor aligned when the sizes of those before it are multiples of its element.
// Errors: Error(kInvalidArgument) for a name twice, an unknown dtype, a bad shape or bytes that do not match what was
// announced; Error(kIo) as AtomicFile.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorSpec>& tensors,
                    const std::map<std::string, std::string>& metadata = {});

  void append(std::span<const std::byte> data);
  void commit();

 private:
  AtomicFile file_;
  int64_t missing_ = 0;  // bytes announced and not yet appended
};

}  // namespace uniep::io
