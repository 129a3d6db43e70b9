#include "io/safetensors_writer.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "io/extents.h"
#include "io/quote.h"
#include "io/safetensors.h"
#include "io/safetensors_header.h"
#include "uniep/error.h"

namespace uniep::io {
namespace {

constexpr std::size_t kHeaderAlignment = 8;

[[noreturn]] void throw_unwritable(const std::filesystem::path& path, const std::string& problem) {
  throw Error(Status::kInvalidArgument, "safetensors file " + quote_path(path.native()) + " to write: " + problem);
}

int64_t byte_size(const TensorSpec& tensor, const std::filesystem::path& path) {
  const std::optional<std::size_t> size = dtype_size(tensor.dtype);
  if (!size)
    throw_unwritable(path, "tensor " + quote_text(tensor.name) + ": unknown dtype " + quote_text(tensor.dtype));
  const std::optional<int64_t> count = element_count(tensor.shape);
  int64_t bytes = 0;
  if (tensor.shape.size() > kMaxDimensions || !count ||
      __builtin_mul_overflow(*count, static_cast<int64_t>(*size), &bytes)) {
    throw_unwritable(path,
                     "tensor " + quote_text(tensor.name) + ": the shape " + shape_text(tensor.shape) + " is not legal");
  }
  return bytes;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, const std::vector<TensorSpec>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  for (const TensorSpec& tensor : tensors) {
    if (tensor.name == kMetadataKey)
      throw_unwritable(path, "a tensor can not have the name " + quote_text(tensor.name));
    if (header.contains(tensor.name))
      throw_unwritable(path, "tensor " + quote_text(tensor.name) + " is announced twice");
    const int64_t begin = missing_;
    if (__builtin_add_overflow(begin, byte_size(tensor, path), &missing_)) {
      throw_unwritable(path, "the tensors' sizes together overflow 63 bits");
    }
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, missing_}}};
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    throw_unwritable(path, "a tensor's name or the metadata is not valid UTF-8");
  }
  text.append((kHeaderAlignment - text.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
  if (text.size() > kMaxSafetensorsHeader)
    throw_unwritable(path, "the header would have more bytes than readers accept");
  const uint64_t length = text.size();
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(text);
}

void SafetensorsWriter::append(std::span<const std::byte> data) {
  if (data.size() > static_cast<uint64_t>(missing_)) {
    throw_unwritable(file_.path(), std::to_string(data.size()) + " bytes appended where " + std::to_string(missing_) +
                                       " of the announced tensors were missing");
  }
  file_.write(data);
  missing_ -= static_cast<int64_t>(data.size());
}

void SafetensorsWriter::commit() {
  if (missing_ != 0) {
    throw_unwritable(file_.path(), std::to_string(missing_) + " bytes of the announced tensors are missing");
  }
  file_.commit();
}

}  // namespace uniep::io
