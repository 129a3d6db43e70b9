#include "io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "io/extents.h"
#include "io/quote.h"
#include "io/safetensors_header.h"
#include "model/elementwise.h"
#include "uniep/error.h"

namespace uniep::io {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor data is copied as it lies in the file");

constexpr std::size_t kLengthSize = 8;

std::string where(const std::string& name) {
  return "safetensors file " + quote_path(name);
}

[[noreturn]] void throw_invalid(const std::string& name, const std::string& problem) {
  throw Error(Status::kInvalidArgument, where(name) + ": " + problem);
}

struct Range {
  int64_t begin;
  int64_t end;
  const std::string* tensor;
};

// Together the tensors must cover the data from end to end, each byte once.
void require_tiling(std::vector<Range> ranges, std::size_t size, const std::string& name) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  int64_t covered = 0;
  for (const Range& range : ranges) {
    const std::string text = "tensor " + quote_text(*range.tensor) + ": data_offsets [" + std::to_string(range.begin) +
                             ", " + std::to_string(range.end) + ")";
    if (range.begin < covered) throw_invalid(name, text + " overlap another tensor's");
    if (range.begin > covered) throw_invalid(name, text + " leave a hole from byte " + std::to_string(covered));
    covered = range.end;
  }
  if (static_cast<std::size_t>(covered) != size) {
    throw_invalid(name, std::to_string(size - static_cast<std::size_t>(covered)) +
                            " bytes at the end of the file belong to no tensor");
  }
}

Tensor make_tensor(const std::string& tensor, SafetensorsEntry& entry, std::span<const std::byte> data,
                   const std::string& name) {
  const int64_t begin = (*entry.data_offsets)[0];
  const int64_t end = (*entry.data_offsets)[1];
  const std::string label = "tensor " + quote_text(tensor) + ": ";
  if (begin > end || static_cast<uint64_t>(end) > data.size()) {
    throw_invalid(name, label + "data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) +
                            ") do not lie in the " + std::to_string(data.size()) + " bytes of data");
  }
  const std::optional<int64_t> count = element_count(*entry.shape);
  if (!count) throw_invalid(name, label + "the shape " + shape_text(*entry.shape) + " overflows 63 bits");
  if (const std::optional<std::size_t> size = dtype_size(*entry.dtype)) {
    int64_t bytes = 0;
    if (__builtin_mul_overflow(*count, static_cast<int64_t>(*size), &bytes) || bytes != end - begin) {
      throw_invalid(name, label + "data_offsets span " + std::to_string(end - begin) + " bytes, but " + *entry.dtype +
                              " " + shape_text(*entry.shape) + " needs another size");
    }
  }
  const auto offset = static_cast<std::size_t>(begin);
  return {*std::move(entry.dtype), *std::move(entry.shape),
          data.subspan(offset, static_cast<std::size_t>(end) - offset)};
}

template <class Out, class In, class Convert>
void convert_elements(std::span<const std::byte> data, int64_t first, std::span<Out> out, Convert convert) {
  const std::byte* source = data.data() + static_cast<std::size_t>(first) * sizeof(In);
  for (std::size_t i = 0; i < out.size(); ++i) {
    In value;
    std::memcpy(&value, source + i * sizeof(In), sizeof(In));
    out[i] = convert(value);
  }
}

template <class Out>
void copy_elements(std::span<const std::byte> data, int64_t first, std::span<Out> out) {
  if (!out.empty())
    std::memcpy(out.data(), data.data() + static_cast<std::size_t>(first) * sizeof(Out), out.size_bytes());
}

}  // namespace

int64_t Tensor::elements() const {
  return element_count(shape).value_or(0);
}

std::optional<std::size_t> dtype_size(std::string_view dtype) {
  static constexpr struct {
    std::string_view name;
    std::size_t size;
  } kSizes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2},
                {"BF16", 2}, {"U32", 4}, {"I32", 4}, {"F32", 4},     {"U64", 8},     {"I64", 8}, {"F64", 8}};
  for (const auto& entry : kSizes) {
    if (entry.name == dtype) return entry.size;
  }
  return std::nullopt;
}

