// A legal Schedule has a kernel, and the kernel has exactly what the Schedule says: nothing is clamped or refused
// behind the rules. Needs no GPU and compiles nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "engine/cuda/calls/call_kernels.h"
#include "engine/cuda/calls/exchange_request.h"
#include "engine/cuda/calls/layer_tiles.h"
#include "engine/cuda/calls/lent_slices.h"
#include "engine/cuda/kernels/exchange.h"
#include "model/activation_choice.h"
#include "program/build.h"
#include "program/kernel_memory.h"
#include "program/schedule_space.h"
#include "support/branch_counts.h"
#include "support/models.h"
#include "support/random_schedule_case.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

using test::below;
using test::pick;
using test::RandomBits;
using test::ScheduleCase;

Machine hopper(int ranks, int workers) {
  Machine machine;
  machine.engine = EngineKind::kCuda;
  machine.ranks = ranks;
  machine.workers = workers;
  return machine;
}

ScheduleCase forward_case(RandomBits& random) {
  ScheduleCase c;
  c.machine =
      hopper(pick(random, std::vector<int>{1, 2, 4, 8}), pick(random, std::vector<int>{1, 2, 5, 8, 66, 131, 132}));
  c.shape = {8 * (1 + int64_t{below(random, 900)}), 8 * (1 + int64_t{below(random, 900)}),
             c.machine.ranks * (1 + int64_t{below(random, 20)}), 1};
  if (below(random, 3) == 0) c.numerics.combine_groups = c.machine.ranks;
  return c;
}

// Every launch's kernel, field by field.
void expect_kernels(const Schedule& schedule, const Numerics& numerics) {
  SCOPED_TRACE(to_text(schedule));
  ASSERT_NO_THROW(require_instantiable(schedule, numerics, Direction::kForward));
  for (const LaunchStages& stages : launch_stages(schedule, Direction::kForward)) {
    const LayerKernelConfig config = launch_config(schedule, numerics, Direction::kForward, stages);
    for (const GemmStage stage : {GemmStage::kFc1, GemmStage::kFc2}) {
      if (!(stage == GemmStage::kFc1 ? stages.first_gemm : stages.second_gemm)) continue;
      const TileShape tile = schedule.tile_of(stage);
      EXPECT_EQ(tile, (TileShape{kTileM, config.gemm.tile_n, kTileK, config.gemm.pipeline_stages, config.gemm.cluster,
                                 Pipeline::kCooperative}));
    }
    EXPECT_EQ(config.gemm.cluster, cluster_of(schedule, Direction::kForward));
    EXPECT_EQ(config.gemm.ring_stage_bytes, schedule.comm.chunk_bytes);
    EXPECT_EQ(config.gemm.copy_stages, schedule.comm.stages);
    EXPECT_EQ(config.on_sms, schedule.comm.where == CommWhere::kSms);
    EXPECT_EQ(config.combine == CombineKind::kEpilogue, schedule.combine.transport == CombineTransport::kEpilogue);
    EXPECT_LE(shared_memory_bytes(config.gemm), kSharedMemoryLimit);
    EXPECT_EQ(shared_memory_bytes(config.gemm), layer_kernel_bytes(config.gemm.tile_n, config.gemm.pipeline_stages,
                                                                   schedule.comm.chunk_bytes, schedule.comm.stages));
  }
}

TEST(ScheduleKernels, TheDefaultIsWhatIsBuilt) {
  const LayerShape shape{4096, 1536, 128, 8};
  const Schedule schedule = resolve({}, {.direction = Direction::kForward, .shape = shape, .machine = hopper(2, 132)});
  expect_kernels(schedule, {});
  const LayerKernelConfig config =
      launch_config(schedule, {}, Direction::kForward, launch_stages(schedule, Direction::kForward).front());
  EXPECT_EQ(layer_request(config).description(), layer_request(default_layer_configs().front()).description());
  EXPECT_EQ(config.gemm.pipeline_stages, 4);
  EXPECT_EQ(config.gemm.copy_stages, 3);
  EXPECT_EQ(config.gemm.ring_stage_bytes, 4096);
}

