#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "io/hash64.h"
#include "uniep/error.h"

// Numbers and texts as bytes of a message between ranks of one machine type.
namespace uniep::tune {

class ByteWriter {
 public:
  template <typename T>
  void number(T value) {
    static_assert(std::is_arithmetic_v<T>);
    const std::size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  void text(const std::string& value) {
    number(static_cast<uint32_t>(value.size()));
    const std::size_t at = bytes_.size();
    bytes_.resize(at + value.size());
    if (!value.empty()) std::memcpy(bytes_.data() + at, value.data(), value.size());
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// Throws Error(kInvalidArgument) where the bytes end early, or what they count does not fit into them.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename T>
  T number() {
    static_assert(std::is_arithmetic_v<T>);
    T value{};
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  std::string text() {
    const auto size = number<uint32_t>();
    const std::byte* const data = take(size);
    return {reinterpret_cast<const char*>(data), size};
  }
  // A number of things of at least `least_bytes` each.
  uint32_t count(std::size_t least_bytes) {
    const auto value = number<uint32_t>();
    if (value > bytes_.size() / least_bytes) fail();
    return value;
  }
  void end() const {
    if (!bytes_.empty()) fail();
  }

 private:
  [[noreturn]] static void fail() { throw Error(Status::kInvalidArgument, "damaged: it ends early or too late"); }
  const std::byte* take(std::size_t size) {
    if (size > bytes_.size()) fail();
    const std::byte* const data = bytes_.data();
    bytes_ = bytes_.subspan(size);
    return data;
  }

  std::span<const std::byte> bytes_;
};

inline uint64_t hash_of(std::span<const std::byte> bytes, uint64_t hash = 0) {
  for (const std::byte byte : bytes) hash = io::avalanche64(hash + io::kGolden64 + static_cast<uint64_t>(byte));
  return hash;
}
inline uint64_t hash_of(const std::string& text, uint64_t hash = 0) {
  return hash_of(std::as_bytes(std::span<const char>(text)), hash);
}

}  // namespace uniep::tune
