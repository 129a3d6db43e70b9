#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "model/elementwise.h"
#include "program/schedule_space.h"
#include "support/disturb.h"
#include "support/environment.h"
#include "support/random_layer.h"

// Batch invariance: what a rank gets for its own tokens (y, dx, dprobs) does not depend on what the other ranks' tokens
// are: how many, with which values, routed where. Weight gradients do depend on them, which shows that the test can
// fail: an expert's dw is the same if and only if all of its rows are. The other tests of bits keep the batch and vary
// the Schedule; this one varies both.
namespace uniep::test {
namespace {

// One rank's tokens.
struct RankTokens {
  int64_t count = 0;
  std::vector<BFloat16> x, dy;  // [count, H]
  std::vector<int32_t> ids;     // [count, K]
  std::vector<float> probs;     // [count, K]
};

std::vector<RankTokens> split(const cli::LayerData& data) {
  std::vector<RankTokens> ranks;
  for (std::size_t rank = 0; rank < data.tokens.size(); ++rank) {
    const int64_t first = data.first_token(static_cast<int>(rank)), end = first + data.tokens[rank];
    const int64_t h = data.shape.hidden, k = data.shape.topk;
    ranks.push_back({data.tokens[rank],
                     {data.x.begin() + first * h, data.x.begin() + end * h},
                     {data.dy.begin() + first * h, data.dy.begin() + end * h},
                     {data.ids.begin() + first * k, data.ids.begin() + end * k},
                     {data.probs.begin() + first * k, data.probs.begin() + end * k}});
  }
  return ranks;
}

// The same experts with these tokens.
cli::LayerData with_tokens(const cli::LayerData& data, const std::vector<RankTokens>& ranks) {
  cli::LayerData joined;
  joined.shape = data.shape;
  joined.w1 = data.w1;
  joined.w2 = data.w2;
  for (const RankTokens& own : ranks) {
    joined.tokens.push_back(own.count);
    joined.x.insert(joined.x.end(), own.x.begin(), own.x.end());
    joined.dy.insert(joined.dy.end(), own.dy.begin(), own.dy.end());
    joined.ids.insert(joined.ids.end(), own.ids.begin(), own.ids.end());
    joined.probs.insert(joined.probs.end(), own.probs.begin(), own.probs.end());
  }
  return joined;
}

void draw_values(Random& random, const LayerShape& shape, RankTokens& own) {
  for (std::vector<BFloat16>* values : {&own.x, &own.dy}) {
    values->resize(own.count * shape.hidden);
    for (BFloat16& value : *values) value = to_bfloat16(static_cast<float>(random.unit() * 4 - 2));
  }
  own.probs.resize(own.count * shape.topk);
  for (float& prob : own.probs) prob = static_cast<float>(random.unit());
}

// Slot 0 goes to `expert` if that is one; the others to any, without repetition, some of them unused.
void draw_routing(Random& random, const LayerShape& shape, int64_t expert, RankTokens& own) {
  own.ids.assign(own.count * shape.topk, -1);
  for (int64_t token = 0; token < own.count; ++token) {
    int32_t* const ids = own.ids.data() + token * shape.topk;
    if (expert >= 0) ids[0] = static_cast<int32_t>(expert);
    for (int64_t slot = expert >= 0 ? 1 : 0; slot < shape.topk; ++slot) {
      const int32_t drawn = static_cast<int32_t>(random.between(0, shape.experts - 1));
      if (std::find(ids, ids + slot, drawn) == ids + slot) ids[slot] = drawn;
    }
  }
}

enum class Change { kEmpty, kFewer, kMore, kValues, kNotFinite, kRouting, kOneExpert, kAll };
constexpr int kChanges = 8;

void change(Random& random, const LayerShape& shape, Change what, int64_t expert, RankTokens& own) {
  if (what == Change::kEmpty || what == Change::kFewer) {
    own.count = what == Change::kEmpty || own.count == 0 ? 0 : random.between(0, own.count - 1);
    own.x.resize(own.count * shape.hidden);
    own.dy.resize(own.count * shape.hidden);
    own.ids.resize(own.count * shape.topk);
    own.probs.resize(own.count * shape.topk);
  } else if (what == Change::kMore || what == Change::kAll) {
    own.count += random.between(1, random.one_in(4) ? 300 : 60);
    draw_values(random, shape, own);
    draw_routing(random, shape, -1, own);
  } else if (what == Change::kRouting || what == Change::kOneExpert) {
    draw_routing(random, shape, what == Change::kOneExpert ? expert : -1, own);
  } else {
    draw_values(random, shape, own);
    const uint16_t specials[] = {0x7fc0, 0x7f80, 0xff80, 0x7f7f};  // NaN, both infinities, the largest number
    for (BFloat16& value : own.x) {
      if (what == Change::kNotFinite && random.one_in(3)) value.bits = specials[random.next() % 4];
    }
  }
}

template <typename T>
bool same_bytes(const T* a, const T* b, int64_t count) {
  return count == 0 || std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(T)) == 0;
}

template <typename T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && same_bytes(a.data(), b.data(), static_cast<int64_t>(a.size()));
}

