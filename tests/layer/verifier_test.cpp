#include "uniep/verifier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <regex>

#include "engine/cpu/bit_fault.h"
#include "io/checksum.h"
#include "support/branch_counts.h"
#include "support/command.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "support/verified_job.h"

// A wrong chip is found and named, and nothing else is.
namespace uniep::test {
namespace {

using cpu::BitFault;
using cpu::BitSite;

// UNIEP_TEST_CHECKS lets a soak check as many layers as one likes.
int64_t checked_layers() {
  const char* text = std::getenv("UNIEP_TEST_CHECKS");
  return text == nullptr ? 150 : std::strtoll(text, nullptr, 10);
}

RandomLayer small_layer(uint64_t seed, std::vector<int> ranks, int64_t fewest_tokens = 0) {
  return random_layer(seed, {.ranks = std::move(ranks),
                             .most_local_experts = 4,
                             .most_tokens = 24,
                             .most_columns = 64,
                             .fewest_tokens = fewest_tokens});
}

constexpr const char* kJobSchedules[] = {"fusion=layer",
                                         "fusion=none",
                                         "queue=dynamic,order.raster=4",
                                         "fusion=pairs,combine.transport=staged",
                                         "dispatch.transport=push",
                                         "save.z=recompute",
                                         "save.xg=redispatch,save.z=recompute"};

TEST(Verifier, HasNoFalseAlarmAndChangesNothing) {
  const int64_t layers = checked_layers();
  BranchCounts branches;
  for (int64_t seed = 1; seed <= layers; ++seed) {
    const RandomLayer layer = small_layer(static_cast<uint64_t>(seed), {1, 2, 4});
    const char* const schedule = kJobSchedules[static_cast<std::size_t>(seed) % std::size(kJobSchedules)];
    VerifiedJob job(layer, schedule, {.every = 1, .budget = 1, .seed = static_cast<uint64_t>(seed)});
    for (int step = 0; step < 2; ++step) {
      job.arrays.reset();
      job.run();
      for (const Finding& finding : job.verifier->end_step()) {
        FAIL() << layer.description << ", " << schedule << ": " << finding.message;
      }
    }
    ASSERT_EQ(difference(job.arrays.result, job.arrays.expected(WeightGradientTime::kNow)), "") << layer.description;
    const VerifierCounts counts = job.verifier->counts();
    ASSERT_EQ(counts.forward_checks, 1);
    ASSERT_EQ(counts.backward_checks, 1);
    ASSERT_EQ(counts.calls, 2);
    const LayerConfig& config = layer.config;
    branches.count("one rank", layer.ranks == 1);
    branches.count("two ranks", layer.ranks == 2);
    branches.count("four ranks", layer.ranks == 4);
    branches.count("a rank without tokens",
                   std::find(layer.data.tokens.begin(), layer.data.tokens.end(), 0) != layer.data.tokens.end());
    branches.count("unused slots", std::find(layer.data.ids.begin(), layer.data.ids.end(), -1) != layer.data.ids.end());
    branches.count("several experts a rank", config.shape.experts > layer.ranks);
    branches.count("combine groups", config.numerics.combine_groups > 2);
    branches.count("gradients in bf16", config.numerics.weight_gradient == WeightGradient::kBFloat16);
    branches.count("gradients in fp32", config.numerics.weight_gradient == WeightGradient::kFloat32);
    branches.count("gradients added", config.numerics.weight_gradient == WeightGradient::kMainGrad);
    branches.count("more slots than ranks", config.shape.topk > layer.ranks);
  }
  branches.expect_all_taken();
}

// What a planted bit came to.
struct Outcome {
  bool flipped = false, changed = false;
  std::vector<Finding> findings;
};

Outcome plant(const RandomLayer& layer, const char* schedule, BitSite site, Direction direction, int rank,
              uint64_t seed) {
  VerifiedJob job(layer, schedule, {.every = 1, .budget = 1, .seed = seed});
  if (direction == Direction::kBackward) {  // whose turn is the second
    job.run();
    EXPECT_TRUE(job.verifier->end_step().empty());
  }
  BitFault fault;
  fault.site = site;
  fault.rank = rank;
  fault.seed = seed;
  const bool of_sum = site == BitSite::kOutput || site == BitSite::kSum;  // of which a rank has a tile or two
  fault.after = of_sum ? 0 : static_cast<int64_t>(seed / 3 % 3);
  job.arrays.reset();
  job.run(&fault, direction);
  Outcome outcome;
  outcome.flipped = fault.flipped > 0;
  const cli::LayerResult expected = job.arrays.expected(WeightGradientTime::kNow);
  outcome.changed = !difference(job.arrays.result, expected).empty();
  outcome.findings = job.verifier->end_step();
  return outcome;
}

struct Planted {
  const char* name;
  BitSite site;
  Direction direction;
  bool gradients_only = false;  // seen where the moved expert is the wrong one
};

class PlantedBit : public testing::TestWithParam<Planted> {};

TEST_P(PlantedBit, IsFoundAndItsRankNamed) {
  const Planted& planted = GetParam();
  BranchCounts branches;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    RandomLayer layer = small_layer(seed, {seed % 3 == 0 ? 2 : 4}, 4);
    layer.config.numerics.combine_groups = 0;
    if (planted.site == BitSite::kGradient) {  // one expert a rank: it is the one that is compared
      const auto one_expert = [&](uint64_t from) {
        return random_layer(
            from,
            {.ranks = {2, 4}, .most_local_experts = 1, .most_tokens = 24, .most_columns = 64, .fewest_tokens = 4});
      };
      layer = one_expert(seed + 100);
      layer.config.numerics.combine_groups = 0;
    }
    const int rank = static_cast<int>(seed % static_cast<uint64_t>(layer.ranks));
    const char* const schedule = seed % 2 == 0 ? "fusion=layer" : "combine.transport=staged,queue=dynamic";
    const Outcome outcome = plant(layer, schedule, planted.site, planted.direction, rank, seed);
    branches.count("a flip that changes the result", outcome.changed);
    branches.count("two ranks", outcome.changed && layer.ranks == 2);
    branches.count("four ranks", outcome.changed && layer.ranks == 4);
    if (!outcome.changed) {  // rounded away, or no tile there
      EXPECT_TRUE(outcome.findings.empty() || outcome.findings[0].kind == FindingKind::kWrongRank);
      continue;
    }
    ASSERT_EQ(outcome.findings.size(), 1u) << layer.description << " seed " << seed;
    const Finding& finding = outcome.findings[0];
    EXPECT_EQ(finding.kind, FindingKind::kWrongRank) << finding.message << " " << layer.description;
    EXPECT_EQ(finding.rank, rank) << finding.message << " " << layer.description;
    EXPECT_EQ(finding.direction, planted.direction);
    EXPECT_NE(finding.message.find("rank " + std::to_string(rank) + " (cpu engine, host "), std::string::npos)
        << finding.message;
  }
  branches.expect_all_taken();
}

INSTANTIATE_TEST_SUITE_P(Sites, PlantedBit,
                         testing::Values(Planted{"TileOfZ", BitSite::kFirstGemm, Direction::kForward},
                                         Planted{"TileOfY", BitSite::kOutput, Direction::kForward},
                                         Planted{"SumOfY", BitSite::kSum, Direction::kForward},
                                         Planted{"RowOfX", BitSite::kDispatchedRow, Direction::kForward},
                                         Planted{"RowOnItsWayBack", BitSite::kReturnedRow, Direction::kForward},
                                         Planted{"TileOfDx", BitSite::kOutput, Direction::kBackward},
                                         Planted{"SumOfDx", BitSite::kSum, Direction::kBackward},
                                         Planted{"RowOfDy", BitSite::kDispatchedRow, Direction::kBackward},
                                         Planted{"RowOfDxOnItsWayBack", BitSite::kReturnedRow, Direction::kBackward},
                                         Planted{"TileOfDw", BitSite::kGradient, Direction::kBackward}),
                         [](const testing::TestParamInfo<Planted>& planted) { return planted.param.name; });

// A fault that is there in all calls, also in the verifier's own.
std::vector<Finding> steps_with(VerifiedJob& job, BitFault& fault, int steps) {
  std::vector<Finding> all;
  job.engine().plant(&fault);
  for (int step = 0; step < steps; ++step) {
    const Placement placement = place(*job.group, job.layer.config.shape, job.arrays.routings);
    const std::vector<ForwardArguments> forwards = job.arrays.forward_arguments();
    const Saved saved = forward(*job.group, job.layer.config, job.forward_schedule, placement, forwards);
    job.verifier->after_forward({"layer 1", job.layer.config, job.forward_schedule, job.arrays.routings}, forwards,
                                saved);
    const std::vector<BackwardArguments> backwards = job.arrays.backward_arguments(WeightGradientTime::kNow, false);
    job.verifier->before_backward("layer 1", job.layer.config, backwards);
    backward(*job.group, job.layer.config, job.backward_schedule, saved, backwards);
    job.verifier->after_backward({"layer 1", job.layer.config, job.backward_schedule, job.arrays.routings}, backwards);
    for (Finding& finding : job.verifier->end_step()) all.push_back(std::move(finding));
  }
  job.engine().plant(static_cast<BitFault*>(nullptr));
  return all;
}

TEST(Verifier, FindsAWorkerThatIsWrongNowAndThen) {
  int64_t named = 0, undecided = 0;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    RandomLayer layer = small_layer(seed + 20, {4}, 8);
    layer.config.numerics.combine_groups = 0;
    VerifiedJob job(layer, "fusion=layer", {.every = 1, .budget = 1, .seed = seed});
    BitFault fault;
    fault.site = BitSite::kWorker;
    fault.rank = static_cast<int>(seed % 4);
    fault.worker = static_cast<int>(seed % 2);
    fault.seed = seed;
    fault.one_in = 20;
    bool found = false;
    // How many tiles the worker gets is up to the threads: where others keep them busy, few.
    for (int tries = 0; tries < 10 && !found; ++tries) {
      for (const Finding& finding : steps_with(job, fault, 30)) {
        if (finding.kind == FindingKind::kWrongRank) {
          EXPECT_EQ(finding.rank, fault.rank) << finding.message;
          found = true;
          continue;
        }
        ++undecided;  // wrong in two runs of three
        if (finding.kind == FindingKind::kUndecided) {
          EXPECT_EQ(std::count(finding.suspects.begin(), finding.suspects.end(), fault.rank), 1) << finding.message;
        } else {
          EXPECT_EQ(finding.kind, FindingKind::kOwnBug) << finding.message;
        }
      }
    }
    EXPECT_GT(fault.flipped, 0);
    EXPECT_TRUE(found) << layer.description;
    named += found;
  }
  std::printf("a worker wrong in 1 of 20 tiles: named in %lld of 6 jobs, %lld findings without a rank\n",
              static_cast<long long>(named), static_cast<long long>(undecided));
}

