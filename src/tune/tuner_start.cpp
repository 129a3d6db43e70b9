// A tuner's begin: options, the folder, and that all ranks begin with the same.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>

#include "io/quote.h"
#include "model/refuse.h"
#include "program/buildable.h"
#include "tune/rank_names.h"
#include "tune/tuner_state.h"
#include "uniep/error.h"
#include "uniep/libraries.h"

namespace uniep {

using tune::ByteReader;
using tune::ByteWriter;
using tune::hash_of;

namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 40;  // of a rank; far above any batch, and doubles count them

uint64_t identity_of(const TunerOptions& options) {
  ByteWriter writer;
  writer.text(library_label());
  writer.number(static_cast<int32_t>(options.machine.engine));
  writer.number(options.machine.ranks);
  writer.number(options.machine.workers);
  writer.number(options.machine.shared_memory_bytes);
  for (const TunerLayer& layer : options.layers) {
    const LayerShape& shape = layer.config.shape;
    for (const int64_t value : {shape.hidden, shape.intermediate, shape.experts, shape.topk,
                                layer.config.numerics.combine_groups, tune::token_bucket(layer.tokens)}) {
      writer.number(value);
    }
    writer.number(static_cast<int32_t>(layer.config.numerics.weight_gradient));
    writer.text(activation_text(layer.config.numerics));
    writer.number(static_cast<int32_t>(layer.config.numerics.router_weight));
    writer.number(static_cast<uint8_t>(layer.config.numerics.bias));
  }
  return hash_of(writer.bytes());
}

}  // namespace

Tuner::Implementation::Implementation(TunerOptions options) : options_(std::move(options)), folder_(options_.folder) {
  check_options();
  identity_ = identity_of(options_);
  make_slots();
  find_kept();
  agree_on_start();
  for (Slot& slot : slots_) {
    slot.base = slot.search.incumbent();
    slot.base_text = slot.search.incumbent_text();
    slot.incumbencies = {{0, slot.base}};
  }
}

void Tuner::Implementation::check_options() const {
  const TunerOptions& o = options_;
  if (o.ranks < 1) refuse(fmt::format("ranks: {}; must be 1 or more", o.ranks));
  if (o.rank < 0 || o.rank >= o.ranks) refuse(fmt::format("rank: {}; must be 0 to {}", o.rank, o.ranks - 1));
  if (o.ranks == 1 && o.machine.processes && o.machine.ranks > 1) {
    refuse(fmt::format("ranks: 1; the machine has a process for each of {} ranks, which tune together: must be {}",
                       o.machine.ranks, o.machine.ranks));
  }
  if (o.ranks > 1 && o.exchange == nullptr) refuse(fmt::format("exchange: null; {} ranks need one", o.ranks));
  if (!o.check) refuse("check: null; no candidate may run in the job that has not shown its bits before");
  if (o.layers.empty()) refuse("layers: none; at least one is needed");
  if (!(o.budget >= 0) || o.budget > 1) refuse(fmt::format("budget: {}; must be 0 to 1", o.budget));
  if (o.until < 0) refuse(fmt::format("until: {}; must be a step, or 0 for none", o.until));
  if (o.batch < 1 || o.batch > 64) refuse(fmt::format("batch: {}; must be 1 to 64", o.batch));
  if (o.groups < 1) refuse(fmt::format("groups: {}; must be 1 or more", o.groups));
  if (o.group < 0 || o.group >= o.groups) refuse(fmt::format("group: {}; must be 0 to {}", o.group, o.groups - 1));
  if (!o.folder.empty() && o.machine_name.empty()) refuse("machine_name: empty; entries of the folder need one");
  if (!o.folder.empty() && !tune::is_utf8(o.machine_name)) {
    refuse(fmt::format("machine_name: {}; must be UTF-8, which entries of the folder are",
                       io::quote_text(o.machine_name)));
  }
  for (std::size_t layer = 0; layer < o.layers.size(); ++layer) {
    const TunerLayer& own = o.layers[layer];
    if (own.tokens < 0 || own.tokens > kMaxTokens) {
      refuse(fmt::format("layers[{}].tokens: {}; must be 0 to {}", layer, own.tokens, kMaxTokens));
    }
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const bool forward = direction == Direction::kForward;
      const std::vector<std::string> broken = validate(
          forward ? own.forward : own.backward,
          {.direction = direction, .shape = own.config.shape, .numerics = own.config.numerics, .machine = o.machine});
      if (!broken.empty()) {
        refuse(fmt::format("layers[{}].{}: {}", layer, forward ? "forward" : "backward", broken.front()));
      }
    }
  }
}

void Tuner::Implementation::make_slots() {
  slots_.reserve(options_.layers.size() * 2);
  for (int layer = 0; layer < static_cast<int>(options_.layers.size()); ++layer) {
    const TunerLayer& own = options_.layers[static_cast<std::size_t>(layer)];
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const Schedule given = direction == Direction::kForward ? own.forward : own.backward;
      slots_.push_back({.layer = layer,
                        .direction = direction,
                        .search = tune::OnlineSearch(given),
                        .forecast = tune::Forecast(own.config, options_.machine, own.forward, own.tokens),
                        .given = given});
      slots_.back().calls_of_step.push_back(0);
    }
  }
}

tune::TunedKey Tuner::Implementation::key_of(const Slot& slot) const {
  const TunerLayer& layer = options_.layers[static_cast<std::size_t>(slot.layer)];
  const PartialSchedule& fixed = slot.direction == Direction::kForward ? layer.fixed_forward : layer.fixed_backward;
  return {options_.machine_name, options_.machine.ranks,           layer.config.shape,        layer.config.numerics,
          slot.direction,        tune::token_bucket(layer.tokens), tune::conditions_of(fixed)};
}

