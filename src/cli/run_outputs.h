#pragma once

#include <optional>
#include <string>

#include "cli/layer_runner.h"
#include "io/safetensors_writer.h"

namespace uniep::cli {

// Writes y, z and with backward dx, dprobs, dw1 and dw2 in global order: what an engine gives as bf16 as BF16, else
// F32.
void write_outputs(const std::string& path, const LayerConfig& config, const LayerResult& result, bool backward);

}  // namespace uniep::cli
