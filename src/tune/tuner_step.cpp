// A tuner's calls and steps.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tune/changed_fields.h"
#include "tune/median.h"
#include "tune/rank_names.h"
#include "tune/tuner_state.h"
#include "uniep/error.h"

namespace uniep {

using tune::ByteReader;
using tune::ByteWriter;
using tune::Candidate;
using tune::hash_of;
using tune::OnlineEvent;
using tune::OpenCall;
using tune::Verdict;

namespace {

constexpr int kUnplanned = 8;  // calls of no pair whose time is asked for, a step
constexpr float kFailed = -1, kMissing = -2, kVoid = -3;

float reported(const OpenCall& open) {
  if (open.is_void) return kVoid;
  if (open.failed) return kFailed;
  return open.measured ? static_cast<float>(open.time.milliseconds) : kMissing;
}

// A call's number, of which there may be none.
void write_call(ByteWriter& writer, const std::optional<uint64_t>& number) {
  writer.number(number ? *number + 1 : uint64_t{0});
}

std::optional<uint64_t> read_call(ByteReader& reader) {
  const auto number = reader.number<uint64_t>();
  return number == 0 ? std::nullopt : std::optional(number - 1);
}

const char* word(const OnlineEvent& event, const Candidate& candidate) {
  return event.kind == OnlineEvent::Kind::kTaken ? "taken" : tune::verdict_name(candidate.verdict);
}

}  // namespace

tune::TunerSlot& Tuner::Implementation::slot(int layer, Direction direction) {
  if (layer < 0 || layer >= static_cast<int>(options_.layers.size())) {
    throw Error(Status::kInvalidArgument, fmt::format("layer: {}; must be 0 to {}", layer, options_.layers.size() - 1));
  }
  return slots_[static_cast<std::size_t>(layer) * 2 + static_cast<std::size_t>(direction)];
}

TunerCall Tuner::Implementation::schedule(int layer, Direction direction) {
  Slot& own = slot(layer, direction);
  TunerCall call{.layer = layer, .direction = direction, .number = own.calls++};
  if (frozen) {
    call.schedule = own.search.incumbent();
    return call;
  }
  ++own.calls_of_step.back();
  const tune::PlannedCall planned = own.search.next_call();
  call.schedule = own.search.schedule_of(planned);
  tried_calls_ += planned.of_candidate;
  call.of_candidate = planned.of_candidate;
  if (planned.candidate >= 0 || own.unplanned++ < kUnplanned) {
    own.open.push_back({.number = call.number, .step = steps + 1, .planned = planned});
    call.timed = true;
  }
  return call;
}

const Schedule& Tuner::Implementation::schedule_to_keep(int layer, Direction direction) {
  Slot& own = slot(layer, direction);
  if (!own.said_kept) say(place(own) + "a captured call keeps its schedule, whatever is found later");
  own.said_kept = true;
  return own.search.incumbent();
}

void Tuner::Implementation::measured(const TunerCall& call, const CallTime& time) {
  if (!(time.milliseconds > 0) || !std::isfinite(time.milliseconds)) {
    throw Error(Status::kInvalidArgument, fmt::format("milliseconds: {}; must be a time above 0", time.milliseconds));
  }
  OpenCall* const open = slot(call.layer, call.direction).find_open(call.number);
  if (open == nullptr) return;
  open->measured = true;
  open->time = time;
}

std::vector<std::vector<std::byte>> Tuner::Implementation::take(int64_t number) {
  std::vector<std::vector<std::byte>> all = options_.exchange->take(number);
  if (all.size() == static_cast<std::size_t>(options_.ranks)) return all;
  throw Error(Status::kInternal,
              fmt::format("exchange: gave the bytes of {} ranks; there are {}", all.size(), options_.ranks));
}

std::vector<std::vector<std::byte>> Tuner::Implementation::exchanged(std::span<const std::byte> own) {
  if (options_.exchange == nullptr) return {{own.begin(), own.end()}};
  const int64_t number = next_number_++;
  options_.exchange->give(number, own);
  return take(number);
}

std::vector<std::byte> Tuner::Implementation::step_bytes(int64_t covered) {
  ByteWriter writer;
  writer.number(covered);
  writer.number(state_hash());
  uint64_t results = 0;
  for (const Pending& pending : pending_) {
    if (pending.step == covered + 1) results = hash_of(pending.bytes, results + 1);
  }
  writer.number(results);
  for (Slot& slot : slots_) {
    const std::size_t known = slot.calls_of_step.size();
    writer.number(known < 2 ? uint64_t{0} : slot.calls_of_step[known - 2]);
    write_call(writer, std::exchange(slot.failed_call, std::nullopt));
    writer.number(static_cast<uint8_t>(std::exchange(slot.had_void, false)));
    uint32_t count = 0;
    for (const OpenCall& open : slot.open) count += open.step == covered;
    writer.number(count);
    for (const OpenCall& open : slot.open) {
      if (open.step != covered) continue;
      writer.number(reported(open));
      writer.number(static_cast<float>(open.time.busiest_rows));
      writer.number(static_cast<float>(open.time.mean_rows));
    }
    const std::vector<std::pair<uint32_t, tune::Prepared>> waiting = poll(slot);
    writer.number(static_cast<uint32_t>(waiting.size()));
    for (const auto& [id, state] : waiting) {
      writer.number(id);
      writer.number(static_cast<uint8_t>(state));
    }
  }
  return writer.bytes();
}

Tuner::Implementation::StepMessage Tuner::Implementation::parse_step(std::span<const std::byte> bytes) const {
  ByteReader reader(bytes);
  StepMessage message;
  message.covered = reader.number<int64_t>();
  message.state = reader.number<uint64_t>();
  message.results = reader.number<uint64_t>();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    StepMessage::OfSlot of_slot;
    of_slot.calls = reader.number<uint64_t>();
    of_slot.failed_call = read_call(reader);
    of_slot.had_void = reader.number<uint8_t>() != 0;
    of_slot.reports.resize(reader.count(3 * sizeof(float)));
    for (Report& report : of_slot.reports) {
      report.milliseconds = reader.number<float>();
      report.busiest_rows = reader.number<float>();
      report.mean_rows = reader.number<float>();
    }
    of_slot.waiting.resize(reader.count(sizeof(uint32_t) + 1));
    for (auto& [id, state] : of_slot.waiting) {
      id = reader.number<uint32_t>();
      state = static_cast<tune::Prepared>(std::min<uint8_t>(reader.number<uint8_t>(), 2));
    }
    message.slots.push_back(std::move(of_slot));
  }
  reader.end();
  return message;
}

