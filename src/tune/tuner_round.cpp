// A tuner's rounds: which candidates may run in the job.
#include <algorithm>
#include <chrono>

#include "tune/calibrated_machine.h"
#include "tune/changed_fields.h"
#include "tune/online_candidates.h"
#include "tune/rank_names.h"
#include "tune/tuner_state.h"
#include "uniep/error.h"

namespace uniep {

using tune::ByteReader;
using tune::ByteWriter;
using tune::Candidate;
using tune::Verdict;

namespace {

constexpr double kCheckShare = 0.25;  // of a call: what a check of an eighth of the tokens takes for both Schedules

}  // namespace

bool Tuner::Implementation::affordable(const Slot& slot, std::size_t checks) const {
  if (slot.checks == 0) return true;
  const TunerSpent so_far = spent();
  const double left = options_.budget * so_far.layers_milliseconds - so_far.lost_milliseconds;
  // The first one has brought the inputs to the device as well.
  const double later = slot.checks == 1
                           ? slot.checks_milliseconds
                           : (slot.checks_milliseconds - slot.first_check_milliseconds) / (slot.checks - 1);
  const double one = std::max(kCheckShare * slot.milliseconds, later);
  return left >= static_cast<double>(checks) * one;
}

bool Tuner::Implementation::wants_round() const {
  if (frozen) return false;
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) { return wants_round(slot); });
}

bool Tuner::Implementation::wants_round(const Slot& slot) const {
  const std::size_t checks = ready(slot) + (wants_candidates(slot) ? static_cast<std::size_t>(options_.batch) : 0);
  return checks > 0 && slot.calls > 0 && affordable(slot, checks);
}

// What is never compiled takes a place, but ends no search.
bool Tuner::Implementation::wants_candidates(const Slot& slot) const {
  return slot.search.wants_round() && slot.waiting.size() < static_cast<std::size_t>(options_.batch);
}

sim::MachineDescription Tuner::Implementation::described_machine() {
  std::string doubt;
  if (auto calibrated = tune::find_calibrated_among(options_.machine_name, doubt)) return *std::move(calibrated);
  if (!doubt.empty()) say(doubt + "; it is left out");
  const sim::MachineDescription* const known = sim::machine_of_device(options_.machine_name);
  return known != nullptr ? *known : sim::shipped_machine(sim::kDefaultMachine);
}

std::vector<Schedule> Tuner::Implementation::own_candidates(Slot& slot) {
  const TunerLayer& layer = options_.layers[static_cast<std::size_t>(slot.layer)];
  const Schedule& incumbent = slot.search.incumbent();
  std::vector<Schedule> all;
  if (options_.candidates) {
    all = options_.candidates(slot.layer, slot.direction, incumbent);
  } else {
    all = tune::online_candidates(layer, slot.direction, options_.machine, incumbent, described_machine());
  }
  // Another group of the job begins elsewhere.
  if (!all.empty()) {
    const std::size_t first = all.size() * static_cast<std::size_t>(options_.group) / options_.groups;
    std::rotate(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(first), all.end());
  }
  // What was faster there comes first.
  const std::vector<Schedule> suggested = suggestions(slot);
  all.insert(all.begin(), suggested.begin(), suggested.end());
  std::vector<tune::Tried> known;
  for (const Schedule& schedule : all) known.push_back({.schedule = schedule});
  if (slot.journal != nullptr) slot.journal->mark(known);
  std::vector<Schedule> kept;
  for (const tune::Tried& one : known) {
    const std::string text = to_text(one.schedule);
    if (kept.size() + slot.waiting.size() == static_cast<std::size_t>(options_.batch)) break;
    if (text == slot.search.incumbent_text() || slot.tried.contains(text) || slot.out_for_good.contains(text)) continue;
    slot.tried.insert(text);
    if (one.verdict == Verdict::kFailed || one.verdict == Verdict::kWrong) {
      slot.out_for_good.insert(text);
      say(place(slot) + "left out: " + tune::changed_fields(one.schedule, slot.base) + "; " + one.reason);
      continue;
    }
    if (one.verdict == Verdict::kUntried && tune::is_proven(layer, slot.direction, options_.machine, one.schedule)) {
      kept.push_back(one.schedule);
    }
  }
  return kept;
}