TEST(ScheduleKernels, SampledLegalSchedulesHaveThem) {
  RandomBits random(41);
  int own_tiles = 0, pairs = 0, narrow = 0, deep_rings = 0;
  for (int round = 0; round < 3000; ++round) {
    const ScheduleCase c = forward_case(random);
    const Schedule schedule = sample_legal(
        random(), {.direction = Direction::kForward, .shape = c.shape, .numerics = c.numerics, .machine = c.machine});
    expect_kernels(schedule, c.numerics);
    own_tiles += schedule.stage_tile[0] != TileOverride{} || schedule.stage_tile[1] != TileOverride{};
    pairs +=
        schedule.fusion != Fusion::kLayer && schedule.tile_of(GemmStage::kFc1) != schedule.tile_of(GemmStage::kFc2);
    narrow += schedule.tile.n == 128;
    deep_rings += schedule.comm.stages > 3;
    if (HasFailure()) return;
  }
  EXPECT_GT(own_tiles, 100);
  EXPECT_GT(pairs, 20);
  EXPECT_GT(narrow, 300);
  EXPECT_GT(deep_rings, 300);
}

int bytes_of(const Schedule& schedule, GemmStage stage) {
  const TileShape tile = schedule.tile_of(stage);
  const CommSchedule& comm = schedule.comm;
  return stage == GemmStage::kDgradFc2 ? gradient_kernel_bytes(tile.n, tile.stages, comm.chunk_bytes, comm.stages)
                                       : layer_kernel_bytes(tile.n, tile.stages, comm.chunk_bytes, comm.stages);
}

TileShape tile_of(const GemmConfig& gemm) {
  return {kTileM, gemm.tile_n, kTileK, gemm.pipeline_stages, gemm.cluster, Pipeline::kCooperative};
}

// Every launch's kernel of a backward Schedule. Returns how many launches have weight gradients beside dgrad FC1.
int expect_backward_kernels(const Schedule& schedule, const Numerics& numerics) {
  SCOPED_TRACE(to_text(schedule));
  constexpr Direction kBackward = Direction::kBackward;
  int filled = 0;
  EXPECT_NO_THROW(require_instantiable(schedule, numerics, kBackward));
  for (const LaunchStages& stages : launch_stages(schedule, kBackward)) {
    if (is_weight_gradients_alone(stages)) {
      for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
        const GemmConfig gemm = weight_gradient_config(schedule, numerics, stage);
        EXPECT_EQ(tile_of(gemm), schedule.tile_of(stage));
        EXPECT_EQ(shared_memory_bytes(gemm), standalone_kernel_bytes(gemm.tile_n, gemm.pipeline_stages));
      }
      continue;
    }
    const LayerKernelConfig config = launch_config(schedule, numerics, kBackward, stages);
    const bool first = config.gemms == LayerGemms::kFirstGradient, both = config.gemms == LayerGemms::kGradients;
    const GemmStage stage = first ? GemmStage::kDgradFc2 : GemmStage::kDgradFc1;
    EXPECT_EQ(both, schedule.fusion == Fusion::kLayer);
    EXPECT_EQ(first, !both && (stages.first_gemm || (stages.dispatch && !stages.second_gemm)));
    EXPECT_EQ(tile_of(config.gemm), schedule.tile_of(stage));
    EXPECT_EQ(config.gemm.cluster, cluster_of(schedule, kBackward));
    if (both) {
      EXPECT_EQ(tile_of(first_gemm(config)), schedule.tile_of(GemmStage::kDgradFc2));
    }
    const int other = both ? bytes_of(schedule, GemmStage::kDgradFc2) : 0;
    EXPECT_EQ(shared_memory_bytes(config.gemm), std::max(bytes_of(schedule, stage), other));
    EXPECT_EQ(shared_memory_bytes(first_gemm(config)), shared_memory_bytes(config.gemm));
    EXPECT_LE(shared_memory_bytes(config.gemm), kSharedMemoryLimit);
    EXPECT_EQ(config.filled != FilledGradients::kNone, stages.wgrad_fc1);
    EXPECT_EQ(config.mixed, schedule.wgrad == WgradOrder::kMixed);
    if (!stages.wgrad_fc1) continue;
    ++filled;
    EXPECT_EQ(schedule.tile_of(GemmStage::kWgradFc2).n, config.gemm.tile_n);
    EXPECT_EQ(schedule.tile_of(GemmStage::kWgradFc1).stages, config.gemm.pipeline_stages);
  }
  return filled;
}

