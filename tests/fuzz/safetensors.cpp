#include "io/safetensors.h"

#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "io/extents.h"

using uniep::fuzz::accepts;
using uniep::fuzz::require;
using uniep::io::Safetensors;
using uniep::io::Tensor;

namespace {

// Reads a tensor whole and in two pieces; false when its dtype can not be read as Value.
template <class Value>
bool read_all_ways(const Safetensors& file, const std::string& name, const Tensor& tensor) {
  const int64_t count = tensor.elements();
  std::vector<Value> whole(static_cast<std::size_t>(count)), pieces(whole.size());
  if (!accepts([&] { file.read(name, 0, std::span<Value>(whole)); })) {
    require(!accepts([&] { file.read(name, 0, std::span<Value>()); }), "what can not be read can not be read in part");
    return false;
  }
  const auto middle = static_cast<std::ptrdiff_t>(whole.size() / 3);
  file.read(name, middle, std::span<Value>(pieces).subspan(static_cast<std::size_t>(middle)));
  file.read(name, 0, std::span<Value>(pieces).first(static_cast<std::size_t>(middle)));
  require(whole.empty() || std::memcmp(whole.data(), pieces.data(), whole.size() * sizeof(Value)) == 0,
          "a tensor in pieces is the tensor");
  Value one{};
  require(!accepts([&] { file.read(name, count, std::span<Value>(&one, 1)); }), "nothing lies beyond the end");
  require(!accepts([&] { file.read(name, -1, std::span<Value>(&one, 1)); }), "nothing lies before the beginning");
  return true;
}

}  // namespace

// What is accepted has tensors that share the data among them without a hole, and those of a known dtype can be read.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  accepts([&] {
    const Safetensors file = uniep::io::parse_safetensors(bytes, "fuzzed.safetensors");
    std::size_t total = 0;
    for (const auto& [name, tensor] : file.tensors()) {
      total += tensor.data.size();
      require(tensor.data.empty() || (tensor.data.data() >= bytes.data() &&
                                      tensor.data.data() + tensor.data.size() <= bytes.data() + bytes.size()),
              "a tensor lies in the file");
      require(&file.at(name) == file.find(name), "a tensor is found by its name");
      const std::optional<std::size_t> element = uniep::io::dtype_size(tensor.dtype);
      if (!element) continue;
      require(static_cast<std::size_t>(tensor.elements()) * *element == tensor.data.size(),
              "size, dtype and shape agree");
      const bool real = read_all_ways<uniep::BFloat16>(file, name, tensor);
      require(real == read_all_ways<float>(file, name, tensor), "bf16 and float read the same dtypes");
      require(real == (tensor.dtype == "BF16" || tensor.dtype == "F32"), "BF16 and F32 are read as numbers");
      require(read_all_ways<int64_t>(file, name, tensor) == (tensor.dtype == "I32" || tensor.dtype == "I64"),
              "I32 and I64 are read as whole numbers");
    }
    require(total < bytes.size(), "tensors share the bytes after the header");
  });
  return 0;
}
