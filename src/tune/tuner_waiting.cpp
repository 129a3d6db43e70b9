// Candidates of a tuner whose kernels are compiled in the background, until all ranks have them.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tune/changed_fields.h"
#include "tune/rank_names.h"
#include "tune/tuner_state.h"
#include "uniep/error.h"

namespace uniep {

using tune::ByteReader;
using tune::ByteWriter;
using tune::Prepared;
using tune::Verdict;
using tune::Waiting;

namespace {

constexpr double kLongest = 600e3;  // ms of the layers that a candidate waits

// How far the last rank is, and which ones are that far.
struct Agreed {
  Prepared worst = Prepared::kReady;
  std::vector<int> ranks = {};

  void add(int rank, Prepared state) {
    if (state > worst) ranks.clear();
    worst = std::max(worst, state);
    if (state == worst) ranks.push_back(rank);
  }
};

std::string on_ranks(const std::vector<int>& ranks) {
  return "its kernels do not compile on " + tune::rank_names(ranks, "", "");
}

}  // namespace

Tuner::Implementation::OwnPreparation Tuner::Implementation::prepare(const Slot& slot, const Schedule& schedule) const {
  if (!options_.prepare) return {};
  try {
    Preparation found = options_.prepare(slot.layer, slot.direction, schedule);
    if (!found.failed.empty()) return {Prepared::kFailed, 0, std::move(found.failed)};
    return {found.compiling > 0 ? Prepared::kCompiling : Prepared::kReady, found.compiling, ""};
  } catch (const Error& error) {
    return {Prepared::kFailed, 0, error.what()};
  }
}

void Tuner::Implementation::prepare_rounds(std::vector<Round>& rounds) {
  if (rounds.empty()) return;
  ByteWriter writer;
  std::vector<OwnPreparation> own;
  for (const Round& round : rounds) {
    for (const Schedule& schedule : round.schedules) {
      own.push_back(prepare(slots_[round.slot], schedule));
      writer.number(static_cast<uint8_t>(own.back().state));
    }
  }
  const std::vector<std::vector<std::byte>> all = exchanged(writer.bytes());
  std::vector<ByteReader> readers(all.begin(), all.end());
  std::size_t next = 0;
  for (Round& round : rounds) {
    Slot& slot = slots_[round.slot];
    int kernels = 0, candidates = 0;
    std::erase_if(round.schedules, [&](const Schedule& schedule) {
      OwnPreparation& mine = own[next++];
      Agreed agreed;
      for (std::size_t rank = 0; rank < readers.size(); ++rank) {
        const auto state = std::min<uint8_t>(readers[rank].number<uint8_t>(), 2);
        agreed.add(static_cast<int>(rank), static_cast<Prepared>(state));
      }
      if (agreed.worst == Prepared::kReady) return false;
      if (agreed.worst == Prepared::kFailed) {
        end_checked(slot, schedule, Verdict::kFailed, mine.reason.empty() ? on_ranks(agreed.ranks) : mine.reason);
        return true;
      }
      slot.waiting.push_back({.id = slot.next_waiting++, .schedule = schedule, .since = layers_milliseconds_});
      kernels += mine.kernels;
      ++candidates;
      return true;
    });
    if (candidates == 0 || options_.rank != 0) continue;
    say(place(slot) + fmt::format("{} candidate{} for kernels that are compiled in the background, {} on rank 0",
                                  candidates, candidates == 1 ? " waits" : "s wait", kernels));
  }
}

std::size_t Tuner::Implementation::ready(const Slot& slot) {
  return static_cast<std::size_t>(
      std::count_if(slot.waiting.begin(), slot.waiting.end(), [](const Waiting& one) { return one.ready; }));
}

std::vector<Tuner::Implementation::Round> Tuner::Implementation::ready_rounds() {
  std::vector<Round> rounds;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (ready(slot) == 0 || !affordable(slot, ready(slot))) continue;
    Round round{.slot = i, .schedules = {}, .joins = true};
    std::erase_if(slot.waiting, [&](const Waiting& one) {
      if (one.ready) round.schedules.push_back(one.schedule);
      return one.ready;
    });
    for (const Schedule& schedule : round.schedules) {
      if (options_.rank != 0) continue;
      say(place(slot) + "compiled on all ranks: " + tune::changed_fields(schedule, slot.base));
    }
    rounds.push_back(std::move(round));
  }
  return rounds;
}

std::vector<std::pair<uint32_t, Prepared>> Tuner::Implementation::poll(Slot& slot) {
  std::vector<std::pair<uint32_t, Prepared>> states;
  for (Waiting& one : slot.waiting) {
    OwnPreparation own = one.ready ? OwnPreparation() : prepare(slot, one.schedule);
    if (!own.reason.empty()) one.reason = std::move(own.reason);
    states.emplace_back(one.id, own.state);
  }
  return states;
}

void Tuner::Implementation::apply_waiting(std::size_t index, const std::vector<StepMessage>& messages) {
  Slot& slot = slots_[index];
  for (std::size_t i = 0; i < messages.front().slots[index].waiting.size(); ++i) {
    const uint32_t id = messages.front().slots[index].waiting[i].first;
    const auto found =
        std::find_if(slot.waiting.begin(), slot.waiting.end(), [&](const Waiting& one) { return one.id == id; });
    if (found == slot.waiting.end()) continue;
    Agreed agreed;
    for (std::size_t rank = 0; rank < messages.size(); ++rank) {
      agreed.add(static_cast<int>(rank), messages[rank].slots[index].waiting[i].second);
    }
    found->ready |= agreed.worst == Prepared::kReady;
    if (agreed.worst != Prepared::kFailed) continue;
    const Waiting ended = std::move(*found);
    slot.waiting.erase(found);
    end_checked(slot, ended.schedule, Verdict::kFailed, ended.reason.empty() ? on_ranks(agreed.ranks) : ended.reason);
  }
}

// What is out by other groups' results, and what waits for ever.
void Tuner::Implementation::end_waiting(Slot& slot) {
  std::vector<Schedule> late;
  std::erase_if(slot.waiting, [&](const Waiting& one) {
    if (slot.out_for_good.contains(to_text(one.schedule))) return true;
    const bool is_late = !one.ready && layers_milliseconds_ - one.since > kLongest;
    if (is_late) late.push_back(one.schedule);
    return is_late;
  });
  for (const Schedule& schedule : late) {
    end_checked(slot, schedule, Verdict::kSlower,
                fmt::format("its kernels are not compiled after {:.0f} s of the layers", kLongest / 1e3));
  }
}

}  // namespace uniep
