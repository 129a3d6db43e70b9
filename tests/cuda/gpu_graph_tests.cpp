// A layer in a CUDA graph: place() within a capacity and forward() are captured once; every replay has other routings
// and inputs, and gives the bytes of the naive oracle. Then a routing that is not legal, and calls outside of the
// graph. Usage: gpu_graph_tests [--replays N] [--verbose]; exit status 77 without a Hopper GPU.
#include <cstdlib>
#include <functional>

#include "engine/cuda/device_array.h"
#include "engine/engine.h"
#include "model/row_table.h"
#include "support/random_layer.h"
#include "tests/cuda/graph_functions.h"
#include "tests/cuda/layer_oracle.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::Random;
using uniep::test::random_layer;
using uniep::test::RandomLayer;
using uniep::test::RandomLayerLimits;

// The same layer with tokens and experts in another order; the numbers of tokens and slots stay.
cli::LayerData other_batch(const cli::LayerData& data, Random& random) {
  cli::LayerData other = data;
  const int64_t shift = random.between(0, data.shape.experts - 1);
  for (int32_t& id : other.ids) {
    if (id >= 0) id = static_cast<int32_t>((id + shift) % data.shape.experts);
  }
  for (int64_t token = 0; token + 1 < data.all_tokens(); ++token) {
    const int64_t with = random.between(token, data.all_tokens() - 1);
    const auto swap_rows = [&](auto& rows, int64_t columns) {
      std::swap_ranges(rows.begin() + token * columns, rows.begin() + (token + 1) * columns,
                       rows.begin() + with * columns);
    };
    if (with == token) continue;
    swap_rows(other.ids, data.shape.topk);
    swap_rows(other.probs, data.shape.topk);
    if (random.one_in(2)) swap_rows(other.x, data.shape.hidden);
  }
  return other;
}

