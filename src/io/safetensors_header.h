#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace uniep::io {

// Longest JSON header that is read; the format's own implementation has the same bound.
constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;
constexpr const char* kMetadataKey = "__metadata__";

struct SafetensorsEntry {
  std::optional<std::string> dtype;
  std::optional<std::vector<int64_t>> shape;
  std::optional<std::vector<int64_t>> data_offsets;  // [begin, end) in bytes, from the end of the header
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry, std::less<>> tensors;  // every entry complete, offsets two
  std::map<std::string, std::string, std::less<>> metadata;
};

// Reads the JSON text; checks its form, not what the numbers mean. Error(kInvalidArgument) begins with `where`.
SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& where);

}  // namespace uniep::io
