#include "engine/cuda/layer/host_exchange.h"

#include <algorithm>
#include <cstring>

#include "uniep/error.h"

namespace uniep::cuda {

std::vector<int64_t> share_sizes(SymmetricRegion& symmetric, int64_t own_bytes) {
  std::vector<int64_t> sizes;
  for (const std::vector<std::byte>& told :
       symmetric.memory().mesh()->all_gather(std::as_bytes(std::span(&own_bytes, 1)))) {
    if (told.size() != sizeof(int64_t)) throw Error(Status::kInternal, "a rank shares something else than its size");
    std::memcpy(&sizes.emplace_back(), told.data(), sizeof(int64_t));
  }
  return sizes;
}

void share_bytes(SymmetricRegion& symmetric, std::span<const std::byte> own, const std::vector<int64_t>& sizes,
                 std::byte* all) {
  const std::vector<std::vector<std::byte>> told = symmetric.memory().mesh()->all_gather(own);
  for (std::size_t rank = 0; all != nullptr && rank < sizes.size(); ++rank) {
    if (static_cast<int64_t>(told[rank].size()) != sizes[rank]) {
      throw Error(Status::kInternal, "a rank shares another number of bytes than it said");
    }
    all = std::copy(told[rank].begin(), told[rank].end(), all);
  }
}

}  // namespace uniep::cuda
