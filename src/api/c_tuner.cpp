#include <fmt/format.h>

#include <cstring>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "api/c_handles.h"
#include "uniep/libraries.h"
#include "uniep/tuner.h"

namespace uniep {
namespace {

constexpr int32_t kMaxLayers = 4096;

// The error that a caller's function stands for.
[[noreturn]] void throw_status(uniep_status status, const std::string& what) {
  const bool known = status > UNIEP_OK && status <= UNIEP_INTERNAL;
  throw Error(known ? static_cast<Status>(status) : Status::kInternal, what);
}

// The caller's way between ranks.
class CallerExchange : public TunerExchange {
 public:
  explicit CallerExchange(const uniep_tuner_options& options) : options_(options) {}

  void give(int64_t number, std::span<const std::byte> own) override {
    const uniep_status status = options_.give(options_.context, number, own.data(), own.size());
    if (status != UNIEP_OK) throw_status(status, fmt::format("give: message {} did not go out", number));
  }

  std::vector<std::vector<std::byte>> take(int64_t number) override {
    Taken taken;
    const uniep_status status = options_.take(options_.context, number, &taken, put);
    if (status != UNIEP_OK) throw_status(status, fmt::format("take: message {} did not come", number));
    if (taken.no_room) throw Error(Status::kOutOfMemory, "the C++ heap has no room");
    return std::move(taken.all);
  }

 private:
  struct Taken {
    std::vector<std::vector<std::byte>> all;
    bool no_room = false;
  };
  // Called by the caller's function, through whose frames nothing may be thrown.
  static void put(void* sink, const void* bytes, size_t size) {
    Taken& taken = *static_cast<Taken*>(sink);
    const auto* const first = static_cast<const std::byte*>(bytes);
    if (size > kMaxExchangedBytes) size = 0;  // is read as damaged
    if (bytes == nullptr) size = 0;
    try {
      taken.all.emplace_back(first, first + size);
    } catch (const std::bad_alloc&) {
      taken.no_room = true;
    }
  }

  uniep_tuner_options options_;
};

TunerCheck check_by_caller(const uniep_tuner_options& options, int layer, Direction direction,
                           const Schedule& candidate, const Schedule& incumbent) {
  uniep_tuner_check result{};
  result.size = sizeof(result);
  const uniep_status status = options.check(options.context, layer, static_cast<int32_t>(direction),
                                            to_text(candidate).c_str(), to_text(incumbent).c_str(), &result);
  const std::string said = result.refused == nullptr ? "" : result.refused;
  if (status != UNIEP_OK) throw_status(status, said.empty() ? "its check failed" : said);
  return {result.equal != 0, result.milliseconds, said};
}

TunerLayer tuner_layer(const uniep_tuner_layer& given, const Machine& machine) {
  TunerLayer layer;
  layer.config = layer_config(given.config);
  layer.tokens = given.tokens;
  if (given.tokens < 0)
    throw Error(Status::kInvalidArgument, fmt::format("tokens: {}; must not be negative", given.tokens));
  const auto fields = [](const char* text) { return PartialSchedule::parse(text == nullptr ? "auto" : text); };
  layer.fixed_forward = fields(given.forward);
  layer.fixed_backward = fields(given.backward);
  const auto whole = [&](const PartialSchedule& fixed, Direction direction) {
    return resolve(
        fixed,
        {.direction = direction, .shape = layer.config.shape, .numerics = layer.config.numerics, .machine = machine});
  };
  layer.forward = whole(layer.fixed_forward, Direction::kForward);
  layer.backward = whole(layer.fixed_backward, Direction::kBackward);
  return layer;
}

// The processes that call the group's layers together, and which one this is.
struct TuningRank {
  int rank, ranks;
};
TuningRank tuning_rank(const uniep_tuner_options& given, const Group& group) {
  const int ranks = group.ranks() / group.local_ranks(), rank = ranks > 1 ? group.first_local_rank() : 0;
  if (given.ranks == 0 && (given.rank == 0 || given.rank == rank)) return {rank, ranks};
  const bool over_group = given.give == nullptr && given.take == nullptr && (given.ranks > 1 || ranks > 1);
  if (over_group && (given.ranks != ranks || given.rank != rank)) {
    throw Error(
        Status::kInvalidArgument,
        fmt::format("options.give and take: NULL, and options.rank and ranks are {} and {}; over the group's own "
                    "connection they must be {} and {}",
                    given.rank, given.ranks, rank, ranks));
  }
  return {given.rank, given.ranks == 0 ? ranks : given.ranks};
}

std::shared_ptr<TunerExchange> exchange_of(const uniep_tuner_options& given, int ranks, Group& group) {
  if (ranks <= 1) return nullptr;
  if (given.give == nullptr && given.take == nullptr) return make_tuner_exchange(group);
  require_pointer(given.give, "options.give");
  require_pointer(given.take, "options.take");
  return std::make_shared<CallerExchange>(given);
}

TunerOptions tuner_options(const uniep_tuner_options& given, Group& group) {
  require_pointer(given.check, "options.check");
  const auto [rank, ranks] = tuning_rank(given, group);
  check_index(given.layer_count, 1, kMaxLayers + 1, "options.layer_count");
  const Machine machine = group.machine();
  TunerOptions options;
  options.rank = rank;
  options.ranks = ranks;
  options.exchange = exchange_of(given, ranks, group);
  options.calls_alone = group.ranks() == 1 && ranks > 1;
  options.machine = machine;
  options.layers = converted(given.layers, given.layer_count, "options.layers",
                             [&](const uniep_tuner_layer& layer) { return tuner_layer(layer, machine); });
  options.check = [given](int layer, Direction direction, const Schedule& candidate, const Schedule& incumbent) {
    return check_by_caller(given, layer, direction, candidate, incumbent);
  };
  if (given.log != nullptr) {
    options.log = [given](const std::string& line) { given.log(given.context, line.c_str()); };
  }
  if (given.folder != nullptr) options.folder = given.folder;
  if (given.machine_name != nullptr && *given.machine_name != 0) {
    options.machine_name = std::string(given.machine_name) + ", " + library_label();
  }
  if (given.budget != 0) options.budget = given.budget;
  options.until = given.until;
  if (given.batch != 0) options.batch = given.batch;
  options.group = given.job_group;
  if (given.job_groups != 0) options.groups = given.job_groups;
  return options;
}

Direction direction_of(int32_t direction) {
  return checked_constant(direction, Direction::kBackward, "direction");
}

}  // namespace
}  // namespace uniep

