#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/parser_forward.h"
#include "io/synthetic.h"
#include "uniep/uniep.h"

namespace uniep::cli {

inline constexpr int kHopperSms = 132;  // of an H100 or H200 in full

// What a forward keeps for its backward, in one word: save.xg and save.z of both directions.
enum class SaveWay { kAsScheduled, kKeep, kRedispatch, kRows, kRecompute };
// Sets both, where a way was given. Throws Error(kInvalidArgument) where the Schedule names one of them, too.
void set_saves(PartialSchedule& schedule, SaveWay way);

// "auto", key=value,..., flat JSON, or a file with any of them.
PartialSchedule read_schedule(const std::string& option, const std::string& text);

// The options that say which layer is meant, on how many ranks and by which engine. The defaults make a small layer.
struct LayerOptions {
  EngineKind engine = EngineKind::kAuto;
  int ranks = 4;
  std::vector<int64_t> tokens_given = {256};  // of every rank, or of each
  LayerShape shape = {256, 128, 16, 4};
  std::string routing = "uniform";  // a kind, or a .npy file
  uint64_t seed = 1;
  int workers = 0;
  Numerics numerics;
  PartialSchedule schedule;
  PartialSchedule schedule_backward;  // what differs from `schedule`
  SaveWay save = SaveWay::kAsScheduled;
  std::string tuned;          // a file of `uniep tune`, or empty
  bool tuned_strict = false;  // it has to have an entry for this layer

  // T of each rank. Throws Error(kInvalidArgument) where the list has another length than there are ranks.
  std::vector<int64_t> tokens() const;
  // Throws Error(kInvalidArgument) where no rank has a token. `what`: the option that needs some, and why.
  void require_tokens(std::string_view what) const;
  bool routing_is_file() const;
  LayerConfig config() const { return {shape, numerics}; }

  // The fields that were given for a direction.
  PartialSchedule given(Direction direction) const;
  // Each direction's schedule, filled, after the sizes have been checked; Error(kInvalidArgument) lists all violated
  // rules.
  Schedule resolved(Direction direction, const Machine& machine, Operation operation = Operation::kLayer) const;
};

void add_layer_options(CLI::App& app, LayerOptions& options);
// --tuned and --tuned-strict: of commands whose calls run under chosen_schedule().
void add_tuned_options(CLI::App& app, LayerOptions& options);
// --activation, --router-weight and --bias; add_layer_options() has them.
void add_activation_options(CLI::App& app, Numerics& numerics);
void add_save_option(CLI::App& app, SaveWay& save);
// --devices, a list of GPUs.
void add_devices_option(CLI::App& app, std::vector<int>& devices, const std::string& description);

// "cpu", "cuda" or "auto"; "bf16", "fp32" or "main_grad".
const char* engine_name(EngineKind engine);
const char* weight_gradient_name(WeightGradient mode);

// A Hopper GPU for each rank, as a schedule sees it, for what is asked where there is none.
Machine absent_gpu(const LayerOptions& options);

// The ids of the global batch, [sum T, K]: synthetic, or from the file that --routing names, whose every id is checked.
std::vector<int32_t> make_ids(const LayerOptions& options);

// The batch placed on the ranks, with router weights of one: for what needs no tensors.
Placement place_ids(const LayerOptions& options, const std::vector<int32_t>& ids);

}  // namespace uniep::cli
