#include "tests/cuda/layer_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>

#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/kernels/bias_kernels.h"
#include "engine/cuda/kernels/layer_kernels.h"
#include "model/activation_choice.h"
#include "model/elementwise.h"
#include "model/place.h"
#include "program/build.h"
#include "program/buildable.h"
#include "program/recompute.h"
#include "program/schedule_space.h"
#include "program/wgrad_queues.h"
#include "uniep/error.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::BranchCounts;
using uniep::test::Random;
using uniep::test::random_layer;
using uniep::test::RandomLayer;
using uniep::test::RandomLayerLimits;

// What a random Schedule seldom has: mixed GEMMs, few workers, relays, and waves inside experts. Half of all cases have
// it.
constexpr int kFewWorkers = 12;
struct Seldom {
  const char* fields;
  int fewest_workers, most_workers;  // 0: any number
};
constexpr Seldom kSeldom[] = {
    {"fusion=layer,order.interleave=mixed,queue=dynamic", 4, 0},
    {"fusion=layer,order.interleave=mixed,queue=dynamic,comm.reserve_sms=0,comm.where=warps", 2, kFewWorkers},
    {"fusion=layer,order.interleave=mixed,queue=static,comm.reserve_sms=0", 4, 0},
    {"comm.where=sms,comm.dispatch_sms=2,comm.reserve_sms=0", 8, 0},
    {"comm.where=sms,dispatch.transport=push,comm.dispatch_sms=2,comm.relay_sms=2,comm.reserve_sms=0", 8, 0},
    {"fusion=layer,order.experts_per_wave=1,order.blocks_per_wave=1,comm.reserve_sms=0", 4, 0},
    {"fusion=layer,order.interleave=mixed,queue=dynamic,order.experts_per_wave=1,order.blocks_per_wave=2,"
     "order.second_share=5,comm.reserve_sms=0",
     8, 0}};

const Seldom* seldom_of(uint64_t seed, const CaseOptions& options) {
  if (seed % 2 != 0 || !options.fixed.empty()) return nullptr;
  return &kSeldom[seed / 2 % std::size(kSeldom)];
}

// Even, so that they come in pairs; of few workers often one pair.
int random_workers(const CaseOptions& options, int ranks, const Seldom* seldom, Random& random) {
  const int ranks_of_device = (ranks + options.devices - 1) / options.devices;
  const int all = options.processors / ranks_of_device / 2 * 2;
  const int fewest = seldom != nullptr ? seldom->fewest_workers : 2;
  if (seldom != nullptr && seldom->most_workers > 0) {
    return random.one_in(2) ? fewest : static_cast<int>(2 * random.between(fewest / 2, seldom->most_workers / 2));
  }
  return random.one_in(2) ? all : static_cast<int>(2 * random.between(fewest / 2, all / 2));
}

// By need, or room for whatever the routing is, so that the host learns no counts.
Capacity random_capacity(const RandomLayer& layer, int ranks, Random& random) {
  if (random.one_in(2)) return {};
  const LayerShape& shape = layer.data.shape;
  const bool on_one_rank = ranks != layer.ranks;
  const int64_t most_tokens =
      on_one_rank ? layer.data.all_tokens() : *std::max_element(layer.data.tokens.begin(), layer.data.tokens.end());
  return {.rows = round_up(layer.data.all_tokens() * shape.topk, kRowAlignment) + shape.experts / ranks * kRowAlignment,
          .tokens = std::max<int64_t>(most_tokens, 1)};
}

PartialSchedule fixed_fields(const CaseOptions& options, uniep::Launch launch, const Seldom* seldom, Random& random) {
  const std::string given = seldom != nullptr ? seldom->fields : options.fixed;
  PartialSchedule fixed = given.empty() ? PartialSchedule() : PartialSchedule::parse(given);
  const auto set = [&](const char* name, const std::string& value) {
    if (!fixed.given(name)) fixed.set(name, value);
  };
  if (launch == uniep::Launch::kProcesses) set("dispatch.transport", "pull");
  if (options.any_kernel && seldom != nullptr && random.one_in(2)) set("tile.cluster", "2");
  if (options.any_kernel) return fixed;
  const std::string& tile = options.tiles[random.next() % options.tiles.size()];
  const std::size_t colon = tile.find(':');
  set("tile.n", tile.substr(0, colon));
  set("tile.stages", "4");
  set("tile.cluster", tile.substr(colon + 1));
  set("comm.chunk_bytes", "4096");
  set("comm.stages", "3");
  return fixed;
}

