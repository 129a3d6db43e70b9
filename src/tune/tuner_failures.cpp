// A tuner's calls that fail, under a candidate or an incumbent, and a job that ends by one.
#include <algorithm>
#include <exception>

#include "tune/tuner_state.h"
#include "uniep/error.h"

namespace uniep {

using tune::Candidate;
using tune::OnlineEvent;
using tune::OpenCall;
using tune::Verdict;

namespace {

const char* const kCallFailed = "its call failed";

}  // namespace

OpenCall* tune::TunerSlot::find_open(uint64_t number) {
  const auto found = std::find_if(open.begin(), open.end(), [&](const OpenCall& one) { return one.number == number; });
  return found == open.end() ? nullptr : &*found;
}

const Schedule& tune::TunerSlot::incumbent_of(uint64_t number) const {
  const auto after = std::upper_bound(incumbencies.begin(), incumbencies.end(), number,
                                      [](uint64_t call, const Incumbency& one) { return call < one.first_call; });
  return (after == incumbencies.begin() ? after : after - 1)->schedule;
}

Tuner::Implementation::~Implementation() {
  try {
    for (Slot& slot : slots_) {
      end_trials(slot);
      const Schedule* const earlier = slot.search.earlier();
      const bool failed = slot.failed_here.contains(slot.search.incumbent_text());
      if (failed && earlier != nullptr) keep_instead(slot, slot.search.incumbent(), *earlier);
    }
  } catch (const std::exception&) {  // without memory for it the folder stays as it is
  }
}

// An end in the middle of a trial is no fault of the candidate, unless its call has failed; after an error of the
// exchange it may be what ended another rank, and stays as what was being tried.
void Tuner::Implementation::end_trials(Slot& slot) {
  const std::vector<Candidate>& candidates = slot.search.candidates();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].verdict != Verdict::kInTheRunning) continue;
    const bool failed = std::any_of(slot.open.begin(), slot.open.end(), [&](const OpenCall& call) {
      return call.failed && !call.is_void && call.planned.of_candidate && call.planned.epoch == slot.search.epoch() &&
             call.planned.candidate == static_cast<int>(i);
    });
    if (failed) {
      note(slot, candidates[i].schedule, Verdict::kFailed, kCallFailed);
    } else if (candidates[i].ratios.empty() && !ended_by_error_) {
      note(slot, candidates[i].schedule, Verdict::kInTheRunning);
    }
  }
}

void Tuner::Implementation::failed(const TunerCall& call, const std::string& reason) {
  Slot& own = slot(call.layer, call.direction);
  OpenCall* const open = own.find_open(call.number);
  if (open != nullptr) open->failed = true;
  if (open != nullptr && open->planned.of_candidate)
    return say(place(own) + "a candidate's call failed here: " + reason);
  // A call that was asked for longer ago may have been a candidate's.
  const bool late = open == nullptr && call.timed;
  if (!late && call.number < own.calls) incumbent_failed_here(own, call.number, reason);
}

// Into the journal at once: a program that ends by it may have no time for more.
void Tuner::Implementation::incumbent_failed_here(Slot& own, uint64_t number, const std::string& reason) {
  if (!own.failed_call) own.failed_call = number;
  const Schedule& schedule = own.incumbent_of(number);
  if (schedule == own.given || !own.failed_here.insert(to_text(schedule)).second) return;
  say(place(own) + "the incumbent's call failed here: " + reason);
  note(own, schedule, Verdict::kFailed, kCallFailed);
}

void Tuner::Implementation::not_measured(const TunerCall& call) {
  Slot& own = slot(call.layer, call.direction);
  if (OpenCall* const open = own.find_open(call.number)) open->is_void = true;
  own.had_void = true;
}

void Tuner::Implementation::apply_failures(std::size_t index, const std::vector<StepMessage>& messages) {
  Slot& own = slots_[index];
  // A rank that did not make a call lets the others wait until they fail, in that call or as they come to see it.
  const bool is_void = std::any_of(messages.begin(), messages.end(), [](const StepMessage& message) {
    const auto had_one = [](const auto& of_slot) { return of_slot.had_void; };
    return std::any_of(message.slots.begin(), message.slots.end(), had_one);
  });
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    const std::optional<uint64_t> call = messages[rank].slots[index].failed_call;
    if (!call || *call >= own.calls) continue;
    const Schedule schedule = own.incumbent_of(*call);
    if (!is_void) {
      own.search.incumbent_failed(schedule, static_cast<int>(rank));
    } else if (static_cast<int>(rank) == options_.rank && own.failed_here.erase(to_text(schedule)) > 0) {
      note(own, schedule, Verdict::kInTheRunning);
    }
  }
}

void Tuner::Implementation::fell_back(Slot& own, const OnlineEvent& event) {
  const Candidate failed{
      .schedule = event.failed, .text = to_text(event.failed), .verdict = Verdict::kFailed, .reason = event.reason};
  own.out_for_good.insert(failed.text);
  if (failed.text == own.base_text) {
    own.base = own.search.incumbent();
    own.base_text = own.search.incumbent_text();
    own.incumbencies.push_back({own.calls, own.base});
    if (const auto known = own.earlier_milliseconds.find(own.base_text); known != own.earlier_milliseconds.end()) {
      own.milliseconds = known->second;
    }
    note_running(own);
  }
  note(own, failed.schedule, failed.verdict, failed.reason);
  keep_result(own, failed);
  record(own, tune::verdict_name(failed.verdict), failed, failed.reason);
  keep_instead(own, failed.schedule, own.base);
}

// In the folder, where the failed one is kept: what is back, unless the job was given it.
void Tuner::Implementation::keep_instead(Slot& own, const Schedule& failed, const Schedule& back) {
  if (options_.rank != 0 || !folder_.keeps()) return;
  const std::optional<tune::TunedSchedule> entry = folder_.find(key_of(own));
  if (!entry || entry->schedule != failed) return;
  const auto known = own.earlier_milliseconds.find(to_text(back));
  if (back == own.given || known == own.earlier_milliseconds.end()) return folder_.remove(key_of(own));
  write_or_go_on([&] { folder_.store({key_of(own), back, known->second, own.first_milliseconds}); });
}

// Candidates that begin again beside another incumbent: whose first use was under way has none now.
void Tuner::Implementation::note_running(Slot& own) {
  for (const Candidate& candidate : own.search.candidates()) {
    if (candidate.verdict == Verdict::kInTheRunning) note(own, candidate.schedule, Verdict::kInTheRunning);
  }
}

}  // namespace uniep
