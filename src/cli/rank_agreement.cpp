#include "cli/rank_agreement.h"

#include <fmt/format.h>

#include <cstring>
#include <string>

namespace uniep::cli {
namespace {

std::vector<std::byte> bytes_of(const train::PartEnd& end) {
  std::vector<std::byte> bytes(sizeof(end.status) + end.text.size());
  std::memcpy(bytes.data(), &end.status, sizeof(end.status));
  std::memcpy(bytes.data() + sizeof(end.status), end.text.data(), end.text.size());
  return bytes;
}

train::PartEnd end_of(const std::vector<std::byte>& bytes) {
  train::PartEnd end{Status::kInternal, "it told nothing"};
  if (bytes.size() < sizeof(end.status)) return end;
  std::memcpy(&end.status, bytes.data(), sizeof(end.status));
  end.text.assign(reinterpret_cast<const char*>(bytes.data()) + sizeof(end.status), bytes.size() - sizeof(end.status));
  return end;
}

int weight_of(Status status) {
  if (status == Status::kOk) return 0;
  if (status == Status::kTimeout) return 1;
  return status == Status::kOutOfMemory ? 3 : 2;
}

}  // namespace

train::PartEnd end_on_all_ranks(Group& group, const train::PartEnd& own) {
  if (group.local_ranks() == group.ranks()) return own;
  train::PartEnd end;
  int rank = 0;
  for (const std::vector<std::byte>& told : group.implementation().tell_all(bytes_of(own))) {
    train::PartEnd of_rank = end_of(told);
    if (weight_of(of_rank.status) > weight_of(end.status)) {
      end = {of_rank.status, fmt::format("rank {}: {}", rank, of_rank.text)};
    }
    ++rank;
  }
  return end;
}

}  // namespace uniep::cli
