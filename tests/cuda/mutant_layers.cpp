#include "tests/cuda/mutant_layers.h"

#include <algorithm>
#include <cmath>

#include "engine/cuda/calls/exchange_request.h"
#include "model/elementwise.h"
#include "uniep/error.h"

namespace uniep::cuda::test {
namespace {

using uniep::test::Random;

constexpr int kRanks = 4;
constexpr int kWorkers = 16;
constexpr int kFewWorkers = 4;  // so that each has many tiles, and rings are used again and again

constexpr const char* kDispatchAlone = "queued-dispatch";

struct LayerFields {
  const char* name;
  const char* forward;
  const char* backward = nullptr;  // null: none
  int64_t groups = 0;
  int workers = kWorkers;
  WeightGradient gradient = WeightGradient::kMainGrad;
  // Several tiles along all of H and I, and K longer than the stages.
  int64_t hidden = 768, intermediate = 384;
};
constexpr LayerFields kLayers[] = {
    {"epilogue", "combine.transport=epilogue,dispatch.transport=pull"},
    // queued_calls.h. A copy warp has several parts of a block, and so rows of several ranks. What follows from a
    // rank's own results is known without waiting; that peers have pulled x again does not.
    {"queued", "combine.transport=epilogue,dispatch.transport=pull", nullptr, 0, kFewWorkers},
    // Long rows and short GEMMs: a rank still pulls x of others that have all of their results. It has more workers
    // than tiles of the last weight gradient, so that some end before x is there.
    {"queued-redispatch", "combine.transport=epilogue,dispatch.transport=pull",
     "fusion=pairs,backward.wgrad=fill,save.xg=redispatch", 0, 24, WeightGradient::kBFloat16, 2048, 64},
    // Only who waits for peers to be done has x as long as it is pulled.
    {kDispatchAlone, "combine.transport=epilogue,dispatch.transport=pull", nullptr, 0, kWorkers,
     WeightGradient::kMainGrad, 2048, 64},
    {"push", "combine.transport=epilogue,dispatch.transport=push"},
    {"staged", "combine.transport=staged,dispatch.transport=pull"},
    {"sms", "combine.transport=staged,dispatch.transport=pull,comm.where=sms,comm.dispatch_sms=4"},
    {"groups", "combine.transport=staged,dispatch.transport=pull", nullptr, 8},
    {"gradients", "combine.transport=epilogue,dispatch.transport=pull",
     "fusion=layer,backward.wgrad=fill,save.xg=keep"},
    {"mixed", "combine.transport=epilogue,dispatch.transport=pull", "fusion=layer,backward.wgrad=mixed,save.xg=keep"},
    // One tile of dgrad FC2 a block of rows, so that the last tile that is missing is a whole block.
    {"mixed-narrow", "combine.transport=epilogue,dispatch.transport=pull",
     "fusion=layer,backward.wgrad=mixed,save.xg=keep", 0, kWorkers, WeightGradient::kMainGrad, 768, 192},
    {"redispatch", "combine.transport=epilogue,dispatch.transport=pull",
     "fusion=layer,backward.wgrad=mixed,save.xg=redispatch"},
    {"few", "combine.transport=epilogue,dispatch.transport=pull", nullptr, 0, kFewWorkers},
    {"few-staged", "combine.transport=staged,dispatch.transport=pull", nullptr, 0, kFewWorkers},
    {"few-gradients", "combine.transport=epilogue,dispatch.transport=pull",
     "fusion=layer,backward.wgrad=fill,save.xg=keep", 0, kFewWorkers},
};
constexpr const char* kForward =
    "fusion=layer,dispatch.dedup=on,combine.column_chunks=1,tile.n=256,tile.stages=4,tile.cluster=2,"
    "comm.chunk_bytes=4096,comm.stages=3,";
constexpr const char* kBackward = "dispatch.dedup=on,combine.column_chunks=1,";

std::vector<BFloat16> values(Random& random, int64_t count, float scale) {
  std::vector<BFloat16> numbers(static_cast<std::size_t>(count));
  for (BFloat16& number : numbers) number = to_bfloat16((static_cast<float>(random.unit()) - 0.5f) * 2 * scale);
  return numbers;
}

// Low experts more often, none twice; some slots stay unused.
void route(Random& random, const LayerShape& shape, int32_t* ids) {
  for (int64_t slot = 0; slot < shape.topk; ++slot) {
    int32_t expert = 0;
    do {
      expert = static_cast<int32_t>(random.unit() * random.unit() * static_cast<double>(shape.experts));
    } while (std::find(ids, ids + slot, expert) != ids + slot);
    ids[slot] = expert;
  }
  if (random.one_in(8)) ids[random.next() % static_cast<uint64_t>(shape.topk)] = -1;
}

}  // namespace

const std::vector<std::string>& mutant_layer_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const LayerFields& fields : kLayers) all.emplace_back(fields.name);
    return all;
  }();
  return names;
}

