#include "io/npy.h"

#include <cstring>

#include "fuzz_target.h"
#include "io/extents.h"

using uniep::fuzz::accepts;
using uniep::fuzz::require;

// What is accepted has as many values as its shape says, and they are the last bytes of the file as they lie there.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  uniep::io::NpyArray array;
  if (!accepts([&] { array = uniep::io::parse_npy(bytes, "fuzzed.npy"); })) return 0;

  std::visit(
      [&](const auto& values) {
        const std::span<const std::byte> parsed = std::as_bytes(std::span(values));
        require(uniep::io::element_count(array.shape) == static_cast<int64_t>(values.size()), "shape and values agree");
        require(array.shape.size() <= uniep::io::kMaxDimensions, "the number of dimensions is bounded");
        require(parsed.size() <= bytes.size(), "no more values than the file has bytes");
        require(parsed.empty() || std::memcmp(parsed.data(), bytes.last(parsed.size()).data(), parsed.size()) == 0,
                "values are the file's last bytes");
      },
      array.values);
  return 0;
}
