#include "cli/layer_inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>

#include "cli/memory_limit.h"
#include "cli/options.h"
#include "io/extents.h"
#include "io/npy.h"
#include "io/quote.h"
#include "io/safetensors.h"
#include "model/activation_choice.h"
#include "model/placement.h"
#include "model/refuse.h"
#include "reference/parallel.h"

namespace uniep::cli {
namespace {

struct TensorShapes {
  std::vector<int64_t> tokens;  // x and dy
  std::vector<int64_t> slots;   // probs
  std::vector<int64_t> w1, w2, b1, b2;
};

TensorShapes shapes_of(const LayerConfig& config, int64_t tokens) {
  const LayerShape& shape = config.shape;
  return {{tokens, shape.hidden},
          {tokens, shape.topk},
          {shape.experts, z_columns(shape, config.numerics), shape.hidden},
          {shape.experts, shape.hidden, shape.intermediate},
          {shape.experts, z_columns(shape, config.numerics)},
          {shape.experts, shape.hidden}};
}

double elements(const std::vector<int64_t>& extents) {
  double product = 1;
  for (const int64_t extent : extents) product *= static_cast<double>(extent);
  return product;
}

// What the run holds at its peak, in all its processes: inputs, saved rows, outputs, and the copy of the outputs that
// is reported. `rows` with their padding.
double run_bytes(const LayerOptions& options, const TensorShapes& shapes, double rows, bool backward) {
  const double hidden = static_cast<double>(options.shape.hidden);
  const double columns = static_cast<double>(options.shape.intermediate);
  const double gradient_bytes = options.numerics.weight_gradient == WeightGradient::kBFloat16 ? 2 : 4;
  double weights = elements(shapes.w1) + elements(shapes.w2);
  if (options.numerics.bias) weights += elements(shapes.b1) + elements(shapes.b2);
  double bytes = 2 * weights + 2 * elements(shapes.tokens) * (backward ? 6 : 3);
  bytes += rows * 2 * (2 * hidden + 5 * columns);
  if (backward) bytes += 2 * gradient_bytes * weights;
  return bytes;
}

// Of all ranks: a capacity each, or the slots, of which every expert that has any is padded.
double most_rows(const LayerOptions& options, int64_t slots, int64_t capacity) {
  if (capacity > 0) return static_cast<double>(capacity) * options.ranks;
  const int64_t padded = std::min(slots, options.shape.experts);
  return static_cast<double>(slots) + static_cast<double>(padded) * (kRowAlignment - 1);
}

void check_file_shape(const std::string& option, const std::string& file, const std::string& tensor,
                      const std::vector<int64_t>& shape, const std::vector<int64_t>& expected) {
  if (shape == expected) return;
  refuse(fmt::format("{}: {}: {} has shape {}; must be {} as the options say", option, io::quote_path(file), tensor,
                     io::shape_text(shape), io::shape_text(expected)));
}

// The tensors of --tensors, if there is such a file.
class TensorFile {
 public:
  TensorFile(const std::string& path, bool bias) : path_(path) {
    if (path.empty()) return;
    file_ = naming_option("--tensors", [&] { return io::open_safetensors(path); });
    constexpr std::array<std::string_view, 7> kNames = {"x", "dy", "probs", "w1", "w2", "b1", "b2"};
    const auto* const end = bias ? kNames.end() : kNames.end() - 2;
    for (const auto& [name, tensor] : file_->tensors()) {
      if (std::find(kNames.begin(), end, name) != end) continue;
      refuse(fmt::format("--tensors: {} holds {}; legal are x, dy, probs, w1 and w2{}", io::quote_path(path),
                         io::quote_text(name), bias ? ", and b1 and b2" : " (b1 and b2 with --bias)"));
    }
  }

  // From the element `first` on. False where the file does not have the tensor.
  template <typename T>
  bool read(const std::string& name, const std::vector<int64_t>& expected, int64_t first, std::vector<T>& out) const {
    const io::Tensor* tensor = file_ ? file_->find(name) : nullptr;
    if (tensor == nullptr) return false;
    check_file_shape("--tensors", path_, name, tensor->shape, expected);
    naming_option("--tensors", [&] { file_->read(name, first, std::span<T>(out)); });
    return true;
  }