// A random legal Schedule: the engine has kernels for each.
Schedule random_schedule(const CaseOptions& options, const LayerConfig& config, const LayerCase& layer_case,
                         const Seldom* seldom, Random& random) {
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = layer_case.ranks;
  machine.workers = layer_case.workers;
  return sample_legal(
      random.next(),
      {.direction = Direction::kForward, .shape = config.shape, .numerics = config.numerics, .machine = machine},
      fixed_fields(options, layer_case.launch, seldom, random));
}

// Any Schedule's.
int workers_of_part(const CaseOptions& options, int part, int ranks) {
  constexpr int kMin = 8;
  Random random(static_cast<uint64_t>(part * 64 + ranks));
  return std::max(kMin, random_workers(options, ranks, nullptr, random));
}

// Where the router's weight multiplies biases there is no one kernel for all of backward.
bool has_one_kernel(const Numerics& numerics) {
  return !numerics.bias || numerics.router_weight != RouterWeight::kOutput;
}

// Which of them exist: one launch a stage, pairs of them, or one in all, and rows that their owner fetches. Of what is
// compiled into kernels there are few values, unless the options want any.
// What a random schedule seldom has.
constexpr const char* kMixedWgrads = "queue=dynamic,order.interleave=phased,backward.wgrad=mixed";

PartialSchedule backward_fields(const CaseOptions& options, const LayerConfig& config, const Machine& machine,
                                const LayerCase& layer_case, Random& random) {
  PartialSchedule fixed =
      options.fixed_backward.empty() ? PartialSchedule() : PartialSchedule::parse(options.fixed_backward);
  const auto set = [&](const std::string& name, const std::string& value) {
    if (!fixed.given(name)) fixed.set(name, value);
  };
  const bool none = random.one_in(4), layer = random.one_in(2) && has_one_kernel(config.numerics);
  set("fusion", none ? "none" : layer ? "layer" : "pairs");
  set("dispatch.transport", "pull");
  const bool kept = layer_case.schedule.save_xg == SaveXg::kKeep;
  set("save.xg", random.one_in(3) || !kept ? "redispatch" : "keep");
  const bool kept_z = layer_case.schedule.save_z == SaveZ::kKeep;
  set("save.z", random.one_in(4) || !kept_z ? "recompute" : "keep");
  constexpr int kEnoughToCopy = 8;
  if (random.one_in(4) && layer_case.workers >= kEnoughToCopy) set("comm.where", "sms");
  const auto& given = fixed.values();
  const bool layer_given =
      std::find(given.begin(), given.end(), std::pair<std::string, std::string>("fusion", "layer")) != given.end();
  const bool may_mix =
      layer_given && !fixed.given("backward.wgrad") && !fixed.given("queue") && !fixed.given("order.interleave");
  if (may_mix && random.one_in(3)) {
    for (const auto& [name, value] : PartialSchedule::parse(kMixedWgrads).values()) set(name, value);
  }
  if (options.any_kernel && random.one_in(2)) set("tile.cluster", "2");
  if (options.any_kernel) return fixed;
  const Schedule filled =
      fill(fixed,
           {.direction = Direction::kBackward, .shape = config.shape, .numerics = config.numerics, .machine = machine});
  const PartialSchedule whole = PartialSchedule::from(filled);
  for (const auto& [name, value] : whole.values()) {
    if (name.starts_with("tile.") || name == "comm.chunk_bytes" || name == "comm.stages") set(name, value);
  }
  return fixed;
}

// Whether a layer's routing may be given as a map.
bool has_slots_of_a_map(uint64_t seed) {
  return seed % 3 == 1;
}

// With a stream of random numbers of its own, so that forward passes are the same with and without.
void draw_backward(const CaseOptions& options, const RandomLayer& layer, uint64_t seed, LayerCase& drawn) {
  constexpr uint64_t kStream = 0x6261636b77617264;
  Random random(Random(seed ^ kStream).next() + static_cast<uint64_t>(drawn.ranks));
  drawn.by_address = random.one_in(2);
  drawn.backward_twice = random.one_in(8);
  Random of_forms(random.next());
  drawn.apart = of_forms.one_in(2) && is_gated(layer.config.numerics.activation);
  drawn.dense = has_slots_of_a_map(seed) && !of_forms.one_in(4);
  drawn.later = of_forms.one_in(4);
  if (!options.backward) return;
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = drawn.ranks;
  machine.workers = drawn.workers;
  const LayerConfig& config = layer.config;
  const PartialSchedule fixed = backward_fields(options, config, machine, drawn, random);
  drawn.backward = sample_legal(
      random.next(),
      {.direction = Direction::kBackward, .shape = config.shape, .numerics = config.numerics, .machine = machine},
      fixed);
  // Not built where a warp would store rows of both.
  if (drawn.backward->wgrad != WgradOrder::kAfter && config.shape.intermediate % 16 != 0) drawn.apart = false;
}

