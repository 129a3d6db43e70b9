#include "tests/cuda/device_layer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "engine/cuda/runtime/driver.h"
#include "engine/engine.h"
#include "model/elementwise.h"
#include "model/row_table.h"
#include "tests/cuda/layer_oracle.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::Random;

constexpr auto kElement = static_cast<int64_t>(sizeof(BFloat16));

std::vector<BFloat16> random_values(Random& random, int64_t count, float scale) {
  std::vector<BFloat16> values(static_cast<std::size_t>(count));
  for (BFloat16& value : values) value = to_bfloat16(static_cast<float>(random.unit() * 2 - 1) * scale);
  return values;
}

}  // namespace

CapturedCalls::~CapturedCalls() {
  const GraphFunctions functions;
  if (executable_ != nullptr) functions.destroy_executable(executable_);
  if (graph_ != nullptr) functions.destroy(graph_);
}

CapturedCalls::CapturedCalls(CapturedCalls&& other) noexcept
    : graph_(std::exchange(other.graph_, nullptr)), executable_(std::exchange(other.executable_, nullptr)) {}

DeviceLayer::DeviceLayer(const GroupOptions& options, const LayerConfig& config, Results& results,
                         const std::string& folder)
    : config_(config),
      results_(results),
      group_(options),
      schedule_(resolve({}, {.direction = Direction::kForward,
                             .shape = config.shape,
                             .numerics = config.numerics,
                             .machine = group_.machine()})),
      kernels_(group_.device(group_.first_local_rank()), folder) {
  const LayerShape& shape = config_.shape;
  weights_.shape = shape;
  weights_.w1 = random_values(random_, shape.experts * 2 * shape.intermediate * shape.hidden,
                              std::sqrt(3.0f / static_cast<float>(shape.hidden)));
  weights_.w2 = random_values(random_, shape.experts * shape.hidden * shape.intermediate,
                              std::sqrt(3.0f / static_cast<float>(shape.intermediate)));
  const int64_t of_rank = shape.experts / group_.ranks() * shape.intermediate * shape.hidden;
  for (int local = 0; local < group_.local_ranks(); ++local) {
    const int rank = rank_of(static_cast<std::size_t>(local)), device = group_.device(rank);
    device_weights_.push_back({DeviceArray(device, weights_.w1.data() + rank * 2 * of_rank, 2 * of_rank * kElement),
                               DeviceArray(device, weights_.w2.data() + rank * of_rank, of_rank * kElement)});
    auto found = std::find_if(devices_.begin(), devices_.end(), [&](const auto& own) { return own.device == device; });
    if (found == devices_.end()) {
      const ScopedDevice scope(device);
      found = devices_.insert(devices_.end(), {device, nullptr, nullptr});
      check(driver().cuStreamCreate(&found->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
      check(driver().cuEventCreate(&found->event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    }
    device_index_.push_back(static_cast<std::size_t>(found - devices_.begin()));
  }
}

DeviceLayer::~DeviceLayer() {
  for (const OfDevice& own : devices_) {
    const ScopedDevice scope(own.device);
    driver().cuStreamSynchronize(own.stream);
    driver().cuEventDestroy(own.event);
    driver().cuStreamDestroy(own.stream);
  }
}

int DeviceLayer::device_of(std::size_t local) const {
  return of(local).device;
}
CUstream DeviceLayer::stream_of(std::size_t local) const {
  return of(local).stream;
}

uniep::Weights DeviceLayer::weights_of(std::size_t local) const {
  uniep::Weights weights;
  weights.w1 = static_cast<const BFloat16*>(device_weights_[local].w1.data());
  weights.w2 = static_cast<const BFloat16*>(device_weights_[local].w2.data());
  return weights;
}

void DeviceLayer::use_schedule(const PartialSchedule& given) {
  schedule_ = resolve(given, {.direction = Direction::kForward,
                              .shape = config_.shape,
                              .numerics = config_.numerics,
                              .machine = group_.machine()});
}

// ---- Data

std::vector<int64_t> DeviceLayer::tokens(int64_t most) const {
  std::vector<int64_t> tokens;
  for (int rank = 0; rank < group_.ranks(); ++rank) tokens.push_back(most - rank * most / 16);
  return tokens;
}

CallArrays DeviceLayer::arrays(const std::vector<int64_t>& tokens, bool in_symmetric_buffer) {
  const LayerShape& shape = config_.shape;
  CallArrays made;
  made.tokens = tokens;
  int64_t all = 0;
  for (const int64_t of_rank : tokens) all += of_rank;
  made.capacity = {.rows = round_up(all * shape.topk, kRowAlignment) + shape.experts / group_.ranks() * kRowAlignment,
                   .tokens = *std::max_element(tokens.begin(), tokens.end())};
  const int64_t row_bytes = shape.hidden * kElement;
  if (in_symmetric_buffer) {
    made.buffer = group_.allocate_symmetric(static_cast<std::size_t>(made.capacity.tokens * row_bytes));
  }
  for (std::size_t local = 0; local < device_index_.size(); ++local) {
    const int rank = rank_of(local), device = device_of(local);
    const int64_t own = tokens[static_cast<std::size_t>(rank)];
    CallArrays::OfRank& of_rank = made.local.emplace_back();
    of_rank.ids = {device, maps_ ? own * shape.experts : own * shape.topk * 4};
    of_rank.probs = {device, own * (maps_ ? shape.experts : shape.topk) * 4};
    of_rank.x = {device, own * row_bytes};
    of_rank.y = {device, own * row_bytes};
    of_rank.input = static_cast<const BFloat16*>(in_symmetric_buffer ? made.buffer.data(rank) : of_rank.x.data());
  }
  return made;
}

cli::LayerData DeviceLayer::batch(const std::vector<int64_t>& tokens) {
  const LayerShape& shape = config_.shape;
  cli::LayerData data = weights_;
  data.tokens = tokens;
  for (int64_t token = 0; token < data.all_tokens(); ++token) {
    std::vector<int32_t> left(static_cast<std::size_t>(shape.experts));
    for (std::size_t expert = 0; expert < left.size(); ++expert) left[expert] = static_cast<int32_t>(expert);
    for (int64_t slot = 0; slot < shape.topk; ++slot) {
      const auto drawn = static_cast<std::ptrdiff_t>(random_.next() % left.size());
      data.ids.push_back(random_.one_in(8) ? -1 : left[static_cast<std::size_t>(drawn)]);
      left.erase(left.begin() + drawn);
      data.probs.push_back(static_cast<float>(random_.unit()));
    }
  }
  data.x = random_values(random_, data.all_tokens() * shape.hidden, 2.0f);
  return maps_ ? uniep::test::with_ascending_slots(data) : data;
}

cli::LayerData DeviceLayer::with_other_x(const cli::LayerData& data) {
  cli::LayerData other = data;
  other.x = random_values(random_, static_cast<int64_t>(data.x.size()), 2.0f);
  return other;
}

cli::LayerData DeviceLayer::with_dy(const cli::LayerData& data) {
  cli::LayerData whole = data;
  whole.dy = random_values(random_, static_cast<int64_t>(data.x.size()), 2.0f);
  return whole;
}

void DeviceLayer::upload(const CallArrays& arrays, const cli::LayerData& data) {
  const LayerShape& shape = config_.shape;
  for (std::size_t local = 0; local < arrays.local.size(); ++local) {
    const ScopedDevice scope(device_of(local));
    const CallArrays::OfRank& own = arrays.local[local];
    const auto copy = [&](const void* target, const void* source, int64_t bytes) {
      if (bytes == 0) return;
      check(
          driver().cuMemcpyHtoDAsync(device_pointer(target), source, static_cast<std::size_t>(bytes), stream_of(local)),
          "uploading a batch");
    };
    const int rank = rank_of(local);
    const int64_t first = data.first_token(rank), count = data.tokens[static_cast<std::size_t>(rank)];
    if (maps_) {
      std::vector<uint8_t> map(static_cast<std::size_t>(count * shape.experts), 0);
      std::vector<float> probs(map.size(), std::nanf(""));
      for (int64_t slot = 0; slot < count * shape.topk; ++slot) {
        const auto entry = static_cast<std::size_t>(first * shape.topk + slot);
        if (data.ids[entry] < 0) continue;
        const auto at = static_cast<std::size_t>(slot / shape.topk * shape.experts + data.ids[entry]);
        map[at] = 1;
        probs[at] = data.probs[entry];
      }
      copy(own.ids.data(), map.data(), static_cast<int64_t>(map.size()));
      copy(own.probs.data(), probs.data(), static_cast<int64_t>(probs.size()) * 4);
    } else {
      copy(own.ids.data(), data.ids.data() + first * shape.topk, count * shape.topk * 4);
      copy(own.probs.data(), data.probs.data() + first * shape.topk, count * shape.topk * 4);
    }
    copy(own.input, data.x.data() + first * shape.hidden, count * shape.hidden * kElement);
  }
  poison(arrays);
}

void DeviceLayer::poison(const CallArrays& arrays) {
  for (std::size_t local = 0; local < arrays.local.size(); ++local) {
    const int64_t bytes = arrays.tokens[static_cast<std::size_t>(rank_of(local))] * config_.shape.hidden * kElement;
    if (bytes == 0) continue;
    const ScopedDevice scope(device_of(local));
    check(driver().cuMemsetD8Async(device_pointer(arrays.local[local].y.data()), 0xff, static_cast<std::size_t>(bytes),
                                   stream_of(local)),
          "poisoning y");
  }
}

// ---- Calls

Placement DeviceLayer::place(const CallArrays& arrays, Capacity capacity) {
  std::vector<Routing> routings;
  for (std::size_t local = 0; local < arrays.local.size(); ++local) {
    const CallArrays::OfRank& own = arrays.local[local];
    routings.push_back({arrays.tokens[static_cast<std::size_t>(rank_of(local))], own.ids.data(), IndexType::kInt32,
                        static_cast<const float*>(own.probs.data()), Stream{stream_of(local)}});
    if (!maps_) continue;
    routings.back().topk_ids = nullptr;
    routings.back().routing_map = static_cast<const uint8_t*>(own.ids.data());
  }
  return uniep::place(group_, config_.shape, routings, capacity);
}

Saved DeviceLayer::forward(const CallArrays& arrays, const Placement& placement) {
  std::vector<ForwardArguments> arguments;
  for (std::size_t local = 0; local < arrays.local.size(); ++local) {
    ForwardArguments& own = arguments.emplace_back();
    own.x = arrays.local[local].input;
    own.weights = weights_of(local);
    own.y = static_cast<BFloat16*>(arrays.local[local].y.data());
    own.stream = Stream{stream_of(local)};
  }
  return uniep::forward(group_, config_, schedule_, placement, arguments);
}

DeviceLayer::Called DeviceLayer::call(const CallArrays& arrays, Capacity capacity) {
  Called called;
  called.placement = place(arrays, capacity);
  called.saved = forward(arrays, called.placement);
  return called;
}

// ---- Graphs

void DeviceLayer::fork() {
  const OfDevice& first = devices_.front();
  {
    const ScopedDevice scope(first.device);
    check(driver().cuEventRecord(first.event, first.stream), "cuEventRecord");
  }
  for (std::size_t i = 1; i < devices_.size(); ++i) {
    const ScopedDevice scope(devices_[i].device);
    check(driver().cuStreamWaitEvent(devices_[i].stream, first.event, 0), "cuStreamWaitEvent");
  }
}

void DeviceLayer::join() {
  for (std::size_t i = 1; i < devices_.size(); ++i) {
    {
      const ScopedDevice scope(devices_[i].device);
      check(driver().cuEventRecord(devices_[i].event, devices_[i].stream), "cuEventRecord");
    }
    const ScopedDevice scope(devices_.front().device);
    check(driver().cuStreamWaitEvent(devices_.front().stream, devices_[i].event, 0), "cuStreamWaitEvent");
  }
}

// All devices' streams go into one graph.
void DeviceLayer::begin_capture() {
  const ScopedDevice scope(devices_.front().device);
  check(graphs_.begin_capture(devices_.front().stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
  fork();
}

CUgraph DeviceLayer::end_capture() {
  const ScopedDevice scope(devices_.front().device);
  join();
  CUgraph graph = nullptr;
  check(graphs_.end_capture(devices_.front().stream, &graph), "cuStreamEndCapture");
  return graph;
}

CapturedCalls DeviceLayer::capture(const std::function<void()>& calls) {
  begin_capture();
  calls();
  const ScopedDevice scope(devices_.front().device);
  CUgraph graph = end_capture();
  CUgraphExec executable = nullptr;
  check(graphs_.instantiate(&executable, graph, 0), "cuGraphInstantiateWithFlags");
  return {graph, executable};
}

void DeviceLayer::replay(const CapturedCalls& captured) {
  const ScopedDevice scope(devices_.front().device);
  join();
  check(graphs_.launch(captured.executable(), devices_.front().stream), "cuGraphLaunch");
  fork();
}

// ---- What is expected

void DeviceLayer::synchronize() {
  for (const OfDevice& own : devices_) {
    const ScopedDevice scope(own.device);
    check(driver().cuStreamSynchronize(own.stream), "cuStreamSynchronize");
  }
}

void DeviceLayer::expect(const std::string& name, const CallArrays& arrays, const cli::LayerData& data) {
  synchronize();
  cli::LayerResult expected;
  {
    const ScopedDevice scope(devices_.front().device);
    expected = naive_layer(kernels_, config_, data);
  }
  std::string wrong;
  for (std::size_t local = 0; local < arrays.local.size(); ++local) {
    const int rank = rank_of(local);
    cli::LayerResult got, own;
    got.y.resize(static_cast<std::size_t>(data.tokens[static_cast<std::size_t>(rank)] * config_.shape.hidden));
    arrays.local[local].y.read(got.y.data(), static_cast<int64_t>(got.y.size()) * kElement);
    const auto first = expected.y.begin() + data.first_token(rank) * config_.shape.hidden;
    own.y.assign(first, first + static_cast<std::ptrdiff_t>(got.y.size()));
    const std::string text = uniep::test::difference(got, own);
    if (!text.empty()) wrong += " rank " + std::to_string(rank) + ": " + text;
  }
  results_.record(name, wrong.empty(), wrong);
}

void DeviceLayer::expect_nan(const std::string& name, const CallArrays& arrays) {
  synchronize();
  int64_t others = 0;
  for (std::size_t local = 0; local < arrays.local.size(); ++local) {
    const int64_t tokens = arrays.tokens[static_cast<std::size_t>(rank_of(local))];
    std::vector<BFloat16> y(static_cast<std::size_t>(tokens * config_.shape.hidden));
    arrays.local[local].y.read(y.data(), static_cast<int64_t>(y.size()) * kElement);
    others += std::count_if(y.begin(), y.end(), [](BFloat16 value) { return !std::isnan(to_float(value)); });
  }
  results_.record(name, others == 0, std::to_string(others) + " values of y are not NaN");
}

void DeviceLayer::expect_error(const std::string& name, Status status, const std::vector<std::string>& words,
                               const std::function<void()>& call) {
  std::string text = "nothing was thrown";
  bool good = false;
  try {
    call();
  } catch (const Error& error) {
    text = std::string(status_name(error.status())) + ": " + error.what();
    good = error.status() == status;
    for (const std::string& word : words) good = good && text.find(word) != std::string::npos;
  }
  results_.record(name, good, text);
}

GroupOptions group_options(int ranks, const std::vector<int>& devices) {
  GroupOptions options;
  options.engine = EngineKind::kCuda;
  options.ranks = ranks;
  options.devices = devices;
  options.timeout_seconds = 20;
  return options;
}

GroupOptions process_options(int ranks) {
  GroupOptions options = group_options(ranks, {});
  options.launch = uniep::Launch::kProcesses;
  options.arrival_timeout_seconds = 120;  // compiling kernels takes long
  return options;
}

}  // namespace uniep::cuda::test
