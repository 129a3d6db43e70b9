#include "tests/cuda/backward_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "program/build.h"

namespace uniep::cuda::test {

using uniep::test::BranchCounts;
using uniep::test::Random;

const std::vector<std::string> kBackwardSchedules = {"fusion=none",
                                                     "fusion=pairs,backward.wgrad=after",
                                                     "fusion=pairs,backward.wgrad=fill",
                                                     "fusion=pairs,backward.wgrad=fill,tile.n=128",
                                                     "fusion=layer,backward.wgrad=fill",
                                                     "fusion=layer,backward.wgrad=after",
                                                     "backward.wgrad=mixed",
                                                     "backward.wgrad=mixed,backward.wgrad_reserve=0,save.xg=redispatch",
                                                     "fusion=layer,backward.wgrad=fill,save.xg=redispatch",
                                                     "fusion=layer,combine.transport=staged",
                                                     "fusion=pairs,backward.wgrad=fill,save.xg=redispatch",
                                                     "fusion=pairs,backward.wgrad=after,combine.transport=staged",
                                                     "fusion=none,save.xg=redispatch,combine.transport=staged",
                                                     "fusion=pairs,save.z=recompute",
                                                     "fusion=layer,save.xg=redispatch,save.z=recompute",
                                                     "fusion=none,save.xg=redispatch,save.z=recompute"};

BackwardCase draw_backward_case(uint64_t seed, int ranks, int workers) {
  // Few, for a kernel may be compiled for each; 192 and 320 columns end in half a tile.
  constexpr std::pair<int64_t, int64_t> kColumns[] = {{256, 128}, {320, 192}};
  constexpr int64_t kTokens[] = {1, 40, 300};
  Random random(seed * 131 + static_cast<uint64_t>(ranks));
  BackwardCase drawn;
  LayerShape& shape = drawn.config.shape;
  std::tie(shape.hidden, shape.intermediate) = kColumns[random.next() % std::size(kColumns)];
  shape.experts = ranks * random.between(1, 6);
  shape.topk = random.between(1, std::min<int64_t>(4, shape.experts));
  drawn.config.numerics.weight_gradient = static_cast<WeightGradient>(random.between(0, 2));
  // Every schedule comes with any other choice.
  drawn.schedule = kBackwardSchedules[seed % kBackwardSchedules.size()];
  const bool again = drawn.schedule.find("redispatch") != std::string::npos;
  const bool recomputes = drawn.schedule.find("recompute") != std::string::npos;
  if (!(again || recomputes) || random.one_in(2)) {
    drawn.forward = "auto";
  } else {
    drawn.forward = std::string("save.xg=") + (again ? "redispatch" : "keep") + (recomputes ? ",save.z=recompute" : "");
  }
  drawn.most_tokens = kTokens[random.next() % std::size(kTokens)];
  drawn.within = random.one_in(2);
  drawn.by_address = random.one_in(2);
  drawn.none_gets_addresses = random.one_in(2);
  drawn.last_use = random.one_in(2);
  drawn.drops_handles = random.one_in(2);
  const int works = static_cast<int>(random.between(1, 4));
  for (int i = 0; i < works; ++i) {
    WorkPlan& plan = drawn.works.emplace_back();
    plan.parts = static_cast<WorkPlan::Parts>(random.between(0, 3));
    plan.sms = random.one_in(2) ? 0 : static_cast<int>(random.one_in(3) ? 1 : random.between(1, workers));
    plan.aside = random.one_in(2);
  }
  drawn.order.resize(drawn.works.size());
  std::iota(drawn.order.begin(), drawn.order.end(), 0);
  for (std::size_t i = drawn.order.size(); i-- > 1;) std::swap(drawn.order[i], drawn.order[random.next() % (i + 1)]);
  if (works > 1 && random.one_in(4)) drawn.order.pop_back();
  return drawn;
}

void count_branches(BranchCounts& branches, const BackwardCase& drawn, int workers) {
  const WeightGradient mode = drawn.config.numerics.weight_gradient;
  branches.count("bf16", mode == WeightGradient::kBFloat16);
  branches.count("fp32", mode == WeightGradient::kFloat32);
  branches.count("main_grad", mode == WeightGradient::kMainGrad);
  for (const std::string& schedule : kBackwardSchedules) branches.count(schedule.c_str(), drawn.schedule == schedule);
  const bool again = drawn.schedule.find("redispatch") != std::string::npos;
  branches.count("redispatch after a forward that kept xg", again && drawn.forward == "auto");
  branches.count("redispatch after a forward that did not", again && drawn.forward != "auto");
  const bool recomputes = drawn.schedule.find("recompute") != std::string::npos;
  branches.count("FC1 again after a forward that kept z", recomputes && drawn.forward == "auto");
  branches.count("FC1 again after a forward that did not", recomputes && drawn.forward != "auto");
  branches.count("last use, FC1 again", drawn.last_use && recomputes);
  branches.count("last use, xg kept", drawn.last_use && !again);
  branches.count("last use, redispatch", drawn.last_use && again);
  branches.count("used again, xg kept", !drawn.last_use && !again);
  branches.count("used again, redispatch", !drawn.last_use && again);
  branches.count("placed by need", !drawn.within);
  branches.count("placed within a capacity", drawn.within);
  branches.count("tensors of all experts", !drawn.by_address);
  branches.count("a tensor an expert", drawn.by_address);
  branches.count("none, with addresses", drawn.none_gets_addresses);
  branches.count("none, without addresses", !drawn.none_gets_addresses);
  branches.count("Saved and Placement gone before the works", drawn.drops_handles);
  branches.count("Saved and Placement kept", !drawn.drops_handles);
  const bool sorted = std::is_sorted(drawn.order.begin(), drawn.order.end());
  branches.count("several works outstanding", drawn.works.size() > 1);
  branches.count("works out of the order of the backwards", !sorted);
  branches.count("a work that is dropped", drawn.order.size() < drawn.works.size());
  const auto any = [&](auto&& holds) {
    return std::any_of(drawn.order.begin(), drawn.order.end(),
                       [&](int work) { return holds(drawn.works[static_cast<std::size_t>(work)]); });
  };
  using Parts = WorkPlan::Parts;
  branches.count("both in one call", any([](const WorkPlan& plan) { return plan.parts == Parts::kBoth; }));
  branches.count("dw1, then dw2", any([](const WorkPlan& plan) { return plan.parts == Parts::kFirstThenSecond; }));
  branches.count("dw2, then dw1", any([](const WorkPlan& plan) { return plan.parts == Parts::kSecondThenFirst; }));
  branches.count("dw1 and never dw2", any([](const WorkPlan& plan) { return plan.parts == Parts::kFirstAlone; }));
  branches.count("all SMs", any([](const WorkPlan& plan) { return plan.sms == 0; }));
  branches.count("one SM", any([](const WorkPlan& plan) { return plan.sms == 1; }));
  branches.count("some SMs", any([&](const WorkPlan& plan) { return plan.sms > 1 && plan.sms < workers; }));
  branches.count("on another stream", any([](const WorkPlan& plan) { return plan.aside; }));
  branches.count("on the layer's stream", any([](const WorkPlan& plan) { return !plan.aside; }));
}

std::vector<KernelRequest> kernels_of(const BackwardCase& drawn, int ranks, int workers) {
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = ranks;
  machine.workers = workers;
  const Numerics& numerics = drawn.config.numerics;
  std::vector<KernelRequest> requests;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const std::string fields = direction == Direction::kBackward ? drawn.schedule : drawn.forward;
    const Schedule schedule =
        resolve(PartialSchedule::parse(fields),
                {.direction = direction, .shape = drawn.config.shape, .numerics = numerics, .machine = machine});
    for (const bool gradients : {false, true}) {
      for (const LaunchStages& stages : launch_stages(schedule, direction, gradients)) {
        if (is_weight_gradients_alone(stages)) continue;
        requests.push_back(layer_request(launch_config(schedule, numerics, direction, stages)));
      }
    }
    if (direction == Direction::kForward) continue;
    for (const LayerKernelConfig& kernel : recompute_kernels(drawn.config, schedule, ranks, workers)) {
      requests.push_back(layer_request(kernel));
    }
    for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
      requests.push_back(gemm_request(weight_gradient_config(schedule, numerics, stage)));
    }
  }
  return requests;
}

std::string to_text(const BackwardCase& drawn) {
  const LayerShape& shape = drawn.config.shape;
  return fmt::format("hidden {} intermediate {} experts {} topk {} tokens {} gradients {}{}{}{}{} works {} | {}",
                     shape.hidden, shape.intermediate, shape.experts, shape.topk, drawn.most_tokens,
                     static_cast<int>(drawn.config.numerics.weight_gradient), drawn.by_address ? " by address" : "",
                     drawn.within ? " within" : "", drawn.last_use ? " last use" : "",
                     drawn.drops_handles ? " handles dropped" : "", drawn.works.size(), drawn.schedule);
}

}  // namespace uniep::cuda::test
