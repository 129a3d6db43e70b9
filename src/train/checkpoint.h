#pragma once

#include <filesystem>

#include "train/text.h"
#include "train/trainer.h"

// Checkpoints: a safetensors file with each parameter as "values/NAME", "first_moments/NAME" and "second_moments/NAME"
// (F32), and the configuration, the text's hash, the engine, the steps done and a checksum as metadata.
// docs/training.md describes it.
namespace uniep::train {

// Replaces the file atomically: whoever reads it finds the old checkpoint or the new one, whole.
void save_checkpoint(const std::filesystem::path& path, const TrainState& state, const ParameterLayout& layout,
                     const TrainConfig& config, const Text& text);

// Throws Error(kInvalidArgument) when the file is no whole checkpoint, or one of another configuration or text. Ranks,
// workers, Schedules and the number of steps to come are free.
TrainState load_checkpoint(const std::filesystem::path& path, const ParameterLayout& layout, const TrainConfig& config,
                           const Text& text);

}  // namespace uniep::train
