// What the simulator says of machines that nobody here has, beside what their owners publish.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "io/npy.h"
#include "sim/machine.h"
#include "support/command.h"
#include "support/temporary_folder.h"

namespace uniep::cli {
namespace {

using test::CommandResult;
using test::run_command;
using test::TemporaryFolder;

// HyperParallel-MoE (arXiv 2605.23764), whose all-to-alls carry a row for every slot. The machine's constants follow
// from the EP 4 column alone.
TEST(PublishedFigures, OfHyperParallelsLayersOnAscend) {
  const std::string common = "queue=static,dispatch.dedup=off,combine.transport=staged,fusion=";
  const struct {
    const char *direction, *fusion;
    double ms[3];  // EP 4, 8, 16
  } published[] = {{"forward", "none", {16.3, 17.3, 18.4}},
                   {"forward", "layer", {10.2, 10.3, 11.2}},
                   {"backward", "none", {27.9, 29.8, 30.5}},
                   {"backward", "layer", {19.4, 19.6, 19.9}}};
  double sum = 0;
  for (const auto& [direction, fusion, milliseconds] : published) {
    int ranks = 4;
    for (const double ms : milliseconds) {
      const CommandResult result =
          run_command({"simulate", "--machine", "ascend_a3", "--shape", "7168,2048," + std::to_string(8 * ranks) + ",8",
                       "--ranks", std::to_string(ranks), "--tokens", "4096", "--direction", direction, "--schedule",
                       common + fusion, "--one-rank", "--json", "-"});
      ASSERT_EQ(result.status, 0) << result.err;
      const double error = result.json()["ms"].get<double>() / ms - 1;
      std::printf("%-8s %-5s EP %2d: %5.1f ms, %+.1f %%\n", direction, fusion, ranks, ms, 100 * error);
      EXPECT_LT(std::abs(error), ranks == 4 ? 0.03 : 0.08);
      if (ranks > 4) sum += std::abs(error);
      ranks *= 2;
    }
  }
  EXPECT_LT(sum / 8, 0.05);
}

// Dispatch and combine alone, on so many SMs each. `hidden` counts bf16 values.
class Exchange {
 public:
  explicit Exchange(int ranks, int local_experts = 8) : ranks_(ranks), experts_(ranks * local_experts) {
    constexpr int64_t kTopk = 8;
    io::NpyArray ids{{ranks * kTokens, kTopk}, std::vector<int32_t>()};
    auto& values = std::get<std::vector<int32_t>>(ids.values);
    std::mt19937 random(1);
    std::uniform_int_distribution<int32_t> any(0, experts_ - 1);
    int64_t reached = 0, nodes = 0;
    for (int64_t token = 0; token < ranks * kTokens; ++token) {
      std::set<int32_t> experts, of_token, of_nodes;
      while (experts.size() < kTopk) experts.insert(any(random));
      for (const int32_t expert : experts) {
        const int32_t rank = expert / local_experts;
        // One row for a rank: what follows in the rank is not part of the exchange.
        values.push_back(of_token.insert(rank).second ? expert : -1);
        of_nodes.insert(rank / 8);
      }
      reached += static_cast<int64_t>(of_token.size());
      nodes += static_cast<int64_t>(of_nodes.size());
    }
    ranks_a_token_ = static_cast<double>(reached) / static_cast<double>(ranks * kTokens);
    nodes_a_token_ = static_cast<double>(nodes) / static_cast<double>(ranks * kTokens);
    io::write_npy(folder_ / "ids.npy", ids);
  }

