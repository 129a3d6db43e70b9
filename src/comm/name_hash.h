#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace uniep {

// 128 bits of any bytes. It keeps apart what is different by chance, not what somebody made equal on purpose.
constexpr std::array<uint64_t, 2> name_hash(std::string_view bytes) {
  std::array<uint64_t, 2> hash = {0xcbf29ce484222325, 0x9e3779b97f4a7c15};
  for (uint64_t& word : hash) {
    for (const char byte : bytes) word = (word ^ static_cast<uint8_t>(byte)) * 0x100000001b3;  // FNV-1a
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    word ^= word >> 31;
  }
  return hash;
}

}  // namespace uniep