bool Tuner::Implementation::StepMessage::is_like(const StepMessage& other) const {
  return covered == other.covered && state == other.state &&
         std::equal(slots.begin(), slots.end(), other.slots.begin(), other.slots.end(),
                    [](const OfSlot& a, const OfSlot& b) {
                      return a.calls == b.calls && a.reports.size() == b.reports.size() &&
                             std::equal(a.waiting.begin(), a.waiting.end(), b.waiting.begin(), b.waiting.end(),
                                        [](const auto& x, const auto& y) { return x.first == y.first; });
                    });
}

void Tuner::Implementation::apply_step(int64_t covered, const std::vector<std::vector<std::byte>>& agreed) {
  std::vector<StepMessage> messages;
  std::vector<int> others;
  bool same_results = true;
  for (std::size_t rank = 0; rank < agreed.size(); ++rank) {
    bool alike = true;
    try {
      messages.push_back(parse_step(agreed[rank]));
      alike = messages.back().is_like(messages.front());
      same_results &= messages.back().results == messages.front().results;
    } catch (const Error&) {
      messages.emplace_back();
      alike = false;
    }
    if (!alike) others.push_back(static_cast<int>(rank));
  }
  if (!others.empty()) {
    throw Error(Status::kInvalidArgument,
                fmt::format("{} other calls of the layers than rank 0 up to step {}, or decided otherwise",
                            tune::rank_names(others, "made", "made"), covered));
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    apply_calls(i, covered, messages);
    apply_failures(i, messages);
    apply_waiting(i, messages);
  }
  if (!same_results && options_.rank == 0) say("other groups' results are left out: ranks were given different ones");
  pool_results(covered + 1, same_results);
}