std::vector<Tuner::Implementation::Round> Tuner::Implementation::first_ranks_round() {
  ByteWriter writer;
  std::vector<std::size_t> wanting;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!wants_round(slots_[i]) || !wants_candidates(slots_[i])) continue;
    wanting.push_back(i);
    std::vector<Schedule> own;
    if (options_.rank == 0) own = own_candidates(slots_[i]);
    writer.number(static_cast<uint32_t>(own.size()));
    for (const Schedule& schedule : own) writer.text(to_text(schedule));
  }
  if (wanting.empty()) return {};
  const std::vector<std::vector<std::byte>> all = exchanged(writer.bytes());
  ByteReader reader(all.front());
  std::vector<Round> rounds;
  for (const std::size_t i : wanting) {
    Round round{.slot = i, .schedules = {}};
    const uint32_t count = reader.count(sizeof(uint32_t));
    for (uint32_t k = 0; k < count; ++k) {
      const std::string text = reader.text();
      const TunerLayer& layer = options_.layers[static_cast<std::size_t>(slots_[i].layer)];
      round.schedules.push_back(resolve(PartialSchedule::parse(text), {.direction = slots_[i].direction,
                                                                       .shape = layer.config.shape,
                                                                       .numerics = layer.config.numerics,
                                                                       .machine = options_.machine}));
      slots_[i].tried.insert(text);
    }
    round.last = count == 0;
    rounds.push_back(std::move(round));
  }
  reader.end();
  return rounds;
}

Tuner::Implementation::OwnCheck Tuner::Implementation::check_candidate(const Slot& slot, const Schedule& schedule) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    TunerCheck check = options_.check(slot.layer, slot.direction, schedule, slot.search.incumbent());
    const CheckOutcome outcome = !check.refused.empty() ? CheckOutcome::kRefused
                                 : check.equal          ? CheckOutcome::kEqual
                                                        : CheckOutcome::kWrong;
    return {outcome, check.milliseconds, std::move(check.refused)};
  } catch (const Error& error) {
    const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - begin;
    // Memory that lacks now may be there another time.
    const bool lacks = error.status() == Status::kOutOfMemory;
    return {lacks ? CheckOutcome::kRefused : CheckOutcome::kFailed, passed.count(), error.what(), error.status()};
  }
}

std::vector<Tuner::Implementation::OwnCheck> Tuner::Implementation::check_round(const std::vector<Round>& rounds) {
  std::vector<OwnCheck> checks;
  for (const Round& round : rounds) {
    Slot& slot = slots_[round.slot];
    for (const Schedule& schedule : round.schedules) {
      note(slot, schedule, Verdict::kUntried);
      checks.push_back(check_candidate(slot, schedule));
    }
  }
  return checks;
}