// All that reaches an expert's weight gradient, in its order.
std::vector<uint8_t> rows_of_expert(const std::vector<RankTokens>& ranks, const LayerShape& shape, int64_t expert) {
  std::vector<uint8_t> bytes;
  const auto append = [&](const void* from, std::size_t count) {
    const auto* begin = static_cast<const uint8_t*>(from);
    bytes.insert(bytes.end(), begin, begin + count);
  };
  for (const RankTokens& own : ranks) {
    for (int64_t slot = 0; slot < own.count * shape.topk; ++slot) {
      if (own.ids[slot] != expert) continue;
      const int64_t token = slot / shape.topk;
      append(own.x.data() + token * shape.hidden, shape.hidden * sizeof(BFloat16));
      append(own.dy.data() + token * shape.hidden, shape.hidden * sizeof(BFloat16));
      append(&own.probs[slot], sizeof(float));
    }
  }
  return bytes;
}

class BatchInvariance {
 public:
  void draw(uint64_t seed);
  void report(uint64_t draws) const {
    for (const auto& [name, times] : branches_) {
      std::printf("  %-36s %6llu\n", name.c_str(), static_cast<unsigned long long>(times));
      // A handful of draws, to look for one that failed, need not see everything.
      if (draws >= 300) {
        EXPECT_GT(times, 0u) << "no draw with " << name;
      }
    }
  }

 private:
  void count(const std::string& name, bool taken) { branches_[name] += taken; }
  void count_changes(const std::vector<RankTokens>& before, const std::vector<RankTokens>& now, int rank, Change what);
  void count_run(const Schedule& forward, const Schedule& backward, uint64_t shuffle);
  cli::LayerResult run(Random& random, const RandomLayer& layer, const cli::LayerData& data, std::string& described);

  std::map<std::string, uint64_t> branches_;
};

void BatchInvariance::count_changes(const std::vector<RankTokens>& before, const std::vector<RankTokens>& now, int rank,
                                    Change what) {
  bool any_before = false, any_now = false, larger = false, smaller = false, values = false, routing = false;
  for (std::size_t other = 0; other < now.size(); ++other) {
    if (static_cast<int>(other) == rank) continue;
    const RankTokens &a = before[other], &b = now[other];
    any_before |= a.count > 0;
    any_now |= b.count > 0;
    larger |= b.count > a.count;
    smaller |= b.count < a.count && b.count > 0;
    const bool same_routing = a.count == b.count && same_bytes(a.ids, b.ids);
    values |= same_routing && !same_bytes(a.x, b.x);
    routing |= a.count == b.count && same_bytes(a.x, b.x) && !same_routing;
  }
  count("others: all empty now", any_before && !any_now);
  count("others: more tokens", larger);
  count("others: fewer tokens", smaller);
  count("others: other values alone", values && what == Change::kValues);
  count("others: NaN and infinities", values && what == Change::kNotFinite);
  count("others: other routing alone", routing && what == Change::kRouting);
  count("others: all to one expert", routing && what == Change::kOneExpert);
  count("rank: the first", rank == 0);
  count("rank: the last", rank == static_cast<int>(now.size()) - 1);
  count("rank: between", rank > 0 && rank < static_cast<int>(now.size()) - 1);
}

void BatchInvariance::count_run(const Schedule& forward, const Schedule& backward, uint64_t shuffle) {
  count("run: fusion=none", forward.fusion == Fusion::kNone);
  count("run: fusion=pairs", forward.fusion == Fusion::kPairs);
  count("run: fusion=layer", forward.fusion == Fusion::kLayer);
  count("run: push", forward.dispatch.transport == DispatchTransport::kPush);
  count("run: dynamic queue", forward.queue == QueueKind::kDynamic);
  count("run: redispatch", backward.save_xg == SaveXg::kRedispatch);
  count("run: FC1 again", backward.save_z == SaveZ::kRecompute);
  count("run: not shuffled", shuffle == 0);
  count("run: shuffled, odd seed", shuffle % 2 == 1);
  count("run: shuffled, even seed", shuffle != 0 && shuffle % 2 == 0);
}

