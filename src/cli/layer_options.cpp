#include "cli/layer_options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <limits>
#include <numeric>

#include "cli/memory_limit.h"
#include "cli/options.h"
#include "cli/shapes.h"
#include "io/extents.h"
#include "io/file.h"
#include "io/npy.h"
#include "io/quote.h"
#include "model/place.h"
#include "model/placement.h"
#include "reference/parallel.h"

namespace uniep::cli {
namespace {

constexpr int kMaxRanks = 64;
constexpr int kMaxWorkers = 1024;
constexpr int kMaxDevices = 1024;
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

const std::vector<std::pair<std::string, WeightGradient>> kWeightGradients = {
    {"bf16", WeightGradient::kBFloat16}, {"fp32", WeightGradient::kFloat32}, {"main_grad", WeightGradient::kMainGrad}};

bool is_file(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored) && !std::filesystem::is_directory(path, ignored);
}

void add_schedule_options(CLI::App& app, LayerOptions& options) {
  add_text_option(
      app, "--schedule", [&options](const std::string& text) { options.schedule = read_schedule("--schedule", text); },
      "auto|FILE|key=value,...", "schedule of both directions; what is not given is filled (default auto)");
  add_text_option(
      app, "--schedule-backward",
      [&options](const std::string& text) { options.schedule_backward = read_schedule("--schedule-backward", text); },
      "auto|FILE|key=value,...", "fields that backward has instead of --schedule's");
  add_save_option(app, options.save);
}

void check_sizes(const LayerOptions& options) {
  check_shape(options.shape, options.ranks);
  const int64_t groups = options.numerics.combine_groups;
  if (groups == 0 || (options.shape.experts % groups == 0 && groups % options.ranks == 0)) return;
  refuse_value("--combine-groups", std::to_string(groups),
               fmt::format("0, or a divisor of the {} experts that is a multiple of the {} ranks",
                           options.shape.experts, options.ranks));
}

// Throws what is wrong with the ids of a file; `ids` gets them as int32.
template <typename Id>
void check_ids(const std::vector<Id>& file_ids, const LayerOptions& options, int64_t tokens,
               std::vector<int32_t>& ids) {
  const std::vector<float> no_probs(file_ids.size());
  std::vector<int32_t> counts(options.shape.experts);
  const RoutingProblem problem =
      count_chunk(file_ids.data(), no_probs.data(), {0, tokens}, options.shape, {counts.data(), ids.data()});
  if (problem.fault == RoutingFault::kNone) return;
  const Id id = file_ids[problem.token * options.shape.topk + problem.slot];
  const std::string where =
      fmt::format("--routing: {}: token {}, slot {}", io::quote_path(options.routing), problem.token, problem.slot);
  throw Error(Status::kInvalidArgument,
              problem.fault == RoutingFault::kExpertTwice
                  ? fmt::format("{} names expert {} a second time; the experts of a token must differ", where, id)
                  : fmt::format("{} holds {}; legal are 0 to {}, and -1 for an unused slot", where, id,
                                options.shape.experts - 1));
}

std::vector<int32_t> read_ids(const LayerOptions& options, int64_t tokens) {
  const io::NpyArray array = naming_option("--routing", [&] { return io::read_npy(options.routing); });
  const std::vector<int64_t> expected = {tokens, options.shape.topk};
  if (array.shape != expected) {
    throw Error(Status::kInvalidArgument,
                fmt::format("--routing: {} has shape {}; must be {} (all tokens, top-k)",
                            io::quote_path(options.routing), io::shape_text(array.shape), io::shape_text(expected)));
  }
  std::vector<int32_t> ids(tokens * options.shape.topk);
  if (const auto* narrow = std::get_if<std::vector<int32_t>>(&array.values)) {
    check_ids(*narrow, options, tokens, ids);
  } else if (const auto* wide = std::get_if<std::vector<int64_t>>(&array.values)) {
    check_ids(*wide, options, tokens, ids);
  } else {
    throw Error(Status::kInvalidArgument,
                fmt::format("--routing: {} holds float32; must be int32 or int64", io::quote_path(options.routing)));
  }
  return ids;
}

}  // namespace

PartialSchedule read_schedule(const std::string& option, const std::string& text) {
  const bool file = text != "auto" && is_file(text);
  if (!file && text != "auto" && text.find_first_of("={") == std::string::npos) {
    refuse_value(option, text, "auto, a file that exists, or key=value,key=value");
  }
  return naming_option(option, [&] { return PartialSchedule::parse(file ? io::read_text_file(text) : text); });
}