TEST(Verifier, NamesARankThatIsAlwaysWrong) {
  for (const int ranks : {2, 4}) {
    RandomLayer layer = small_layer(7, {ranks}, 8);
    layer.config.numerics.combine_groups = 0;
    VerifiedJob job(layer, "fusion=layer");
    BitFault fault;
    fault.site = BitSite::kFirstGemm;
    fault.rank = 1;
    fault.steady = true;
    const std::vector<Finding> findings = steps_with(job, fault, 1);
    ASSERT_EQ(findings.size(), 1u);
    if (ranks == 2) {  // each says something else of the expert, always
      EXPECT_EQ(findings[0].kind, FindingKind::kUndecided) << findings[0].message;
      EXPECT_EQ(findings[0].suspects, (std::vector<int>{0, 1}));
    } else {
      EXPECT_EQ(findings[0].kind, FindingKind::kWrongRank) << findings[0].message;
      EXPECT_EQ(findings[0].rank, 1) << findings[0].message;
    }
    EXPECT_TRUE(steps_with(job, fault, 2).size() <= 1);  // forward: told once
  }
}

// Of a call that kept no z, which reruns keep.
TEST(Verifier, NamesARankThatIsAlwaysWrongWhereNoZIsKept) {
  int found = 0;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    RandomLayer layer = small_layer(seed, {4}, 8);
    layer.config.numerics.combine_groups = 0;
    VerifiedJob job(layer, seed % 2 == 0 ? "save.z=recompute" : "fusion=none,save.z=recompute");
    BitFault fault;
    fault.site = BitSite::kDispatchedRow;
    fault.rank = 1;
    fault.steady = true;
    fault.seed = seed;
    for (const Finding& finding : steps_with(job, fault, 1)) {
      ++found;
      EXPECT_EQ(finding.kind, FindingKind::kWrongRank) << finding.message;
      EXPECT_EQ(finding.rank, 1) << finding.message;
      EXPECT_NE(finding.tensor, "z") << finding.message;
    }
  }
  std::printf("wrong rows of x without z: found in %d of 12 calls\n", found);
  EXPECT_GE(found, 3);  // of others no bit is left in y
}