std::optional<Schedule> Tuner::Implementation::legal(const Slot& slot, PartialSchedule fields) const {
  const TunerLayer& layer = options_.layers[static_cast<std::size_t>(slot.layer)];
  const PartialSchedule& fixed = slot.direction == Direction::kForward ? layer.fixed_forward : layer.fixed_backward;
  for (const auto& [name, value] : fixed.values()) fields.set(name, value);
  // Forward and backward agree on them.
  fields.set("save.xg", slot.given.save_xg == SaveXg::kKeep ? "keep" : "redispatch");
  fields.set("save.z", slot.given.save_z == SaveZ::kKeep ? "keep" : "recompute");
  const ScheduleRequest request = {.direction = slot.direction,
                                   .shape = layer.config.shape,
                                   .numerics = layer.config.numerics,
                                   .machine = options_.machine};
  try {
    const Schedule schedule = resolve(fields, request);
    if (buildable(schedule, request).empty()) return schedule;
  } catch (const Error&) {  // not legal here
  }
  return std::nullopt;
}

void Tuner::Implementation::find_kept() {
  if (!folder_.keeps()) return;
  for (Slot& slot : slots_) {
    const std::filesystem::path file = folder_.path(key_of(slot)).replace_extension(".online");
    if (options_.rank == 0) slot.journal = std::make_unique<tune::Journal>(file, options_.group);
    std::optional<Schedule> schedule;
    for (const tune::TunedKey& key : tune::keys_of(key_of(slot))) {
      std::string problem;
      const std::optional<tune::TunedSchedule> entry = folder_.find(key, &problem);
      if (!problem.empty()) say(problem + "; it is left out");
      if (entry) schedule = legal(slot, PartialSchedule::from(entry->schedule));
      if (schedule) break;
    }
    if (schedule && !tune::Journal::look(file).is_out(*schedule)) slot.search.begin_with(*schedule);
  }
}

void Tuner::Implementation::build_forecasts(const std::vector<int64_t>& tokens) {
  for (Slot& slot : slots_) {
    const auto layer = static_cast<std::size_t>(slot.layer);
    const Schedule& forward = slots_[2 * layer].given;
    slot.forecast = tune::Forecast(options_.layers[layer].config, options_.machine, forward, tokens[layer]);
  }
}

void Tuner::Implementation::agree_on_start() {
  ByteWriter writer;
  writer.number(identity_);
  ByteWriter settings;
  settings.number(options_.budget);
  settings.number(options_.until);
  settings.number(static_cast<int32_t>(options_.batch));
  settings.number(static_cast<int32_t>(options_.group));
  settings.number(static_cast<int32_t>(options_.groups));
  for (const Slot& slot : slots_) {
    settings.text(to_text(slot.given));
    settings.text(slot.search.incumbent_text());
  }
  writer.number(hash_of(settings.bytes()));
  // Ranks' own numbers of tokens differ.
  for (const TunerLayer& layer : options_.layers) settings.number(layer.tokens);
  std::vector<std::byte> own = writer.bytes();
  own.insert(own.end(), settings.bytes().begin(), settings.bytes().end());

  const std::vector<std::vector<std::byte>> all = exchanged(own);
  std::vector<int> strangers, others;
  uint64_t identity = 0, chosen = 0;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    uint64_t of_rank = ~identity, settings_of_rank = 0;
    try {
      ByteReader reader(all[rank]);
      of_rank = reader.number<uint64_t>();
      settings_of_rank = reader.number<uint64_t>();
    } catch (const Error&) {
      strangers.push_back(static_cast<int>(rank));
      continue;
    }
    if (rank == 0) identity = of_rank, chosen = settings_of_rank;
    if (of_rank != identity) {
      strangers.push_back(static_cast<int>(rank));
    } else if (settings_of_rank != chosen) {
      others.push_back(static_cast<int>(rank));
    }
  }
  if (!strangers.empty()) {
    refuse(fmt::format("{} other layers, another machine or another library than rank 0",
                       tune::rank_names(strangers, "has", "have")));
  }
  if (!others.empty() && options_.rank == 0) {
    say(fmt::format("{} another cache, schedule or budget; rank 0's counts", tune::rank_names(others, "has", "have")));
  }
  ByteReader reader(std::span<const std::byte>(all.front()).subspan(2 * sizeof(uint64_t)));
  options_.budget = reader.number<double>();
  options_.until = reader.number<int64_t>();
  options_.batch = reader.number<int32_t>();
  options_.group = reader.number<int32_t>();
  options_.groups = reader.number<int32_t>();
  for (Slot& slot : slots_) {
    const LayerConfig& config = options_.layers[static_cast<std::size_t>(slot.layer)].config;
    const auto schedule_of = [&](const std::string& text) {
      return resolve(PartialSchedule::parse(text), {.direction = slot.direction,
                                                    .shape = config.shape,
                                                    .numerics = config.numerics,
                                                    .machine = options_.machine});
    };
    slot.given = schedule_of(reader.text());
    slot.search = tune::OnlineSearch(slot.given);
    slot.search.begin_with(schedule_of(reader.text()));
  }
  std::vector<int64_t> tokens;
  for (std::size_t layer = 0; layer < options_.layers.size(); ++layer) tokens.push_back(reader.number<int64_t>());
  build_forecasts(tokens);
}

}  // namespace uniep