std::vector<Tuner::Implementation::AgreedCheck> Tuner::Implementation::agreed_checks(
    const std::vector<OwnCheck>& checks) {
  ByteWriter writer;
  for (const OwnCheck& check : checks) {
    writer.number(static_cast<uint8_t>(check.outcome));
    writer.number(static_cast<float>(check.milliseconds));
    writer.number(static_cast<uint8_t>(check.failed_by));
  }
  const std::vector<std::vector<std::byte>> all = exchanged(writer.bytes());
  std::vector<ByteReader> readers(all.begin(), all.end());
  std::vector<AgreedCheck> agreed(checks.size());
  for (AgreedCheck& one : agreed) {
    double longest = 0;
    std::vector<int> lacking;
    bool only_waited = true;  // who failed
    for (std::size_t rank = 0; rank < readers.size(); ++rank) {
      const auto outcome = static_cast<CheckOutcome>(std::min<uint8_t>(readers[rank].number<uint8_t>(), 3));
      const double of_rank = readers[rank].number<float>();
      const auto failed_by = static_cast<Status>(readers[rank].number<uint8_t>());
      if (failed_by == Status::kOutOfMemory) lacking.push_back(static_cast<int>(rank));
      only_waited &= outcome != CheckOutcome::kFailed || failed_by == Status::kTimeout;
      one.milliseconds = rank == 0 ? of_rank : std::min(one.milliseconds, of_rank);
      longest = std::max(longest, of_rank);
      if (outcome > one.worst) {
        one.worst = outcome;
        one.ranks.clear();
      }
      if (outcome == one.worst) one.ranks.push_back(static_cast<int>(rank));
    }
    // One that failed at once had the others wait.
    if (one.worst == CheckOutcome::kFailed) one.milliseconds = longest;
    if (one.worst == CheckOutcome::kFailed && only_waited && !lacking.empty()) {
      one.worst = CheckOutcome::kRefused;
      one.ranks = std::move(lacking);
    }
  }
  return agreed;
}

bool Tuner::Implementation::enters(Slot& slot, const Schedule& schedule, const OwnCheck& own,
                                   const AgreedCheck& agreed) {
  ++slot.checks;
  slot.checks_milliseconds += std::max(0.0, agreed.milliseconds);
  if (slot.checks == 1) slot.first_check_milliseconds = slot.checks_milliseconds;
  if (agreed.worst == CheckOutcome::kEqual) {
    note(slot, schedule, Verdict::kInTheRunning);
    return true;
  }
  const Verdict verdict = agreed.worst == CheckOutcome::kFailed  ? Verdict::kFailed
                          : agreed.worst == CheckOutcome::kWrong ? Verdict::kWrong
                                                                 : Verdict::kSlower;
  end_checked(slot, schedule, verdict,
              own.reason.empty() ? "on " + tune::rank_names(agreed.ranks, "", "") : own.reason);
  return false;
}

void Tuner::Implementation::begin_search(const Round& round, const std::vector<Schedule>& kept) {
  Slot& slot = slots_[round.slot];
  if (round.joins) {
    for (const Schedule& schedule : kept) slot.search.join(schedule);
    return;
  }
  slot.search.begin_round(kept, round.last);
  if (!round.last) return;
  if (options_.rank == 0) say(place(slot) + "nothing is left to try");
  if (slot.journal != nullptr) write_or_go_on([&] { slot.journal->finish(); });
}

void Tuner::Implementation::begin_round() {
  if (!wants_round()) return;
  try {
    std::vector<Round> rounds = first_ranks_round();
    prepare_rounds(rounds);
    const std::vector<Round> joining = ready_rounds();
    rounds.insert(rounds.end(), joining.begin(), joining.end());
    check_and_begin(rounds);
  } catch (...) {
    frozen = ended_by_error_ = true;
    throw;
  }
}

void Tuner::Implementation::check_and_begin(const std::vector<Round>& rounds) {
  const std::vector<OwnCheck> own = check_round(rounds);
  const std::vector<AgreedCheck> agreed = agreed_checks(own);
  std::size_t next = 0;
  for (const Round& round : rounds) {
    std::vector<Schedule> kept;
    for (const Schedule& schedule : round.schedules) {
      if (enters(slots_[round.slot], schedule, own[next], agreed[next])) kept.push_back(schedule);
      ++next;
    }
    begin_search(round, kept);
  }
}

void Tuner::Implementation::end_checked(Slot& slot, const Schedule& schedule, Verdict verdict,
                                        const std::string& reason) {
  Candidate candidate{.schedule = schedule, .text = to_text(schedule), .verdict = verdict, .reason = reason};
  if (verdict != Verdict::kSlower) {
    slot.out_for_good.insert(candidate.text);
    keep_result(slot, candidate);
  }
  note(slot, schedule, verdict, reason);
  record(slot, verdict == Verdict::kSlower ? "refused" : tune::verdict_name(verdict), candidate, reason);
}

}  // namespace uniep
