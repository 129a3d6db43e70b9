#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace uniep {

// "rank 2", "ranks 1, 2 and 5".
inline std::string rank_names(const std::vector<int>& ranks) {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) names += i + 1 == ranks.size() ? " and " : ", ";
    names += std::to_string(ranks[i]);
  }
  return names;
}

}  // namespace uniep
