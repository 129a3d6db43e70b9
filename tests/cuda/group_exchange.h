#pragma once

#include <algorithm>
#include <numeric>

#include "tests/cuda/device_values.h"
#include "uniep/uniep.h"

namespace uniep::cuda::test {

// Dispatch and combine by the public functions of a Group: what dispatch fills, combine returns, so that every token
// comes back topk times.
class GroupExchange {
 public:
  struct Options {
    int workers = 0;
    PartialSchedule schedule = {};
  };

  GroupExchange(const std::vector<int64_t>& tokens, const std::vector<int>& devices, const LayerShape& shape,
                const Options& options)
      : tokens_(tokens), devices_(devices), group_(group_options(options, devices)) {
    config_.shape = shape;
    schedule_ = resolve(
        options.schedule,
        {.direction = Direction::kForward, .shape = shape, .numerics = config_.numerics, .machine = group_.machine()});
    std::vector<Routing> routings;
    for (std::size_t rank = 0; rank < devices.size(); ++rank) routings.push_back(add_routing(rank));
    placement_ = place(group_, shape, routings);
    for (std::size_t rank = 0; rank < devices.size(); ++rank) add_arguments(rank);
  }

  // Queues both.
  void call() {
    dispatch(group_, config_, schedule_, placement_, there_);
    combine(group_, config_, schedule_, placement_, back_);
  }

  // Empty, or which array of the last rank was taken at 8 bytes behind a multiple of 16.
  std::string taken_unaligned() {
    std::string taken;
    const auto expect_refused = [&](const std::string& name, const auto& call) {
      std::string message = "no error";
      try {
        call();
      } catch (const Error& error) {
        message = error.what();
      }
      const bool refused =
          message.starts_with(name + ": its address on rank ") && message.ends_with("must be a multiple of 16");
      if (!refused) taken += name + ": " + message + "; ";
    };
    const auto dispatched = [&](auto DispatchArguments::*array) {
      std::vector<DispatchArguments> arguments = there_;
      arguments.back().*array += 4;
      dispatch(group_, config_, schedule_, placement_, arguments);
    };
    const auto combined = [&](auto CombineArguments::*array) {
      std::vector<CombineArguments> arguments = back_;
      arguments.back().*array += 4;
      combine(group_, config_, schedule_, placement_, arguments);
    };
    expect_refused("x", [&] { dispatched(&DispatchArguments::x); });
    expect_refused("rows", [&] { dispatched(&DispatchArguments::rows); });
    expect_refused("rows", [&] { combined(&CombineArguments::rows); });
    expect_refused("y", [&] { combined(&CombineArguments::y); });
    return taken;
  }

  void poison_results() {
    group_.synchronize();
    for (std::size_t rank = 0; rank < devices_.size(); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      for (const Buffer& buffer : results_[rank]) buffer.set_bytes(0xff);
      check(driver().cuCtxSynchronize(), "poison");
    }
  }

  // Waits; empty, or what is wrong.
  std::string difference() {
    group_.synchronize();
    std::string wrong;
    for (std::size_t rank = 0; rank < devices_.size(); ++rank) {
      const ScopedDevice scope(devices_[rank]);
      const int64_t values = tokens_[rank] * config_.shape.hidden, slots = tokens_[rank] * config_.shape.topk;
      if (from_device(back_[rank].dprobs, slots) != probs_[rank])
        wrong += "dprobs of rank " + std::to_string(rank) + " ";
      const std::vector<BFloat16> y = from_device(back_[rank].y, values);
      if (std::memcmp(y.data(), expected_[rank].data(), y.size() * sizeof(BFloat16)) != 0) {
        wrong += "y of rank " + std::to_string(rank) + " ";
      }
    }
    return wrong;
  }

 private:
  static GroupOptions group_options(const Options& options, const std::vector<int>& devices) {
    GroupOptions group;
    group.engine = EngineKind::kCuda;
    group.ranks = static_cast<int>(devices.size());
    group.workers = options.workers;
    group.devices = devices;
    return group;
  }

  template <typename T>
  T* on_device(std::vector<std::vector<Buffer>>& keeper, std::size_t rank, const std::vector<T>& values) {
    const ScopedDevice scope(devices_[rank]);
    keeper.resize(devices_.size());
    Buffer& buffer = keeper[rank].emplace_back(static_cast<int64_t>(values.size() * sizeof(T)));
    if (!values.empty()) buffer.upload(values);
    return buffer.template as<T>();
  }

  Routing add_routing(std::size_t rank) {
    const LayerShape& shape = config_.shape;
    std::vector<int32_t> experts(static_cast<std::size_t>(shape.experts)), ids;
    std::iota(experts.begin(), experts.end(), 0);
    probs_.emplace_back();
    for (int64_t token = 0; token < tokens_[rank]; ++token) {
      std::shuffle(experts.begin(), experts.end(), random_);
      ids.insert(ids.end(), experts.begin(), experts.begin() + shape.topk);
      for (int64_t slot = 0; slot < shape.topk; ++slot) {
        probs_.back().push_back(static_cast<float>(random_() % 1000) / 1000);
      }
    }
    return {
        tokens_[rank], on_device(inputs_, rank, ids), IndexType::kInt32, on_device(inputs_, rank, probs_[rank]), {}};
  }

  void add_arguments(std::size_t rank) {
    const int64_t hidden = config_.shape.hidden, tokens = tokens_[rank];
    const int64_t rows = placement_.padded_rows(static_cast<int>(rank));
    const auto bfloat16s = [](int64_t count) { return std::vector<BFloat16>(static_cast<std::size_t>(count)); };
    const auto floats = [](int64_t count) { return std::vector<float>(static_cast<std::size_t>(count)); };
    std::vector<BFloat16> x = random_values(tokens * hidden, random_);
    DispatchArguments& there = there_.emplace_back();
    there.x = on_device(inputs_, rank, x);
    there.rows = on_device(results_, rank, bfloat16s(rows * hidden));
    there.row_probs = on_device(results_, rank, floats(rows));
    CombineArguments& back = back_.emplace_back();
    back.rows = there.rows;
    back.y = on_device(results_, rank, bfloat16s(tokens * hidden));
    back.row_dprobs = there.row_probs;
    back.dprobs = on_device(results_, rank, floats(tokens * config_.shape.topk));
    for (BFloat16& value : x) {
      float sum = 0.0f;
      for (int64_t slot = 0; slot < config_.shape.topk; ++slot) sum = add(sum, to_float(value));
      value = to_bfloat16(sum);
    }
    expected_.push_back(std::move(x));
  }

  const std::vector<int64_t> tokens_;
  const std::vector<int> devices_;
  std::mt19937_64 random_{21};
  std::vector<std::vector<Buffer>> inputs_, results_;  // of each rank; outlive the group's calls
  Group group_;
  LayerConfig config_;
  Schedule schedule_;
  Placement placement_;
  std::vector<std::vector<float>> probs_;        // of each rank, as the next two
  std::vector<std::vector<BFloat16>> expected_;  // y
  std::vector<DispatchArguments> there_;
  std::vector<CombineArguments> back_;
};

}  // namespace uniep::cuda::test
