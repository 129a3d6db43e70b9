#pragma once

#include <string>

#include "cli/layer_runner.h"
#include "io/safetensors_writer.h"

namespace uniep::cli {

// A file for y, z and with backward dx, dprobs, dw1 and dw2 in global order: what an engine gives as bf16 as BF16, else
// F32. It is opened before the run, so that a path that can not be written is noticed at once.
inline constexpr int64_t kNoZ = -1;  // in the place of its rows

class OutputTensors {
 public:
  // `rows`: routed rows of all ranks.
  OutputTensors(const std::string& path, const LayerConfig& config, int64_t tokens, int64_t rows, bool backward);
  void write(const LayerResult& result);

 private:
  bool backward_;
  io::SafetensorsWriter writer_;
};

}  // namespace uniep::cli