void set_saves(PartialSchedule& schedule, SaveWay way) {
  if (way == SaveWay::kAsScheduled) return;
  for (const char* field : {"save.xg", "save.z"}) {
    if (!schedule.given(field)) continue;
    throw Error(Status::kInvalidArgument,
                fmt::format("--save: given beside {} in the schedule; give one of them", field));
  }
  const bool keeps_xg = way == SaveWay::kKeep || way == SaveWay::kRows;
  const bool keeps_z = way == SaveWay::kKeep || way == SaveWay::kRedispatch;
  schedule.set("save.xg", keeps_xg ? "keep" : "redispatch");
  schedule.set("save.z", keeps_z ? "keep" : "recompute");
}

void LayerOptions::require_tokens(std::string_view what) const {
  const std::vector<int64_t> all = tokens();
  if (std::all_of(all.begin(), all.end(), [](int64_t one) { return one == 0; })) {
    refuse_value("--tokens", "0", fmt::format("more than 0 on some rank with {}", what));
  }
}

std::vector<int64_t> LayerOptions::tokens() const {
  if (tokens_given.size() == 1) return std::vector<int64_t>(ranks, tokens_given[0]);
  if (tokens_given.size() != static_cast<std::size_t>(ranks)) {
    throw Error(Status::kInvalidArgument, fmt::format("--tokens: {} numbers given; must be one, or one for each of the "
                                                      "{} ranks",
                                                      tokens_given.size(), ranks));
  }
  return tokens_given;
}

bool LayerOptions::routing_is_file() const {
  const bool is_kind = routing == "uniform" || routing == "one" || routing.starts_with("zipf:");
  return !is_kind && (routing.ends_with(".npy") || is_file(routing));
}

PartialSchedule LayerOptions::given(Direction direction) const {
  PartialSchedule fields = schedule;
  if (direction == Direction::kBackward) {
    for (const auto& [name, value] : schedule_backward.values()) fields.set(name, value);
  }
  set_saves(fields, save);
  return fields;
}

Schedule LayerOptions::resolved(Direction direction, const Machine& machine, Operation operation) const {
  check_sizes(*this);
  return naming_option(direction == Direction::kForward ? "--schedule (forward)" : "--schedule (backward)", [&] {
    return resolve(
        given(direction),
        {.direction = direction, .shape = shape, .numerics = numerics, .machine = machine, .operation = operation});
  });
}

void add_tuned_options(CLI::App& app, LayerOptions& options) {
  app.add_option("--tuned", options.tuned, "schedules that `uniep tune --export` wrote, before those of its cache")
      ->type_name("FILE");
  app.add_flag("--tuned-strict", options.tuned_strict, "an error where --tuned has none for this layer and machine");
}

void add_layer_options(CLI::App& app, LayerOptions& options) {
  add_word_option<EngineKind>(
      app, "--engine", options.engine,
      {{"cpu", EngineKind::kCpu}, {"cuda", EngineKind::kCuda}, {"auto", EngineKind::kAuto}},
      "auto: cuda where a Hopper GPU is, else cpu; simulate, solve and compile: cuda (default auto)");
  add_integer_option(app, "--ranks", options.ranks, {1, kMaxRanks}, {"R", "ranks"});
  add_text_option(
      app, "--tokens",
      [&options](const std::string& text) { options.tokens_given = parse_integers("--tokens", text, 0, kNoLimit); },
      "T|T0,T1,...", fmt::format("tokens of every rank, or of each (default {})", options.tokens_given.front()));
  // Before the four sizes, which CLI11 reads in this order: one of them overrides the shape's.
  add_text_option(
      app, "--shape", [&options](const std::string& text) { options.shape = parse_shape("--shape", text); },
      "NAME|H,I,E,K", "all four sizes; names: " + shape_names());
  add_integer_option(app, "--hidden", options.shape.hidden, {1, kNoLimit},
                     {"H", "columns of x and y, a multiple of 8"});
  add_integer_option(app, "--intermediate", options.shape.intermediate, {1, kNoLimit},
                     {"I", "columns of an expert's activation, a multiple of 8"});
  add_integer_option(app, "--experts", options.shape.experts, {1, kNoLimit}, {"E", "experts of all ranks"});
  add_integer_option(app, "--topk", options.shape.topk, {1, kNoLimit}, {"K", "slots of a token"});
  app.add_option("--routing", options.routing, "experts of every token (default uniform)")
      ->type_name("uniform|zipf:S|one|FILE.npy");
  add_text_option(
      app, "--seed", [&options](const std::string& text) { options.seed = parse_unsigned("--seed", text, 0); }, "N",
      "seed of the synthetic data (default 1)");
  add_integer_option(app, "--workers", options.workers, {0, kMaxWorkers},
                     {"N", "compute units of a rank: threads on cpu, SMs on cuda; 0: the engine's choice"});
  add_word_option(app, "--wgrad", options.numerics.weight_gradient, kWeightGradients,
                  "how weight gradients leave (default bf16)");
  add_integer_option(app, "--combine-groups", options.numerics.combine_groups, {0, kNoLimit},
                     {"G", "0: one flat sum over the slots; G: sums inside G groups of experts first"});
  add_activation_options(app, options.numerics);
  add_schedule_options(app, options);
}

