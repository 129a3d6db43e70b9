#include "train/candidate_check.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <new>
#include <string>
#include <utility>

#include "io/synthetic_value.h"
#include "model/activation_choice.h"

namespace uniep::train {
namespace {

constexpr int64_t kShare = 8;  // of the tokens
constexpr uint64_t kSeed = 17;
constexpr int64_t kWeights = 2;  // experts' weights that differ: neighbours' do

std::vector<BFloat16> values(io::SyntheticTensor tensor, int64_t count, float scale) {
  std::vector<BFloat16> all(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = io::synthetic_value(kSeed, tensor, i, scale);
  return all;
}

// Memory of each kind that a call asks for, at most that of another.
bool needs_more(const std::vector<MemoryNeed>& one, const std::vector<MemoryNeed>& other) {
  for (std::size_t rank = 0; rank < one.size(); ++rank) {
    const MemoryNeed &a = one[rank], &b = other[rank];
    if (a.saved_bytes > b.saved_bytes || a.workspace_bytes > b.workspace_bytes || a.symmetric_bytes > b.symmetric_bytes)
      return true;
  }
  return false;
}

// What is added to a NaN can not be seen.
unsigned char before_gradients(const Numerics& numerics) {
  return numerics.weight_gradient == WeightGradient::kMainGrad ? 0 : RankMemory::kUnwritten;
}

}  // namespace

CandidateCheck::CandidateCheck(Group& group, const LayerConfig& layer, int64_t tokens,
                               const DeviceArrays* device_arrays, AgreeOnEnd agree)
    : group_(group),
      layer_(layer),
      tokens_(std::max<int64_t>(1, tokens / kShare)),
      device_arrays_(device_arrays),
      agree_(std::move(agree)) {
  const LayerShape& shape = layer.shape;
  const int64_t weights = kWeights * shape.hidden * shape.intermediate;
  x_ = values(io::SyntheticTensor::kX, tokens_ * shape.hidden, io::kUnitScale);
  dy_ = values(io::SyntheticTensor::kDy, tokens_ * shape.hidden, io::kUnitScale);
  w1_ = values(io::SyntheticTensor::kW1, 2 * weights, io::weight_scale(shape.hidden));
  w2_ = values(io::SyntheticTensor::kW2, weights, io::weight_scale(shape.intermediate));
  if (layer.numerics.bias) {
    const int64_t local = shape.experts / group.ranks();
    b1_ = values(io::SyntheticTensor::kB1, local * z_columns(shape, layer.numerics), io::kUnitScale);
    b2_ = values(io::SyntheticTensor::kB2, local * shape.hidden, io::kUnitScale);
  }
  const uint64_t experts = static_cast<uint64_t>(shape.experts);
  for (int64_t token = 0; token < tokens_; ++token) {
    const uint64_t first = io::synthetic_hash(kSeed, io::SyntheticTensor::kRouting, static_cast<uint64_t>(token));
    for (int64_t slot = 0; slot < shape.topk; ++slot) {
      ids_.push_back(static_cast<int32_t>((first + static_cast<uint64_t>(slot)) % experts));
      probs_.push_back(io::synthetic_prob(kSeed, static_cast<uint64_t>(token * shape.topk + slot)));
    }
  }
}

// What all checks read stays where its engine wants it: bringing it there again would take longer than the calls.
void CandidateCheck::make_inputs() {
  const LayerShape& shape = layer_.shape;
  const int64_t local = shape.experts / group_.ranks(), one = shape.hidden * shape.intermediate;
  // All of it or nothing: without memory for a part the next check makes it again.
  std::vector<RankMemory> memory;
  std::vector<Inputs> inputs(static_cast<std::size_t>(group_.local_ranks()));
  memory.reserve(inputs.size());
  for (Inputs& in : inputs) {
    RankMemory& own = memory.emplace_back(device_of(memory.size()), device_arrays_);
    const auto read = [&own](const auto& all) { return own.input(all.data(), static_cast<int64_t>(all.size())); };
    in.routing = {tokens_, read(ids_), IndexType::kInt32, read(probs_), {}};
    in.x = read(x_);
    in.dy = read(dy_);
    const BFloat16 *const w1 = read(w1_), *const w2 = read(w2_);
    for (int64_t expert = 0; expert < local; ++expert) {
      in.w1.push_back(w1 + expert % kWeights * 2 * one);
      in.w2.push_back(w2 + expert % kWeights * one);
    }
    in.weights.w1_experts = in.w1.data();
    in.weights.w2_experts = in.w2.data();
    if (layer_.numerics.bias) in.weights.b1 = read(b1_);
    if (layer_.numerics.bias) in.weights.b2 = read(b2_);
  }
  memory_ = std::move(memory);
  inputs_ = std::move(inputs);
}

struct CandidateCheck::Calls {
  std::vector<RankMemory> memory = {};
  std::vector<Routing> routings = {};
  std::vector<ForwardArguments> forwards = {};
  std::vector<BackwardArguments> backwards = {};
};

int CandidateCheck::device_of(std::size_t local) const {
  return group_.device(group_.first_local_rank() + static_cast<int>(local));
}

CandidateCheck::Calls CandidateCheck::make_calls(Direction direction) {
  const LayerShape& shape = layer_.shape;
  const auto weights = static_cast<std::size_t>(shape.experts / group_.ranks() * shape.hidden * shape.intermediate);
  if (inputs_.empty()) make_inputs();
  Calls calls{.forwards = std::vector<ForwardArguments>(inputs_.size()),
              .backwards = std::vector<BackwardArguments>(inputs_.size())};
  calls.memory.reserve(inputs_.size());
  for (std::size_t local = 0; local < inputs_.size(); ++local) {
    const Inputs& in = inputs_[local];
    RankMemory& own = calls.memory.emplace_back(device_of(local), device_arrays_);
    calls.routings.push_back(in.routing);
    calls.forwards[local].x = in.x;
    calls.forwards[local].weights = in.weights;
    calls.forwards[local].y = own.unread_result<BFloat16>(tokens_ * shape.hidden);
    if (direction == Direction::kForward) continue;
    BackwardArguments& back = calls.backwards[local];
    back.dy = in.dy;
    back.x = in.x;
    back.weights = in.weights;
    back.dx = own.unread_result<BFloat16>(tokens_ * shape.hidden);
    back.dprobs = own.unread_result<float>(tokens_ * shape.topk);
    const auto gradient = [&](std::size_t count) {
      return own.unread_result<float>(static_cast<int64_t>(count), before_gradients(layer_.numerics));
    };
    back.gradients.dw1 = gradient(2 * weights);
    back.gradients.dw2 = gradient(weights);
    if (!layer_.numerics.bias) continue;
    back.gradients.db1 = gradient(b1_.size());
    back.gradients.db2 = gradient(b2_.size());
  }
  return calls;
}

// A part of what all ranks do: none goes on where another can not, and would wait for it.
void CandidateCheck::together(const std::function<void()>& work) const {
  if (!agree_) return work();
  PartEnd own;
  try {
    work();
  } catch (const Error& error) {
    own = {error.status(), error.what()};
  } catch (const std::bad_alloc&) {
    own = {Status::kOutOfMemory, "the C++ heap has no room"};
  }
  const PartEnd end = agree_(own);
  if (end.status != Status::kOk) throw Error(end.status, end.text);
}

CandidateCheck::Results CandidateCheck::run(Direction direction, const Schedule& forward, const Schedule& backward) {
  Calls calls;
  Results results;
  together([&] { calls = make_calls(direction); });
  together([&] {
    results.placement = place(group_, layer_.shape, calls.routings);
    const Saved saved = uniep::forward(group_, layer_, forward, results.placement, calls.forwards);
    if (direction == Direction::kBackward) uniep::backward(group_, layer_, backward, saved, calls.backwards);
    group_.synchronize();
    for (const RankMemory& own : calls.memory) {
      const std::vector<uint64_t> of_rank = own.checksums();
      results.checksums.insert(results.checksums.end(), of_rank.begin(), of_rank.end());
    }
  });
  return results;
}

TunerCheck CandidateCheck::check(Direction direction, const Schedule& candidate, const Schedule& forward,
                                 const Schedule& backward) {
  const auto begin = std::chrono::steady_clock::now();
  const bool is_forward = direction == Direction::kForward;
  // The same under every Schedule, so once is enough.
  std::vector<uint64_t>& expected = expected_[static_cast<std::size_t>(direction)];
  TunerCheck check;
  const auto refuse = [&](const std::string& reason) {
    group_.recover();
    check.refused = reason;
  };
  bool is_incumbent = expected.empty();  // that runs
  try {
    if (is_incumbent) expected = run(direction, forward, backward).checksums;
    is_incumbent = false;
    const Results seen = run(direction, is_forward ? candidate : forward, is_forward ? backward : candidate);
    check.equal = seen.checksums == expected;
    const auto need = [&](const Schedule& schedule) {
      return memory_need(group_, layer_, schedule, seen.placement, {.direction = direction});
    };
    if (needs_more(need(candidate), need(is_forward ? forward : backward))) check.refused = "it needs more memory";
  } catch (const Error& error) {
    if (error.status() == Status::kOutOfMemory) {
      refuse(std::string("no room to check it: ") + error.what());
    } else if (is_incumbent) {  // which says nothing of the candidate
      refuse(std::string("what runs now failed beside it: ") + error.what());
    } else {
      group_.recover();
      throw;
    }
  } catch (const std::bad_alloc&) {
    refuse("no room to check it");
  }
  check.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  return check;
}

}  // namespace uniep::train