TEST(Verifier, TellsAWrongKernelFromAWrongRank) {
  RandomLayer layer = small_layer(9, {4}, 8);
  layer.config.numerics.combine_groups = 0;
  const LayerShape& shape = layer.config.shape;
  for (const bool one_expert : {false, true}) {
    if (one_expert) {  // a single tile is wrong, and only another rank under the same Schedule can tell
      std::fill(layer.data.ids.begin(), layer.data.ids.end(), -1);
      for (int64_t token = 0; token < layer.data.all_tokens(); ++token) layer.data.ids[token * shape.topk] = 1;
    }
    VerifiedJob job(layer, "order.raster=16");
    BitFault fault;
    fault.site = BitSite::kFirstGemm;
    fault.rank = -1;
    fault.raster = 16;
    fault.steady = true;
    const std::vector<Finding> findings = steps_with(job, fault, 1);
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].kind, FindingKind::kOwnBug) << findings[0].message;
    EXPECT_EQ(findings[0].rank, -1);
  }
}

// Where nothing can be moved, another rank can not tell.
TEST(Verifier, BlamesNoKernelWhereExpertsStay) {
  RandomLayer layer = small_layer(9, {4}, 8);
  layer.config.numerics.combine_groups = 4;
  VerifiedJob job(layer, "order.raster=16");
  BitFault fault;
  fault.site = BitSite::kFirstGemm;
  fault.rank = 1;
  fault.raster = 16;
  fault.steady = true;
  const std::vector<Finding> findings = steps_with(job, fault, 1);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].kind, FindingKind::kWrongRank) << findings[0].message;
  EXPECT_EQ(findings[0].rank, 1);
}

