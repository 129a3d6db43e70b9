#include "support/measured_layers.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/calibration_model.h"
#include "cli/layer_options.h"
#include "io/file.h"
#include "support/random_layer.h"

namespace uniep::test {
namespace {

// The routing of bench/remote_routing.py: of a token's slots seven in eight go to other ranks.
std::vector<int32_t> remote_ids(const LayerShape& shape, int ranks, int64_t tokens) {
  const int64_t local = shape.experts / ranks, topk = shape.topk;
  const int64_t remote = std::min<int64_t>(std::llround(static_cast<double>(topk) * 7 / 8), shape.experts - local);
  Random random(1);
  std::vector<int32_t> ids, own(local), other(shape.experts - local);
  ids.reserve(ranks * tokens * topk);
  const auto draw = [&](std::vector<int32_t>& from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      std::swap(from[i], from[random.between(i, static_cast<int64_t>(from.size()) - 1)]);
      ids.push_back(from[i]);
    }
  };
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::iota(own.begin(), own.end(), static_cast<int32_t>(rank * local));
    std::iota(other.begin(), other.begin() + rank * local, 0);
    std::iota(other.begin() + rank * local, other.end(), static_cast<int32_t>((rank + 1) * local));
    for (int64_t token = 0; token < tokens; ++token) {
      draw(own, topk - remote);
      draw(other, remote);
    }
  }
  return ids;
}

}  // namespace

std::vector<MeasuredLayer> read_measured_layers(const std::string& path) {
  const nlohmann::json file = nlohmann::json::parse(io::read_text_file(path));
  std::vector<MeasuredLayer> layers;
  for (const nlohmann::json& point : file.at("points")) {
    MeasuredLayer layer;
    layer.session = point.at("session");
    layer.cell = point.at("kind") == "cell";
    layer.machine = point.at("machine");
    layer.schedule = point.at("schedule");
    layer.routing = point.at("routing");
    layer.wgrad = point.at("wgrad");
    const std::vector<int64_t> shape = point.at("shape");
    layer.shape = {shape.at(0), shape.at(1), shape.at(2), shape.at(3)};
    layer.ranks = point.at("ranks");
    layer.tokens = point.at("tokens");
    layer.direction = point.at("direction") == "forward" ? Direction::kForward : Direction::kBackward;
    layer.ascending_sums = point.at("sums") == "ascending";
    layer.state = point.at("state") == "paused" ? sim::State::kPaused : sim::State::kSustained;
    layer.ms = point.at("ms");
    layer.held_out = point.at("held_out");
    layers.push_back(std::move(layer));
  }
  return layers;
}

program::Program LayerPredictor::program_of(const MeasuredLayer& layer, const sim::MachineDescription& machine) {
  cli::LayerOptions options;
  options.shape = layer.shape;
  options.ranks = layer.ranks;
  options.tokens_given = {layer.tokens};
  if (layer.wgrad == "main_grad") options.numerics.weight_gradient = WeightGradient::kMainGrad;
  std::shared_ptr<const internal::PlacementState>& placement = placements_[{
      layer.shape.experts, layer.shape.topk, layer.ranks, layer.tokens,
      layer.routing + std::to_string(layer.shape.hidden * 65536 + layer.shape.intermediate), layer.ascending_sums}];
  if (!placement) {
    const bool remote = layer.routing == "seven_eighths_remote" && layer.ranks > 1;
    const Placement made =
        cli::place_ids(options, remote ? remote_ids(layer.shape, layer.ranks, layer.tokens) : cli::make_ids(options));
    auto state = std::make_shared<internal::PlacementState>(*made.state());
    for (internal::RankPlacement& rank : state->rank) {
      if (layer.ascending_sums) std::iota(rank.token_order.begin(), rank.token_order.end(), 0);
    }
    placement = state;
  }
  const Schedule schedule =
      resolve(PartialSchedule::parse(layer.schedule), {.direction = layer.direction,
                                                       .shape = layer.shape,
                                                       .numerics = options.numerics,
                                                       .machine = sim::schedule_machine(machine, layer.ranks)});
  return {sim::simulated_request(layer.shape, options.numerics, schedule, layer.direction, machine), placement};
}

