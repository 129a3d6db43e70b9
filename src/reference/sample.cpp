#include "reference/sample.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "reference/expert.h"

namespace uniep::reference {
namespace {

constexpr int64_t kMaxTokens = 256;
constexpr int64_t kMaxColumns = 32;

// A small generator of our own (a Weyl sequence through a mixer), so that a seed chooses the same sample everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  int64_t below(int64_t bound) { return static_cast<int64_t>(next() % static_cast<uint64_t>(bound)); }

 private:
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t bits = state_;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
  }
  uint64_t state_;
};

std::vector<int64_t> choose_tokens(const LayerInput& input, Random* random, double flops) {
  const LayerShape& shape = input.shape;
  const double per_token = (input.dy ? 12.0 : 6.0) * static_cast<double>(shape.hidden) *
                           static_cast<double>(shape.intermediate) * static_cast<double>(shape.topk);
  const double affordable = std::clamp(flops / per_token, 1.0, static_cast<double>(kMaxTokens));
  const int64_t count = std::min(input.tokens, static_cast<int64_t>(affordable));
  std::set<int64_t> tokens;
  if (count == input.tokens) {
    for (int64_t token = 0; token < count; ++token) tokens.insert(token);
  }
  while (static_cast<int64_t>(tokens.size()) < count) tokens.insert(random->below(input.tokens));
  return {tokens.begin(), tokens.end()};
}

std::vector<WeightColumn> choose_columns(const LayerInput& input, const RoutedRows& routed, Random* random,
                                         double flops) {
  const LayerShape& shape = input.shape;
  std::vector<int64_t> experts(shape.experts);
  std::iota(experts.begin(), experts.end(), 0);
  for (int64_t i = shape.experts - 1; i > 0; --i) std::swap(experts[i], experts[random->below(i + 1)]);
  const auto rows = [&](int64_t expert) { return routed.rows_of(expert); };
  const auto by_rows = [&](int64_t left, int64_t right) { return rows(left) < rows(right); };
  const auto cost = [&](int64_t expert) {
    return 12.0 * static_cast<double>(shape.hidden) * static_cast<double>(rows(expert));
  };
  std::set<WeightColumn> columns;
  const auto take = [&](int64_t expert) {
    columns.insert({expert, random->below(shape.intermediate)});
    flops -= cost(expert);
  };

  const int64_t fewest = *std::min_element(experts.begin(), experts.end(), by_rows);
  if (rows(fewest) == 0) take(fewest);
  std::erase_if(experts, [&](int64_t expert) { return rows(expert) == 0; });
  if (experts.empty()) return {columns.begin(), columns.end()};
  take(*std::min_element(experts.begin(), experts.end(), by_rows));
  // Round and round through the experts, until nothing more is affordable.
  int64_t left = kMaxColumns;
  for (bool taken = true; taken;) {
    taken = false;
    for (const int64_t expert : experts) {
      if (left == 0 || cost(expert) > flops) continue;
      take(expert);
      --left;
      taken = true;
    }
  }
  return {columns.begin(), columns.end()};
}

// The chosen tokens as a batch of their own.
struct TokenBatch {
  std::vector<BFloat16> x;
  std::vector<BFloat16> dy;
  std::vector<int32_t> ids;
  std::vector<float> probs;
};

template <typename T>
std::vector<T> gather(const T* rows, int64_t columns, const std::vector<int64_t>& chosen) {
  std::vector<T> result;
  result.reserve(chosen.size() * columns);
  for (const int64_t row : chosen) result.insert(result.end(), rows + row * columns, rows + (row + 1) * columns);
  return result;
}

void evaluate_tokens(const LayerInput& input, const RoutedRows& routed, const std::vector<int64_t>& tokens,
                     SampleOutput* output) {
  const LayerShape& shape = input.shape;
  TokenBatch batch;
  batch.x = gather(input.x, shape.hidden, tokens);
  if (input.dy) batch.dy = gather(input.dy, shape.hidden, tokens);
  batch.ids = gather(input.ids, shape.topk, tokens);
  batch.probs = gather(input.probs, shape.topk, tokens);
  LayerInput part = input;
  part.tokens = static_cast<int64_t>(tokens.size());
  part.x = batch.x.data();
  part.dy = input.dy ? batch.dy.data() : nullptr;
  part.ids = batch.ids.data();
  part.probs = batch.probs.data();

  LayerOutput whole = evaluate(part, WeightGradientSink());
  output->y = std::move(whole.y);
  output->z = std::move(whole.z);
  output->dx = std::move(whole.dx);
  output->dprobs = std::move(whole.dprobs);
  // Tokens are ascending, so the part's rows are the chosen tokens' rows of the whole, in the same order.
  for (int64_t row = 0; row < routed.rows(); ++row) {
    const int64_t token = routed.slots[row] / shape.topk;
    if (std::binary_search(tokens.begin(), tokens.end(), token)) output->z_rows.push_back(row);
  }
}

void evaluate_columns(const LayerInput& input, const RoutedRows& routed, const std::vector<WeightColumn>& chosen,
                      SampleOutput* output) {
  const int64_t hidden = input.shape.hidden;
  for (auto begin = chosen.begin(); begin != chosen.end();) {
    const int64_t index = begin->expert;
    std::vector<int64_t> columns;
    for (; begin != chosen.end() && begin->expert == index; ++begin) columns.push_back(begin->column);
    const int64_t n = static_cast<int64_t>(columns.size());
    const Expert<BFloat16, float> expert(input, routed, index);
    const ExpertColumns some = expert.columns(columns);
    const std::vector<double> dw1 = expert.dw1(some, n);
    const std::vector<double> dw2 = expert.dw2(some, n);
    const std::vector<double> db1 = expert.db1(some, n), db2 = expert.db2();
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t line = j; line < halves_of(input.numerics) * n; line += n) {
        output->dw1.insert(output->dw1.end(), dw1.begin() + line * hidden, dw1.begin() + (line + 1) * hidden);
      }
      if (input.numerics.bias) {
        for (int64_t line = j; line < halves_of(input.numerics) * n; line += n) output->db1.push_back(db1[line]);
        output->db2.insert(output->db2.end(), db2.begin(), db2.end());
      }
      for (int64_t h = 0; h < hidden; ++h) output->dw2.push_back(dw2[h * n + j]);
    }
  }
}

}  // namespace

Sample choose_sample(const LayerInput& input, const RoutedRows& routed, uint64_t seed, double flops) {
  Random random(seed);
  Sample sample;
  sample.tokens = choose_tokens(input, &random, input.dy ? flops / 2 : flops);
  if (input.dy) sample.weight_columns = choose_columns(input, routed, &random, flops / 2);
  return sample;
}

SampleOutput evaluate_sample(const LayerInput& input, const RoutedRows& routed, const Sample& sample) {
  SampleOutput output;
  evaluate_tokens(input, routed, sample.tokens, &output);
  evaluate_columns(input, routed, sample.weight_columns, &output);
  return output;
}

}  // namespace uniep::reference
