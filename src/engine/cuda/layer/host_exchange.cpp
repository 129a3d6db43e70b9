#include "engine/cuda/layer/host_exchange.h"

#include <algorithm>

#include "engine/cuda/driver.h"

namespace uniep::cuda {
namespace {

constexpr int64_t kMostBytesAtOnce = int64_t{64} << 20;  // of symmetric memory

CUdeviceptr pointer(const void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

// Copies in default-stream order, and waits.
void write_exchange(const SymmetricRegion& symmetric, int rank, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  check(driver().cuMemcpyHtoDAsync(pointer(symmetric.exchange(rank, rank)), bytes.data(), bytes.size(), nullptr),
        "sharing with the other ranks");
  check(driver().cuCtxSynchronize(), "sharing with the other ranks");
}

void read_exchange(const SymmetricRegion& symmetric, int rank, int peer, std::byte* to, int64_t bytes) {
  if (bytes <= 0) return;
  check(
      driver().cuMemcpyDtoHAsync(to, pointer(symmetric.exchange(rank, peer)), static_cast<std::size_t>(bytes), nullptr),
      "reading what a peer shares");
  check(driver().cuCtxSynchronize(), "reading what a peer shares");
}

}  // namespace

std::vector<int64_t> share_sizes(SymmetricRegion& symmetric, int64_t own_bytes) {
  std::vector<int64_t> sizes(static_cast<std::size_t>(symmetric.memory().ranks()));
  const std::vector<int64_t> size_bytes(sizes.size(), sizeof(int64_t));
  share_bytes(symmetric, std::as_bytes(std::span(&own_bytes, 1)), size_bytes,
              std::as_writable_bytes(std::span(sizes)).data());
  return sizes;
}

void share_bytes(SymmetricRegion& symmetric, std::span<const std::byte> own, const std::vector<int64_t>& sizes,
                 std::byte* all) {
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  SymmetricNeed need;
  need.exchange = std::min(largest, kMostBytesAtOnce);
  symmetric.reserve(need);
  SymmetricMemory& memory = symmetric.memory();
  const int rank = memory.own_ranks().front();
  const ScopedDevice scope(memory.device(rank));
  const auto own_bytes = static_cast<int64_t>(own.size());
  for (int64_t done = 0; done < largest; done += kMostBytesAtOnce) {
    const auto left = [&](int64_t bytes) { return std::clamp(bytes - done, int64_t{0}, kMostBytesAtOnce); };
    write_exchange(
        symmetric, rank,
        own.subspan(static_cast<std::size_t>(std::min(done, own_bytes)), static_cast<std::size_t>(left(own_bytes))));
    memory.barrier();
    std::byte* to = all;
    for (std::size_t peer = 0; all != nullptr && peer < sizes.size(); to += sizes[peer++]) {
      read_exchange(symmetric, rank, static_cast<int>(peer), to + done, left(sizes[peer]));
    }
    memory.barrier();
  }
}

}  // namespace uniep::cuda
