#pragma once

#include <optional>
#include <string>

#include "cli/layer_options.h"
#include "cli/layer_runner.h"

namespace uniep::cli {

// Where the tensors of a batch come from; what no file gives is synthetic.
struct InputFiles {
  std::string probs;    // .npy, or empty
  std::string tensors;  // .safetensors, or empty
};

// The global batch that the options describe, with x, dy and weights of those of its ranks that are `held`. Throws
// Error: kInvalidArgument for a file whose contents or shapes do not fit, kIo for one that can not be read,
// kOutOfMemory when the tensors and the results are more than there is memory; `capacity`: rows that each rank takes
// memory for, 0: those of the routing.
LayerData make_layer_data(const LayerOptions& options, const InputFiles& files, bool backward, RankRange held,
                          int64_t capacity = 0);

}  // namespace uniep::cli