// One finding beside another is not enough, and none makes of a suspect a rank that is proven wrong.
TEST(Verifier, NarrowsSuspectsByTwoEarlierFindingsAndSaysSo) {
  int narrowed = 0;
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    RandomLayer layer = random_layer(
        seed, {.ranks = {4}, .most_local_experts = 4, .most_tokens = 24, .most_columns = 64, .fewest_tokens = 16});
    layer.config.numerics.combine_groups = 4;
    if (layer.config.shape.topk < 2) continue;
    VerifiedJob job(layer, "fusion=layer");
    int undecided = 0;
    for (int step = 0; step < 24; ++step) {
      BitFault fault;
      fault.site = BitSite::kOutput;
      fault.rank = 2;
      fault.seed = seed * 100 + static_cast<uint64_t>(step);
      job.run(&fault, step % 2 == 0 ? Direction::kForward : Direction::kBackward);
      for (const Finding& finding : job.verifier->end_step()) {
        if (finding.kind == FindingKind::kWrongRank) {  // all slots of the token are on that rank
          EXPECT_EQ(finding.message.find("findings at steps"), std::string::npos) << finding.message;
          continue;
        }
        ASSERT_EQ(finding.kind, FindingKind::kUndecided) << finding.message;
        EXPECT_EQ(std::count(finding.suspects.begin(), finding.suspects.end(), 2), 1) << finding.message;
        const bool by_others = finding.message.find("by the findings at steps ") != std::string::npos;
        EXPECT_EQ(by_others, finding.suspects.size() == 1) << finding.message;
        EXPECT_TRUE(!by_others || undecided >= 2) << finding.message;
        narrowed += by_others;
        ++undecided;
      }
    }
  }
  EXPECT_GT(narrowed, 0);
}

TEST(Verifier, AFindingStaysWhereItsInputsCanNotBeWritten) {
  const TemporaryFolder folder;
  const std::filesystem::path gone = folder / "gone";
  std::filesystem::create_directory(gone);
  VerifiedJob job(small_layer(15, {4}, 8), "fusion=layer", {.every = 1, .budget = 1, .folder = gone.string()});
  std::filesystem::remove(gone);
  BitFault fault;
  fault.site = BitSite::kOutput;
  fault.rank = 2;
  job.run(&fault);
  const std::vector<Finding> findings = job.verifier->end_step();
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].file, "");
  EXPECT_NE(findings[0].message.find("; inputs were not written: "), std::string::npos) << findings[0].message;
}