struct uniep_tuner {
  std::shared_ptr<uniep::GroupState> state;
  uniep::Tuner tuner;
  std::set<std::string> texts;  // of Schedules that callers hold
  std::string decided;          // of the decision that was asked for last

  const char* text_of(const uniep::Schedule& schedule) { return texts.insert(uniep::to_text(schedule)).first->c_str(); }
};

using namespace uniep;

namespace {

TunerCall call_of(const uniep_tuner_call* call) {
  const uniep_tuner_call given = read_struct<uniep_tuner_call>(call, "call");
  return {given.layer, direction_of(given.direction), given.number, {}, given.timed != 0, given.of_candidate != 0};
}

}  // namespace

uniep_status uniep_tuner_create(uniep_group* group, const uniep_tuner_options* options, uniep_tuner** tuner) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    *tuner = nullptr;
    require_pointer(group, "group");
    const uniep_tuner_options given = read_struct<uniep_tuner_options>(options, "options");
    TunerOptions made = tuner_options(given, group->state->group);
    made.prepare = [state = group->state, layers = made.layers](int layer, Direction direction, const Schedule& one) {
      return prepare(state->group, layers[static_cast<std::size_t>(layer)].config, one, {.direction = direction});
    };
    *tuner = new uniep_tuner{group->state, Tuner(std::move(made)), {}, {}};
  });
}

void uniep_tuner_destroy(uniep_tuner* tuner) {
  delete tuner;
}

uniep_status uniep_tuner_schedule(uniep_tuner* tuner, int32_t layer, int32_t direction, uniep_tuner_call* call) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    const std::size_t size = checked_size<uniep_tuner_call>(call, "call");
    const TunerCall planned = tuner->tuner.schedule(layer, direction_of(direction));
    uniep_tuner_call value{};
    value.schedule = tuner->text_of(planned.schedule);
    value.number = planned.number;
    value.layer = layer;
    value.direction = direction;
    value.timed = planned.timed ? 1 : 0;
    value.of_candidate = planned.of_candidate ? 1 : 0;
    write_struct(value, call, size);
  });
}

