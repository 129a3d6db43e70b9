// A mixture-of-experts layer over four ranks, forward and backward: once as one overlapped kernel a direction, once
// stage after stage, with the same bits.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "uniep/uniep.h"

namespace {

constexpr int kRanks = 4;
constexpr int64_t kTokens = 96;  // of each rank
const uniep::LayerShape kShape{.hidden = 128, .intermediate = 64, .experts = 16, .topk = 2};

// Numbers in [-1, 1), as bf16: the upper half of an fp32 value.
std::vector<uniep::BFloat16> random_values(std::size_t count, uint32_t seed) {
  std::vector<uniep::BFloat16> values(count);
  for (uniep::BFloat16& value : values) {
    seed = seed * 1664525u + 1013904223u;
    const float number = static_cast<float>(seed >> 8) / (1 << 23) - 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    value.bits = static_cast<unsigned short>(bits >> 16);
  }
  return values;
}

// What one rank holds.
struct Rank {
  std::vector<uniep::BFloat16> x, dy, w1, w2;
  std::vector<int32_t> topk_ids;
  std::vector<float> probs;
};

Rank make_rank(int rank) {
  const int64_t experts = kShape.experts / kRanks;
  Rank own;
  own.x = random_values(kTokens * kShape.hidden, 10 + rank);
  own.dy = random_values(kTokens * kShape.hidden, 20 + rank);
  own.w1 = random_values(experts * 2 * kShape.intermediate * kShape.hidden, 30 + rank);
  own.w2 = random_values(experts * kShape.hidden * kShape.intermediate, 40 + rank);
  for (int64_t token = 0; token < kTokens; ++token) {
    const int32_t first = static_cast<int32_t>((7 * token + 3LL * rank) % kShape.experts);
    own.topk_ids.push_back(first);
    own.topk_ids.push_back(static_cast<int32_t>((first + 1 + token % 5) % kShape.experts));
    own.probs.push_back(0.75f);
    own.probs.push_back(0.25f);
  }
  return own;
}

// What one rank computes.
struct Results {
  std::vector<uniep::BFloat16> y, dx, dw1, dw2;
  std::vector<float> dprobs;
};

// `before` is what memory holds before the run: other bits in every run, so that what is never written shows.
std::vector<Results> run(uniep::Group& group, const std::vector<Rank>& ranks, const char* schedule,
                         unsigned short before) {
  // A Schedule describes one direction; fields that the text leaves open are filled for this shape and machine.
  const uniep::PartialSchedule given = uniep::PartialSchedule::parse(schedule);
  const uniep::Layer layer(group, kShape, {.forward = given, .backward = given});

  // Where each (token, slot) pair goes: once a batch, for both directions.
  std::vector<uniep::Routing> routings;
  for (const Rank& own : ranks) {
    routings.push_back({.tokens = kTokens, .topk_ids = own.topk_ids.data(), .probs = own.probs.data()});
  }
  const uniep::Placement placement = layer.place(routings);

  std::vector<Results> results(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    results[rank].y.assign(ranks[rank].x.size(), {before});
    results[rank].dx.assign(ranks[rank].x.size(), {before});
    results[rank].dw1.assign(ranks[rank].w1.size(), {before});
    results[rank].dw2.assign(ranks[rank].w2.size(), {before});
    results[rank].dprobs.assign(ranks[rank].probs.size(), before);
  }

  std::vector<uniep::ForwardArguments> forward;
  std::vector<uniep::BackwardArguments> backward;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Rank& own = ranks[rank];
    Results& result = results[rank];
    const uniep::Weights weights{.w1 = own.w1.data(), .w2 = own.w2.data()};
    forward.push_back({.x = own.x.data(), .weights = weights, .y = result.y.data()});
    backward.push_back({.dy = own.dy.data(),
                        .weights = weights,
                        .dx = result.dx.data(),
                        .dprobs = result.dprobs.data(),
                        .gradients = {.dw1 = result.dw1.data(), .dw2 = result.dw2.data()}});
  }
  const uniep::Saved saved = layer.forward(placement, forward);
  layer.backward(saved, backward);
  return results;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

int main() {
  try {
    uniep::GroupOptions options;
    options.ranks = kRanks;
    options.engine = uniep::EngineKind::kCpu;
    uniep::Group group(options);

    std::vector<Rank> ranks;
    for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(make_rank(rank));
    const std::vector<Results> overlapped = run(group, ranks, "fusion=layer", 0);
    const std::vector<Results> sequential = run(group, ranks, "fusion=none", 0x4000);

    for (int rank = 0; rank < kRanks; ++rank) {
      const Results& a = overlapped[rank];
      const Results& b = sequential[rank];
      if (!same_bits(a.y, b.y) || !same_bits(a.dx, b.dx) || !same_bits(a.dprobs, b.dprobs) ||
          !same_bits(a.dw1, b.dw1) || !same_bits(a.dw2, b.dw2)) {
        std::fprintf(stderr, "rank %d: the overlapped run differs from the sequential one\n", rank);
        return 1;
      }
    }
    std::printf("%d ranks, %d tokens each: y, dx, dprobs, dw1 and dw2 have the same bits\n", kRanks,
                static_cast<int>(kTokens));
    return 0;
  } catch (const uniep::Error& error) {
    std::fprintf(stderr, "%s: %s\n", uniep::status_name(error.status()), error.what());
    return 1;
  }
}
