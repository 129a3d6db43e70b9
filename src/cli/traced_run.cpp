#include "cli/traced_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "cli/options.h"
#include "cli/shapes.h"
#include "io/quote.h"
#include "io/synthetic.h"

namespace uniep::cli {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 17, kMaxExperts = int64_t{1} << 12, kMostTracedTokens = int64_t{1} << 16;
constexpr int64_t kMaxSlots = int64_t{1} << 22;  // of all ranks
constexpr int kMostTracedRanks = 64, kMaxUnits = 4096;

constexpr const char* kNeeded[] = {"engine", "device",         "gpus", "compute_units", "workers",
                                   "tokens", "routing",        "seed", "activation",    "router_weight",
                                   "bias",   "combine_groups", "wgrad"};

// One of a few words; its place among them.
std::size_t word(const char* key, const std::string& text, const std::vector<std::string>& words) {
  const auto at = std::find(words.begin(), words.end(), text);
  if (at == words.end()) refuse_value(key, text, fmt::format("{}", fmt::join(words, ", ")));
  return static_cast<std::size_t>(at - words.begin());
}

LayerShape shape_of(const std::string& text) {
  const LayerShape shape = parse_shape("shape", text);
  if (std::max(shape.hidden, shape.intermediate) > kMaxSize || std::max(shape.experts, shape.topk) > kMaxExperts) {
    refuse_value("shape", text, fmt::format("at most {0},{0},{1},{1}", kMaxSize, kMaxExperts));
  }
  return shape;
}

// Kinds can be made again.
std::string routing_of(const std::string& text) {
  if (text == kRoutingFromFile) {
    throw Error(Status::kInvalidArgument,
                "routing: from a file, which a timeline does not hold; must be uniform, zipf:S or one");
  }
  return io::to_string(naming_option("routing", [&] { return io::parse_routing_kind(text); }));
}

void require_known(const TraceMark& mark) {
  std::vector<std::string> missing;
  if (mark.shape.empty()) missing.emplace_back("shape");
  if (mark.schedule.empty()) missing.emplace_back("schedule");
  for (const char* key : kNeeded) {
    if (mark.more.count(key) == 0) missing.emplace_back(key);
  }
  if (missing.empty()) return;
  throw Error(Status::kInvalidArgument, fmt::format("does not say {}; must be a timeline of `uniep run` or `uniep "
                                                    "bench` of this version",
                                                    fmt::join(missing, ", ")));
}

void require_slots(const LayerOptions& layer, const std::string& tokens) {
  int64_t all = 0;
  for (const int64_t own : layer.tokens_given) all += own;
  if (layer.tokens_given.size() <= kMostTracedRanks && all <= kMaxSlots / layer.shape.topk) return;
  refuse_value("tokens", tokens,
               fmt::format("of at most {} ranks, with at most {} slots in all", kMostTracedRanks, kMaxSlots));
}

}  // namespace

TracedRun traced_run(const TraceMark& mark) {
  TracedRun run;
  run.direction = word("call", mark.name, {"forward", "backward"}) == 0 ? Direction::kForward : Direction::kBackward;
  const auto engine = mark.more.find("engine");
  if (engine != mark.more.end() && word("engine", engine->second, {"cpu", "cuda", "simulator"}) == 0) {
    refuse_value("engine", "cpu", "cuda or simulator: a GPU's timeline");
  }
  require_known(mark);
  const auto& said = mark.more;
  const auto number = [&](const char* key, int64_t least, int64_t most) {
    return parse_integer(key, said.at(key), least, most);
  };
  run.machine.engine = said.at("engine");
  run.machine.device = said.at("device");
  run.machine.compute_units = static_cast<int>(number("compute_units", 1, kMaxUnits));
  run.machine.gpus = static_cast<int>(number("gpus", 1, kMostTracedRanks));
  run.machine.workers = static_cast<int>(number("workers", 1, run.machine.compute_units));

  LayerOptions& layer = run.layer;
  layer.engine = EngineKind::kCuda;
  layer.shape = shape_of(mark.shape);
  layer.tokens_given = parse_integers("tokens", said.at("tokens"), 0, kMostTracedTokens);
  layer.ranks = static_cast<int>(std::min<std::size_t>(layer.tokens_given.size(), kMostTracedRanks + 1));
  layer.workers = run.machine.workers;
  if (layer.ranks > kMostTracedRanks)
    refuse_value("tokens", said.at("tokens"), fmt::format("of at most {} ranks", kMostTracedRanks));
  require_slots(layer, said.at("tokens"));
  if (run.machine.gpus != layer.ranks) {
    refuse_value("gpus", said.at("gpus"), fmt::format("{}, one for each rank", layer.ranks));
  }
  layer.routing = routing_of(said.at("routing"));
  layer.seed = parse_unsigned("seed", said.at("seed"), 0);
  Numerics& numerics = layer.numerics;
  naming_option("activation", [&] { set_activation(numerics, said.at("activation")); });
  numerics.router_weight = naming_option("router_weight", [&] { return router_weight_from(said.at("router_weight")); });
  numerics.bias = word("bias", said.at("bias"), {"no", "yes"}) == 1;
  numerics.combine_groups = number("combine_groups", 0, kMaxExperts);
  numerics.weight_gradient =
      static_cast<WeightGradient>(word("wgrad", said.at("wgrad"), {"bf16", "fp32", "main_grad"}));
  layer.schedule = naming_option("schedule", [&] { return PartialSchedule::parse(mark.schedule); });
  const auto state = said.find("state");
  if (state != said.end()) {
    run.state = word("state", state->second, {kSustained, kPaused}) == 1 ? sim::State::kPaused : sim::State::kSustained;
  }
  return run;
}

}  // namespace uniep::cli
