#include "support/branch_counts.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "model/activation_choice.h"
#include "program/wgrad_queues.h"

namespace uniep::test {
namespace {

template <typename Holds>
bool any_rank(const Program& program, const Holds& holds) {
  for (int rank = 0; rank < program.ranks(); ++rank) {
    if (holds(program.rank(rank))) return true;
  }
  return false;
}

// Whether an expert has rows for several waves of its own.
bool has_parted_experts(const RankProgram& p) {
  for (int32_t turn = 0; p.wave_blocks > 0 && turn < p.local_experts; ++turn) {
    if (p.spans_before[turn + 1] - p.spans_before[turn] > 1) return true;
  }
  return false;
}

bool comes_out_of_order(const RankProgram& p) {
  for (int32_t turn = 0; turn < p.local_experts; ++turn) {
    if (expert_of_turn(p, turn) != turn) return true;
  }
  return false;
}

void count_queues(BranchCounts& branches, const Program& program) {
  const RankProgram& p = program.rank(0);
  const bool pairs = p.cluster == 2;
  const bool queues =
      any_rank(program, [](const RankProgram& of) { return has_gemm_queues(of, 0) && local_blocks(of) > 0; });
  const int walkers = queues ? gemm_queues(p, 0).walkers : 0;
  branches.count("static queues", !p.dynamic);
  branches.count("dynamic queues", p.dynamic);
  branches.count("clusters of two", pairs);
  branches.count("clusters of two, static queues", pairs && !p.dynamic);
  branches.count("clusters of two, dynamic queues", pairs && p.dynamic);
  branches.count("clusters of two, positions without a tile", pairs && any_rank(program, [](const RankProgram& of) {
                                                                return of.first_tiles % 2 != 0 &&
                                                                       of.odd_blocks[of.local_experts] > 0;
                                                              }));
  branches.count("mixed GEMMs, static queues", is_merged(p));
  branches.count("mixed GEMMs, static queues, clusters of two", is_merged(p) && pairs);
  branches.count("mixed GEMMs, dynamic queues", queues);
  branches.count("mixed GEMMs, dynamic queues, one walker", walkers == 1);
  branches.count("mixed GEMMs, dynamic queues, several walkers", walkers > 1);
  branches.count("mixed GEMMs, dynamic queues, one pair", walkers == 1 && pairs);
  branches.count("mixed GEMMs, dynamic queues, several pairs", walkers > 1 && pairs);
  branches.count("mixed GEMMs, dynamic queues, several waves and chunks", queues && p.waves > 1 && p.chunks > 1);
  branches.count("mixed GEMMs, dynamic queues, a given share", queues && p.second_share > 0 && walkers > 2);
  const bool parted = any_rank(program, has_parted_experts);
  branches.count("waves inside an expert", parted);
  branches.count("waves inside an expert, clusters of two", parted && pairs);
  branches.count("waves inside an expert, mixed GEMMs, dynamic queues", parted && queues);
  branches.count("waves inside an expert, mixed GEMMs, static queues", parted && is_merged(p));
}

void count_transports(BranchCounts& branches, const Program& program) {
  const RankProgram& p = program.rank(0);
  const bool groups = p.combine_groups > 0;
  branches.count("push", p.push);
  branches.count("push with dedup", p.push && p.dedup);
  branches.count("pull with dedup", !p.push && p.dedup);
  branches.count("pull without dedup", !p.push && !p.dedup);
  branches.count("pull in one part", !p.push && p.pull_parts == 1);
  branches.count("pull in several parts", !p.push && p.pull_parts > 1);
  branches.count("redispatch", p.operands == 2);
  branches.count("redispatch by push", p.operands == 2 && p.push);
  branches.count("combine by the epilogue", p.epilogue_combine);
  branches.count("combine staged", !p.epilogue_combine && !groups);
  branches.count("combine by groups", groups);
  branches.count("copy warps", !p.on_sms);
  branches.count("copy sms", p.on_sms);
  branches.count("copy sms, clusters of two", p.on_sms && p.cluster == 2);
  branches.count("relay sms, push", p.relay_workers > 0);
  branches.count("relay sms, push, dynamic queues", p.relay_workers > 0 && p.dynamic);
  branches.count("combine sms", p.combine_workers > 0);
  branches.count("reduce sms", p.reduce_workers > 0);
  branches.count("reserved sms", p.workers < program.request().workers);
}

void count_order(BranchCounts& branches, const Program& program) {
  const RankProgram& p = program.rank(0);
  const Schedule& schedule = program.request().schedule;
  const bool backward = p.direction == Direction::kBackward;
  const bool wgrad = backward && program.request().weight_gradients;
  const bool fill = wgrad && schedule.wgrad != WgradOrder::kAfter;
  const bool mixed = wgrad && schedule.wgrad == WgradOrder::kMixed && has_wgrad_queues(p, 0);
  const WgradQueues queues = mixed ? wgrad_queues(p, 0) : WgradQueues{};
  branches.count("column chunks", p.chunks > 1);
  branches.count("raster", p.raster > 1);
  branches.count("several waves", p.waves > 1);
  branches.count("no rotation of sources", !p.source_rotation);
  branches.count("heavy experts first", any_rank(program, comes_out_of_order));
  branches.count("fusion none", schedule.fusion == Fusion::kNone);
  branches.count("fusion pairs", schedule.fusion == Fusion::kPairs);
  branches.count("fusion layer", schedule.fusion == Fusion::kLayer);
  branches.count("wgrad after", wgrad && !fill);
  branches.count("wgrad fills", fill);
  branches.count("wgrad mixed", mixed);
  branches.count("wgrad mixed, by some of the walkers", queues.takers > 0);
  branches.count("wgrad mixed, all but one of the walkers",
                 queues.takers > 0 && queues.takers == queues.dgrads.walkers - 1);
  branches.count("wgrad mixed, one walker", mixed && queues.dgrads.walkers == 1);
  branches.count("wgrad mixed, clusters of two", mixed && p.cluster == 2);
  branches.count("wgrad mixed, several waves and chunks", mixed && p.waves > 1 && p.chunks > 1);
  branches.count("wgrad mixed, redispatch", mixed && p.operands == 2);
  branches.count("wgrad fills behind mixed GEMMs, static queues", fill && is_merged(p));
  branches.count("wgrad fills behind mixed GEMMs, dynamic queues", fill && has_gemm_queues(p, 0));
  branches.count("wgrad fills behind mixed GEMMs, clusters of two", fill && p.mixed && p.cluster == 2);
}

}  // namespace

void BranchCounts::count(const char* branch, bool taken) {
  if (next_ >= counts_.size() || counts_[next_].first != branch) {
    const auto found =
        std::find_if(counts_.begin(), counts_.end(), [branch](const auto& entry) { return entry.first == branch; });
    next_ = found - counts_.begin();
    if (found == counts_.end()) counts_.emplace_back(branch, 0);
  }
  counts_[next_].second += taken;
  next_ = (next_ + 1) % counts_.size();
}

void BranchCounts::print() const {
  for (const auto& [branch, taken] : counts_) std::printf("%8lld  %s\n", static_cast<long long>(taken), branch.c_str());
}

std::vector<std::string> BranchCounts::never_taken() const {
  std::vector<std::string> branches;
  for (const auto& [branch, taken] : counts_) {
    if (taken == 0) branches.push_back(branch);
  }
  return branches;
}

void BranchCounts::expect_all_taken() const {
  print();
  EXPECT_FALSE(counts_.empty()) << "no case was counted";
  for (const std::string& branch : never_taken()) ADD_FAILURE() << "no case took the branch: " << branch;
}

void count_layer(BranchCounts& branches, const RandomLayer& layer) {
  const cli::LayerData& data = layer.data;
  const WeightGradient gradient = layer.config.numerics.weight_gradient;
  std::vector<int64_t> rows_of_expert(data.shape.experts, 0), rows_of_rank(layer.ranks, 0);
  for (const int32_t expert : data.ids) {
    if (expert < 0) continue;
    ++rows_of_expert[expert];
    ++rows_of_rank[expert / (data.shape.experts / layer.ranks)];
  }
  const auto any = [](const auto& values, int64_t value) {
    return std::find(values.begin(), values.end(), value) != values.end();
  };
  branches.count("one rank", layer.ranks == 1);
  branches.count("several ranks", layer.ranks > 1);
  branches.count("several ranks, all with tokens", layer.ranks > 1 && !any(data.tokens, 0));
  branches.count("a rank without tokens", any(data.tokens, 0));
  branches.count("a rank without rows", any(rows_of_rank, 0));
  branches.count("several experts a rank", data.shape.experts > layer.ranks);
  branches.count("an expert without rows", any(rows_of_expert, 0));
  branches.count("an unused slot", any(data.ids, -1));
  branches.count("several slots a token", data.shape.topk > 1);
  branches.count("dW in bf16", gradient == WeightGradient::kBFloat16);
  branches.count("dW in fp32", gradient == WeightGradient::kFloat32);
  branches.count("dW in main_grad", gradient == WeightGradient::kMainGrad);
  branches.count("one flat sum", layer.config.numerics.combine_groups == 0);
  branches.count("combine groups", layer.config.numerics.combine_groups > 0);
}

void count_activation(BranchCounts& branches, const Numerics& numerics) {
  const auto count = [&](const char* branch, Activation activation, bool parameters, RouterWeight weight) {
    const bool taken = numerics.activation == activation && numerics.router_weight == weight &&
                       parameters == (activation_kind(numerics) == ActivationKind::kShapedSwiglu);
    branches.count(branch, taken);
  };
  count("swiglu, weight on the activation", Activation::kSwiglu, false, RouterWeight::kActivation);
  count("swiglu, weight on the output", Activation::kSwiglu, false, RouterWeight::kOutput);
  count("swiglu, weight on the input", Activation::kSwiglu, false, RouterWeight::kInput);
  count("swiglu with parameters, weight on the activation", Activation::kSwiglu, true, RouterWeight::kActivation);
  count("swiglu with parameters, weight on the output", Activation::kSwiglu, true, RouterWeight::kOutput);
  count("swiglu with parameters, weight on the input", Activation::kSwiglu, true, RouterWeight::kInput);
  count("geglu_tanh, weight on the activation", Activation::kGegluTanh, false, RouterWeight::kActivation);
  count("geglu_tanh, weight on the output", Activation::kGegluTanh, false, RouterWeight::kOutput);
  count("geglu_tanh, weight on the input", Activation::kGegluTanh, false, RouterWeight::kInput);
  count("geglu_erf, weight on the activation", Activation::kGegluErf, false, RouterWeight::kActivation);
  count("geglu_erf, weight on the output", Activation::kGegluErf, false, RouterWeight::kOutput);
  count("geglu_erf, weight on the input", Activation::kGegluErf, false, RouterWeight::kInput);
  count("relu2, weight on the activation", Activation::kRelu2, false, RouterWeight::kActivation);
  count("relu2, weight on the output", Activation::kRelu2, false, RouterWeight::kOutput);
  count("relu2, weight on the input", Activation::kRelu2, false, RouterWeight::kInput);
  count("silu, weight on the activation", Activation::kSilu, false, RouterWeight::kActivation);
  count("silu, weight on the output", Activation::kSilu, false, RouterWeight::kOutput);
  count("silu, weight on the input", Activation::kSilu, false, RouterWeight::kInput);
  const auto count_biases = [&](const char* branch, bool gated, RouterWeight weight) {
    branches.count(branch, numerics.bias && is_gated(numerics.activation) == gated && numerics.router_weight == weight);
  };
  count_biases("biases with a gate, weight on the activation", true, RouterWeight::kActivation);
  count_biases("biases with a gate, weight on the output", true, RouterWeight::kOutput);
  count_biases("biases without a gate, weight on the activation", false, RouterWeight::kActivation);
  count_biases("biases without a gate, weight on the output", false, RouterWeight::kOutput);
  branches.count("biases' gradients in bf16", numerics.bias && numerics.weight_gradient == WeightGradient::kBFloat16);
  branches.count("biases' gradients in fp32", numerics.bias && numerics.weight_gradient == WeightGradient::kFloat32);
  branches.count("biases' gradients in main_grad",
                 numerics.bias && numerics.weight_gradient == WeightGradient::kMainGrad);
}

void count_schedule(BranchCounts& branches, const Program& program) {
  branches.count("lent workers", program.rank(0).lent_workers > 0);
  branches.count("forward", program.request().direction == Direction::kForward);
  branches.count("backward", program.request().direction == Direction::kBackward);
  count_queues(branches, program);
  count_transports(branches, program);
  count_order(branches, program);
}

}  // namespace uniep::test