void Tuner::Implementation::apply_calls(std::size_t index, int64_t covered, const std::vector<StepMessage>& messages) {
  Slot& own = slots_[index];
  const std::size_t reports = messages.front().slots[index].reports.size();
  double sum = 0, known = 0;
  for (std::size_t i = 0; i < reports; ++i) {
    const OpenCall open = own.open.front();
    own.open.pop_front();
    tune::AgreedTime time;
    double busiest = 0, mean = 0;
    for (std::size_t rank = 0; rank < messages.size(); ++rank) {
      const Report& report = messages[rank].slots[index].reports[i];
      if (report.milliseconds == kFailed && time.failed_on < 0) time.failed_on = static_cast<int>(rank);
      if (report.milliseconds == kMissing && time.missing_on < 0) time.missing_on = static_cast<int>(rank);
      time.is_void |= report.milliseconds == kVoid;
      const double milliseconds = report.milliseconds;
      const double least = std::min(time.milliseconds, milliseconds), most = std::max(time.milliseconds, milliseconds);
      time.milliseconds = rank == 0 ? milliseconds : options_.calls_alone ? most : least;
      busiest = std::max<double>(busiest, report.busiest_rows);
      mean = std::max<double>(mean, report.mean_rows);
    }
    // A rank that did not make the call lets the others wait until they fail.
    if (time.is_void) time.failed_on = time.missing_on = -1;
    const double forecast =
        options_.forecast ? options_.forecast(own.layer, own.direction, busiest, mean) : own.forecast.of(busiest, mean);
    time.forecast = forecast > 0 && std::isfinite(forecast) ? forecast : 1;
    time.skew = mean > 0 ? busiest / mean : 0;
    if (time.is_known()) {
      sum += time.milliseconds;
      ++known;
    }
    own.search.apply(open.planned, time);
  }
  if (covered < 1) return;
  own.calls_of_step.pop_front();
  const double calls = static_cast<double>(messages.front().slots[index].calls);
  if (known > 0) layers_milliseconds_ += sum / known * calls;
}

void Tuner::Implementation::step() {
  if (frozen) {
    ++steps;
    return;
  }
  const int64_t current = steps + 1;
  try {
    for (Pending& pending : pending_) {
      if (pending.step == 0) pending.step = current;
    }
    const std::vector<std::byte> own = step_bytes(current - 1);
    std::vector<std::vector<std::byte>> agreed;
    if (options_.exchange != nullptr) {
      const int64_t number = next_number_++;
      options_.exchange->give(number, own);
      if (last_given_) agreed = take(*last_given_);
      last_given_ = number;
    } else {
      if (!own_last_.empty()) agreed = {own_last_};
      own_last_ = own;
    }
    if (!agreed.empty()) apply_step(current - 2, agreed);
    decide();
  } catch (...) {
    frozen = ended_by_error_ = true;
    throw;
  }
  steps = current;
  for (Slot& slot : slots_) {
    slot.calls_of_step.push_back(0);
    slot.unplanned = 0;
  }
  if (options_.until > 0 && steps >= options_.until) freeze("it is the last step to tune in");
}

void Tuner::Implementation::decide() {
  double expected = 0;
  bool first_use = false;
  for (const Slot& slot : slots_) {
    expected += slot.search.expected();
    first_use |= slot.search.has_first_use();
  }
  const TunerSpent so_far = spent();
  double allowed = options_.budget * so_far.layers_milliseconds - so_far.lost_milliseconds - expected;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    // Another one is first each time.
    Slot& own = slots_[(i + static_cast<std::size_t>(steps)) % slots_.size()];
    if (own.search.milliseconds() > 0) own.milliseconds = own.search.milliseconds();
    use_results(own);
    end_waiting(own);
    for (const OnlineEvent& event : own.search.decide(allowed, own.calls_of_step.back(), first_use)) handle(own, event);
  }
}

void Tuner::Implementation::handle(Slot& own, const OnlineEvent& event) {
  using Kind = OnlineEvent::Kind;
  if (event.kind == Kind::kNewRound) {
    own.tried.clear();
    forget_results(own);
    forget_slower(own);
    for (const tune::Waiting& one : own.waiting) own.tried.insert(to_text(one.schedule));
    if (options_.rank == 0) say(place(own) + "a new round: " + event.reason);
    return;
  }
  if (event.kind == Kind::kFellBack) return fell_back(own, event);
  const Candidate& candidate = own.search.candidates()[event.candidate];
  switch (event.kind) {
    case Kind::kFirstUse:
      note(own, candidate.schedule, Verdict::kUntried);
      break;
    case Kind::kStaysIn:
      note(own, candidate.schedule, Verdict::kInTheRunning);
      break;
    case Kind::kOut:
      if (candidate.verdict != Verdict::kSlower) own.out_for_good.insert(candidate.text);
      note(own, candidate.schedule, candidate.verdict, event.reason);
      keep_result(own, candidate);
      record(own, word(event, candidate), candidate, event.reason);
      break;
    case Kind::kTaken:
      record(own, word(event, candidate), candidate, "");
      keep_result(own, candidate);
      taken(own, candidate);
      note_running(own);
      break;
    case Kind::kNewRound:
    case Kind::kFellBack:
      break;
  }
}

