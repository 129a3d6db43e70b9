#include "cli/chosen_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <optional>
#include <vector>

#include "api/machine_name.h"
#include "cli/options.h"
#include "cli/report_words.h"
#include "cli/solver_choice.h"
#include "engine/cuda/calls/engine.h"
#include "engine/engine.h"
#include "io/cache_folder.h"
#include "io/file.h"
#include "io/json_text.h"
#include "io/quote.h"
#include "program/buildable.h"
#include "tune/calibrated_machine.h"
#include "tune/rank_names.h"

namespace uniep::cli {
namespace {

struct Choice {
  std::optional<Schedule> schedule;
  std::string source;                // of the schedule
  std::vector<std::string> remarks;  // on what was looked at and is not taken
};

std::optional<tune::TunedSchedule> entry_of_file(const LayerOptions& options, const tune::TunedKey& key,
                                                 std::string& why) {
  const std::vector<tune::TunedSchedule> all = naming_option(
      "--tuned " + io::quote_path(options.tuned), [&] { return tune::parse_tuned(io::read_text_file(options.tuned)); });
  for (const tune::TunedKey& wanted : tune::keys_of(key)) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const tune::TunedSchedule& one) { return one.key == wanted; });
    if (found != all.end()) return *found;
  }
  why = fmt::format("--tuned: {} has no entry for this layer's {} on '{}', {} ranks and about {} tokens",
                    io::quote_path(options.tuned), direction_name(key.direction), key.machine, key.ranks, key.tokens);
  return std::nullopt;
}

Choice look(const LayerOptions& options, Direction direction, const Group& group) {
  if (options.tuned_strict && options.tuned.empty()) {
    throw Error(Status::kInvalidArgument, "--tuned-strict: without --tuned");
  }
  const tune::TunedKey key = tuned_key(options, direction, group);
  Choice choice;
  const auto take = [&](const std::optional<tune::TunedSchedule>& entry, const std::string& source, std::string why) {
    if (entry) {
      choice.schedule = overlaid(options, direction, group, entry->schedule, why);
      if (!choice.schedule) why = source + ": " + why;
    }
    if (choice.schedule) {
      choice.source = source;
    } else if (!why.empty()) {
      choice.remarks.push_back(std::move(why));
    }
  };
  if (!options.tuned.empty()) {
    std::string why;
    const std::optional<tune::TunedSchedule> entry = entry_of_file(options, key, why);
    if (!entry && options.tuned_strict) throw Error(Status::kInvalidArgument, why);
    take(entry, "--tuned " + options.tuned, why);
    if (!choice.schedule && options.tuned_strict) throw Error(Status::kInvalidArgument, choice.remarks.back());
  }
  if (choice.schedule) return choice;
  const tune::TunedFolder folder = tuned_folder();
  for (const tune::TunedKey& wanted : tune::keys_of(key)) {
    std::string why;
    const std::optional<tune::TunedSchedule> entry = folder.find(wanted, &why);
    take(entry, folder.path(wanted).string(), why);
    if (choice.schedule) break;
  }
  if (choice.schedule) return choice;
  choice.source = "the built-in defaults";
  if (group.engine() != EngineKind::kCuda) return choice;
  std::string doubt;
  const std::optional<sim::MachineDescription> calibrated =
      tune::find_calibrated(cuda::device_label(group.device(group.first_local_rank())), doubt);
  if (!doubt.empty()) choice.remarks.push_back(doubt);
  const sim::MachineDescription* const description = calibrated ? &*calibrated : sim::machine_of_device(key.machine);
  if (description == nullptr) {
    choice.source += "; no machine description is of this GPU";
    return choice;
  }
  std::string unasked, why;
  const std::optional<SolverChoice> solved = solver_choice(options, direction, group.machine(), *description, &unasked);
  // What was given stays, whatever the solver varied.
  if (solved && overlaid(options, direction, group, solved->schedule, why) == solved->schedule) {
    choice.schedule = solved->schedule;
    choice.source =
        fmt::format("the solver, {:.3f} of the default's time on {} as simulated", solved->ratio, description->name);
  } else {
    choice.source += unasked.empty() ? fmt::format(", which the solver does not surely beat on {}", description->name)
                                     : fmt::format("; the solver was not asked: {}", unasked);
  }
  return choice;
}

std::string conditions_of(const LayerOptions& options, Direction direction) {
  std::string fields = tune::conditions_of(options.given(direction));
  if (options.routing == "uniform") return fields;
  return "routing " + options.routing + (fields.empty() ? "" : "," + fields);
}