// An allocator that has nothing at the n-th request.
struct CountingDown {
  int64_t left = 0;
  static void* allocate(void* context, std::size_t bytes, std::size_t alignment, int, Stream) {
    auto& own = *static_cast<CountingDown*>(context);
    if (own.left > 0 && --own.left == 0) return nullptr;
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  static void release(void*, void* memory, std::size_t, int, Stream) { std::free(memory); }
};

TEST(Verifier, TwoRunsThatDisagreeAreToldWhereAThirdHasNoMemory) {
  BranchCounts branches;
  RandomLayer layer = small_layer(15, {4}, 8);
  layer.config.numerics.combine_groups = 0;
  bool decided = false;
  for (int64_t request = 1; !decided && request < 1000; ++request) {
    CountingDown memory;
    VerifiedJob job(layer, "fusion=layer", {.every = 1, .budget = 1},
                    {CountingDown::allocate, CountingDown::release, &memory});
    BitFault fault;
    fault.site = BitSite::kOutput;
    fault.rank = 2;
    job.run(&fault);
    memory.left = request;
    const std::vector<Finding> findings = job.verifier->end_step();
    const bool failed = memory.left == 0;
    memory.left = 0;
    const VerifierCounts counts = job.verifier->counts();
    if (counts.calls == 0) {
      branches.count("no second run", failed);
      EXPECT_TRUE(findings.empty());
      EXPECT_EQ(counts.skipped, 1);
      continue;
    }
    ASSERT_EQ(findings.size(), 1u) << request;
    EXPECT_EQ(counts.skipped, 0);
    decided = findings[0].kind == FindingKind::kWrongRank && !failed;
    if (findings[0].kind != FindingKind::kUndecided) continue;
    branches.count("no third run", counts.calls == 1);
    EXPECT_EQ(findings[0].suspects, (std::vector<int>{0, 1, 2, 3}));
    EXPECT_NE(findings[0].message.find("there is no memory"), std::string::npos) << findings[0].message;
  }
  EXPECT_TRUE(decided);
  branches.expect_all_taken();
}

TEST(Verifier, TellsMemoryThatChangedFromInputsThatWereWritten) {
  RandomLayer layer = small_layer(11, {4}, 8);
  const int64_t half = layer.config.shape.intermediate * layer.config.shape.hidden;
  {
    VerifiedJob job(layer, "fusion=layer");
    job.run();
    const int64_t expert = layer.config.shape.experts - 1;
    job.layer.data.w1[static_cast<std::size_t>(expert * 2 * half + 5)].bits ^= 1u;
    const std::vector<Finding> findings = job.verifier->end_step();
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].kind, FindingKind::kChangedMemory) << findings[0].message;
    EXPECT_EQ(findings[0].rank, 3);
    EXPECT_EQ(findings[0].expert, expert);
    EXPECT_EQ(findings[0].tensor, "w1");
  }
  {
    VerifiedJob job(layer, "fusion=layer");
    job.run();
    for (BFloat16& weight : job.layer.data.w2) weight.bits ^= 1u;  // an optimizer's step
    const std::vector<Finding> findings = job.verifier->end_step();
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].kind, FindingKind::kChangedInputs) << findings[0].message;
    EXPECT_EQ(findings[0].rank, -1);
  }
  {
    VerifiedJob job(layer, "fusion=layer");
    job.run();
    for (BFloat16& value : job.layer.data.x) value.bits ^= 1u;  // the next replay's
    for (BFloat16& value : job.arrays.result.y) value.bits ^= 1u;
    const std::vector<Finding> findings = job.verifier->end_step();
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].kind, FindingKind::kReplayed) << findings[0].message;
  }
}

TEST(Verifier, TakesNanForWhatItIs) {
  RandomLayer layer = small_layer(13, {4}, 8);
  VerifiedJob job(layer, "fusion=layer");
  job.layer.data.x[0] = BFloat16{0x7fc1};
  job.layer.data.x[static_cast<std::size_t>(layer.config.shape.hidden)] = BFloat16{0x7f80};
  std::vector<Finding> findings;
  for (int step = 0; step < 4; ++step) {
    job.run();
    for (Finding& finding : job.verifier->end_step()) findings.push_back(std::move(finding));
  }
  ASSERT_GE(findings.size(), 1u);
  for (const Finding& finding : findings) EXPECT_EQ(finding.kind, FindingKind::kNotFinite) << finding.message;
  EXPECT_LE(findings.size(), 2u);  // once a direction
}

