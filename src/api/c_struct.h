#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

#include "uniep/c_api.h"
#include "uniep/error.h"
#include "uniep/version.h"

// Reading and writing the C API's structures, whose first field is the caller's idea of their size.
namespace uniep {

// The bytes of a structure in the first version that had it: what every caller has. Never changes. A field of a later
// version lies behind them: what is padding to an older caller holds anything.
template <typename Struct>
inline constexpr std::size_t kFirstSize = 0;

// Sizes of version 0.1 on 64-bit machines.
template <>
inline constexpr std::size_t kFirstSize<uniep_group_options> = 104;
template <>
inline constexpr std::size_t kFirstSize<uniep_group_info> = 32;
template <>
inline constexpr std::size_t kFirstSize<uniep_group_bytes> = 24;
template <>
inline constexpr std::size_t kFirstSize<uniep_call_times> = 40;
template <>
inline constexpr std::size_t kFirstSize<uniep_layer_config> = 88;
template <>
inline constexpr std::size_t kFirstSize<uniep_routing> = 56;
template <>
inline constexpr std::size_t kFirstSize<uniep_capacity> = 24;
template <>
inline constexpr std::size_t kFirstSize<uniep_rank_rows> = 32;
template <>
inline constexpr std::size_t kFirstSize<uniep_expert_rows> = 24;
template <>
inline constexpr std::size_t kFirstSize<uniep_weights> = 88;
template <>
inline constexpr std::size_t kFirstSize<uniep_weight_gradients> = 88;
template <>
inline constexpr std::size_t kFirstSize<uniep_memory_need> = 40;
template <>
inline constexpr std::size_t kFirstSize<uniep_forward_arguments> = 72;
template <>
inline constexpr std::size_t kFirstSize<uniep_backward_arguments> = 104;
template <>
inline constexpr std::size_t kFirstSize<uniep_weight_gradient_arguments> = 32;
template <>
inline constexpr std::size_t kFirstSize<uniep_dispatch_arguments> = 40;
template <>
inline constexpr std::size_t kFirstSize<uniep_combine_arguments> = 48;
template <>
inline constexpr std::size_t kFirstSize<uniep_verifier_options> = 56;
template <>
inline constexpr std::size_t kFirstSize<uniep_finding> = 88;
template <>
inline constexpr std::size_t kFirstSize<uniep_tuner_layer> = 40;
template <>
inline constexpr std::size_t kFirstSize<uniep_tuner_check> = 32;
template <>
inline constexpr std::size_t kFirstSize<uniep_tuner_options> = 120;
template <>
inline constexpr std::size_t kFirstSize<uniep_tuner_call> = 40;
template <>
inline constexpr std::size_t kFirstSize<uniep_tuner_state> = 56;
template <>
inline constexpr std::size_t kFirstSize<uniep_tuner_decision> = 64;

template <typename Pointer>
void require_pointer(Pointer pointer, const char* name) {
  if (pointer == nullptr) throw Error(Status::kInvalidArgument, fmt::format("{}: null pointer", name));
}

// More than any structure will have: a size that was never set is not to clear what lies behind.
inline constexpr std::size_t kMostSize = 4096;

template <typename Struct>
std::size_t checked_size(const void* given, const char* name) {
  static_assert(std::is_trivially_copyable_v<Struct> && offsetof(Struct, size) == 0, "a structure of the C API");
  static_assert(kFirstSize<Struct> > 0 && kFirstSize<Struct> <= sizeof(Struct), "structures only grow");
  require_pointer(given, name);
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  if (size < kFirstSize<Struct> || size > kMostSize) {
    throw Error(Status::kInvalidArgument, fmt::format("{}.size: {}; must be sizeof(the structure), {} to {}", name,
                                                      size, kFirstSize<Struct>, kMostSize));
  }
  return size;
}

// Fields that the caller does not have are zero; fields that this library does not have must be.
template <typename Struct>
Struct read_struct(const void* given, const char* name) {
  const std::size_t size = checked_size<Struct>(given, name);
  const std::byte* bytes = static_cast<const std::byte*>(given);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != std::byte{0}) {
      throw Error(Status::kUnsupported, fmt::format("{}: byte {} belongs to a field that version " UNIEP_VERSION_STRING
                                                    " does not know; it must be zero",
                                                    name, i));
    }
  }
  Struct value{};
  std::memcpy(&value, given, std::min(size, sizeof(Struct)));
  return value;
}

// The entries of an array lie as far apart as the caller's structure is large.
template <typename Struct>
std::size_t checked_stride(const void* first, int count, const char* name) {
  const std::size_t stride = checked_size<Struct>(first, name);
  for (int i = 1; i < count; ++i) {
    std::size_t size = 0;
    std::memcpy(&size, static_cast<const std::byte*>(first) + i * stride, sizeof(size));
    if (size != stride) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("{}[{}].size: {}; must be that of the first entry, {}", name, i, size, stride));
    }
  }
  return stride;
}

template <typename Struct>
std::vector<Struct> read_structs(const void* first, int count, const char* name) {
  const std::size_t stride = checked_stride<Struct>(first, count, name);
  std::vector<Struct> values;
  values.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    values.push_back(read_struct<Struct>(static_cast<const std::byte*>(first) + i * stride, name));
  }
  return values;
}

// Fills a structure of `size` bytes, of which the caller's first field stays as it is.
template <typename Struct>
void write_struct(Struct value, void* out, std::size_t size) {
  value.size = size;
  std::memset(out, 0, size);
  std::memcpy(out, &value, std::min(size, sizeof(Struct)));
}

}  // namespace uniep
