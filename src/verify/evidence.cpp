#include "verify/evidence.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace uniep::verify {
namespace {

using Key = std::tuple<int, int64_t, int64_t>;  // in the order of tensors

class Comparison {
 public:
  Comparison(const Inputs& inputs, const std::vector<HostRouting>& routings, const std::vector<Sums>& runs)
      : inputs_(inputs), routings_(routings), runs_(runs) {}

  Disagreement run() {
    std::map<Key, Place> places;
    for (const auto& [one, other] : {std::pair(0, 1), std::pair(0, 2), std::pair(1, 2)}) {
      for (const Place& place : differences(runs_[one], runs_[other], 0, kFirstInput)) {
        if (!is_known(place.tensor)) continue;
        places[{static_cast<int>(place.tensor), place.unit, place.index}] = place;
      }
    }
    for (const auto& [key, place] : places) {
      if (place.tensor == Tensor::kY || place.tensor == Tensor::kDx)
        wrong_tokens_.insert({place.unit, token_of(place)});
    }
    for (const auto& [key, place] : places) judge(place);
    return std::move(found_);
  }

 private:
  // In all runs: z is not, of a call that kept none.
  bool is_known(Tensor tensor) const {
    return std::all_of(runs_.begin(), runs_.end(), [&](const Sums& run) { return !run.of(tensor).empty(); });
  }
  int64_t token_of(const Place& place) const { return place.index / tiles_of_row(place); }
  int64_t tiles_of_row(const Place& place) const {
    return std::max<int64_t>(runs_[0].of(place.tensor)[place.unit].tiles_of_row, 1);
  }
  bool is_rows(Tensor tensor) const { return tensor == Tensor::kRows || tensor == Tensor::kDxRows; }
  int32_t expert_of(const Place& row) const { return routings_[row.unit].ids[token_of(row)]; }

  void judge(const Place& place) {
    // Rows on their way only explain a sum: what they are when nobody looks is not promised.
    if (is_rows(place.tensor) && wrong_tokens_.count({place.unit, token_of(place) / inputs_.config.shape.topk}) == 0) {
      return;
    }
    const uint64_t sums[3] = {sum_at(runs_[0], place), sum_at(runs_[1], place), sum_at(runs_[2], place)};
    ++found_.tiles;
    Evidence evidence;
    evidence.place = place;
    if (sums[1] == sums[2]) {
      evidence.run = 0;
    } else if (sums[0] == sums[2]) {
      evidence.run = 1;
    } else if (sums[0] == sums[1]) {
      evidence.run = 2;
    } else {
      found_.no_majority.push_back(place);
      if (!is_rows(place.tensor)) return;
      doubted_[{place.unit, token_of(place) / inputs_.config.shape.topk}].insert(expert_of(place));
      return;
    }
    evidence.wrong = sums[evidence.run];
    blame(evidence);
    if (evidence.candidates.empty()) return;
    if (is_rows(place.tensor))
      explained_.insert({evidence.run, place.unit, token_of(place) / inputs_.config.shape.topk});
    const std::vector<int>&home = hosts(0, place.tensor), &other = hosts(1, place.tensor),
          &third = hosts(2, place.tensor);
    const bool moved = evidence.expert >= 0 && home[evidence.expert] != other[evidence.expert];
    if (evidence.run == 1 && moved && home[evidence.expert] == third[evidence.expert]) {
      found_.ambiguous.push_back(evidence);
    } else {
      found_.evidence.push_back(evidence);
    }
  }

  const std::vector<int>& hosts(int run, Tensor tensor) const {
    const bool gradient = tensor == Tensor::kDw1 || tensor == Tensor::kDw2;
    return gradient && !runs_[run].gradient_host.empty() ? runs_[run].gradient_host : runs_[run].host;
  }

  void blame_expert(Evidence& evidence, int64_t expert) const {
    evidence.expert = expert;
    evidence.candidates = {hosts(evidence.run, evidence.place.tensor)[expert]};
  }

  void blame(Evidence& evidence) const {
    const Place& place = evidence.place;
    if (is_by_expert(place.tensor)) return blame_expert(evidence, place.unit);
    const std::vector<int32_t>& ids = routings_[place.unit].ids;
    if (is_rows(place.tensor)) return blame_expert(evidence, expert_of(place));
    if (place.tensor == Tensor::kDprobs) {  // made by the expert's rank, kept by the token's; an unused slot has none
      if (ids[place.index] >= 0) blame_expert(evidence, ids[place.index]);
      const int keeper = static_cast<int>(place.unit);
      std::erase(evidence.candidates, keeper);
      evidence.candidates.push_back(keeper);
      return;
    }
    // A sum: its rows are to blame where they are known to be wrong, else the rank that summed; all of them where
    // rows are not known. A row without a majority may be right in this run or not.
    const int64_t token = token_of(place), topk = inputs_.config.shape.topk;
    if (explained_.count({evidence.run, place.unit, token}) > 0) return;
    std::set<int> candidates = {static_cast<int>(place.unit)};
    if (const auto doubted = doubted_.find({place.unit, token}); doubted != doubted_.end()) {
      for (const int32_t expert : doubted->second) candidates.insert(runs_[evidence.run].host[expert]);
    }
    const Tensor rows = place.tensor == Tensor::kY ? Tensor::kRows : Tensor::kDxRows;
    for (int64_t slot = token * topk; slot < (token + 1) * topk && !is_known(rows); ++slot) {
      if (ids[slot] >= 0) candidates.insert(runs_[evidence.run].host[ids[slot]]);
    }
    evidence.candidates.assign(candidates.begin(), candidates.end());
  }

  const Inputs& inputs_;
  const std::vector<HostRouting>& routings_;
  const std::vector<Sums>& runs_;
  std::set<std::pair<int64_t, int64_t>> wrong_tokens_;                // (rank, token)
  std::set<std::tuple<int, int64_t, int64_t>> explained_;             // (run, rank, token)
  std::map<std::pair<int64_t, int64_t>, std::set<int32_t>> doubted_;  // (rank, token): experts whose rows all differ
  Disagreement found_;
};

}  // namespace

Disagreement compare(const Inputs& inputs, const std::vector<HostRouting>& routings, const std::vector<Sums>& runs) {
  return Comparison(inputs, routings, runs).run();
}

std::vector<int> common_candidates(const std::vector<Evidence>& evidence) {
  std::vector<int> common;
  for (std::size_t i = 0; i < evidence.size(); ++i) {
    if (i == 0) {
      common = evidence[0].candidates;
      continue;
    }
    std::erase_if(common, [&](int rank) {
      const std::vector<int>& own = evidence[i].candidates;
      return std::find(own.begin(), own.end(), rank) == own.end();
    });
  }
  return common;
}

}  // namespace uniep::verify