PredictedLayer LayerPredictor::predict(const MeasuredLayer& layer, const sim::MachineDescription& machine,
                                       double near_ghz) {
  const program::Program program = program_of(layer, machine);
  const sim::Simulated simulated =
      simulate(program, machine, {.state = layer.state, .near_ghz = near_ghz, .one_rank = true});
  return {simulated.ms, simulated.limits.gemm_ms, simulated.limits.links_ms, simulated.clock_ghz};
}

void LayerPredictor::add_to(tune::FitRequest& request, const std::vector<MeasuredLayer>& layers) {
  // A fit predicts each layer hundreds of times, on machines of as many workers and ranks as the base.
  struct Kept {
    Kept(LayerPredictor& of, const MeasuredLayer& layer, const sim::MachineDescription& base)
        : program(of.program_of(layer, base)), state(layer.state) {}
    sim::Simulated simulated(const sim::MachineDescription& machine, double near_ghz) const {
      return simulate(costs, machine, {.state = state, .near_ghz = near_ghz, .one_rank = true});
    }
    const program::Program program;
    const sim::State state;
    const sim::ProgramCosts costs{program, true};
    double ghz = 0;  // on the base
  };
  const sim::MachineDescription& base = *request.base;
  std::vector<std::shared_ptr<Kept>> kept;
  for (const MeasuredLayer& layer : layers) {
    kept.push_back(std::make_shared<Kept>(*this, layer, base));
    kept.back()->ghz = kept.back()->simulated(base, 0).clock_ghz;
  }
  request.predict = [kept, &base](std::size_t i, const sim::MachineDescription& machine) {
    return kept[i]->simulated(machine, kept[i]->ghz * sim::clock_scale(machine, base, kept[i]->state)).ms;
  };
  request.follows = [kept, &base](std::size_t i, std::string_view key) {
    return cli::follows_constant(kept[i]->program, kept[i]->state, base, key);
  };
}

double PredictionErrors::mean(const std::vector<double>& errors) {
  double sum = 0;
  for (const double error : errors) sum += std::abs(error);
  return errors.empty() ? 0 : sum / static_cast<double>(errors.size());
}

double PredictionErrors::quantile(std::vector<double> errors, double share) {
  if (errors.empty()) return 0;
  for (double& error : errors) error = std::abs(error);
  std::sort(errors.begin(), errors.end());
  return errors[std::min(errors.size() - 1, static_cast<std::size_t>(share * static_cast<double>(errors.size())))];
}

PredictionErrors prediction_errors(const std::vector<MeasuredLayer>& layers, const std::vector<double>& predicted,
                                   bool held_out) {
  std::map<std::string, std::vector<std::size_t>> sessions;
  for (std::size_t i = 0; i < layers.size(); ++i) sessions[layers[i].session].push_back(i);
  PredictionErrors errors;
  for (const auto& [session, members] : sessions) {
    // A session's clock is that of its layers that are not held out, where it has some.
    double logarithms = 0;
    int64_t count = 0;
    for (const bool any : {false, true}) {
      if (count > 0) break;
      for (const std::size_t i : members) {
        if (layers[i].cell ? i != members.front() : (layers[i].held_out && !any)) continue;
        logarithms += std::log(layers[i].ms / predicted[i]);
        ++count;
      }
    }
    const double scale = std::exp(logarithms / static_cast<double>(count));
    for (const std::size_t i : members) {
      if (layers[i].held_out != held_out) continue;
      errors.absolute.push_back(predicted[i] / layers[i].ms - 1);
      if (layers[i].cell && i == members.front()) continue;
      errors.ratio.push_back(predicted[i] * scale / layers[i].ms - 1);
    }
  }
  return errors;
}

}  // namespace uniep::test