  struct Rates {
    double dispatch, combine;  // GB/s of rows for a (token, rank), its own among them
  };
  Rates run(const std::string& machine, int sms, int hidden = 7168) const {
    const std::string count = std::to_string(sms);
    const CommandResult result = run_command(
        {"simulate", "--machine", machine, "--shape",
         std::to_string(hidden) + ",128," + std::to_string(experts_) + ",8", "--ranks", std::to_string(ranks_),
         "--tokens", std::to_string(kTokens), "--routing", (folder_ / "ids.npy").string(), "--schedule",
         "fusion=none,dispatch.transport=push,comm.where=sms,comm.dispatch_sms=" + count +
             ",combine.transport=staged,comm.combine_sms=" + count,
         "--one-rank", "--json", "-"});
    EXPECT_EQ(result.status, 0) << result.err;
    const nlohmann::json stages = result.json()["stages"];
    const sim::MachineDescription& described = sim::shipped_machine(machine);
    const double begun_ms = (described.time.begin + described.time.launch) * 1e-3;
    const double megabytes = kTokens * ranks_a_token_ * 2 * hidden * 1e-6;
    const nlohmann::json& combine = stages["combine"];
    return {megabytes / (stages["fc1"]["begin_ms"].get<double>() - begun_ms),
            megabytes / (combine["end_ms"].get<double>() - combine["begin_ms"].get<double>())};
  }
  // Of rows for a (token, node) among those for a (token, rank): what crosses a network that relays.
  double share_of_nodes() const { return nodes_a_token_ / ranks_a_token_; }

 private:
  static constexpr int64_t kTokens = 4096;
  int ranks_, experts_;
  double ranks_a_token_ = 0, nodes_a_token_ = 0;
  TemporaryFolder folder_;
};

void expect_near(const char* what, int ranks, int sms, double simulated, double published, double most) {
  const double error = simulated / published - 1;
  std::printf("%-20s %2d ranks, %2d SMs: %5.1f GB/s, %+.1f %%\n", what, ranks, sms, published, 100 * error);
  EXPECT_LT(std::abs(error), most);
}

// DeepEP's README: FP8 dispatch, with its scales a row of 3696 values of two bytes, and bf16 combine.
TEST(PublishedFigures, OfDeepEpOnEightH800) {
  const Exchange eight(8, 32);
  expect_near("DeepEP, dispatch", 8, 24, eight.run("h800", 24, 3696).dispatch, 153, 0.03);
  expect_near("DeepEP, combine", 8, 24, eight.run("h800", 24).combine, 158, 0.03);
}

// README_Hybrid-EP.md of DeepEP's branch hybrid-ep, kernels, bf16. Links of gb200_nvl72 are from 32 SMs.
TEST(PublishedFigures, OfHybridEpOnSixteenSmsOfGb200) {
  const struct {
    int ranks;
    double dispatch, combine, dispatch_error, combine_error;  // errors at most
  } published[] = {{8, 750.15, 684.27, 0.13, 0.05},
                   {16, 661.93, 600.75, 0.03, 0.12},
                   {24, 637.8, 565.53, 0.03, 0.15},
                   {32, 629.79, 547.25, 0.08, 0.12},
                   {36, 612.85, 543.27, 0.05, 0.12}};
  for (const auto& [ranks, dispatch, combine, dispatch_error, combine_error] : published) {
    const Exchange::Rates rates = Exchange(ranks).run("gb200_nvl72", 16);
    expect_near("Hybrid-EP, dispatch", ranks, 16, rates.dispatch, dispatch, dispatch_error);
    expect_near("Hybrid-EP, combine", ranks, 16, rates.combine, combine, combine_error);
  }
}

// Dispatch over InfiniBand, GB/s of rows for a (token, node): where the network's rate is not from.
TEST(PublishedFigures, OfHybridEpsDispatchOnH100) {
  const Exchange two(16), four(32);
  const auto run = [](const Exchange& exchange, const char* machine, int sms) {
    return exchange.run(machine, sms).dispatch * exchange.share_of_nodes();
  };
  expect_near("Hybrid-EP, dispatch", 16, 4, run(two, "h100_ib2", 4), 44.4, 0.16);
  expect_near("Hybrid-EP, dispatch", 16, 16, run(two, "h100_ib2", 16), 71.71, 0.04);
  expect_near("Hybrid-EP, dispatch", 32, 8, run(four, "h100_ib8", 8), 54.5, 0.08);
  expect_near("Hybrid-EP, dispatch", 32, 16, run(four, "h100_ib8", 16), 57.69, 0.12);
}

}  // namespace
}  // namespace uniep::cli
