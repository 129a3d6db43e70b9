#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "train/candidate_check.h"

// What the processes of a group tell each other beside their calls. Collective; of a process that holds all ranks it is
// what that one says.
namespace uniep::cli {

// What each process says, in rank order, in all of them. A plain value.
template <typename T>
std::vector<T> told_by_all(Group& group, const T& own) {
  std::vector<T> all;
  for (const std::vector<std::byte>& told : group.implementation().tell_all(std::as_bytes(std::span(&own, 1)))) {
    if (told.size() != sizeof(T)) throw Error(Status::kInternal, "a rank tells another number of bytes");
    std::array<T, 1> value{};
    std::copy(told.begin(), told.end(), std::as_writable_bytes(std::span(value)).begin());
    all.push_back(value.front());
  }
  return all;
}

// What a part of all ranks' work has ended with: well only where it has on all of them. Of several failures the one
// that the others follow from: a lack of memory, else what is no wait for another rank, else the lowest rank's.
train::PartEnd end_on_all_ranks(Group& group, const train::PartEnd& own);

}  // namespace uniep::cli
