#include "train/config.h"

#include <fmt/format.h>

#include <algorithm>

#include "model/refuse.h"

namespace uniep::train {
namespace {

// Bounds the arrays of a step, so that no size overflows and a slip of the keyboard does not ask for all memory.
constexpr int64_t kMaxElements = int64_t{1} << 32;

void check_range(const char* option, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) refuse(fmt::format("{}: {}; legal are {} to {}", option, value, least, most));
}

void check_columns(const char* option, int64_t value) {
  if (value < 8 || value > 8192 || value % 8 != 0) {
    refuse(fmt::format("{}: {}; must be a multiple of 8 from 8 to 8192", option, value));
  }
}

void check_number(const char* option, double value, double most) {
  if (!(value >= 0) || value > most) refuse(fmt::format("{}: {}; legal are 0 to {}", option, value, most));
}

}  // namespace

void check(const TrainConfig& config) {
  const ModelConfig& model = config.model;
  check_columns("--hidden", model.hidden);
  check_columns("--intermediate", model.intermediate);
  check_range("--experts", model.experts, 1, 4096);
  check_range("--layers", model.layers, 1, 256);
  check_range("--sequence", model.sequence, 1, 65536);
  check_range("--batch", config.batch, 1, 65536);
  if (model.topk < 1 || model.topk > model.experts) {
    refuse(fmt::format("--topk: {}; legal are 1 to the number of experts, {}", model.topk, model.experts));
  }
  check_number("--learning-rate", config.learning_rate, 1);
  check_number("--balance-weight", config.balance_weight, 100);
  const int64_t widest = std::max({8 * model.hidden, kVocabulary, model.experts, model.topk * model.hidden});
  const int64_t tokens = config.batch * model.sequence;
  const int64_t dense = model.hidden * (2 * kVocabulary + (3 * model.hidden + model.experts + 32) * model.layers);
  if (tokens > kMaxElements / widest / model.layers || config.batch > kMaxElements / dense) {
    refuse(fmt::format("--batch: {} sequences of {} bytes are too many for {} layers of width {}", config.batch,
                       model.sequence, model.layers, model.hidden));
  }
  if (model.experts > kMaxElements / (3 * model.hidden * model.intermediate) / model.layers) {
    refuse(fmt::format("--experts: {} experts of {} x {} in {} layers are too large; at most 2^32 weights",
                       model.experts, model.hidden, model.intermediate, model.layers));
  }
}

void check(const TrainConfig& config, const ParallelConfig& parallel) {
  check(config);
  check_range("--ranks", parallel.ranks, 1, 64);
  check_range("--workers", parallel.workers, 0, 1024);
  if (parallel.engine == EngineKind::kCpu && !parallel.devices.empty()) {
    refuse("--devices: names GPUs, and the engine is cpu; give --engine cuda, too");
  }
  if (config.model.numerics.bias && parallel.verify_every > 0) {
    refuse("--verify: beside --bias, and the verifier does not check experts with biases; must be left out");
  }
  if (config.model.experts % parallel.ranks != 0) {
    refuse(fmt::format("--experts: {} can not be divided evenly over {} ranks (--ranks)", config.model.experts,
                       parallel.ranks));
  }
}

}  // namespace uniep::train
