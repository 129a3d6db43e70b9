#include "io/npy.h"

#include <bit>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "io/extents.h"
#include "io/file.h"
#include "io/quote.h"
#include "uniep/error.h"

namespace uniep::io {
namespace {

static_assert(std::endian::native == std::endian::little, "array data is copied as it lies in the file");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kVersionEnd = 8;      // magic, major and minor version
constexpr std::size_t kDataAlignment = 64;  // where a written file's data begins, as NumPy does
constexpr const char* kLegalTypes = "legal: '<i4', '<i8', '<f4'";

struct Header {
  std::string type;
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

[[noreturn]] void throw_bad_npy(const std::string& name, const std::string& problem) {
  throw Error(Status::kInvalidArgument, "npy file " + quote_path(name) + ": " + problem);
}

// The header: a Python dict literal with exactly the keys descr, fortran_order and shape, in any order.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  Header parse() {
    expect('{');
    while (!accept('}')) {
      const std::string key = string_literal();
      expect(':');
      if (key == "descr") {
        once(type_, key) = type_descriptor();
      } else if (key == "fortran_order") {
        once(fortran_order_, key) = boolean();
      } else if (key == "shape") {
        once(shape_, key) = tuple();
      } else {
        fail("unknown key " + quote_text(key));
      }
      if (accept(',')) continue;
      expect('}');
      break;
    }
    skip_space();
    if (position_ != text_.size()) fail("characters after the closing brace");
    if (!type_ || !fortran_order_ || !shape_) fail("one of the keys descr, fortran_order and shape is missing");
    return Header{*std::move(type_), *fortran_order_, *std::move(shape_)};
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw_bad_npy(name_, "bad header at character " + std::to_string(position_) + ": " + problem);
  }

  template <class Value>
  std::optional<Value>& once(std::optional<Value>& value, const std::string& key) const {
    if (value) fail("the key " + quote_text(key) + " stands there twice");
    return value;
  }

  void skip_space() {
    while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\n')) ++position_;
  }

  bool accept(char wanted) {
    skip_space();
    if (position_ >= text_.size() || text_[position_] != wanted) return false;
    ++position_;
    return true;
  }

  void expect(char wanted) {
    if (!accept(wanted)) fail(std::string("expected '") + wanted + "'");
  }

  bool accept_word(std::string_view word) {
    skip_space();
    if (!text_.substr(position_).starts_with(word)) return false;
    position_ += word.size();
    return true;
  }

  std::string string_literal() {
    const char quote = accept('\'') ? '\'' : '"';
    if (quote == '"') expect('"');
    const std::size_t begin = position_;
    while (position_ < text_.size() && text_[position_] != quote) {
      const char c = text_[position_];
      if (c == '\\' || c < ' ' || c > '~') fail("a string may hold printable ASCII without escapes only");
      ++position_;
    }
    const std::size_t end = position_;
    expect(quote);
    return std::string(text_.substr(begin, end - begin));
  }

  std::string type_descriptor() {
    if (accept('[')) fail(std::string("structured dtypes are not supported; ") + kLegalTypes);
    return string_literal();
  }

  bool boolean() {
    if (accept_word("True")) return true;
    if (accept_word("False")) return false;
    fail("fortran_order must be True or False");
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> extents;
    expect('(');
    while (!accept(')')) {
      if (extents.size() == kMaxDimensions) fail("more than " + std::to_string(kMaxDimensions) + " dimensions");
      extents.push_back(extent());
      if (accept(',')) continue;
      if (extents.size() == 1) fail("a tuple of one number needs a comma, as in (3,)");
      expect(')');
      break;
    }
    return extents;
  }

  int64_t extent() {
    skip_space();
    int64_t value = 0;
    const char* begin = text_.data() + position_;
    const char* end = text_.data() + text_.size();
    if (begin != end && *begin == '-') fail("a dimension must not be negative");
    const auto result = std::from_chars(begin, end, value);
    if (result.ec == std::errc::result_out_of_range) fail("a dimension does not fit into 63 bits");
    if (result.ec != std::errc()) fail("a dimension must be a decimal number");
    if (*begin == '0' && result.ptr - begin > 1) fail("a dimension must not begin with 0");
    position_ += static_cast<std::size_t>(result.ptr - begin);
    return value;
  }