bool logs() {
  const char* const given = std::getenv("UNIEP_SCHEDULE_LOG");
  return given != nullptr && std::string(given) == "1";
}

}  // namespace

std::optional<Schedule> overlaid(const LayerOptions& options, Direction direction, const Group& group,
                                 const Schedule& whole, std::string& why) {
  PartialSchedule fields = PartialSchedule::from(whole);
  for (const auto& [name, value] : options.given(direction).values()) fields.set(name, value);
  const ScheduleRequest request = {
      .direction = direction, .shape = options.shape, .numerics = options.numerics, .machine = group.machine()};
  try {
    const Schedule schedule = resolve(fields, request);
    const std::vector<std::string> reasons = buildable(schedule, request);
    if (reasons.empty()) return schedule;
    why = reasons.front();
  } catch (const Error& error) {
    why = error.what();
  }
  return std::nullopt;
}

tune::TunedKey tuned_key(const LayerOptions& options, Direction direction, const Group& group) {
  const std::vector<int64_t> tokens = options.tokens();
  return {api::machine_name(group),
          group.ranks(),
          options.shape,
          options.numerics,
          direction,
          tune::token_bucket(*std::max_element(tokens.begin(), tokens.end())),
          conditions_of(options, direction)};
}

tune::TunedFolder tuned_folder() {
  return tune::TunedFolder(cache_folder());
}

std::string text_of_first_rank(Group& group, const std::string& own) {
  if (group.local_ranks() == group.ranks()) return own;
  internal::Engine& engine = group.implementation();
  const auto bytes = static_cast<std::size_t>(engine.all_gather(static_cast<int64_t>(own.size())).front());
  std::string text(bytes, '\0');
  for (std::size_t first = 0; first < bytes; first += sizeof(int64_t)) {
    int64_t word = 0;
    if (first < own.size()) std::memcpy(&word, own.data() + first, std::min(sizeof(word), own.size() - first));
    word = engine.all_gather(word).front();
    std::memcpy(text.data() + first, &word, std::min(sizeof(word), bytes - first));
  }
  return text;
}

std::string text_made_by_first_rank(Group& group, const std::function<std::string()>& make) {
  Status status = Status::kOk;
  std::string text;
  if (group.first_local_rank() == 0) {
    try {
      text = make();
    } catch (const Error& error) {
      status = error.status();
      text = error.what();
    } catch (const std::exception& error) {  // the others wait for what it says
      status = Status::kInternal;
      text = error.what();
    }
  }
  text = text_of_first_rank(group, fmt::format("{} {}", static_cast<int>(status), text));
  status = static_cast<Status>(std::atoi(text.c_str()));
  text.erase(0, text.find(' ') + 1);
  if (status != Status::kOk) throw Error(status, text);
  return text;
}

std::vector<int> ranks_that_differ(Group& group, const std::string& own) {
  std::vector<int> ranks;
  if (group.local_ranks() == group.ranks()) return ranks;
  const std::vector<int64_t> all =
      group.implementation().all_gather(static_cast<int64_t>(std::hash<std::string>()(own)));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

Schedule chosen_schedule(const LayerOptions& options, Direction direction, Group& group) {
  const Schedule built_in = options.resolved(direction, group.machine());
  const bool first = group.first_local_rank() == 0;
  Choice choice;
  std::string refused;  // in one of ranks' files, which the others may not have
  const auto look_here = [&] {
    choice = look(options, direction, group);
    return std::string();
  };
  if (!first) {
    try {
      look_here();
    } catch (const std::exception& error) {
      refused = error.what();
    }
  }
  text_made_by_first_rank(group, look_here);
  if (first) {
    for (const std::string& remark : choice.remarks) std::cerr << "uniep: " << remark << "; it is left out\n";
  }
  const Schedule own = choice.schedule.value_or(built_in);
  const std::string text = text_of_first_rank(group, to_text(own));
  if (first && logs()) {
    std::cerr << fmt::format("uniep: schedule ({}) from {}: {}\n", direction_name(direction), choice.source, text);
  }
  if (const std::vector<int> others = ranks_that_differ(group, to_text(own) + refused); first && !others.empty()) {
    std::cerr << fmt::format(
        "uniep: schedule ({}): {} found another one, in another cache or --tuned file; rank 0's counts\n",
        direction_name(direction), tune::rank_names(others, "has", "have"));
  }
  if (text == to_text(own)) return own;
  return resolve(
      PartialSchedule::parse(text),
      {.direction = direction, .shape = options.shape, .numerics = options.numerics, .machine = group.machine()});
}

}  // namespace uniep::cli