// Columns of dy that are zero or so small that sums of them are subnormal: what main_grad holds, and bf16, must keep
// it.
void make_small_gradients(cli::LayerData& data) {
  constexpr float kSmall = 0x1p-127f;
  const auto hidden = static_cast<std::size_t>(data.shape.hidden);
  for (std::size_t i = 0; i < data.dy.size(); i += hidden) {
    data.dy[i] = BFloat16{0};
    data.dy[i + 1] = to_bfloat16(mul(to_float(data.dy[i + 1]), kSmall));
  }
}

LayerCase random_case(const CaseOptions& options, const RandomLayer& layer, int ranks, uint64_t seed) {
  Random random(Random(seed).next() + static_cast<uint64_t>(ranks));  // a stream of each seed and number of ranks
  LayerCase drawn;
  drawn.ranks = ranks;
  if (options.random_launch && ranks <= options.devices && random.one_in(2)) drawn.launch = uniep::Launch::kProcesses;
  drawn.part = part_of(seed);
  const Seldom* const seldom = seldom_of(seed, options);
  if (drawn.launch == uniep::Launch::kProcesses) {
    drawn.workers = workers_of_part(options, drawn.part, ranks);
  } else {
    drawn.workers = random_workers(options, ranks, seldom, random);
  }
  drawn.capacity = random_capacity(layer, ranks, random);
  drawn.schedule = random_schedule(options, layer.config, drawn, seldom, random);
  draw_backward(options, layer, seed, drawn);
  return drawn;
}

Program program_of(const cli::LayerData& data, const Numerics& numerics, const LayerCase& layer_case,
                   Direction direction) {
  std::vector<Routing> routings;
  for (int rank = 0; rank < layer_case.ranks; ++rank) {
    const int64_t slot = data.first_token(rank) * data.shape.topk;
    routings.push_back({data.tokens[static_cast<std::size_t>(rank)],
                        data.ids.data() + slot,
                        IndexType::kInt32,
                        data.probs.data() + slot,
                        {}});
  }
  const bool backward = direction == Direction::kBackward;
  ProgramRequest request;
  request.shape = data.shape;
  request.numerics = numerics;
  request.schedule = backward ? *layer_case.backward : layer_case.schedule;
  request.direction = direction;
  request.redispatch = backward && dispatches_x_again(request.schedule, true);
  request.workers = layer_case.workers;
  request.cluster = cluster_of(request.schedule, direction);
  request.pull_parts = pull_parts(data.shape);
  return {request, place_on_host(data.shape, layer_case.ranks, routings, {})};
}

// How the ranks run.
void count_launch(BranchCounts& branches, const LayerCase& layer_case, const CaseOptions& options) {
  const bool one = layer_case.launch == uniep::Launch::kThreads;
  const bool within = layer_case.capacity.rows > 0;
  const bool several = std::min(layer_case.ranks, options.devices) > 1;
  branches.count("placed by need", !within);
  branches.count("placed within a capacity", within);
  branches.count("tensors of all experts", !layer_case.by_address);
  branches.count("a tensor an expert", layer_case.by_address);
  branches.count("gate and up apart, one tensor", layer_case.apart && !layer_case.by_address);
  branches.count("gate and up apart, a tensor an expert", layer_case.apart && layer_case.by_address);
  branches.count("dense routing, by need", layer_case.dense && !within);
  branches.count("dense routing, within a capacity", layer_case.dense && within);
  constexpr int kMaxRanks = 8;
  if (options.devices < kMaxRanks)
    branches.count("one process, virtual ranks", one && layer_case.ranks > options.devices);
  if (options.devices > 1) branches.count("one process, several GPUs", one && several);
  if (options.random_launch) branches.count("processes", !one);
  if (options.random_launch) branches.count("processes, within a capacity", !one && within);
  if (options.random_launch && options.devices > 1) branches.count("several processes", !one && several);
}

