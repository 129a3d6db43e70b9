#include "engine/cuda/layer/host_routing.h"

#include <cstring>
#include <numeric>

#include "api/place.h"
#include "engine/cuda/driver.h"
#include "engine/cuda/layer/host_exchange.h"

namespace uniep::cuda {
namespace {

CUdeviceptr pointer(const void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

std::size_t id_bytes(IndexType type) {
  return type == IndexType::kInt32 ? 4 : 8;
}

// A rank's part of the exchange.
struct Header {
  int64_t tokens;
  int64_t index_type;
};

std::size_t slots_of(const LayerShape& shape, int64_t tokens) {
  return static_cast<std::size_t>(tokens * shape.topk);
}

std::vector<std::byte> packed(const HostRouting& routing) {
  const Header header{routing.tokens, static_cast<int64_t>(routing.index_type)};
  const std::size_t probs_bytes = routing.probs.size() * sizeof(float);
  std::vector<std::byte> bytes(sizeof(header) + routing.ids.size() + probs_bytes);
  std::memcpy(bytes.data(), &header, sizeof(header));
  if (!routing.ids.empty()) std::memcpy(bytes.data() + sizeof(header), routing.ids.data(), routing.ids.size());
  if (probs_bytes > 0) {
    std::memcpy(bytes.data() + sizeof(header) + routing.ids.size(), routing.probs.data(), probs_bytes);
  }
  return bytes;
}

HostRouting unpacked(const LayerShape& shape, const std::byte* bytes) {
  Header header{};
  std::memcpy(&header, bytes, sizeof(header));
  HostRouting routing;
  routing.tokens = header.tokens;
  routing.index_type = static_cast<IndexType>(header.index_type);
  const std::size_t slots = slots_of(shape, header.tokens);
  const std::byte* const ids = bytes + sizeof(header);
  routing.ids.assign(ids, ids + slots * id_bytes(routing.index_type));
  routing.probs.resize(slots);
  if (slots > 0) std::memcpy(routing.probs.data(), ids + routing.ids.size(), slots * sizeof(float));
  return routing;
}

}  // namespace

Routing HostRouting::view() const {
  return {tokens, ids.data(), index_type, probs.data(), {}};
}

std::vector<HostRouting> read_routings(const LayerShape& shape, std::span<const Routing> routings,
                                       std::span<const int> devices, int first_rank) {
  std::vector<HostRouting> copies(routings.size());
  for (std::size_t i = 0; i < routings.size(); ++i) {
    const Routing& routing = routings[i];
    check_routing(routing, first_rank + static_cast<int>(i), shape);
    HostRouting& copy = copies[i];
    copy.tokens = routing.tokens;
    copy.index_type = routing.index_type;
    const std::size_t slots = slots_of(shape, routing.tokens);
    copy.ids.resize(slots * id_bytes(routing.index_type));
    copy.probs.resize(slots);
    if (slots == 0) continue;
    const ScopedDevice scope(devices[i]);
    auto* const stream = static_cast<CUstream>(routing.stream.handle);
    check(driver().cuMemcpyDtoHAsync(copy.ids.data(), pointer(routing.topk_ids), copy.ids.size(), stream),
          "reading topk_ids");
    check(driver().cuMemcpyDtoHAsync(copy.probs.data(), pointer(routing.probs), slots * sizeof(float), stream),
          "reading probs");
    check(driver().cuStreamSynchronize(stream), "reading a routing");
  }
  return copies;
}

std::vector<HostRouting> share_routings(SymmetricRegion& symmetric, const LayerShape& shape, const HostRouting& own) {
  const std::vector<std::byte> bytes = packed(own);
  const std::vector<int64_t> sizes = share_sizes(symmetric, static_cast<int64_t>(bytes.size()));
  std::vector<std::byte> all(static_cast<std::size_t>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0})));
  share_bytes(symmetric, bytes, sizes, all.data());
  std::vector<HostRouting> routings;
  const std::byte* next = all.data();
  for (const int64_t size : sizes) {
    routings.push_back(unpacked(shape, next));
    next += size;
  }
  return routings;
}

}  // namespace uniep::cuda