class GraphTest {
 public:
  GraphTest(const RandomLayer& layer, const std::vector<int>& devices, Results& results, const std::string& folder)
      : layer_(layer), results_(results), kernels_(0, folder), group_(options(layer, devices)) {
    const LayerShape& shape = layer.data.shape;
    capacity_.rows =
        round_up(layer.data.all_tokens() * shape.topk, kRowAlignment) + shape.experts / layer.ranks * kRowAlignment;
    check(driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    const int64_t weights = shape.experts / layer.ranks * shape.intermediate * shape.hidden;
    for (int rank = 0; rank < layer.ranks; ++rank) {
      const int64_t tokens = layer.data.tokens[static_cast<size_t>(rank)];
      Rank& own = ranks_.emplace_back();
      own.ids = {0, tokens * shape.topk * 4};
      own.probs = {0, tokens * shape.topk * 4};
      own.x = {0, tokens * shape.hidden * 2};
      own.y = {0, tokens * shape.hidden * 2};
      own.w1 = {0, layer.data.w1.data() + rank * 2 * weights, 2 * weights * 2};
      own.w2 = {0, layer.data.w2.data() + rank * weights, weights * 2};
      routings_.push_back(
          {tokens, own.ids.data(), IndexType::kInt32, static_cast<const float*>(own.probs.data()), Stream{stream_}});
      ForwardArguments& arguments = arguments_.emplace_back();
      arguments.x = static_cast<const BFloat16*>(own.x.data());
      arguments.y = static_cast<BFloat16*>(own.y.data());
      arguments.weights.w1 = static_cast<const BFloat16*>(own.w1.data());
      arguments.weights.w2 = static_cast<const BFloat16*>(own.w2.data());
      arguments.stream = Stream{stream_};
    }
    schedule_ = resolve({}, Direction::kForward, shape, layer.config.numerics, group_.machine());
  }

  void run(int replays) {
    Random random(11);
    const auto call = [&] { replay_needs_.push_back(call_layer()); };
    expect("before the graph", layer_.data, call);
    CUgraph graph = nullptr;
    CUgraphExec executable = nullptr;
    check(graphs_.begin_capture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
    call();
    check(graphs_.end_capture(stream_, &graph), "cuStreamEndCapture");
    check(graphs_.instantiate(&executable, graph, 0), "cuGraphInstantiateWithFlags");
    const auto replay = [&] { check(graphs_.launch(executable, stream_), "cuGraphLaunch"); };
    for (int i = 0; i < replays; ++i) {
      expect("replay " + std::to_string(i), other_batch(layer_.data, random), replay);
    }
    cli::LayerData illegal = layer_.data;
    illegal.ids.front() = static_cast<int32_t>(illegal.shape.experts);
    upload(illegal);
    replay();
    check(driver().cuStreamSynchronize(stream_), "a replay");
    std::string text = "nothing was thrown";
    try {
      call_layer();
    } catch (const Error& error) {
      text = error.what();
    }
    results_.record("a replay with an illegal routing", text.find("token 0, slot 0 holds") != std::string::npos, text);
    expect("a replay after it", other_batch(layer_.data, random), replay);
    expect("outside of the graph", other_batch(layer_.data, random), call);
  }

 private:
  struct Rank {
    DeviceArray ids, probs, x, w1, w2, y;
  };
  struct Called {
    Placement placement;
    Saved saved;
  };

  static GroupOptions options(const RandomLayer& layer, const std::vector<int>& devices) {
    GroupOptions options;
    options.engine = EngineKind::kCuda;
    options.ranks = layer.ranks;
    options.devices = devices;
    return options;
  }

  Called call_layer() {
    Called called;
    called.placement = place(group_, layer_.data.shape, routings_, capacity_);
    called.saved = forward(group_, layer_.config, schedule_, called.placement, arguments_);
    return called;
  }

  void upload(const cli::LayerData& data) {
    const auto copy = [&](const DeviceArray& target, const void* source, int64_t bytes) {
      if (bytes == 0) return;
      check(driver().cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(target.data()), source, static_cast<size_t>(bytes),
                                       stream_),
            "uploading a batch");
    };
    for (int rank = 0; rank < layer_.ranks; ++rank) {
      const Rank& own = ranks_[static_cast<size_t>(rank)];
      const int64_t first = data.first_token(rank), tokens = data.tokens[static_cast<size_t>(rank)];
      copy(own.ids, data.ids.data() + first * data.shape.topk, tokens * data.shape.topk * 4);
      copy(own.probs, data.probs.data() + first * data.shape.topk, tokens * data.shape.topk * 4);
      copy(own.x, data.x.data() + first * data.shape.hidden, tokens * data.shape.hidden * 2);
    }
  }

  void expect(const std::string& name, const cli::LayerData& data, const std::function<void()>& action) {
    upload(data);
    for (const Rank& own : ranks_) own.y.fill(0xff);
    action();
    check(driver().cuStreamSynchronize(stream_), name.c_str());
    std::vector<BFloat16> y(data.x.size());
    for (int rank = 0; rank < layer_.ranks; ++rank) {
      ranks_[static_cast<size_t>(rank)].y.read(y.data() + data.first_token(rank) * data.shape.hidden,
                                               data.tokens[static_cast<size_t>(rank)] * data.shape.hidden * 2);
    }
    const cli::LayerResult expected = naive_layer(kernels_, layer_.config, data);
    const bool good =
        y.size() == expected.y.size() && std::memcmp(y.data(), expected.y.data(), y.size() * sizeof(BFloat16)) == 0;
    results_.record(name, good, good ? "" : "y differs from the oracle's");
  }

  const RandomLayer& layer_;
  Results& results_;
  Kernels kernels_;
  GraphFunctions graphs_;
  Group group_;
  Capacity capacity_;
  Schedule schedule_;
  CUstream stream_ = nullptr;
  std::vector<Rank> ranks_;
  std::vector<Routing> routings_;
  std::vector<ForwardArguments> arguments_;
  std::vector<Called> replay_needs_;  // what the graph works in
};

int run(int argc, char** argv) {
  int replays = 20;
  Results results;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--verbose") == 0) results.verbose = true;
    if (std::strcmp(argv[i], "--replays") == 0 && i + 1 < argc) replays = std::atoi(argv[++i]);
  }
  const std::string path = __FILE__;
  const char* const given = std::getenv("UNIEP_TEST_KERNELS");
  const std::string folder = given != nullptr ? given : path.substr(0, path.rfind('/'));
  for (const int ranks : {1, 4, 8}) {
    RandomLayerLimits limits;
    limits.ranks = {ranks};
    limits.most_tokens = 200;
    limits.most_columns = 640;
    limits.most_local_experts = 8;
    uint64_t seed = 1;
    RandomLayer layer = random_layer(seed, limits);
    while (layer.data.all_tokens() == 0 || layer.data.tokens[0] == 0) layer = random_layer(++seed, limits);
    const ScopedDevice scope(0);
    GraphTest(layer, {0}, results, folder).run(replays);
  }
  std::printf("graph tests: %d passed, %d failed\n", results.passed, results.failed);
  return results.failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace uniep::cuda::test

int main(int argc, char** argv) {
  return uniep::cuda::test::run_on_hopper(uniep::cuda::test::run, argc, argv);
}
