// What groups of one job tell each other.
#include <fmt/format.h>

#include <algorithm>

#include "tune/median.h"
#include "tune/tuner_state.h"
#include "uniep/error.h"

namespace uniep {

using tune::ByteReader;
using tune::ByteWriter;
using tune::Candidate;
using tune::Result;
using tune::Verdict;

namespace {

constexpr uint32_t kFormat = 1;
constexpr std::size_t kMostResults = 256;  // of a layer and direction
constexpr std::size_t kMostRatios = 128;   // of one result
constexpr double kFaster = 0.995;

Result result_of(const std::string& base, const Candidate& candidate) {
  Result result{base, candidate.text, candidate.verdict, {}};
  if (candidate.verdict == Verdict::kUntried) result.verdict = Verdict::kInTheRunning;  // taken
  for (const double ratio : candidate.ratios) {
    if (result.ratios.size() < kMostRatios) result.ratios.push_back(static_cast<float>(ratio));
  }
  return result;
}

bool is_out_for_good(const Result& result) {
  return result.verdict == Verdict::kFailed || result.verdict == Verdict::kWrong;
}

struct OfGroup {
  int group = 0;
  std::vector<std::vector<Result>> slots;
};

OfGroup parse(std::span<const std::byte> bytes, uint64_t identity, std::size_t slots) {
  ByteReader reader(bytes);
  const auto refuse = [](const std::string& what) { throw Error(Status::kInvalidArgument, what); };
  if (const auto format = reader.number<uint32_t>(); format != kFormat) {
    refuse(fmt::format("format {}; this version reads {}", format, kFormat));
  }
  if (reader.number<uint64_t>() != identity) refuse("of other layers, another machine or another library");
  OfGroup all;
  all.group = reader.number<int32_t>();
  for (std::size_t i = 0; i < slots; ++i) {
    std::vector<Result> results(reader.count(3 * sizeof(uint32_t)));
    for (Result& result : results) {
      result.base = reader.text();
      result.schedule = reader.text();
      const auto verdict = reader.number<uint8_t>();
      if (verdict > static_cast<uint8_t>(Verdict::kWrong)) refuse(fmt::format("a verdict of {}", verdict));
      result.verdict = static_cast<Verdict>(verdict);
      result.ratios.resize(reader.count(sizeof(float)));
      for (float& ratio : result.ratios) {
        ratio = reader.number<float>();
        if (!(ratio > 0) || !(ratio < 1e6f)) refuse(fmt::format("a ratio of {}", ratio));
      }
    }
    all.slots.push_back(std::move(results));
  }
  reader.end();
  return all;
}

}  // namespace

void Tuner::Implementation::keep_result(Slot& slot, const Candidate& candidate) {
  slot.ended.push_back(result_of(slot.base_text, candidate));
  if (slot.ended.size() > kMostResults) slot.ended.erase(slot.ended.begin());
}

std::vector<std::byte> Tuner::Implementation::results() const {
  ByteWriter writer;
  writer.number(kFormat);
  writer.number(identity_);
  writer.number(static_cast<int32_t>(options_.group));
  for (const Slot& slot : slots_) {
    std::vector<Result> all = slot.ended;
    for (const Candidate& candidate : slot.search.candidates()) {
      const bool runs = candidate.verdict == Verdict::kInTheRunning && !candidate.ratios.empty();
      if (runs) all.push_back(result_of(slot.base_text, candidate));
    }
    writer.number(static_cast<uint32_t>(all.size()));
    for (const Result& result : all) {
      writer.text(result.base);
      writer.text(result.schedule);
      writer.number(static_cast<uint8_t>(result.verdict));
      writer.number(static_cast<uint32_t>(result.ratios.size()));
      for (const float ratio : result.ratios) writer.number(ratio);
    }
  }
  return writer.bytes();
}

void Tuner::Implementation::add_results(std::span<const std::byte> bytes) {
  try {
    parse(bytes, identity_, slots_.size());
  } catch (const Error& error) {
    throw Error(error.status(), std::string("bytes: results that can not be used: ") + error.what());
  }
  if (!frozen) pending_.push_back({{bytes.begin(), bytes.end()}, 0});
}

void Tuner::Implementation::pool_results(int64_t step, bool all_have_them) {
  while (!pending_.empty() && pending_.front().step != 0 && pending_.front().step <= step) {
    if (all_have_them) {
      const OfGroup all = parse(pending_.front().bytes, identity_, slots_.size());
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
