#include <fmt/format.h>

#include <algorithm>

#include "model/activation_choice.h"
#include "program/schedule_rules.h"

namespace uniep {
namespace {

constexpr int64_t kMaxRanks = 64;

}  // namespace

std::vector<std::string> shape_violations(const ScheduleRequest& request) {
  const LayerShape& shape = request.shape;
  const Numerics& numerics = request.numerics;
  const Machine& machine = request.machine;
  std::vector<std::string> violations;
  const auto require = [&](bool holds, const char* name, int64_t value, const std::string& legal) {
    if (!holds) violations.push_back(fmt::format("{}={}: {}", name, value, legal));
  };
  const auto is_positive_multiple = [](int64_t value, int64_t of) { return value > 0 && value % of == 0; };
  const bool ranks_legal = machine.ranks >= 1 && machine.ranks <= kMaxRanks;
  const int64_t groups = numerics.combine_groups;
  require(is_positive_multiple(shape.hidden, 8), "hidden", shape.hidden, "legal are positive multiples of 8");
  require(is_positive_multiple(shape.intermediate, 8), "intermediate", shape.intermediate,
          "legal are positive multiples of 8");
  require(shape.experts >= 1, "experts", shape.experts, "legal are 1 or more");
  require(shape.topk >= 1 && shape.topk <= std::max<int64_t>(shape.experts, 1), "topk", shape.topk,
          fmt::format("legal are 1 to the number of experts, {}", shape.experts));
  require(ranks_legal, "ranks", machine.ranks, fmt::format("legal are 1 to {}", kMaxRanks));
  require(machine.workers >= 1, "workers", machine.workers, "legal are 1 or more");
  if (ranks_legal && shape.experts >= 1) {
    require(shape.experts % machine.ranks == 0, "experts", shape.experts,
            fmt::format("must be a multiple of the number of ranks, {}", machine.ranks));
  }
  for (std::string& violation : activation_violations(numerics)) violations.push_back(std::move(violation));
  if (numerics.bias && numerics.router_weight == RouterWeight::kInput) {
    violations.emplace_back("bias=1: not with router_weight=input; legal with activation and output");
  }
  const int weight_gradient = static_cast<int>(numerics.weight_gradient);
  require(weight_gradient >= 0 && weight_gradient <= static_cast<int>(WeightGradient::kMainGrad), "weight_gradient",
          weight_gradient, "legal are bf16 (0), fp32 (1) and main_grad (2)");
  require(groups >= 0, "combine_groups", groups, "legal are 0 (one flat sum) or a number of equal expert groups");
  if (groups > 0 && shape.experts >= 1) {
    require(shape.experts % groups == 0, "combine_groups", groups,
            fmt::format("must divide the number of experts, {}", shape.experts));
  }
  if (groups > 0 && ranks_legal) {
    require(groups % machine.ranks == 0, "combine_groups", groups,
            fmt::format("must be a multiple of the number of ranks, {}", machine.ranks));
  }
  return violations;
}

}  // namespace uniep