void add_activation_options(CLI::App& app, Numerics& numerics) {
  add_text_option(
      app, "--activation",
      [&numerics](const std::string& text) {
        naming_option("--activation", [&] {
          set_activation(numerics, text);
          return 0;
        });
      },
      "NAME", "swiglu, geglu_tanh, geglu_erf, relu2, silu, or swiglu:alpha=A,limit=L,up_offset=B (default swiglu)");
  add_word_option<RouterWeight>(
      app, "--router-weight", numerics.router_weight,
      {{"activation", RouterWeight::kActivation}, {"output", RouterWeight::kOutput}, {"input", RouterWeight::kInput}},
      "what the router's weight multiplies (default activation)");
  app.add_flag("--bias", numerics.bias, "experts have biases b1 and b2");
}

void add_save_option(CLI::App& app, SaveWay& save) {
  add_word_option<SaveWay>(
      app, "--save", save,
      {{"keep", SaveWay::kKeep},
       {"redispatch", SaveWay::kRedispatch},
       {"rows", SaveWay::kRows},
       {"recompute", SaveWay::kRecompute}},
      "what forward keeps for backward: FC1's output and the dispatched rows; the output; the rows; "
      "neither (default as the schedule says: keep)");
}

void add_devices_option(CLI::App& app, std::vector<int>& devices, const std::string& description) {
  add_text_option(
      app, "--devices",
      [&devices](const std::string& text) {
        devices.clear();
        for (const int64_t device : parse_integers("--devices", text, 0, kMaxDevices - 1)) {
          devices.push_back(static_cast<int>(device));
        }
      },
      "LIST", description);
}

const char* engine_name(EngineKind engine) {
  return engine == EngineKind::kCpu ? "cpu" : engine == EngineKind::kCuda ? "cuda" : "auto";
}

const char* weight_gradient_name(WeightGradient mode) {
  return kWeightGradients.at(static_cast<std::size_t>(mode)).first.c_str();
}

Machine absent_gpu(const LayerOptions& options) {
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = options.ranks;
  machine.workers = options.workers > 0 ? options.workers : kHopperSms;
  return machine;
}

std::vector<int32_t> make_ids(const LayerOptions& options) {
  check_sizes(options);
  const std::vector<int64_t> tokens = options.tokens();
  int64_t slots = 0;
  for (const int64_t own : tokens) {
    int64_t own_slots = 0;
    if (__builtin_mul_overflow(own, options.shape.topk, &own_slots) ||
        __builtin_add_overflow(slots, own_slots, &slots) || slots > std::numeric_limits<int32_t>::max()) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("--tokens: {} on a rank with top-k {} on {} ranks; must be at most {} slots in all", own,
                              options.shape.topk, options.ranks, std::numeric_limits<int32_t>::max()));
    }
  }
  // Ids, probs and the placement's tables.
  require_memory(static_cast<double>(slots) * 32, "routing and placement");
  const int64_t all_tokens = slots / options.shape.topk;
  if (options.routing_is_file()) return read_ids(options, all_tokens);
  const io::RoutingKind kind = naming_option("--routing", [&] { return io::parse_routing_kind(options.routing); });
  std::vector<int32_t> ids(slots);
  constexpr int64_t kTokens = 2048;  // at once
  constexpr double kWork = 200;      // flops that drawing a slot's expert is like
  const auto fill = [&](int64_t part) {
    const int64_t begin = part * kTokens, count = std::min(kTokens, all_tokens - begin);
    io::make_routing(kind, {options.seed, begin, count}, options.shape.experts, options.shape.topk,
                     ids.data() + begin * options.shape.topk);
  };
  reference::parallel_for((all_tokens + kTokens - 1) / kTokens, kWork * static_cast<double>(slots), fill);
  return ids;
}

Placement place_ids(const LayerOptions& options, const std::vector<int32_t>& ids) {
  const std::vector<float> probs(ids.size(), 1.0f);
  std::vector<Routing> routings;
  int64_t first = 0;
  for (const int64_t tokens : options.tokens()) {
    routings.push_back({tokens, ids.data() + first, IndexType::kInt32, probs.data() + first, {}});
    first += tokens * options.shape.topk;
  }
  return Placement(place_on_host(options.shape, options.ranks, routings, {}));
}

}  // namespace uniep::cli