// Under schedules, workers and an interleaving of its own.
cli::LayerResult BatchInvariance::run(Random& random, const RandomLayer& layer, const cli::LayerData& data,
                                      std::string& described) {
  GroupOptions options;
  options.engine = EngineKind::kCpu;
  options.ranks = layer.ranks;
  options.workers = static_cast<int>(random.between(1, 4));
  const uint64_t shuffle = random.one_in(4) ? 0 : random.next();
  Group group(options);
  disturb(group, {.shuffle_seed = shuffle});
  const LayerConfig& config = layer.config;
  const Schedule forward = sample_legal(random.next(), {.direction = Direction::kForward,
                                                        .shape = config.shape,
                                                        .numerics = config.numerics,
                                                        .machine = group.machine()});
  PartialSchedule fixed;
  agree_on_saves(fixed, forward, random);
  const Schedule backward = sample_legal(random.next(),
                                         {.direction = Direction::kBackward,
                                          .shape = config.shape,
                                          .numerics = config.numerics,
                                          .machine = group.machine()},
                                         fixed);
  described += fmt::format("\n  workers {} shuffle {}\n    forward  {}\n    backward {}", options.workers, shuffle,
                           to_text(forward), to_text(backward));
  count_run(forward, backward, shuffle);
  return run_layer(group, config, data, forward, backward);
}

void BatchInvariance::draw(uint64_t seed) {
  RandomLayerLimits limits;
  limits.ranks = {2, 4, 8};
  limits.most_local_experts = 8;
  limits.most_columns = 96;
  RandomLayer layer = random_layer(seed, limits);
  const LayerShape& shape = layer.config.shape;
  Random random(~seed);
  const int rank = static_cast<int>(random.between(0, layer.ranks - 1));
  std::vector<RankTokens> before = split(layer.data);
  RankTokens& fixed = before[rank];
  if (fixed.count == 0) {
    fixed.count = random.between(1, limits.most_tokens);
    draw_values(random, shape, fixed);
    draw_routing(random, shape, -1, fixed);
  }

  const auto what = static_cast<Change>(random.between(0, kChanges - 1));
  const int64_t expert = std::max(0, fixed.ids[0]);  // one that the rank itself uses, if its first slot is used
  std::vector<RankTokens> now = before;
  for (int other = 0; other < layer.ranks; ++other) {
    if (other != rank) change(random, shape, what, expert, now[other]);
  }
  count_changes(before, now, rank, what);

  const cli::LayerData data_before = with_tokens(layer.data, before), data_now = with_tokens(layer.data, now);
  std::string described = fmt::format("{}, rank {}, change {}", layer.description, rank, static_cast<int>(what));
  cli::LayerResult a, b;
  try {
    a = run(random, layer, data_before, described);
    b = run(random, layer, data_now, described);
  } catch (const std::exception& error) {
    FAIL() << error.what() << "\n" << described;
  }
  SCOPED_TRACE(described);

  const int64_t token_a = data_before.first_token(rank), token_b = data_now.first_token(rank);
  const int64_t h = shape.hidden, k = shape.topk, n = fixed.count;
  EXPECT_TRUE(same_bytes(a.y.data() + token_a * h, b.y.data() + token_b * h, n * h)) << "y";
  EXPECT_TRUE(same_bytes(a.dx.data() + token_a * h, b.dx.data() + token_b * h, n * h)) << "dx";
  EXPECT_TRUE(same_bytes(a.dprobs.data() + token_a * k, b.dprobs.data() + token_b * k, n * k)) << "dprobs";
  const auto used = [](BFloat16 value) { return (value.bits & 0x7fff) != 0; };
  count("rank: y is not all zero", std::any_of(a.y.begin() + token_a * h, a.y.begin() + (token_a + n) * h, used));

  const int64_t size = 2 * shape.intermediate * h;  // of an expert's dw1
  for (int64_t e = 0; e < shape.experts; ++e) {
    const bool same_rows = rows_of_expert(before, shape, e) == rows_of_expert(now, shape, e);
    const bool same_dw1 = a.dw1_bf16.empty()
                              ? same_bytes(a.dw1_fp32.data() + e * size, b.dw1_fp32.data() + e * size, size)
                              : same_bytes(a.dw1_bf16.data() + e * size, b.dw1_bf16.data() + e * size, size);
    const bool same_dw2 =
        a.dw2_bf16.empty() ? same_bytes(a.dw2_fp32.data() + e * size / 2, b.dw2_fp32.data() + e * size / 2, size / 2)
                           : same_bytes(a.dw2_bf16.data() + e * size / 2, b.dw2_bf16.data() + e * size / 2, size / 2);
    EXPECT_EQ(same_dw1, same_rows) << "dw1 of expert " << e;
    EXPECT_EQ(same_dw2, same_rows) << "dw2 of expert " << e;
    count("dw: other rows, other bits", !same_rows);
    count("dw: same rows, same bits", same_rows);
  }
}

TEST(BatchInvariance, ARanksResultsDoNotDependOnTheOthersTokens) {
  const uint64_t draws = from_environment("UNIEP_TEST_COMBINATIONS", 400);
  const uint64_t first = from_environment("UNIEP_TEST_SEED", 1);
  BatchInvariance invariance;
  for (uint64_t seed = first; seed < first + draws && !testing::Test::HasFailure(); ++seed) invariance.draw(seed);
  std::printf("%llu draws; branches taken:\n", static_cast<unsigned long long>(draws));
  invariance.report(draws);
}

}  // namespace
}  // namespace uniep::test