TEST(ScheduleKernels, SampledBackwardSchedulesHaveThem) {
  RandomBits random(43);
  int filled = 0, none = 0, narrow = 0, layer = 0, layer_after = 0, mixed = 0;
  for (int round = 0; round < 2000; ++round) {
    ScheduleCase c = forward_case(random);
    c.numerics.weight_gradient = static_cast<WeightGradient>(below(random, 3));
    const Schedule schedule = sample_legal(
        random(), {.direction = Direction::kBackward, .shape = c.shape, .numerics = c.numerics, .machine = c.machine});
    filled += expect_backward_kernels(schedule, c.numerics);
    none += schedule.fusion == Fusion::kNone;
    layer += schedule.fusion == Fusion::kLayer;
    layer_after += schedule.fusion == Fusion::kLayer && schedule.wgrad == WgradOrder::kAfter;
    mixed += schedule.wgrad == WgradOrder::kMixed;
    narrow += schedule.tile_of(GemmStage::kDgradFc2).n == 128;
    if (HasFailure()) return;
  }
  EXPECT_GT(filled, 100);
  EXPECT_GT(none, 100);
  EXPECT_GT(narrow, 100);
  EXPECT_GT(layer - layer_after, 50);
  EXPECT_GT(layer_after, 50);
  EXPECT_GT(mixed, 10);
}

// The fields that decide a kernel, every value of them: legal exactly where the kernel can be built.
TEST(ScheduleKernels, AreBuildableExactlyWhereTheScheduleIsLegal) {
  const LayerShape shape{4096, 1536, 128, 8};
  const Machine machine = hopper(2, 132);
  Schedule schedule = resolve({}, {.direction = Direction::kForward, .shape = shape, .machine = machine});
  int legal = 0, illegal = 0;
  for (const int n : {128, 256}) {
    for (int stages = 2; stages <= 8; ++stages) {
      for (int chunk_bytes = 512; chunk_bytes <= 65536; chunk_bytes *= 2) {
        for (int copy_stages = 1; copy_stages <= 16; ++copy_stages) {
          schedule.tile.n = n;
          schedule.tile.stages = stages;
          schedule.comm.chunk_bytes = chunk_bytes;
          schedule.comm.stages = copy_stages;
          const bool is_legal =
              validate(schedule, {.direction = Direction::kForward, .shape = shape, .machine = machine}).empty();
          bool is_built = true;
          try {
            require_instantiable(schedule, {}, Direction::kForward);
          } catch (const Error&) {
            is_built = false;
          }
          ASSERT_EQ(is_legal, is_built) << to_text(schedule);
          (is_legal ? legal : illegal) += 1;
        }
      }
    }
  }
  EXPECT_GT(legal, 300);
  EXPECT_GT(illegal, 300);
}

ExchangeConfig config_of(const Schedule& schedule, Operation operation) {
  return operation == Operation::kDispatch ? dispatch_config(schedule.comm.chunk_bytes, schedule.comm.stages)
                                           : combine_config(schedule.comm.chunk_bytes, schedule.comm.stages);
}

