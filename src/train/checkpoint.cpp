#include "train/checkpoint.h"

#include <fmt/format.h>

#include <charconv>
#include <map>
#include <span>
#include <string>

#include "io/checksum.h"
#include "io/quote.h"
#include "io/safetensors.h"
#include "io/safetensors_writer.h"
#include "uniep/error.h"

namespace uniep::train {
namespace {

constexpr const char* kFormat = "uniep-checkpoint-1";
constexpr const char* kParts[] = {"values", "first_moments", "second_moments"};

// What must be equal for the bits to be equal, by the option that sets it. Doubles in full precision.
std::map<std::string, std::string> configuration(const TrainConfig& config, const Text& text) {
  const ModelConfig& model = config.model;
  return {{"hidden", std::to_string(model.hidden)},
          {"intermediate", std::to_string(model.intermediate)},
          {"experts", std::to_string(model.experts)},
          {"topk", std::to_string(model.topk)},
          {"activation", activation_text(model.numerics)},
          {"router-weight", router_weight_text(model.numerics.router_weight)},
          {"bias", model.numerics.bias ? "1" : "0"},
          {"layers", std::to_string(model.layers)},
          {"sequence", std::to_string(model.sequence)},
          {"batch", std::to_string(config.batch)},
          {"learning-rate", fmt::format("{}", config.learning_rate)},
          {"balance-weight", fmt::format("{}", config.balance_weight)},
          {"seed", std::to_string(config.seed)},
          {"text", io::to_hex16(text.hash)}};
}

// Of the steps done and all tensors, so that no single changed bit goes unseen.
std::string checksum_text(const TrainState& state) {
  uint64_t sum = io::avalanche64(static_cast<uint64_t>(state.steps_done));
  uint64_t first = 0;
  for (const std::vector<float>* part : {&state.values, &state.first_moments, &state.second_moments}) {
    sum += io::checksum(part->data(), static_cast<int64_t>(part->size()), first);
    first += part->size();
  }
  return io::to_hex16(sum);
}

[[noreturn]] void refuse_resume(const std::filesystem::path& path, const std::string& problem) {
  throw Error(Status::kInvalidArgument, "--resume: " + io::quote_path(path.native()) + " " + problem);
}

io::Safetensors open_file(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) refuse_resume(path, "does not exist");
  try {
    return io::open_safetensors(path);
  } catch (const Error& error) {
    throw Error(error.status(), std::string("--resume: ") + error.what());
  }
}

std::string metadata_value(const io::Safetensors& file, const std::filesystem::path& path, const std::string& key) {
  const auto found = file.metadata().find(key);
  // What came later than the first checkpoints, which were made with what is the default.
  if (found == file.metadata().end() && key == "activation") return activation_text({});
  if (found == file.metadata().end() && key == "router-weight") return router_weight_text({});
  if (found == file.metadata().end() && key == "bias") return "0";
  if (found == file.metadata().end()) refuse_resume(path, "is no whole checkpoint: its metadata lacks " + key);
  return found->second;
}

void check_configuration(const io::Safetensors& file, const std::filesystem::path& path, const TrainConfig& config,
                         const Text& text) {
  for (const auto& [key, value] : configuration(config, text)) {
    const std::string theirs = metadata_value(file, path, key);
    if (theirs == value) continue;
    if (key == "text")
      refuse_resume(path, "was trained on another text (--text); give the same files in the same order");
    refuse_resume(path, fmt::format("was trained with --{} {}; this run has {}", key, io::quote_text(theirs), value));
  }
}

const char* engine_text(EngineKind engine) {
  return engine == EngineKind::kCpu ? "cpu" : "cuda";
}

// Unlike the options above it is not in a file from before it was kept.
EngineKind engine_of(const io::Safetensors& file, const std::filesystem::path& path) {
  const auto found = file.metadata().find("engine");
  if (found == file.metadata().end()) return EngineKind::kAuto;
  for (const EngineKind engine : {EngineKind::kCpu, EngineKind::kCuda}) {
    if (found->second == engine_text(engine)) return engine;
  }
  refuse_resume(path, "is no whole checkpoint: engine is " + io::quote_text(found->second));
}

int64_t steps_done(const io::Safetensors& file, const std::filesystem::path& path) {
  const std::string text = metadata_value(file, path, "steps_done");
  int64_t steps = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), steps);
  if (error != std::errc() || end != text.data() + text.size() || steps < 0) {
    refuse_resume(path, "is no whole checkpoint: steps_done is " + io::quote_text(text));
  }
  return steps;
}

std::vector<float> read_part(const io::Safetensors& file, const std::filesystem::path& path,
                             const ParameterLayout& layout, const std::string& part) {
  std::vector<float> values(layout.count());
  for (const ParameterTensor& tensor : layout.tensors()) {
    const std::string name = part + "/" + tensor.name;
    const io::Tensor* stored = file.find(name);
    if (stored == nullptr || stored->dtype != "F32" || stored->shape != tensor.shape) {
      refuse_resume(path, "is no whole checkpoint: the tensor " + name + " is missing or has another type or shape");
    }
    file.read(name, 0, std::span(values).subspan(tensor.offset, tensor.count));
  }
  return values;
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, const TrainState& state, const ParameterLayout& layout,
                     const TrainConfig& config, const Text& text) {
  std::map<std::string, std::string> metadata = configuration(config, text);
  metadata["format"] = kFormat;
  if (state.engine != EngineKind::kAuto) metadata["engine"] = engine_text(state.engine);
  metadata["steps_done"] = std::to_string(state.steps_done);
  metadata["checksum"] = checksum_text(state);
  std::vector<io::TensorSpec> specs;
  for (const char* part : kParts) {
    for (const ParameterTensor& tensor : layout.tensors()) {
      specs.push_back({std::string(part) + "/" + tensor.name, "F32", tensor.shape});
    }
  }
  io::SafetensorsWriter writer(path, specs, metadata);
  // The flat arrays hold the tensors in the order announced, without gaps.
  for (const std::vector<float>* part : {&state.values, &state.first_moments, &state.second_moments}) {
    writer.append(std::as_bytes(std::span(*part)));
  }
  writer.commit();
}

TrainState load_checkpoint(const std::filesystem::path& path, const ParameterLayout& layout, const TrainConfig& config,
                           const Text& text) {
  const io::Safetensors file = open_file(path);
  const auto format = file.metadata().find("format");
  if (format == file.metadata().end() || format->second != kFormat) {
    refuse_resume(path, fmt::format("is no checkpoint of uniep train (its metadata lacks format = {})", kFormat));
  }
  check_configuration(file, path, config, text);
  TrainState state;
  state.engine = engine_of(file, path);
  state.steps_done = steps_done(file, path);
  state.values = read_part(file, path, layout, kParts[0]);
  state.first_moments = read_part(file, path, layout, kParts[1]);
  state.second_moments = read_part(file, path, layout, kParts[2]);
  if (checksum_text(state) != metadata_value(file, path, "checksum")) {
    refuse_resume(path, "is damaged: its checksum does not match its contents");
  }
  return state;
}

}  // namespace uniep::train
