#include "engine/cuda/layer/host_routing.h"

#include <algorithm>
#include <cstring>

#include "api/place.h"
#include "engine/cuda/driver.h"

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

// Copies in default-stream order, and waits.
void write_exchange(const SymmetricRegion& symmetric, int rank, const std::vector<std::byte>& bytes) {
  check(driver().cuMemcpyHtoDAsync(pointer(symmetric.exchange(rank, rank)), bytes.data(), bytes.size(), nullptr),
        "sharing a routing");
  check(driver().cuCtxSynchronize(), "sharing a routing");
}
std::vector<std::byte> read_exchange(const SymmetricRegion& symmetric, int rank, int peer, std::size_t bytes) {
  std::vector<std::byte> copy(bytes);
  check(driver().cuMemcpyDtoHAsync(copy.data(), pointer(symmetric.exchange(rank, peer)), bytes, nullptr),
        "reading a peer's routing");
  check(driver().cuCtxSynchronize(), "reading a peer's routing");
  return copy;
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

std::size_t packed_bytes(const LayerShape& shape, const Header& header) {
  return sizeof(Header) +
         slots_of(shape, header.tokens) * (id_bytes(static_cast<IndexType>(header.index_type)) + sizeof(float));
}

HostRouting unpacked(const LayerShape& shape, const std::vector<std::byte>& bytes) {
  Header header{};
  std::memcpy(&header, bytes.data(), sizeof(header));
  HostRouting routing;
  routing.tokens = header.tokens;
  routing.index_type = static_cast<IndexType>(header.index_type);
  const std::size_t slots = slots_of(shape, header.tokens);
  const std::byte* const ids = bytes.data() + sizeof(header);
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
                                       std::span<const int> devices) {
  std::vector<HostRouting> copies(routings.size());
  for (std::size_t i = 0; i < routings.size(); ++i) {
    const Routing& routing = routings[i];
    check_routing(routing, static_cast<int>(i), shape);
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
  SymmetricNeed need;
  need.exchange = sizeof(Header);
  symmetric.reserve(need);
  const int rank = symmetric.memory().own_ranks().front(), ranks = symmetric.memory().ranks();
  const ScopedDevice scope(symmetric.memory().device(rank));
  const std::vector<std::byte> bytes = packed(own);
  write_exchange(symmetric, rank, {bytes.begin(), bytes.begin() + sizeof(Header)});
  symmetric.memory().barrier();
  std::vector<std::size_t> sizes;
  for (int peer = 0; peer < ranks; ++peer) {
    Header header{};
    std::memcpy(&header, read_exchange(symmetric, rank, peer, sizeof(Header)).data(), sizeof(Header));
    sizes.push_back(packed_bytes(shape, header));
  }
  symmetric.memory().barrier();
  need.exchange = static_cast<int64_t>(*std::max_element(sizes.begin(), sizes.end()));
  symmetric.reserve(need);
  write_exchange(symmetric, rank, bytes);
  symmetric.memory().barrier();
  std::vector<HostRouting> all;
  for (int peer = 0; peer < ranks; ++peer) {
    all.push_back(unpacked(shape, read_exchange(symmetric, rank, peer, sizes[static_cast<std::size_t>(peer)])));
  }
  symmetric.memory().barrier();
  return all;
}

}  // namespace uniep::cuda