TEST(ScheduleKernels, AnExchangesDefaultIsWhatMeasuredBest) {
  const LayerShape shape{7168, 2048, 256, 8};
  const auto filled = [&](Operation operation, Numerics numerics = {}, const char* given = "") {
    return resolve(PartialSchedule::parse(given), {.direction = Direction::kForward,
                                                   .shape = shape,
                                                   .numerics = numerics,
                                                   .machine = hopper(4, 132),
                                                   .operation = operation});
  };
  const Schedule there = filled(Operation::kDispatch), back = filled(Operation::kCombine);
  EXPECT_EQ(there.queue, QueueKind::kDynamic);
  EXPECT_EQ(there.comm.chunk_bytes, 4096);
  EXPECT_EQ(there.comm.stages, 3);
  EXPECT_EQ(back.queue, QueueKind::kDynamic);
  EXPECT_EQ(back.comm.chunk_bytes, 8192);
  EXPECT_EQ(back.comm.stages, 2);
  EXPECT_EQ(config_of(back, Operation::kCombine).warps, 13);
  EXPECT_EQ(back.combine.column_chunks, 8);
  Numerics groups;
  groups.combine_groups = 4;
  EXPECT_EQ(filled(Operation::kCombine, groups).combine.column_chunks, 2);
  EXPECT_EQ(filled(Operation::kCombine, {}, "comm.chunk_bytes=4096").comm.stages, 3);
  EXPECT_EQ(filled(Operation::kDispatch, {}, "comm.stages=8").comm.chunk_bytes, 1024);
  EXPECT_EQ(filled(Operation::kDispatch, {}, "comm.dispatch_sms=132").comm.where, CommWhere::kSms);
  EXPECT_THROW(filled(Operation::kDispatch, {}, "comm.dispatch_sms=133"), Error);
  EXPECT_THROW(filled(Operation::kDispatch, {}, "comm.chunk_bytes=16384"), Error);
  EXPECT_THROW(filled(Operation::kCombine, {}, "tile.m=64"), Error);
}

TEST(ScheduleKernels, AnExchangeIsBuildableExactlyWhereTheScheduleIsLegal) {
  const LayerShape shape{4096, 1536, 128, 8};
  const Machine machine = hopper(2, 132);
  for (const Operation operation : {Operation::kDispatch, Operation::kCombine}) {
    Schedule schedule =
        resolve({}, {.direction = Direction::kForward, .shape = shape, .machine = machine, .operation = operation});
    int legal = 0, illegal = 0;
    for (int chunk_bytes = 512; chunk_bytes <= 65536; chunk_bytes *= 2) {
      for (int stages = 1; stages <= 16; ++stages) {
        schedule.comm.chunk_bytes = chunk_bytes;
        schedule.comm.stages = stages;
        const bool is_legal =
            validate(schedule,
                     {.direction = Direction::kForward, .shape = shape, .machine = machine, .operation = operation})
                .empty();
        try {
          const ExchangeConfig config = config_of(schedule, operation);
          EXPECT_TRUE(is_legal) << to_text(schedule);
          EXPECT_EQ(config.chunk_bytes, chunk_bytes);
          EXPECT_EQ(config.stages, stages);
          EXPECT_LE(exchange_shared_bytes(config), kSharedMemoryLimit);
        } catch (const Error&) {
          EXPECT_FALSE(is_legal) << to_text(schedule);
        }
        (is_legal ? legal : illegal) += 1;
      }
    }
    EXPECT_GT(legal, 20);
    EXPECT_GT(illegal, 20);
  }
}

// A default layer's Schedule is legal for its exchanges, too.
TEST(ScheduleKernels, ALayersDefaultSuitsItsExchanges) {
  RandomBits random(43);
  for (int round = 0; round < 300; ++round) {
    const ScheduleCase c = forward_case(random);
    const Schedule schedule = c.filled();
    for (const Operation operation : {Operation::kDispatch, Operation::kCombine}) {
      const std::vector<std::string> violations = validate(schedule, {.direction = Direction::kForward,
                                                                      .shape = c.shape,
                                                                      .numerics = c.numerics,
                                                                      .machine = c.machine,
                                                                      .operation = operation});
      ASSERT_TRUE(violations.empty()) << to_text(schedule) << test::listed(violations);
      EXPECT_NO_THROW(config_of(schedule, operation));
    }
  }
}