void Tuner::Implementation::taken(Slot& own, const Candidate& candidate) {
  own.earlier_milliseconds[own.base_text] = own.milliseconds;
  own.base = candidate.schedule;
  own.base_text = candidate.text;
  own.incumbencies.push_back({own.calls, own.base});
  if (own.first_milliseconds == 0) own.first_milliseconds = own.milliseconds;
  own.milliseconds *= tune::median(candidate.pooled());
  if (options_.rank != 0 || !folder_.keeps()) return;
  write_or_go_on([&] { folder_.store({key_of(own), candidate.schedule, own.milliseconds, own.first_milliseconds}); });
}

void Tuner::Implementation::record(Slot& own, const std::string& verdict, const Candidate& candidate,
                                   const std::string& reason) {
  const std::vector<double> all = candidate.pooled();
  const double ratio = all.empty() ? 0 : tune::median(all);
  decisions.push_back(
      {steps + 1, own.layer, own.direction, verdict, candidate.schedule, ratio, static_cast<int>(all.size()), reason});
  if (options_.rank != 0) return;
  std::string line = place(own) + verdict + ": " + tune::changed_fields(candidate.schedule, own.base);
  if (ratio > 0) line += fmt::format(", {:.3f} of the time in {} pairs", ratio, all.size());
  say(line + (reason.empty() ? "" : "; " + reason));
}

void Tuner::Implementation::note(Slot& own, const Schedule& schedule, Verdict verdict, const std::string& reason) {
  if (own.journal == nullptr) return;
  write_or_go_on([&] { own.journal->note({.schedule = schedule, .verdict = verdict, .reason = reason}); });
}

void Tuner::Implementation::write_or_go_on(const std::function<void()>& write) {
  if (!folder_.keeps()) return;
  try {
    write();
  } catch (const Error& error) {
    say(std::string(error.what()) + "; the tuner goes on in memory");
    folder_ = tune::TunedFolder({});
  }
}

// What was slower may be tried again: also in memory alone, where the folder is lost.
void Tuner::Implementation::forget_slower(Slot& own) {
  if (own.journal == nullptr) return;
  own.journal->forget_slower();
  write_or_go_on([&] { own.journal->finish(); });
}

uint64_t Tuner::Implementation::state_hash() const {
  uint64_t hash = static_cast<uint64_t>(steps);
  for (const Slot& slot : slots_) {
    hash = hash_of(slot.search.incumbent_text(), hash + slot.calls + slot.waiting.size());
    for (const Candidate& candidate : slot.search.candidates()) {
      hash = hash_of(candidate.text, hash + candidate.planned * 8 + static_cast<uint64_t>(candidate.verdict));
    }
  }
  return hash;
}

void Tuner::Implementation::freeze(const std::string& why) {
  if (frozen) return;
  frozen = true;
  for (Slot& slot : slots_) {
    end_trials(slot);
    slot.search.stop();
    slot.open.clear();
    slot.waiting.clear();
  }
  if (options_.rank == 0) say(fmt::format("step {}: frozen: {}", steps, why));
}

TunerSpent Tuner::Implementation::spent() const {
  double lost = 0;
  for (const Slot& slot : slots_) lost += slot.search.lost() + slot.checks_milliseconds;
  return {layers_milliseconds_, lost, tried_calls_};
}

void Tuner::Implementation::say(const std::string& line) const {
  if (options_.log) options_.log("uniep tuner: " + line);
}

std::string Tuner::Implementation::place(const Slot& slot) const {
  return fmt::format("step {}: layer {} {}: ", steps + 1, slot.layer,
                     slot.direction == Direction::kForward ? "forward" : "backward");
}

}  // namespace uniep
