#include "verify/verifier_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "api/check_arrays.h"
#include "verify/rank_name.h"

namespace uniep::internal {

using namespace verify;

namespace {

constexpr int64_t kPatience = 3;      // steps that a layer and direction may stay away when it is their turn
constexpr std::size_t kFewTiles = 4;  // as memory that fails, not as a program that writes

[[noreturn]] void refuse(const std::string& message) {
  throw Error(Status::kInvalidArgument, message);
}

const char* direction_name(Direction direction) {
  return direction == Direction::kForward ? "forward" : "backward";
}

bool contains(const std::vector<std::string>& list, const std::string& one) {
  return std::find(list.begin(), list.end(), one) != list.end();
}

std::string file_stem(const std::string& layer) {
  std::string stem = layer;
  for (char& letter : stem) {
    if (!std::isalnum(static_cast<unsigned char>(letter)) && letter != '-' && letter != '.') letter = '_';
  }
  return stem;
}

int64_t not_finite(const Sums& sums) {
  int64_t count = 0;
  for (const Tensor tensor : {Tensor::kY, Tensor::kDx}) {
    for (const TileSums& unit : sums.of(tensor)) count += unit.not_finite;
  }
  return count;
}

}  // namespace

VerifierState::VerifierState(Group& checked, const VerifierOptions& given)
    : group(checked), options(given), next_step_(given.every) {
  if (group.local_ranks() != group.ranks()) {
    throw Error(
        Status::kUnsupported,
        fmt::format("verifier: this process has {} of the group's {} ranks; it needs all of them. With a process "
                    "a rank use uniep.Verifier of the Python package",
                    group.local_ranks(), group.ranks()));
  }
  if (given.every < 1) refuse(fmt::format("every: {}; must be 1 or more", given.every));
  if (!(given.budget > 0)) refuse(fmt::format("budget: {}; must be above 0, such as 0.001", given.budget));
  if (!given.rank_names.empty() && given.rank_names.size() != static_cast<std::size_t>(group.ranks())) {
    refuse(fmt::format("rank_names: {} names; must be none, or one for each of the {} ranks", given.rank_names.size(),
                       group.ranks()));
  }
  std::error_code ignored;
  if (!given.folder.empty() && !std::filesystem::is_directory(given.folder, ignored)) {
    refuse(fmt::format("folder: '{}' is no folder that exists", given.folder));
  }
  names_ = given.rank_names;
  for (int rank = static_cast<int>(names_.size()); rank < group.ranks(); ++rank) {
    names_.push_back(rank_name(group, rank));
  }
}

void VerifierState::see(const std::string& layer) {
  if (!options.layers.empty() && !contains(options.layers, layer)) return;
  if (!contains(layers_, layer)) layers_.push_back(layer);
}

bool VerifierState::due(const std::string& layer, Direction direction) const {
  if (noted_ || counts.steps + 1 < next_step_) return false;
  if (!options.layers.empty() && !contains(options.layers, layer)) return false;
  return turn_ ? turn_->layer == layer && turn_->direction == direction : direction == Direction::kForward;
}

int64_t VerifierState::expert_in_turn(const LayerConfig& config) const {
  const int64_t local = config.shape.experts / group.ranks();
  const int64_t layers = std::max<int64_t>(static_cast<int64_t>(layers_.size()), 1);
  return (static_cast<int64_t>(options.seed % 1000) + turns_ / (2 * layers)) % local;
}

NotedCall VerifierState::begin_note(const VerifiedCall& given, Direction direction, std::size_t arguments) const {
  const LayerConfig& config = given.config;
  const std::span<const Routing> routings = given.routings;
  const std::size_t ranks = static_cast<std::size_t>(group.ranks());
  if (routings.size() != ranks || arguments != ranks) {
    refuse(fmt::format("verifier: {} routings and {} arguments; must be one for each of the {} ranks", routings.size(),
                       arguments, ranks));
  }
  if (!is_gated(config.numerics.activation)) {
    refuse(fmt::format("verifier: activation={} of {}; legal are activations with a gate",
                       activation_text(config.numerics), given.layer));
  }
  if (config.numerics.bias) {
    refuse(fmt::format("verifier: bias=1 of {}; legal are experts without biases", given.layer));
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) api::check_routing(routings[rank], static_cast<int>(rank));
  NotedCall call;
  call.layer = given.layer;
  call.schedule = given.schedule;
  call.inputs.config = config;
  call.inputs.direction = direction;
  call.inputs.routings.assign(routings.begin(), routings.end());
  call.expert = expert_in_turn(config);
  return call;
}

void VerifierState::note(NotedCall call) {
  call.read = sum_inputs(group, call.inputs);
  noted_ = std::move(call);
}

void VerifierState::choose_turn() {
  turn_.reset();
  if (layers_.empty()) return;
  const int64_t layers = static_cast<int64_t>(layers_.size());
  turn_ = Turn{layers_[static_cast<std::size_t>(turns_ / 2 % layers)],
               turns_ % 2 == 0 ? Direction::kForward : Direction::kBackward};
}

// So that checks stay within the budget with one more that costs as much.
void VerifierState::choose_next_step(double check_seconds) {
  next_step_ = counts.steps + options.every;
  if (options.budget >= 1) return;
  const double a_step = std::max(counts.step_seconds / static_cast<double>(counts.steps), 1e-9);
  const double needed = (counts.check_seconds + check_seconds) / options.budget - counts.step_seconds;
  const double steps = std::min(std::ceil(needed / a_step), 1e15);
  next_step_ = std::max(next_step_, counts.steps + static_cast<int64_t>(steps));
}

std::vector<Finding> VerifierState::end_step() {
  ++counts.steps;
  std::vector<Finding> found;
  const auto now = std::chrono::steady_clock::now();
  counts.step_seconds += std::chrono::duration<double>(now - step_begin_).count();
  step_begin_ = now;
  if (noted_) {
    const NotedCall call = std::move(*noted_);
    noted_.reset();
    const double before = counts.check_seconds;
    ++turns_;
    waited_ = 0;
    try {
      found = timed([&] { return check(call); });
      ++(call.inputs.direction == Direction::kForward ? counts.forward_checks : counts.backward_checks);
    } catch (const Error& error) {
      if (error.status() != Status::kOutOfMemory) throw;
      ++counts.skipped;
    }
    choose_next_step(counts.check_seconds - before);
  } else if (counts.steps >= next_step_ && ++waited_ >= kPatience) {
    ++turns_;
    waited_ = 0;
  }
  start = {};
  choose_turn();
  return found;
}

// Where the call's inputs are not what they were behind it.
std::optional<Finding> VerifierState::inputs_finding(const NotedCall& call) const {
  const std::vector<Place> changed = differences(call.read, sum_inputs(group, call.inputs), kFirstInput, kTensors);
  if (changed.empty()) return std::nullopt;
  const Place& first = changed.front();
  const bool alone = std::all_of(changed.begin(), changed.end(), [&](const Place& place) {
    return place.tensor == first.tensor && place.unit == first.unit;
  });
  const std::size_t tiles = call.read.of(first.tensor)[first.unit].sums.size();
  if (alone && changed.size() <= std::min(kFewTiles, tiles / 8)) {
    Finding finding = finding_of(call, FindingKind::kChangedMemory, &first);
    finding.tiles = static_cast<int64_t>(changed.size());
    const int64_t local = call.inputs.local_experts();
    finding.rank = static_cast<int>(is_by_expert(first.tensor) ? first.unit / local : first.unit);
    describe(finding, &first, "changed in memory behind the call, where nothing may write");
    return finding;
  }
  Sums now;
  const LayerShape& shape = call.inputs.config.shape;
  const Tensor result = call.inputs.direction == Direction::kForward ? Tensor::kY : Tensor::kDx;
  for (int rank = 0; rank < group.ranks(); ++rank) {
    const int64_t tokens = call.inputs.routings[rank].tokens;
    const HostView<BFloat16> view(group, rank, call.results[rank], tokens * shape.hidden);
    now.of(result).emplace_back().append(view.data(), tokens, shape.hidden, shape.hidden);
  }
  const bool replayed = !differences(call.made, now, static_cast<int>(result), static_cast<int>(result) + 1).empty();
  Finding finding = finding_of(call, replayed ? FindingKind::kReplayed : FindingKind::kChangedInputs, &first);
  finding.tiles = static_cast<int64_t>(changed.size());
  describe(finding, &first,
           replayed ? "and the results were written behind the call (was a graph replayed, or memory used "
                      "again?); the call can not be checked"
                    : "was written behind the call (an optimizer before end_step()?); it can not be checked");
  return finding;
}

std::optional<VerifierState::Run> VerifierState::run_one(const NotedCall& call, std::vector<std::string>& schedules,
                                                         std::size_t which, Moved moved) {
  while (!schedules.empty()) {
    const std::size_t at = which % schedules.size();
    try {
      Sums sums = run_again(group, call.inputs, schedules[at], moved, call.gradients ? &call.start : nullptr);
      ++counts.calls;
      return Run{std::move(sums), schedules[at]};
    } catch (const Error& error) {
      if (error.status() != Status::kUnsupported) throw;
      ++counts.without_kernel;
      schedules.erase(schedules.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }
  return std::nullopt;
}

std::optional<Finding> VerifierState::runs_finding(const NotedCall& call) {
  const int ranks = group.ranks();
  std::vector<std::string> schedules = other_schedules(group, call.inputs.config, call.schedule, call.inputs.direction);
  const std::size_t which = static_cast<std::size_t>(options.seed) + static_cast<std::size_t>(turns_);
  const int first_shift = ranks == 1 ? 0 : 1 + static_cast<int>(turns_ % (ranks - 1));
  std::vector<Sums> runs = {call.made};
  std::vector<std::string> used = {to_text(call.schedule)};
  const auto run = [&](std::size_t turn, int shift) {
    std::optional<Run> again = run_one(call, schedules, turn, {call.expert, shift});
    if (!again) return false;
    runs.push_back(std::move(again->sums));
    used.push_back(std::move(again->schedule));
    return true;
  };
  if (!run(which, first_shift)) return std::nullopt;
  const std::vector<Place> different = differences(runs[0], runs[1], 0, kFirstInput);
  if (different.empty()) {
    if (not_finite(runs[0]) == 0) return std::nullopt;
    Finding finding = finding_of(call, FindingKind::kNotFinite, nullptr);
    describe(finding, nullptr,
             fmt::format("{} values of the result are NaN or infinite, the same in all runs; no rank is "
                         "wrong",
                         not_finite(runs[0])));
    return finding;
  }
  try {
    // Yet another placement; of two ranks home is the only one.
    const int second_shift = ranks == 1 ? 0 : ranks == 2 ? 0 : 1 + first_shift % (ranks - 1);
    if (run(which + 1, second_shift)) return judge(call, runs, used, schedules);
  } catch (const Error& error) {
    if (error.status() != Status::kOutOfMemory) throw;
  }
  Finding finding = finding_of(call, FindingKind::kUndecided, &different.front());
  finding.tiles = static_cast<int64_t>(different.size());
  for (int rank = 0; rank < ranks; ++rank) finding.suspects.push_back(rank);
  describe(finding, &different.front(), "differs between two runs; there is no memory or no Schedule for a third");
  return finding;
}

std::vector<Finding> VerifierState::check(const NotedCall& call) {
  std::optional<Finding> finding = inputs_finding(call);
  if (!finding) finding = runs_finding(call);
  if (!finding) return {};
  ++counts.findings;
  const std::string key =
      fmt::format("{} {} {} {} {}", static_cast<int>(finding->kind), call.layer, direction_name(finding->direction),
                  finding->rank, fmt::join(finding->suspects, ","));
  if (!told_.insert(key).second) return {};
  const bool replays = finding->kind != FindingKind::kChangedInputs && finding->kind != FindingKind::kReplayed;
  if (!options.folder.empty() && replays) {
    const std::string stem =
        fmt::format("uniep-{}-{}-step{}", file_stem(call.layer), direction_name(finding->direction), counts.steps);
    try {
      finding->file = write_inputs(group, call.inputs, (std::filesystem::path(options.folder) / stem).string());
      finding->message += fmt::format("; inputs: {}", finding->file);
    } catch (const Error& error) {  // what was found counts more
      finding->message += fmt::format("; inputs were not written: {}", error.what());
    }
  }
  return {std::move(*finding)};
}

std::pair<std::vector<int>, std::string> VerifierState::narrowed(const std::vector<int>& candidates) const {
  std::vector<int> common = candidates;
  std::vector<int64_t> steps;
  for (const Undecided& earlier : undecided_) {
    const auto with_earlier = [&](const std::vector<int>& own) {
      std::vector<int> both;
      std::set_intersection(own.begin(), own.end(), earlier.candidates.begin(), earlier.candidates.end(),
                            std::back_inserter(both));
      return both;
    };
    if (with_earlier(candidates).empty()) continue;  // of another fault
    common = with_earlier(common);
    steps.push_back(earlier.step);
  }
  if (common.size() != 1 || steps.size() < 2) return {candidates, ""};
  return {common, fmt::format("; one of several ranks made it so, and by the findings at steps {} this one",
                              fmt::join(steps, ", "))};
}

std::optional<Finding> VerifierState::judge(const NotedCall& call, const std::vector<Sums>& runs,
                                            const std::vector<std::string>& used,
                                            const std::vector<std::string>& schedules) {
  const int ranks = group.ranks();
  std::vector<std::string> left = schedules;
  const std::size_t which = static_cast<std::size_t>(options.seed) + static_cast<std::size_t>(turns_);
  Disagreement found = compare(call.inputs, read_routings(group, call.inputs), runs);
  bool persistent = false;
  if (!found.ambiguous.empty()) {
    // Two ranks: the other one again. If it says what it said before, nobody has a majority.
    const std::optional<Run> fourth = run_one(call, left, which + 1, {call.expert, 1});
    for (Evidence& evidence : found.ambiguous) {
      if (!fourth) break;
      const Place& place = evidence.place;
      const std::vector<TileSums>& units = fourth->sums.of(place.tensor);
      const bool again =
          static_cast<std::size_t>(place.unit) < units.size() && sum_at(fourth->sums, place) == evidence.wrong;
      if (again) {
        evidence.candidates = {0, 1};
        persistent = true;
      }
      found.evidence.push_back(evidence);
    }
  }
  const Place* const first = !found.evidence.empty()      ? &found.evidence.front().place
                             : !found.no_majority.empty() ? &found.no_majority.front()
                                                          : nullptr;
  if (first == nullptr) return std::nullopt;
  const std::vector<int> candidates = common_candidates(found.evidence);
  Finding finding = finding_of(call, FindingKind::kOwnBug, first);
  finding.tiles = found.tiles;
  if (candidates.empty()) {
    describe(finding, first,
             found.evidence.empty() ? "has no two runs that agree; a fault of the library, of more ranks than "
                                      "one, or of one that was wrong twice"
                                    : "and others are wrong on several ranks; a fault of the library, or of "
                                      "more ranks than one");
    return finding;
  }
  if (candidates.size() == 1 && ranks > 1) {
    const auto moved = std::find_if(found.evidence.begin(), found.evidence.end(),
                                    [](const Evidence& evidence) { return evidence.expert >= 0; });
    if (moved != found.evidence.end() &&
        repeats_by_schedule(call, used[static_cast<std::size_t>(moved->run)], *moved, candidates[0])) {
      describe(finding, first, "is wrong on another rank, too, under the same Schedule; a fault of the library");
      return finding;
    }
  }
  auto [suspects, by] = narrowed(candidates);
  if (candidates.size() > 1) undecided_.push_back({counts.steps, candidates});
  const int suspect = suspects[0];
  const auto named = std::find_if(found.evidence.begin(), found.evidence.end(), [&](const Evidence& evidence) {
    return std::find(evidence.candidates.begin(), evidence.candidates.end(), suspect) != evidence.candidates.end();
  });
  finding = finding_of(call, FindingKind::kWrongRank, &named->place);
  finding.expert = named->expert;
  finding.tiles = found.tiles;
  if (candidates.size() == 1) {
    finding.rank = candidates[0];
    describe(finding, &named->place, "is wrong; two other runs agree against it");
    return finding;
  }
  finding.kind = FindingKind::kUndecided;
  finding.suspects = std::move(suspects);
  describe(finding, &named->place,
           persistent   ? std::string("differs by rank; two ranks are too few to say which one is wrong")
           : by.empty() ? std::string("is wrong; later findings may say which one of them it is")
                        : "is wrong" + by);
  return finding;
}

// Whether the wrong bits come again where another rank computes the expert under the Schedule of the wrong run: then
// the Schedule's kernel is wrong, and no rank.
bool VerifierState::repeats_by_schedule(const NotedCall& call, const std::string& used, const Evidence& evidence,
                                        int wrong_rank) {
  const int64_t local = call.inputs.local_experts();
  const int home = static_cast<int>(evidence.expert / local), ranks = group.ranks();
  const bool gradient = evidence.place.tensor == Tensor::kDw1 || evidence.place.tensor == Tensor::kDw2;
  if (gradient && evidence.expert % local != call.expert) return false;
  // run_again() moves experts' gradients alone.
  if (!gradient && call.inputs.config.numerics.combine_groups > 0) return false;
  int shift = 0;
  while ((home + shift) % ranks == wrong_rank) ++shift;
  try {
    const Sums again = run_again(group, call.inputs, used, {evidence.expert % local, shift},
                                 gradient && call.gradients ? &call.start : nullptr);
    ++counts.calls;
    const std::vector<TileSums>& units = again.of(evidence.place.tensor);
    return static_cast<std::size_t>(evidence.place.unit) < units.size() &&
           sum_at(again, evidence.place) == evidence.wrong;
  } catch (const Error& error) {
    if (error.status() != Status::kInvalidArgument && error.status() != Status::kUnsupported) throw;
    return false;  // the Schedule of one direction, or of the whole layer, alone
  }
}

Finding VerifierState::finding_of(const NotedCall& call, FindingKind kind, const Place* place) const {
  Finding finding;
  finding.kind = kind;
  finding.layer = call.layer;
  finding.direction = call.inputs.direction;
  if (place == nullptr) {
    finding.tensor = tensor_name(finding.direction == Direction::kForward ? Tensor::kY : Tensor::kDx);
    return finding;
  }
  finding.tensor = tensor_name(place->tensor);
  if (is_by_expert(place->tensor)) finding.expert = place->unit;
  const Sums& sums = static_cast<int>(place->tensor) >= kFirstInput ? call.read : call.made;
  const int64_t tiles = std::max<int64_t>(sums.of(place->tensor)[place->unit].tiles_of_row, 1);
  const bool by_slot =
      place->tensor == Tensor::kRows || place->tensor == Tensor::kDxRows || place->tensor == Tensor::kDprobs;
  finding.row = place->index / tiles / (by_slot ? call.inputs.config.shape.topk : 1);
  finding.column = place->tensor == Tensor::kDprobs ? 0 : place->index % tiles * kVerifiedColumns;
  return finding;
}

void VerifierState::describe(Finding& finding, const Place* place, const std::string& what) const {
  const bool by_rank = finding.kind == FindingKind::kWrongRank || finding.kind == FindingKind::kChangedMemory;
  std::string who;
  if (by_rank) who = fmt::format("rank {} ({}): ", finding.rank, names_[finding.rank]);
  if (finding.kind == FindingKind::kUndecided) {
    std::vector<std::string> names;
    for (const int rank : finding.suspects) names.push_back(fmt::format("{} ({})", rank, names_[rank]));
    who = fmt::format("{} {}: ", names.size() > 1 ? "one of the ranks" : "rank", fmt::join(names, " and "));
  }
  if (!by_rank) finding.rank = -1;
  std::string tile;
  if (place != nullptr) {
    const std::string expert = finding.expert >= 0 ? fmt::format(" of expert {}", finding.expert) : "";
    const std::string row = is_by_expert(place->tensor) ? fmt::format("row {}", finding.row)
                                                        : fmt::format("token {} of rank {}", finding.row, place->unit);
    tile = fmt::format("{}{}, {}, columns from {} on ({} tiles in all) ", finding.tensor, expert, row, finding.column,
                       finding.tiles);
  }
  finding.message = fmt::format("layer {}, {}, step {}: {}: {}{}{}", finding.layer, direction_name(finding.direction),
                                counts.steps, finding_name(finding.kind), who, tile, what);
}

}  // namespace uniep::internal