// Whatever a Schedule says of workers, a Program without GEMMs has them all.
TEST(ScheduleKernels, AnExchangeRunsOnTheWorkersThatItAsksFor) {
  const LayerConfig config{{256, 128, 8, 2}, {}};
  Machine machine = hopper(1, 8);
  for (const char* const given : {"", "comm.combine_sms=8", "comm.combine_sms=3,comm.reserve_sms=2"}) {
    const Schedule schedule = resolve(PartialSchedule::parse(given), {.direction = Direction::kForward,
                                                                      .shape = config.shape,
                                                                      .machine = machine,
                                                                      .operation = Operation::kCombine});
    const int wanted = schedule.comm.combine_sms > 0 ? schedule.comm.combine_sms : 8;
    const ProgramRequest request = exchange_program(config, schedule, ProgramPart::kCombine, machine.workers);
    EXPECT_EQ(request.workers - schedule.comm.reserve_sms, wanted) << given;
  }
}

std::set<std::string> names_of(const std::vector<KernelRequest>& requests) {
  std::set<std::string> names;
  for (const KernelRequest& request : requests) names.insert(request.function + " " + request.description());
  return names;
}

// Whatever a job calls under its Schedules is compiled before it: each launch of now, later and none, and weight
// gradients on any number of SMs that are whole clusters, in both forms.
TEST(ScheduleKernels, AJobsListHasEachLaunchsKernel) {
  RandomBits random(44);
  int filled = 0, alone = 0, apart = 0;
  for (int round = 0; round < 500; ++round) {
    ScheduleCase c = forward_case(random);
    c.machine.workers = 132;
    const Schedule forward = sample_legal(
        random(), {.direction = Direction::kForward, .shape = c.shape, .numerics = c.numerics, .machine = c.machine});
    const Schedule backward = sample_legal(
        random(), {.direction = Direction::kBackward, .shape = c.shape, .numerics = c.numerics, .machine = c.machine});
    SCOPED_TRACE(to_text(backward));
    const std::set<std::string> listed =
        names_of(layer_kernels({c.shape, c.numerics}, c.machine.ranks, c.machine.workers, forward, backward));
    const auto expect_listed = [&](const KernelRequest& request) {
      EXPECT_TRUE(listed.contains(request.function + " " + request.description())) << request.description();
    };
    for (const LaunchStages& stages : launch_stages(forward, Direction::kForward)) {
      expect_listed(layer_request(launch_config(forward, c.numerics, Direction::kForward, stages)));
    }
    for (const bool now : {true, false}) {
      for (const LaunchStages& stages : launch_stages(backward, Direction::kBackward, now)) {
        if (is_weight_gradients_alone(stages)) {
          ++alone;
          continue;
        }
        filled += stages.wgrad_fc1;
        apart += !now;
        expect_listed(layer_request(launch_config(backward, c.numerics, Direction::kBackward, stages)));
      }
    }
    for (const GemmStage stage : {GemmStage::kWgradFc2, GemmStage::kWgradFc1}) {
      for (const bool by_address : {false, true}) {
        expect_listed(gemm_request(
            weight_gradient_kernel(backward, c.numerics, {stage, c.shape.experts / c.machine.ranks, by_address, 16})));
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(filled, 50);
  EXPECT_GT(alone, 50);
  EXPECT_GT(apart, 100);
}

// Each with its own activation, and FC1's of an expert without a gate, too.
TEST(ScheduleKernels, RealModelsHaveThem) {
  uniep::test::BranchCounts branches;
  const auto look = [&](const uniep::test::Model& model, const char* given) {
    SCOPED_TRACE(model.name + std::string(", ") + given);
    const LayerConfig config = model.config();
    const Machine machine = hopper(8, 132);
    const auto resolved = [&](Direction direction, const char* fields) {
      return resolve(PartialSchedule::parse(fields),
                     {.direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = machine});
    };
    const Schedule backward = resolved(Direction::kBackward, given);
    const std::set<std::string> listed = names_of(
        layer_kernels(config, machine.ranks, machine.workers, resolved(Direction::kForward, "auto"), backward));
    const auto count = [&](const std::vector<std::string>& words) {
      return std::count_if(listed.begin(), listed.end(), [&](const std::string& name) {
        return std::all_of(words.begin(), words.end(),
                           [&](const std::string& word) { return name.find(word + " ") != std::string::npos; });
      });
    };
    const int kind = static_cast<int>(activation_kind(config.numerics));
    const std::string activation = "UNIEP_ACTIVATION=" + std::to_string(kind);
    const bool on_input = model.router_weight == RouterWeight::kInput;
    const std::string place = std::string("UNIEP_WEIGHS_Z=") + (on_input ? "1" : "0");
    const auto gemms_of = [](LayerGemms gemms) { return "UNIEP_GEMMS=" + std::to_string(static_cast<int>(gemms)); };
    const bool mixed = backward.wgrad == WgradOrder::kMixed, one_launch = backward.fusion == Fusion::kLayer;
    const std::string with_z = gemms_of(one_launch ? LayerGemms::kGradients : LayerGemms::kFirstGradient);
    for (const std::string& gemms : {gemms_of(LayerGemms::kForward), with_z}) {
      EXPECT_GE(count({gemms, activation, place}), 1) << gemms;
      EXPECT_EQ(count({gemms}), count({gemms, activation, place})) << gemms;
    }
    branches.count("weight gradients beside dgrads", mixed);
    branches.count("weight gradients behind dgrads in one launch", one_launch && !mixed);
    branches.count("dgrads in launches of their own", !one_launch);
    EXPECT_EQ(count({"UNIEP_MIXED=1"}) > 0, mixed);
    const bool gated = is_gated(config.numerics.activation);
    const std::string of_dgrad_fc1 =
        "UNIEP_ACTIVATION=" +
        std::to_string(static_cast<int>(gated ? ActivationKind::kSwiglu : ActivationKind::kRelu2));
    const std::string dgrad_fc1 = gemms_of(LayerGemms::kSecondGradient);
    EXPECT_EQ(count({dgrad_fc1}) > 0, !one_launch);
    EXPECT_EQ(count({dgrad_fc1}), count({dgrad_fc1, of_dgrad_fc1}));
  };
  for (const uniep::test::Model& model : uniep::test::models()) {
    for (const char* const given : {"auto", "fusion=pairs"}) look(model, given);
  }
  branches.expect_all_taken();
}

// Lent workers' CTAs follow each other for as long as the launch takes, and half as long again.
TEST(LentSlices, LastAsLongAsTheLaunch) {
  program::RankProgram p{};
  p.direction = Direction::kForward;
  p.workers = 132;
  p.topk = 8;
  p.wgrad_fc2 = {4096, 1536, 128, 256};
  p.wgrad_fc1 = {3072, 4096, 128, 256};
  const program::LaunchStages forward{.dispatch = true, .first_gemm = true, .second_gemm = true, .combine = true};
  EXPECT_EQ(lent_slices(p, forward).ns, 0) << "nobody is lent";
  p.lent_workers = 16;
  uniep::test::BranchCounts branches;
  for (const int32_t tokens : {0, 1, 512, 8192, 32768}) {
    for (const bool with_gradients : {false, true}) {
      p.tokens = tokens;
      program::LaunchStages stages = forward;
      stages.wgrad_fc2 = stages.wgrad_fc1 = with_gradients;
      const double flops = 6.0 * tokens * 8 * 4096 * 1536 * (with_gradients ? 2 : 1), ns = flops / (132 * 5000);
      const LentSlices slices = lent_slices(p, stages);
      const int32_t after = slices.ctas / 16;
      EXPECT_EQ(slices.ctas % 16, 0);
      EXPECT_LE(after, 24);
      EXPECT_GE(slices.ns, 400'000);
      EXPECT_GE(static_cast<double>((after + 1) * slices.ns), 1.49 * ns) << tokens;
      EXPECT_LE(static_cast<double>(after * slices.ns), 1.51 * ns) << tokens;
      branches.count("one slice", after == 0);
      branches.count("several", after > 0);
      branches.count("longer slices", slices.ns > 400'000);
    }
  }
  EXPECT_EQ(lent_slices(p, forward, 20'000).ns, lent_slices(p, forward).ns) << "of a long launch";
  p.tokens = 512;
  EXPECT_LT(lent_slices(p, forward, 20'000).ns, 400'000);
  branches.expect_all_taken();
}

}  // namespace
}  // namespace uniep::cuda
