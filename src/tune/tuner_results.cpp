// What groups of one job tell each other.
#include <fmt/format.h>

#include <algorithm>

#include "tune/median.h"
#include "tune/tuner_state.h"
#include "uniep/error.h"

namespace uniep {

using tune::Candidate;
using tune::GroupResults;
using tune::parse_results;
using tune::Result;
using tune::Verdict;

namespace {

constexpr std::size_t kMaxResults = 256;  // of a layer and direction
constexpr std::size_t kMaxRatios = 128;   // of one result
constexpr double kFaster = 0.995;

Result result_of(const std::string& base, const Candidate& candidate) {
  Result result{base, candidate.text, candidate.verdict, {}};
  if (candidate.verdict == Verdict::kUntried) result.verdict = Verdict::kInTheRunning;  // taken
  for (const double ratio : candidate.ratios) {
    if (result.ratios.size() < kMaxRatios) result.ratios.push_back(static_cast<float>(ratio));
  }
  return result;
}

bool is_out_for_good(const Result& result) {
  return result.verdict == Verdict::kFailed || result.verdict == Verdict::kWrong;
}

}  // namespace

void Tuner::Implementation::keep_result(Slot& slot, const Candidate& candidate) {
  slot.ended.push_back(result_of(slot.base_text, candidate));
  if (slot.ended.size() > kMaxResults) slot.ended.erase(slot.ended.begin());
}

void Tuner::Implementation::forget_results(Slot& slot) {
  slot.others.clear();
  std::erase_if(slot.ended, [](const Result& result) { return !is_out_for_good(result); });
}

std::vector<std::byte> Tuner::Implementation::results() const {
  GroupResults own;
  own.group = options_.group;
  for (const Slot& slot : slots_) {
    std::vector<Result> all = slot.ended;
    for (const Candidate& candidate : slot.search.candidates()) {
      const bool runs = candidate.verdict == Verdict::kInTheRunning && !candidate.ratios.empty();
      if (runs) all.push_back(result_of(slot.base_text, candidate));
    }
    own.slots.push_back(std::move(all));
  }
  return tune::results_bytes(own, identity_);
}

void Tuner::Implementation::add_results(std::span<const std::byte> bytes) {
  try {
    parse_results(bytes, identity_, slots_.size());
  } catch (const Error& error) {
    throw Error(error.status(), std::string("bytes: results that can not be used: ") + error.what());
  }
  if (!frozen) pending_.push_back({{bytes.begin(), bytes.end()}, 0});
}

void Tuner::Implementation::pool_results(int64_t step, bool all_have_them) {
  while (!pending_.empty() && pending_.front().step != 0 && pending_.front().step <= step) {
    if (all_have_them) {
      const GroupResults all = parse_results(pending_.front().bytes, identity_, slots_.size());
      for (std::size_t i = 0; i < slots_.size() && all.group != options_.group; ++i) {
        slots_[i].others[all.group] = all.slots[i];
      }
    }
    pending_.pop_front();
  }
}

void Tuner::Implementation::use_results(Slot& slot) {
  for (const auto& [group, results] : slot.others) {
    for (const Result& result : results) {
      if (is_out_for_good(result)) slot.out_for_good.insert(result.schedule);
    }
  }
  for (std::size_t i = 0; i < slot.search.candidates().size(); ++i) {
    Candidate& candidate = slot.search.candidate(i);
    if (candidate.verdict != Verdict::kInTheRunning) continue;
    candidate.others.clear();
    for (const auto& [group, results] : slot.others) {
      for (const Result& result : results) {
        if (result.schedule != candidate.text) continue;
        if (is_out_for_good(result)) {
          slot.search.drop(i, result.verdict, fmt::format("in group {}", group));
        } else if (result.base == slot.base_text) {
          candidate.others.insert(candidate.others.end(), result.ratios.begin(), result.ratios.end());
        }
      }
    }
  }
}

std::vector<Schedule> Tuner::Implementation::suggestions(const Slot& slot) const {
  std::vector<Schedule> all;
  for (const auto& [group, results] : slot.others) {
    for (const Result& result : results) {
      if (result.base != slot.base_text || result.ratios.empty()) continue;
      if (tune::median({result.ratios.begin(), result.ratios.end()}) >= kFaster) continue;
      try {
        const std::optional<Schedule> schedule = legal(slot, PartialSchedule::parse(result.schedule));
        if (schedule) all.push_back(*schedule);
      } catch (const Error&) {
        // Of a version with other fields.
      }
    }
  }
  return all;
}

}  // namespace uniep