void count_forward(BranchCounts& branches, const Program& program, const CaseOptions& options) {
  uniep::test::count_schedule(branches, program);
  const bool clusters = program.request().cluster == 2;
  const bool chooses = options.any_kernel || options.tiles.size() > 1;
  if (chooses) branches.count("no clusters", !clusters);
  if (chooses) branches.count("no clusters, dynamic queues", !clusters && program.rank(0).dynamic);
  if (!chooses) return;
  branches.count("mixed GEMMs, dynamic queues, no clusters", !clusters && has_gemm_queues(program.rank(0), 0));
}

// All of backward in one kernel.
void count_backward_layer(BranchCounts& branches, const Program& program, const LayerCase& layer_case) {
  const RankProgram& p = program.rank(0);
  const bool layer = program.request().schedule.fusion == Fusion::kLayer;
  const bool fill = program.request().schedule.wgrad != WgradOrder::kAfter;
  const int walkers = p.workers / p.cluster;
  const auto any_rank = [&](auto&& holds) {
    for (int rank = 0; rank < program.ranks(); ++rank) {
      if (holds(program.rank(rank))) return true;
    }
    return false;
  };
  const auto first_tickets = [](const RankProgram& of) {
    return int64_t{local_blocks(of)} * of.first_tiles / of.cluster;
  };
  branches.count("one launch, wgrad fills", layer && fill);
  branches.count("one launch, wgrad fills, redispatch", layer && fill && p.operands == 2);
  branches.count("one launch, wgrad after", layer && !fill);
  const bool mixed = program.request().schedule.wgrad == WgradOrder::kMixed && has_wgrad_queues(p, 0);
  branches.count("one launch, wgrad mixed", mixed);
  branches.count("one launch, wgrad mixed, weight gradients beside dgrads", any_rank([&](const RankProgram& of) {
                   return mixed && wgrad_queues(of, 0).takers > 0 && local_blocks(of) > 0;
                 }));
  branches.count("one launch, weight gradients later", layer && layer_case.later);
  branches.count("one launch, dynamic queues", layer && p.dynamic);
  branches.count("one launch, static queues", layer && !p.dynamic);
  branches.count("one launch, copy sms", layer && p.on_sms);
  branches.count("one launch, combine by the epilogue", layer && p.epilogue_combine);
  branches.count("one launch, combine staged", layer && !p.epilogue_combine && p.combine_groups == 0);
  branches.count("one launch, combine by groups", layer && p.combine_groups > 0);
  branches.count("one launch, column chunks", layer && p.chunks > 1);
  branches.count("one launch, a walker without tiles of dgrad FC2",
                 layer && any_rank([&](const RankProgram& of) { return first_tickets(of) < walkers; }));
  branches.count("one launch, walkers with several tiles of dgrad FC2",
                 layer && any_rank([&](const RankProgram& of) { return first_tickets(of) > 2 * walkers; }));
  branches.count("one launch, several ranks", layer && program.ranks() > 1);
}

void count_backward(BranchCounts& branches, const Program& program, const LayerCase& layer_case) {
  uniep::test::count_schedule(branches, program);
  const internal::PlacementState& placement = program.placement();
  const auto any_expert = [&](auto&& holds) {
    return std::any_of(placement.expert_rows.begin(), placement.expert_rows.end(), holds);
  };
  const bool empty = any_expert([](int32_t rows) { return rows == 0; });
  const bool pairs = program.request().schedule.fusion == Fusion::kPairs;
  const bool fill = program.request().schedule.wgrad != WgradOrder::kAfter;
  branches.count("xg of a forward that kept it", !program.request().redispatch);
  branches.count("redispatch after a forward that kept xg",
                 program.request().redispatch && layer_case.schedule.save_xg == SaveXg::kKeep);
  branches.count("redispatch after a forward that did not",
                 program.request().redispatch && layer_case.schedule.save_xg == SaveXg::kRedispatch);
  const Schedule& schedule = program.request().schedule;
  const bool recomputes = schedule.save_z == SaveZ::kRecompute;
  branches.count("FC1 again on rows that were kept", recomputes && schedule.save_xg == SaveXg::kKeep);
  branches.count("FC1 again beside its dispatch", recomputes && schedule.save_xg == SaveXg::kRedispatch);
  branches.count("FC1 again after a forward that kept z", recomputes && layer_case.schedule.save_z == SaveZ::kKeep);
  branches.count("backward twice", layer_case.backward_twice);
  branches.count("pairs, wgrad after", pairs && !fill);
  count_backward_layer(branches, program, layer_case);
  const int64_t intermediate = program.request().shape.intermediate;
  branches.count("apart, wgrad fills", layer_case.apart && fill);
  branches.count("apart, wgrad after", layer_case.apart && !fill);
  branches.count("apart, a K block of gate and up rows", layer_case.apart && intermediate % 64 != 0);
  branches.count("apart, K in steps of 16 of gate and up rows", layer_case.apart && intermediate % 16 != 0);
  branches.count("an expert with one row", any_expert([](int32_t rows) { return rows == 1; }));
  branches.count("an expert with several blocks of rows",
                 any_expert([](int32_t rows) { return rows > kRowAlignment; }));
  branches.count("an expert with 600 rows and more", any_expert([](int32_t rows) { return rows >= 600; }));
  constexpr const char* kEmpty[] = {"dW in bf16 of an expert without rows", "dW in fp32 of an expert without rows",
                                    "dW in main_grad of an expert without rows"};
  constexpr const char* kFill[] = {"wgrad fills in bf16", "wgrad fills in fp32", "wgrad fills in main_grad"};
  for (std::size_t mode = 0; mode < std::size(kFill); ++mode) {
    const bool holds = program.request().numerics.weight_gradient == static_cast<WeightGradient>(mode);
    branches.count(kEmpty[mode], holds && empty);
    branches.count(kFill[mode], holds && fill);
  }
}