Safetensors::Safetensors(std::span<const std::byte> bytes, std::string name) : name_(std::move(name)) {
  if (bytes.size() < kLengthSize) throw_invalid(name_, "truncated: shorter than the header's length of 8 bytes");
  uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), kLengthSize);
  const std::span<const std::byte> rest = bytes.subspan(kLengthSize);
  if (header_size > kMaxSafetensorsHeader) {
    throw_invalid(name_, "the header's length is " + std::to_string(header_size) + "; legal: up to " +
                             std::to_string(kMaxSafetensorsHeader));
  }
  if (header_size > rest.size()) {
    throw_invalid(name_, "truncated: the header should have " + std::to_string(header_size) + " bytes, but " +
                             std::to_string(rest.size()) + " follow");
  }
  const std::string_view text(reinterpret_cast<const char*>(rest.data()), header_size);
  SafetensorsHeader header = parse_safetensors_header(text, where(name_));
  const std::span<const std::byte> data = rest.subspan(header_size);
  std::vector<Range> ranges;
  for (auto& [tensor, entry] : header.tensors) {
    ranges.push_back({(*entry.data_offsets)[0], (*entry.data_offsets)[1], &tensor});
    tensors_.emplace(tensor, make_tensor(tensor, entry, data, name_));
  }
  require_tiling(std::move(ranges), data.size(), name_);
  metadata_ = std::move(header.metadata);
}

const Tensor* Safetensors::find(std::string_view tensor) const {
  const auto found = tensors_.find(tensor);
  return found == tensors_.end() ? nullptr : &found->second;
}

const Tensor& Safetensors::at(std::string_view tensor) const {
  const Tensor* found = find(tensor);
  if (found == nullptr) throw_invalid(name_, "there is no tensor " + quote_text(tensor));
  return *found;
}

const Tensor& Safetensors::readable(std::string_view tensor, int64_t first, std::size_t count, std::string_view wide,
                                    std::string_view narrow) const {
  const Tensor& found = at(tensor);
  if (found.dtype != wide && found.dtype != narrow) {
    throw_invalid(name_, "tensor " + quote_text(tensor) + " has dtype " + quote_text(found.dtype) +
                             "; legal here: " + std::string(wide) + ", " + std::string(narrow));
  }
  const int64_t elements = found.elements();
  if (first < 0 || first > elements || count > static_cast<uint64_t>(elements - first)) {
    throw_invalid(name_, "tensor " + quote_text(tensor) + " has " + std::to_string(elements) + " elements; asked for " +
                             std::to_string(count) + " from " + std::to_string(first));
  }
  return found;
}

void Safetensors::read(std::string_view tensor, int64_t first, std::span<BFloat16> out) const {
  const Tensor& source = readable(tensor, first, out.size(), "F32", "BF16");
  if (source.dtype == "BF16") return copy_elements(source.data, first, out);
  convert_elements<BFloat16, float>(source.data, first, out, [](float value) { return to_bfloat16(value); });
}

void Safetensors::read(std::string_view tensor, int64_t first, std::span<float> out) const {
  const Tensor& source = readable(tensor, first, out.size(), "F32", "BF16");
  if (source.dtype == "F32") return copy_elements(source.data, first, out);
  convert_elements<float, BFloat16>(source.data, first, out, [](BFloat16 value) { return to_float(value); });
}

void Safetensors::read(std::string_view tensor, int64_t first, std::span<int64_t> out) const {
  const Tensor& source = readable(tensor, first, out.size(), "I64", "I32");
  if (source.dtype == "I64") return copy_elements(source.data, first, out);
  convert_elements<int64_t, int32_t>(source.data, first, out, [](int32_t value) { return int64_t{value}; });
}

Safetensors parse_safetensors(std::span<const std::byte> bytes, const std::string& name) {
  return Safetensors(bytes, name);
}

Safetensors open_safetensors(const std::filesystem::path& path) {
  auto file = std::make_shared<const MappedFile>(path);
  Safetensors contents(file->bytes(), path.native());
  contents.file_ = std::move(file);
  return contents;
}

}  // namespace uniep::io