uniep_status uniep_tuner_schedule_to_keep(uniep_tuner* tuner, int32_t layer, int32_t direction, const char** schedule) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    require_pointer(schedule, "schedule");
    *schedule = tuner->text_of(tuner->tuner.schedule_to_keep(layer, direction_of(direction)));
  });
}

uniep_status uniep_tuner_measured(uniep_tuner* tuner, const uniep_tuner_call* call, double milliseconds,
                                  double busiest_rows, double mean_rows) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    tuner->tuner.measured(call_of(call), {milliseconds, busiest_rows, mean_rows});
  });
}

uniep_status uniep_tuner_failed(uniep_tuner* tuner, const uniep_tuner_call* call, const char* reason) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    require_pointer(reason, "reason");
    tuner->tuner.failed(call_of(call), reason);
  });
}

uniep_status uniep_tuner_not_measured(uniep_tuner* tuner, const uniep_tuner_call* call) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    tuner->tuner.not_measured(call_of(call));
  });
}

uniep_status uniep_tuner_step(uniep_tuner* tuner) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    tuner->tuner.step();
  });
}

uniep_status uniep_tuner_begin_round(uniep_tuner* tuner) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    tuner->tuner.begin_round();
  });
}

uniep_status uniep_tuner_freeze(uniep_tuner* tuner) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    tuner->tuner.freeze();
  });
}

uniep_status uniep_tuner_describe(const uniep_tuner* tuner, uniep_tuner_state* state) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    const std::size_t size = checked_size<uniep_tuner_state>(state, "state");
    const TunerSpent spent = tuner->tuner.spent();
    uniep_tuner_state value{};
    value.steps = tuner->tuner.steps();
    value.frozen = tuner->tuner.frozen();
    value.wants_round = tuner->tuner.wants_round();
    value.decisions = static_cast<int32_t>(tuner->tuner.decisions().size());
    value.layers_milliseconds = spent.layers_milliseconds;
    value.lost_milliseconds = spent.lost_milliseconds;
    value.tried_calls = spent.tried_calls;
    write_struct(value, state, size);
  });
}

uniep_status uniep_tuner_incumbent(uniep_tuner* tuner, int32_t layer, int32_t direction, const char** schedule) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    require_pointer(schedule, "schedule");
    *schedule = tuner->text_of(tuner->tuner.incumbent(layer, direction_of(direction)));
  });
}

uniep_status uniep_tuner_get_decision(uniep_tuner* tuner, int32_t index, uniep_tuner_decision* decision) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    const std::size_t size = checked_size<uniep_tuner_decision>(decision, "decision");
    const std::vector<TunerDecision>& all = tuner->tuner.decisions();
    if (index < 0 || static_cast<std::size_t>(index) >= all.size()) {
      throw Error(Status::kInvalidArgument, fmt::format("index: {}; there are {} decisions", index, all.size()));
    }
    const TunerDecision& found = all[static_cast<std::size_t>(index)];
    tuner->decided = to_text(found.schedule);
    uniep_tuner_decision value{};
    value.step = found.step;
    value.layer = found.layer;
    value.direction = static_cast<int32_t>(found.direction);
    value.pairs = found.pairs;
    value.ratio = found.ratio;
    value.verdict = found.verdict.c_str();
    value.schedule = tuner->decided.c_str();
    value.reason = found.reason.c_str();
    write_struct(value, decision, size);
  });
}

uniep_status uniep_tuner_results(const uniep_tuner* tuner, void* buffer, size_t capacity, size_t* needed) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    require_pointer(needed, "needed");
    if (capacity > 0) require_pointer(buffer, "buffer");
    const std::vector<std::byte> bytes = tuner->tuner.results();
    *needed = bytes.size();
    if (buffer == nullptr) return;
    if (capacity < bytes.size()) {
      throw Error(Status::kOverflow, fmt::format("capacity: {} bytes; the results need {}", capacity, bytes.size()));
    }
    if (!bytes.empty()) std::memcpy(buffer, bytes.data(), bytes.size());
  });
}

uniep_status uniep_tuner_add_results(uniep_tuner* tuner, const void* bytes, size_t size) {
  return guarded([&] {
    require_pointer(tuner, "tuner");
    if (size > 0) require_pointer(bytes, "bytes");
    tuner->tuner.add_results({static_cast<const std::byte*>(bytes), size});
  });
}