  std::string_view text_;
  const std::string& name_;
  std::size_t position_ = 0;
  std::optional<std::string> type_;
  std::optional<bool> fortran_order_;
  std::optional<std::vector<int64_t>> shape_;
};

uint64_t little_endian(std::span<const std::byte> bytes) {
  uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
  return value;
}

template <class Value>
std::vector<Value> values_of(std::span<const std::byte> data, std::span<const int64_t> shape, const std::string& name) {
  const std::optional<int64_t> count = element_count(shape);
  if (!count) throw_bad_npy(name, "the shape " + shape_text(shape) + " has more elements than 63 bits can count");
  const uint64_t available = data.size() / sizeof(Value);
  if (static_cast<uint64_t>(*count) > available) {
    throw_bad_npy(name, "truncated: the shape " + shape_text(shape) + " needs " + std::to_string(*count) +
                            " elements of " + std::to_string(sizeof(Value)) + " bytes, but " +
                            std::to_string(data.size()) + " bytes of data follow the header");
  }
  const std::size_t size = static_cast<std::size_t>(*count) * sizeof(Value);
  if (data.size() != size) {
    throw_bad_npy(name, std::to_string(data.size() - size) + " bytes too many after the " + std::to_string(size) +
                            " bytes of data of the shape " + shape_text(shape));
  }
  std::vector<Value> values(static_cast<std::size_t>(*count));
  if (size > 0) std::memcpy(values.data(), data.data(), size);
  return values;
}

const char* type_of(const NpyArray& array) {
  constexpr const char* kTypes[] = {"<i4", "<i8", "<f4"};
  return kTypes[array.values.index()];
}

}  // namespace

NpyArray parse_npy(std::span<const std::byte> bytes, const std::string& name) {
  if (bytes.size() < kVersionEnd || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    throw_bad_npy(name, "it does not begin with the magic bytes of the .npy format");
  }
  const auto major = std::to_integer<int>(bytes[6]);
  const auto minor = std::to_integer<int>(bytes[7]);
  if (major < 1 || major > 3 || minor != 0) {
    throw_bad_npy(name, "format version " + std::to_string(major) + "." + std::to_string(minor) +
                            " is not known; legal: 1.0, 2.0, 3.0");
  }
  const std::size_t length_size = major == 1 ? 2 : 4;
  const std::size_t header_begin = kVersionEnd + length_size;
  if (bytes.size() < header_begin) throw_bad_npy(name, "truncated inside the header's length");
  const uint64_t header_size = little_endian(bytes.subspan(kVersionEnd, length_size));
  if (header_size > bytes.size() - header_begin) {
    throw_bad_npy(name, "truncated: the header should have " + std::to_string(header_size) + " bytes, but " +
                            std::to_string(bytes.size() - header_begin) + " follow");
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + header_begin, header_size);
  Header header = HeaderParser(text, name).parse();
  if (header.fortran_order) throw_bad_npy(name, "Fortran order is not supported; save the array in C order");

  const std::span<const std::byte> data = bytes.subspan(header_begin + header_size);
  NpyArray array;
  if (header.type == "<i4") {
    array.values = values_of<int32_t>(data, header.shape, name);
  } else if (header.type == "<i8") {
    array.values = values_of<int64_t>(data, header.shape, name);
  } else if (header.type == "<f4") {
    array.values = values_of<float>(data, header.shape, name);
  } else {
    const bool big_endian = header.type.starts_with('>');
    throw_bad_npy(name, "dtype " + quote_text(header.type) + (big_endian ? " is big endian" : " is not supported") +
                            "; " + kLegalTypes);
  }
  array.shape = std::move(header.shape);
  return array;
}

NpyArray read_npy(const std::filesystem::path& path) {
  return parse_npy(read_file(path), path.native());
}

void write_npy(const std::filesystem::path& path, const NpyArray& array) {
  const std::size_t count = std::visit([](const auto& values) { return values.size(); }, array.values);
  const std::optional<int64_t> expected = element_count(array.shape);
  if (array.shape.size() > kMaxDimensions || !expected || static_cast<uint64_t>(*expected) != count) {
    throw_bad_npy(path.native(), "the shape " + shape_text(array.shape) + " does not fit " + std::to_string(count) +
                                     " values to write");
  }
  std::string header = std::string("{'descr': '") + type_of(array) + "', 'fortran_order': False, 'shape': (";
  for (const int64_t extent : array.shape) header += std::to_string(extent) + ", ";
  header += "), }";
  // NumPy writes (3,) and (3, 4); spaces inside the brackets mean the same.
  const std::size_t prefix = kVersionEnd + 2;
  const std::size_t unpadded = prefix + header.size() + 1;
  header.append((kDataAlignment - unpadded % kDataAlignment) % kDataAlignment, ' ');
  header += '\n';

  std::string start(kMagic);
  start += {'\x01', '\x00', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};
  AtomicFile file(path);
  file.write(start + header);
  file.write(std::visit([](const auto& values) { return std::as_bytes(std::span(values)); }, array.values));
  file.commit();
}

}  // namespace uniep::io