bool names_any(const std::string& branch, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&branch](const char* word) { return branch.find(word) != std::string::npos; });
}

}  // namespace

const std::vector<std::string> kActivations = {"swiglu",
                                               "swiglu:alpha=1.702,limit=1,up_offset=1",
                                               "geglu_tanh",
                                               "geglu_erf",
                                               "relu2",
                                               "silu",
                                               "swiglu:gate_limit=0.75"};

std::vector<ActivationForm> activation_forms() {
  std::vector<ActivationForm> forms;
  for (const std::string& activation : kActivations) {
    forms.push_back({activation});
    forms.push_back({activation, RouterWeight::kOutput, true});
    forms.push_back({activation, RouterWeight::kInput});
  }
  return forms;
}

std::string to_text(const ActivationForm& form) {
  return fmt::format("{}, weight on {}{}", form.activation, router_weight_text(form.router_weight),
                     form.bias ? ", biases" : "");
}

void set_form(RandomLayer& layer, const ActivationForm& form) {
  Numerics& numerics = layer.config.numerics;
  set_activation(numerics, form.activation);
  numerics.router_weight = form.router_weight;
  numerics.bias = form.bias;
  const auto& shape = layer.config.shape;
  layer.data.halves = is_gated(numerics.activation) ? 2 : 1;
  layer.data.w1.resize(static_cast<std::size_t>(shape.experts * z_columns(shape, numerics) * shape.hidden));
  if (form.bias) uniep::test::draw_biases(layer);
}

LayerCases draw_cases(uint64_t seed, const RandomLayerLimits& limits, const CaseOptions& options) {
  LayerCases drawn{random_layer(seed, limits), {}};
  if (seed % 3 == 0) make_small_gradients(drawn.layer.data);
  if (has_slots_of_a_map(seed)) drawn.layer.data = uniep::test::with_ascending_slots(drawn.layer.data);
  if (drawn.layer.config.numerics.combine_groups > kMaxGroups) return drawn;
  drawn.cases.push_back(random_case(options, drawn.layer, drawn.layer.ranks, seed));
  if (drawn.layer.ranks > 1) drawn.cases.push_back(random_case(options, drawn.layer, 1, seed));
  return drawn;
}

void count_branches(Branches& branches, const RandomLayer& layer, const LayerCase& layer_case,
                    const CaseOptions& options) {
  const cli::LayerData data = layer_case.ranks == layer.ranks ? layer.data : uniep::test::on_one_rank(layer.data);
  if (options.forward) {
    count_forward(branches.forward, program_of(data, layer.config.numerics, layer_case, Direction::kForward), options);
    uniep::test::count_layer(branches.forward, layer);
    count_launch(branches.forward, layer_case, options);
  }
  if (!layer_case.backward) return;
  const Program program = program_of(data, layer.config.numerics, layer_case, Direction::kBackward);
  count_backward(branches.backward, program, layer_case);
  uniep::test::count_layer(branches.backward, layer);
  count_launch(branches.backward, layer_case, options);
}