 private:
  std::string path_;
  std::optional<io::Safetensors> file_;
};

bool read_probs_file(const std::string& path, const std::vector<int64_t>& expected, std::vector<float>& probs) {
  if (path.empty()) return false;
  io::NpyArray array = naming_option("--probs", [&] { return io::read_npy(path); });
  check_file_shape("--probs", path, "probs", array.shape, expected);
  auto* values = std::get_if<std::vector<float>>(&array.values);
  if (values == nullptr) refuse(fmt::format("--probs: {} holds integers; must be float32", io::quote_path(path)));
  probs = std::move(*values);
  return true;
}

void check_probs(const LayerData& data, const std::string& source) {
  std::vector<int32_t> counts(data.shape.experts), experts(data.ids.size());
  const RoutingProblem problem = count_chunk(data.ids.data(), data.probs.data(), {0, data.all_tokens()}, data.shape,
                                             {counts.data(), experts.data()});
  if (problem.fault == RoutingFault::kNone) return;
  refuse(fmt::format("{}: probs of token {}, slot {} is {}; must be finite", source, problem.token, problem.slot,
                     data.probs[problem.token * data.shape.topk + problem.slot]));
}

void make_probs(const LayerOptions& options, const InputFiles& files, const TensorFile& tensors,
                const std::vector<int64_t>& expected, LayerData& data) {
  data.probs.resize(data.ids.size());
  const bool from_tensors = tensors.read("probs", expected, 0, data.probs);
  const bool from_probs = read_probs_file(files.probs, expected, data.probs);
  if (from_tensors && from_probs) refuse("--probs: --tensors holds probs, too; give them once");
  if (!from_tensors && !from_probs) {
    io::fill_probs({options.seed, 0, data.all_tokens()}, options.shape.topk, data.ids.data(), data.probs.data());
    return;
  }
  check_probs(data,
              from_probs ? "--probs: " + io::quote_path(files.probs) : "--tensors: " + io::quote_path(files.tensors));
}

constexpr int64_t kTokensAtOnce = 64;

// fill(begin, count) for all of `count` items of so many elements, by all cores.
void in_parts(int64_t count, int64_t at_once, int64_t elements, const std::function<void(int64_t, int64_t)>& fill) {
  constexpr double kWork = 20;  // flops that an element's value is like
  const double work = kWork * static_cast<double>(count) * static_cast<double>(elements);
  reference::parallel_for((count + at_once - 1) / at_once, work, [&](int64_t part) {
    const int64_t begin = part * at_once;
    fill(begin, std::min(at_once, count - begin));
  });
}

}  // namespace

LayerData make_layer_data(const LayerOptions& options, const InputFiles& files, bool backward, RankRange held,
                          int64_t capacity) {
  const LayerShape& shape = options.shape;
  LayerData data;
  data.shape = shape;
  data.tokens = options.tokens();
  data.first_rank = held.first;
  data.ids = make_ids(options);
  data.halves = is_gated(options.numerics.activation) ? 2 : 1;
  const TensorShapes shapes = shapes_of(options.config(), data.all_tokens());
  const double rows = most_rows(options, static_cast<int64_t>(data.ids.size()), capacity);
  require_memory(run_bytes(options, shapes, rows, backward), "tensors of this shape");

  const TensorFile tensors(files.tensors, options.numerics.bias);
  make_probs(options, files, tensors, shapes.slots, data);

  const int64_t first_token = data.first_token(held.first), tokens = data.tokens_of(held);
  const auto make_tokens = [&](const char* name, io::SyntheticTensor tensor, std::vector<BFloat16>& out) {
    out.resize(tokens * shape.hidden);
    if (tensors.read(name, shapes.tokens, first_token * shape.hidden, out)) return;
    in_parts(tokens, kTokensAtOnce, shape.hidden, [&](int64_t begin, int64_t count) {
      io::fill_tokens(tensor, {options.seed, first_token + begin, count}, shape.hidden,
                      out.data() + begin * shape.hidden);
    });
  };
  make_tokens("x", io::SyntheticTensor::kX, data.x);
  if (backward) make_tokens("dy", io::SyntheticTensor::kDy, data.dy);

  const int64_t first_expert = held.first * (shape.experts / options.ranks);
  const int64_t experts = held.count * (shape.experts / options.ranks);
  const auto make_weights = [&](const char* name, io::SyntheticTensor tensor, const std::vector<int64_t>& extents,
                                std::vector<BFloat16>& out) {
    const int64_t elements_of_expert = extents[1] * extents[2];
    out.resize(experts * elements_of_expert);
    if (tensors.read(name, extents, first_expert * elements_of_expert, out)) return;
    in_parts(experts, 1, elements_of_expert, [&](int64_t begin, int64_t count) {
      io::fill_weights(tensor, {options.seed, first_expert + begin, count},
                       {shape.hidden, shape.intermediate, data.halves}, out.data() + begin * elements_of_expert);
    });
  };
  make_weights("w1", io::SyntheticTensor::kW1, shapes.w1, data.w1);
  make_weights("w2", io::SyntheticTensor::kW2, shapes.w2, data.w2);
  if (!options.numerics.bias) return data;
  const auto make_biases = [&](const char* name, io::SyntheticTensor tensor, const std::vector<int64_t>& extents,
                               std::vector<BFloat16>& out) {
    out.resize(experts * extents[1]);
    if (tensors.read(name, extents, first_expert * extents[1], out)) return;
    io::fill_biases(tensor, {options.seed, first_expert, experts}, extents[1], out.data());
  };
  make_biases("b1", io::SyntheticTensor::kB1, shapes.b1, data.b1);
  make_biases("b2", io::SyntheticTensor::kB2, shapes.b2, data.b2);
  return data;
}

}  // namespace uniep::cli
