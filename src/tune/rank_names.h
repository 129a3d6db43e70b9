#pragma once

#include <string>
#include <vector>

namespace uniep::tune {

// "rank 3 has", "ranks 3, 5 have".
inline std::string rank_names(const std::vector<int>& ranks, const std::string& one, const std::string& several) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text + " " + (ranks.size() == 1 ? one : several);
}

}  // namespace uniep::tune
