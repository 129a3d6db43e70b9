#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// A combine with groups sends one row for all experts of a group that have rows of a token.
namespace uniep::program {

class TokenGroups {
 public:
  // 0 groups: each expert's row is sent by itself.
  TokenGroups(int64_t experts, int64_t groups) : per_group_(groups > 0 ? experts / groups : 0) {}

  // Whether this expert (of the whole layer) is the first of its group that is asked about since another token was.
  bool is_first(int64_t token, int64_t expert) {
    if (per_group_ == 0) return true;
    if (token != token_) seen_.clear();
    token_ = token;
    const int64_t group = expert / per_group_;
    if (std::find(seen_.begin(), seen_.end(), group) != seen_.end()) return false;
    seen_.push_back(group);
    return true;
  }

 private:
  int64_t per_group_ = 0, token_ = -1;
  std::vector<int64_t> seen_;
};

}  // namespace uniep::program