MutantLayer mutant_layer(const std::string& name) {
  const auto* const fields =
      std::find_if(std::begin(kLayers), std::end(kLayers), [&](const LayerFields& f) { return name == f.name; });
  if (fields == std::end(kLayers))
    throw Error(Status::kInvalidArgument, "no layer of the mutants is named '" + name + "'");
  MutantLayer layer;
  layer.dispatch_alone = name == kDispatchAlone;
  // With several blocks of rows an expert.
  layer.config.shape = {.hidden = fields->hidden, .intermediate = fields->intermediate, .experts = 8, .topk = 3};
  layer.config.numerics.combine_groups = fields->groups;
  layer.config.numerics.weight_gradient = fields->gradient;
  layer.how.ranks = kRanks;
  layer.how.workers = fields->workers;
  const auto whole = [&](const std::string& given, Direction direction) {
    return resolve(PartialSchedule::parse(given),
                   {.direction = direction,
                    .shape = layer.config.shape,
                    .numerics = layer.config.numerics,
                    .machine = {.engine = EngineKind::kCuda, .ranks = kRanks, .workers = fields->workers}});
  };
  layer.how.schedule = whole(std::string(kForward) + fields->forward, Direction::kForward);
  if (fields->backward != nullptr) {
    layer.how.backward = whole(std::string(kBackward) + fields->backward, Direction::kBackward);
  }
  return layer;
}

std::vector<KernelRequest> kernels_of(const MutantLayer& layer) {
  if (!layer.dispatch_alone) return kernels_of(layer.how, layer.config);
  return {exchange_request(
      exchange_config(exchange_program(layer.config, layer.how.schedule, ProgramPart::kDispatch, layer.how.workers)))};
}

cli::LayerData mutant_batch(const MutantLayer& layer, uint64_t seed) {
  Random random(seed);
  cli::LayerData data;
  const LayerShape& shape = data.shape = layer.config.shape;
  data.tokens = {201, 96, 250, 133};
  const int64_t tokens = data.all_tokens(), weights = shape.experts * shape.intermediate * shape.hidden;
  data.ids.resize(static_cast<std::size_t>(tokens * shape.topk));
  for (int64_t token = 0; token < tokens; ++token) route(random, shape, data.ids.data() + token * shape.topk);
  for (std::size_t i = 0; i < data.ids.size(); ++i) data.probs.push_back(static_cast<float>(random.unit()));
  data.x = values(random, tokens * shape.hidden, 2.0f);
  data.dy = values(random, tokens * shape.hidden, 2.0f);
  data.w1 = values(random, 2 * weights, std::sqrt(3.0f / static_cast<float>(shape.hidden)));
  data.w2 = values(random, weights, std::sqrt(3.0f / static_cast<float>(shape.intermediate)));
  return data;
}

}  // namespace uniep::cuda::test