TEST(Verifier, WritesInputsThatRunReplays) {
  const TemporaryFolder folder;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    RandomLayer layer = small_layer(15, {4}, 8);
    layer.config.numerics = {};
    VerifiedJob job(layer, "fusion=layer", {.every = 1, .budget = 1, .folder = folder.path().string()});
    if (direction == Direction::kBackward) {
      job.run();
      job.verifier->end_step();
    }
    BitFault fault;
    fault.site = BitSite::kOutput;
    fault.rank = 2;
    job.run(&fault, direction);
    const std::vector<Finding> findings = job.verifier->end_step();
    ASSERT_EQ(findings.size(), 1u);
    ASSERT_NE(findings[0].file, "");
    EXPECT_NE(findings[0].message.find(findings[0].file), std::string::npos);
    const LayerShape& shape = layer.config.shape;
    std::string tokens;
    for (const int64_t each : layer.data.tokens) tokens += (tokens.empty() ? "" : ",") + std::to_string(each);
    const std::string stem = findings[0].file.substr(0, findings[0].file.rfind('.'));
    std::vector<std::string> arguments = {"run",
                                          "--engine",
                                          "cpu",
                                          "--ranks",
                                          "4",
                                          "--tokens",
                                          tokens,
                                          "--hidden",
                                          std::to_string(shape.hidden),
                                          "--intermediate",
                                          std::to_string(shape.intermediate),
                                          "--experts",
                                          std::to_string(shape.experts),
                                          "--topk",
                                          std::to_string(shape.topk),
                                          "--routing",
                                          stem + ".npy",
                                          "--tensors",
                                          findings[0].file,
                                          "--json",
                                          "-"};
    if (direction == Direction::kBackward) arguments.emplace_back("--backward");
    const CommandResult replayed = run_command(arguments);
    ASSERT_EQ(replayed.status, 0) << replayed.err;
    const cli::LayerResult expected = job.arrays.expected(WeightGradientTime::kNow);
    const bool backward = direction == Direction::kBackward;
    const std::vector<BFloat16>& values = backward ? expected.dx : expected.y;
    const uint64_t sum = io::checksum(values.data(), static_cast<int64_t>(values.size()), 0);
    EXPECT_EQ(replayed.json()["checksum"][backward ? "dx" : "y"], io::to_hex16(sum));
  }
}

TEST(Verifier, KeepsToItsTurnsAndItsBudget) {
  const RandomLayer layer = small_layer(17, {2}, 4);
  {
    VerifiedJob job(layer, "fusion=layer", {.every = 3, .budget = 1});
    for (int step = 1; step <= 7; ++step) {
      job.run();
      job.verifier->end_step();
      const VerifierCounts counts = job.verifier->counts();
      EXPECT_EQ(counts.forward_checks + counts.backward_checks, step / 3) << "step " << step;
    }
  }
  {
    VerifiedJob job(layer, "fusion=layer", {.every = 1, .budget = 1e-9});
    for (int step = 0; step < 5; ++step) {
      job.run();
      job.verifier->end_step();
    }
    EXPECT_EQ(job.verifier->counts().forward_checks, 1);
    EXPECT_EQ(job.verifier->counts().backward_checks, 0);
  }
  {
    VerifiedJob job(layer, "fusion=layer", {.every = 1, .budget = 1, .layers = {"layer 2"}});
    job.run();
    job.verifier->end_step();
    EXPECT_EQ(job.verifier->counts().forward_checks, 0);
  }
}

TEST(Verifier, RefusesWhatIsWrong) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  Group group(options);
  expect_error(Status::kInvalidArgument, "every: 0", [&] { Verifier(group, {.every = 0}); });
  expect_error(Status::kInvalidArgument,
               "budget: ", [&] { Verifier(group, {.budget = std::numeric_limits<double>::quiet_NaN()}); });
  expect_error(Status::kInvalidArgument, "budget: 0", [&] { Verifier(group, {.budget = 0}); });
  expect_error(Status::kInvalidArgument, "rank_names: 2", [&] { Verifier(group, {.rank_names = {"a", "b"}}); });
  expect_error(Status::kInvalidArgument, "folder: '/nowhere'", [&] { Verifier(group, {.folder = "/nowhere"}); });
}

TEST(Verifier, SaysWhatItNeeds) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = 2;
  Group group(options);
  const Verifier verifier(group, {});
  const LayerConfig config{{256, 128, 8, 2}, {}};
  const VerifierMemory forward = verifier.memory_need(config, Direction::kForward, 100);
  EXPECT_EQ(forward.expert_bytes, 3u * 256 * 128 * 2);  // one expert, whatever their number
  EXPECT_EQ(forward.result_bytes, 100u * 256 * 2 + 100u * 2 * 8);
  const VerifierMemory backward = verifier.memory_need(config, Direction::kBackward, 100);
  EXPECT_EQ(backward.expert_bytes, 2u * 3 * 256 * 128 * 2);
}

}  // namespace
}  // namespace uniep::test