std::vector<std::string> untaken_branches(const Branches& branches) {
  std::vector<std::string> untaken;
  for (const std::string& branch : branches.forward.never_taken()) {
    if (!names_any(branch, {"backward", "redispatch", "wgrad"})) untaken.push_back("forward: " + branch);
  }
  // Rows that are pushed and mixed GEMMs are not built, and a launch of both GEMMs has one wave.
  for (const std::string& branch : branches.backward.never_taken()) {
    if (branch == "forward" || names_any(branch, {"push", "mixed GEMMs", "inside an expert"})) continue;
    untaken.push_back("backward: " + branch);
  }
  return untaken;
}

std::string to_text(const LayerCase& layer_case) {
  std::string text = fmt::format(
      "{} workers {} {} {}", layer_case.launch == uniep::Launch::kProcesses ? "processes" : "threads",
      layer_case.workers, layer_case.by_address ? "addresses" : "tensors", uniep::to_text(layer_case.schedule));
  if (layer_case.backward) text += " | backward " + uniep::to_text(*layer_case.backward);
  if (layer_case.later) text += " | weight gradients later";
  return text;
}

float case_main_grad(uint64_t index) {
  const uint64_t bits = Random(index).next();
  const auto low = static_cast<uint32_t>(bits >> 8);
  constexpr uint32_t kSign = 0x80000000u, kFraction = 0x007fffffu;
  switch (bits % 4) {
    case 0:
      return -0.0f;
    case 1:
      return float_from_bits(low & (kSign | kFraction));
    case 2:
      return static_cast<float>(static_cast<int32_t>(low)) * 0x1p-31f;
    default:
      return static_cast<float>(static_cast<int32_t>(low)) * 0x1p-20f;
  }
}

std::vector<KernelRequest> kernels_of(const LayerCase& layer_case, const LayerConfig& config) {
  std::vector<KernelRequest> requests;
  const auto add_weight_gradients = [&](const Schedule& schedule) {
    for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
      requests.push_back(gemm_request(weight_gradient_kernel(
          schedule, config.numerics,
          {stage, config.shape.experts / layer_case.ranks, layer_case.by_address, layer_case.workers})));
    }
  };
  const auto add = [&](const Schedule& schedule, Direction direction) {
    for (const LaunchStages& stages : launch_stages(schedule, direction, !layer_case.later)) {
      if (!is_weight_gradients_alone(stages)) {
        requests.push_back(layer_request(launch_config(schedule, config.numerics, direction, stages)));
        continue;
      }
      add_weight_gradients(schedule);
    }
    if (direction == Direction::kBackward && layer_case.later) add_weight_gradients(schedule);
  };
  add(layer_case.schedule, Direction::kForward);
  if (layer_case.backward) add(*layer_case.backward, Direction::kBackward);
  if (layer_case.backward) {
    for (const LayerKernelConfig& kernel :
         recompute_kernels(config, *layer_case.backward, layer_case.ranks, layer_case.workers)) {
      requests.push_back(layer_request(kernel));
    }
  }
  if (layer_case.backward && config.numerics.bias) requests.push_back(bias_gradients_request());
  return requests;
}

uint64_t reference_seed(const ActivationForm& form, uint64_t first) {
  return form.router_weight == RouterWeight::kActivation ? first : 1;
}

RandomLayer layer_for_reference(uint64_t seed, const ActivationForm& form) {
  RandomLayerLimits limits;
  limits.most_tokens = 200;
  limits.most_columns = 520;
  RandomLayer layer = random_layer(seed, limits);
  while (layer.config.numerics.combine_groups > kMaxGroups || layer.data.dy.empty()) {
    layer = random_layer(++seed, limits);
  }
  set_form(layer, form);
  return layer;
}

LayerCase reference_case(const RandomLayer& layer, const CaseOptions& options) {
  LayerCase found;
  found.ranks = layer.ranks;
  found.workers = options.processors / layer.ranks / 2 * 2;
  const Machine machine{.engine = EngineKind::kCuda, .ranks = found.ranks, .workers = found.workers};
  const auto whole = [&](const char* given, Direction direction) {
    return resolve(
        PartialSchedule::parse(given),
        {.direction = direction, .shape = layer.config.shape, .numerics = layer.config.numerics, .machine = machine});
  };
  found.schedule = whole("", Direction::kForward);
  if (options.backward) found.backward = whole("fusion=pairs", Direction::kBackward);
  return found;
}

}  // namespace uniep::cuda::test
