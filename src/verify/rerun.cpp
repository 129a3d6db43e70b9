#include "verify/rerun.h"

#include <algorithm>

#include "engine/engine.h"
#include "program/canonical.h"

namespace uniep::verify {
namespace {

std::size_t gradient_bytes(const Numerics& numerics) {
  return numerics.weight_gradient == WeightGradient::kBFloat16 ? sizeof(BFloat16) : sizeof(float);
}

// Which id a global expert has while some are moved.
int64_t moved_id(int64_t expert, const Moved& moved, int64_t local_experts, int ranks) {
  if (expert % local_experts != moved.expert) return expert;
  return (expert / local_experts + moved.shift) % ranks * local_experts + moved.expert;
}

// A matrix of a rank.
struct RankMatrix {
  int rank;
  const void* values;
  int64_t rows, columns;
};

void append_gradient(const Group& group, const Numerics& numerics, const RankMatrix& matrix, TileSums& out) {
  const auto [rank, values, rows, columns] = matrix;
  if (numerics.weight_gradient == WeightGradient::kBFloat16) {
    const HostView<BFloat16> view(group, rank, static_cast<const BFloat16*>(values), rows * columns);
    out.append(view.data(), rows, columns, columns);
  } else {
    const HostView<float> view(group, rank, static_cast<const float*>(values), rows * columns);
    out.append(view.data(), rows, columns, columns);
  }
}

// Rows as they arrived for the sums of the call that just ended.
void append_arrived(const Group& group, const Inputs& inputs, const std::vector<HostRouting>& routings, Tensor tensor,
                    Sums& sums) {
  const LayerShape& shape = inputs.config.shape;
  if (inputs.config.numerics.combine_groups > 0) return;
  for (int rank = 0; rank < inputs.ranks(); ++rank) {
    const BFloat16* const arrived = group.implementation().arrived_rows(rank);
    const int64_t slots = inputs.routings[rank].tokens * shape.topk;
    if (arrived == nullptr && slots > 0) return;
    const HostView<BFloat16> view(group, rank, arrived, slots * shape.hidden);
    TileSums& out = sums.of(tensor).emplace_back();
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (routings[rank].ids[slot] < 0) {
        out.append_none(shape.hidden);
      } else {
        out.append(view.data() + slot * shape.hidden, 1, shape.hidden, shape.hidden);
      }
    }
  }
}

void append_rows(const Group& group, const RankMatrix& matrix, Sums& sums, Tensor tensor) {
  const auto [rank, values, rows, columns] = matrix;
  const HostView<BFloat16> view(group, rank, static_cast<const BFloat16*>(values), rows * columns);
  sums.of(tensor).emplace_back().append(view.data(), rows, columns, columns);
}

// Not with save.z = recompute.
bool keeps_z(const Group& group, const Saved& saved) {
  for (int rank = 0; rank < group.ranks(); ++rank) {
    if (saved.placement().padded_rows(rank) > 0 && saved.z(rank) == nullptr) return false;
  }
  return true;
}

void append_z(const Group& group, const Inputs& inputs, const Saved& saved, const Moved& moved, Sums& sums) {
  if (saved.empty() || !keeps_z(group, saved)) return;
  const LayerShape& shape = inputs.config.shape;
  const int64_t columns = 2 * shape.intermediate;
  for (int64_t expert = 0; expert < shape.experts; ++expert) {
    const int64_t id = moved_id(expert, moved, inputs.local_experts(), inputs.ranks());
    const int rank = static_cast<int>(id / inputs.local_experts());
    const int64_t rows = saved.placement().expert_rows(id);
    TileSums& out = sums.of(Tensor::kZ).emplace_back();
    if (rows == 0) continue;
    const HostView<BFloat16> view(group, rank, saved.z(rank) + saved.placement().expert_segment(id) * columns,
                                  rows * columns);
    out.append(view.data(), rows, columns, columns);
  }
}

void set_hosts(const Inputs& inputs, const Moved& moved, Sums& sums) {
  for (int64_t expert = 0; expert < inputs.config.shape.experts; ++expert) {
    const int64_t id = moved_id(expert, moved, inputs.local_experts(), inputs.ranks());
    sums.host.push_back(static_cast<int>(id / inputs.local_experts()));
  }
}

// One rank's copies of what the moved expert needs there, and where its results go.
struct RankCopies {
  RankArray ids, probs, weights, y, dx, dprobs, dw1, dw2;
  ExpertWeights moved;
  std::vector<const BFloat16*> gate, up, w2;  // [El]
};

class Rerun {
 public:
  Rerun(Group& group, const Inputs& inputs, const std::string& schedule, Moved moved)
      : group_(group),
        inputs_(inputs),
        shape_(inputs.config.shape),
        schedule_(PartialSchedule::parse(schedule)),
        moved_(moved),
        routings_(read_routings(group, inputs)),
        ranks_(inputs.ranks()) {
    if (moved.shift % inputs.ranks() == 0) return;
    for (int rank = 0; rank < inputs.ranks(); ++rank) copy_weights(rank);
  }

  // y, and of a backward dx and dprobs: all experts, one of each rank moved.
  void run_whole(Sums& sums) {
    const int64_t local = inputs_.local_experts();
    LayerConfig config = inputs_.config;
    for (HostRouting& own : routings_) {
      for (int32_t& id : own.ids) {
        if (id >= 0) id = static_cast<int32_t>(moved_id(id, moved_, local, inputs_.ranks()));
      }
    }
    for (int rank = 0; rank < inputs_.ranks(); ++rank) {
      RankCopies& own = ranks_[rank];
      for (int64_t expert = 0; expert < local; ++expert) {
        ExpertWeights weights = inputs_.expert(rank * local + expert);
        if (expert == moved_.expert && own.moved.gate != nullptr) weights = own.moved;
        own.gate.push_back(weights.gate);
        own.up.push_back(weights.up);
        own.w2.push_back(weights.w2);
      }
    }
    const Saved saved = run_forward(config, routings_);
    set_hosts(inputs_, moved_, sums);
    const bool backward = inputs_.direction == Direction::kBackward;
    if (!backward) {
      append_z(group_, inputs_, saved, moved_, sums);
      append_arrived(group_, inputs_, routings_, Tensor::kRows, sums);
      for (int rank = 0; rank < inputs_.ranks(); ++rank) {
        append_rows(group_, {rank, ranks_[rank].y.as<BFloat16>(), tokens(rank), shape_.hidden}, sums, Tensor::kY);
      }
      return;
    }
    run_backward(config, saved, WeightGradientTime::kNone);
    append_arrived(group_, inputs_, routings_, Tensor::kDxRows, sums);
    for (int rank = 0; rank < inputs_.ranks(); ++rank) {
      RankCopies& own = ranks_[rank];
      const HostView<float> dprobs(group_, rank, own.dprobs.as<float>(), tokens(rank) * shape_.topk);
      sums.of(Tensor::kDprobs).emplace_back().append(dprobs.data(), tokens(rank) * shape_.topk, 1, 1);
      append_rows(group_, {rank, own.dx.as<BFloat16>(), tokens(rank), shape_.hidden}, sums, Tensor::kDx);
    }
  }

  // The moved experts' weight gradients: a layer of one expert a rank, with the slots that go to these.
  void run_gradients(Sums& sums, const GradientStart& start) {
    const int ranks = inputs_.ranks();
    LayerConfig config = inputs_.config;
    config.shape.experts = ranks;
    config.shape.topk = std::min<int64_t>(shape_.topk, ranks);
    config.numerics.combine_groups = 0;
    std::vector<HostRouting> routings = read_routings(group_, inputs_);
    for (int rank = 0; rank < ranks; ++rank) {
      keep_moved_slots(routings[rank], tokens(rank), config.shape.topk);
      RankCopies& own = ranks_[rank];
      const ExpertWeights weights =
          own.moved.gate != nullptr ? own.moved : inputs_.expert(rank * inputs_.local_experts() + moved_.expert);
      own.gate = {weights.gate};
      own.up = {weights.up};
      own.w2 = {weights.w2};
    }
    const std::size_t elements = static_cast<std::size_t>(shape_.intermediate * shape_.hidden);
    const std::size_t bytes = elements * gradient_bytes(config.numerics);
    const bool added = config.numerics.weight_gradient == WeightGradient::kMainGrad;
    for (int rank = 0; rank < ranks; ++rank) {
      RankCopies& own = ranks_[rank];
      own.dw1 = RankArray(group_, rank, 2 * bytes);
      own.dw2 = RankArray(group_, rank, bytes);
      if (!added) continue;
      const int home = (rank - moved_.shift % ranks + ranks) % ranks;
      own.dw1 = copied(home, rank, const_cast<RankArray&>(start.dw1[home]).as<float>(), 2 * elements);
      own.dw2 = copied(home, rank, const_cast<RankArray&>(start.dw2[home]).as<float>(), elements);
    }
    const Saved saved = run_forward(config, routings);
    run_backward(config, saved, WeightGradientTime::kNow);
    sums.of(Tensor::kDw1).resize(shape_.experts);
    sums.of(Tensor::kDw2).resize(shape_.experts);
    for (int rank = 0; rank < ranks; ++rank) {
      const int home = (rank - moved_.shift % ranks + ranks) % ranks;
      const int64_t expert = home * inputs_.local_experts() + moved_.expert;
      append_gradient(group_, config.numerics,
                      {rank, ranks_[rank].dw1.as<void>(), 2 * shape_.intermediate, shape_.hidden},
                      sums.of(Tensor::kDw1)[expert]);
      append_gradient(group_, config.numerics, {rank, ranks_[rank].dw2.as<void>(), shape_.hidden, shape_.intermediate},
                      sums.of(Tensor::kDw2)[expert]);
    }
  }

 private:
  int64_t tokens(int rank) const { return inputs_.routings[rank].tokens; }

  template <typename T>
  RankArray copied(int from, int to, const T* values, std::size_t count) const {
    return RankArray(group_, to, HostView<T>(group_, from, values, static_cast<int64_t>(count)).data(),
                     count * sizeof(T));
  }

  void copy_weights(int rank) {
    const int ranks = inputs_.ranks(), home = (rank - moved_.shift % ranks + ranks) % ranks;
    const ExpertWeights from = inputs_.expert(home * inputs_.local_experts() + moved_.expert);
    const int64_t half = shape_.intermediate * shape_.hidden;
    std::vector<BFloat16> all;
    all.reserve(static_cast<std::size_t>(3 * half));
    for (const BFloat16* part : {from.gate, from.up, from.w2}) {
      const HostView<BFloat16> view(group_, home, part, half);
      all.insert(all.end(), view.data(), view.data() + half);
    }
    RankCopies& own = ranks_[rank];
    own.weights = RankArray(group_, rank, all.data(), all.size() * sizeof(BFloat16));
    const BFloat16* const copy = own.weights.as<BFloat16>();
    own.moved = {copy, copy + half, copy + 2 * half};
  }

  // Slots of other experts go; those that are left stand in their order. Ids become the ranks that compute.
  void keep_moved_slots(HostRouting& routing, int64_t token_count, int64_t topk) const {
    const int64_t local = inputs_.local_experts();
    HostRouting kept;
    kept.ids.assign(token_count * topk, -1);
    kept.probs.assign(token_count * topk, 0.0f);
    for (int64_t token = 0; token < token_count; ++token) {
      int64_t next = token * topk;
      for (int64_t slot = token * shape_.topk; slot < (token + 1) * shape_.topk; ++slot) {
        const int32_t id = routing.ids[slot];
        if (id < 0 || id % local != moved_.expert) continue;
        kept.ids[next] = static_cast<int32_t>((id / local + moved_.shift) % inputs_.ranks());
        kept.probs[next++] = routing.probs[slot];
      }
    }
    routing = std::move(kept);
  }

  Weights weights(int rank) {
    Weights given;
    given.w1_experts = ranks_[rank].gate.data();
    given.w1_up_experts = ranks_[rank].up.data();
    given.w2_experts = ranks_[rank].w2.data();
    return given;
  }

  Schedule resolved(const LayerConfig& config, Direction direction) const {
    return resolve(
        schedule_,
        {.direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = group_.machine()});
  }

  Saved run_forward(const LayerConfig& config, const std::vector<HostRouting>& routings) {
    std::vector<Routing> placed(ranks_.size());
    std::vector<ForwardArguments> arguments(ranks_.size());
    for (int rank = 0; rank < inputs_.ranks(); ++rank) {
      RankCopies& own = ranks_[rank];
      const std::size_t slots = routings[rank].ids.size();
      own.ids = RankArray(group_, rank, routings[rank].ids.data(), slots * sizeof(int32_t));
      own.probs = RankArray(group_, rank, routings[rank].probs.data(), slots * sizeof(float));
      own.y = RankArray(group_, rank, static_cast<std::size_t>(tokens(rank) * shape_.hidden) * sizeof(BFloat16));
      placed[rank].tokens = tokens(rank);
      placed[rank].topk_ids = own.ids.as<int32_t>();
      placed[rank].probs = own.probs.as<float>();
      arguments[rank].x = inputs_.x[rank];
      arguments[rank].y = own.y.as<BFloat16>();
      arguments[rank].weights = weights(rank);
    }
    const Schedule schedule = resolved(config, Direction::kForward);
    const Placement placement = place(group_, config.shape, placed);
    Saved saved = forward(group_, config, schedule, placement, arguments);
    group_.synchronize();
    return saved;
  }

  void run_backward(const LayerConfig& config, const Saved& saved, WeightGradientTime time) {
    std::vector<BackwardArguments> arguments(ranks_.size());
    for (int rank = 0; rank < inputs_.ranks(); ++rank) {
      RankCopies& own = ranks_[rank];
      const std::size_t rows = static_cast<std::size_t>(tokens(rank));
      own.dx = RankArray(group_, rank, rows * static_cast<std::size_t>(shape_.hidden) * sizeof(BFloat16));
      own.dprobs = RankArray(group_, rank, rows * static_cast<std::size_t>(config.shape.topk) * sizeof(float));
      BackwardArguments& given = arguments[rank];
      given.dy = inputs_.dy[rank];
      given.x = inputs_.x[rank];
      given.weights = weights(rank);
      given.dx = own.dx.as<BFloat16>();
      given.dprobs = own.dprobs.as<float>();
      given.weight_gradients = time;
      if (time != WeightGradientTime::kNow) continue;
      given.gradients.dw1 = own.dw1.as<void>();
      given.gradients.dw2 = own.dw2.as<void>();
    }
    backward(group_, config, resolved(config, Direction::kBackward), saved, arguments);
    group_.synchronize();
  }

  Group& group_;
  const Inputs& inputs_;
  LayerShape shape_;
  PartialSchedule schedule_;
  Moved moved_;
  std::vector<HostRouting> routings_;
  std::vector<RankCopies> ranks_;
};

const void* half_of(const void* whole, const void* const* experts, int64_t local, int64_t bytes) {
  if (experts != nullptr) return experts[local];
  return static_cast<const std::byte*>(whole) + local * bytes;
}

struct ExpertGradients {
  const void *gate, *up, *dw2;
};

ExpertGradients gradients_of(const LayerConfig& config, const WeightGradients& given, int64_t local) {
  const int64_t half =
      config.shape.intermediate * config.shape.hidden * static_cast<int64_t>(gradient_bytes(config.numerics));
  const bool apart = given.dw1_up != nullptr || given.dw1_up_experts != nullptr;
  ExpertGradients found{};
  found.gate = half_of(given.dw1, given.dw1_experts, local, apart ? half : 2 * half);
  found.up = apart ? half_of(given.dw1_up, given.dw1_up_experts, local, half)
                   : static_cast<const std::byte*>(found.gate) + half;
  found.dw2 = half_of(given.dw2, given.dw2_experts, local, half);
  return found;
}

}  // namespace

Sums observe_forward(const Group& group, const Inputs& inputs, std::span<const ForwardArguments> arguments,
                     const Saved& saved) {
  Sums sums;
  set_hosts(inputs, {}, sums);
  append_z(group, inputs, saved, {}, sums);
  append_arrived(group, inputs, read_routings(group, inputs), Tensor::kRows, sums);
  for (int rank = 0; rank < inputs.ranks(); ++rank) {
    append_rows(group, {rank, arguments[rank].y, inputs.routings[rank].tokens, inputs.config.shape.hidden}, sums,
                Tensor::kY);
  }
  return sums;
}

Sums observe_backward(const Group& group, const Inputs& inputs, std::span<const BackwardArguments> arguments,
                      int64_t gradient_expert) {
  const LayerShape& shape = inputs.config.shape;
  const std::vector<HostRouting> routings = read_routings(group, inputs);
  Sums sums;
  set_hosts(inputs, {}, sums);
  append_arrived(group, inputs, routings, Tensor::kDxRows, sums);
  for (int rank = 0; rank < inputs.ranks(); ++rank) {
    const Routing& routing = inputs.routings[rank];
    const bool dense = routing.topk_ids == nullptr;
    const int64_t slots = routing.tokens * shape.topk;
    const HostView<float> dprobs(group, rank, arguments[rank].dprobs, dense ? routing.tokens * shape.experts : slots);
    std::vector<float> of_slots(static_cast<std::size_t>(slots));
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int32_t id = routings[rank].ids[slot];
      const int64_t at = dense ? slot / shape.topk * shape.experts + id : slot;
      of_slots[slot] = id < 0 ? 0.0f : dprobs.data()[at];
    }
    sums.of(Tensor::kDprobs).emplace_back().append(of_slots.data(), slots, 1, 1);
    append_rows(group, {rank, arguments[rank].dx, routing.tokens, shape.hidden}, sums, Tensor::kDx);
  }
  if (gradient_expert < 0) return sums;
  sums.of(Tensor::kDw1).resize(shape.experts);
  sums.of(Tensor::kDw2).resize(shape.experts);
  for (int rank = 0; rank < inputs.ranks(); ++rank) {
    const ExpertGradients own = gradients_of(inputs.config, arguments[rank].gradients, gradient_expert);
    const int64_t expert = rank * inputs.local_experts() + gradient_expert;
    for (const void* part : {own.gate, own.up}) {
      append_gradient(group, inputs.config.numerics, {rank, part, shape.intermediate, shape.hidden},
                      sums.of(Tensor::kDw1)[expert]);
    }
    append_gradient(group, inputs.config.numerics, {rank, own.dw2, shape.hidden, shape.intermediate},
                    sums.of(Tensor::kDw2)[expert]);
  }
  return sums;
}

GradientStart keep_gradients(const Group& group, const LayerConfig& config,
                             std::span<const BackwardArguments> arguments, int64_t expert) {
  const int64_t half = config.shape.intermediate * config.shape.hidden;
  GradientStart kept;
  kept.expert = expert;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const int rank = static_cast<int>(i);
    const ExpertGradients own = gradients_of(config, arguments[i].gradients, expert);
    std::vector<float> both;
    for (const void* part : {own.gate, own.up}) {
      const HostView<float> view(group, rank, static_cast<const float*>(part), half);
      both.insert(both.end(), view.data(), view.data() + half);
    }
    kept.dw1.emplace_back(group, rank, both.data(), both.size() * sizeof(float));
    const HostView<float> second(group, rank, static_cast<const float*>(own.dw2), half);
    kept.dw2.emplace_back(group, rank, second.data(), static_cast<std::size_t>(half) * sizeof(float));
  }
  return kept;
}

Sums run_again(Group& group, const Inputs& inputs, const std::string& schedule, Moved moved,
               const GradientStart* start) {
  Sums sums;
  // Groups of experts are summed in their order, so their experts stay where they are.
  const Moved of_whole = inputs.config.numerics.combine_groups > 0 ? Moved{moved.expert, 0} : moved;
  Rerun(group, inputs, schedule, of_whole).run_whole(sums);
  Sums with_moved;
  set_hosts(inputs, moved, with_moved);
  sums.gradient_host = with_moved.host;
  if (start != nullptr) Rerun(group, inputs, schedule, moved).run_gradients(sums, *start);
  return sums;
}

std::vector<std::string> other_schedules(const Group& group, const LayerConfig& config, const Schedule& given,
                                         Direction direction) {
  constexpr const char* kTexts[] = {
      "auto",
      "fusion=none",
      "queue=dynamic",
      "combine.transport=staged",
      "fusion=pairs",
      "order.source_rotation=off",
      "order.raster=1,queue=dynamic",
      "tile.m=64",
      "order.interleave=phased,queue=dynamic",
      "dispatch.dedup=off",
  };
  const Machine machine = group.machine();
  LayerConfig small = config;  // of the moved experts alone
  small.shape.experts = group.ranks();
  small.shape.topk = std::min<int64_t>(config.shape.topk, group.ranks());
  small.numerics.combine_groups = 0;
  const auto require_legal = [&](const PartialSchedule& text) {
    for (const Direction each : {Direction::kForward, direction}) {
      for (const LayerConfig* layer : {&config, static_cast<const LayerConfig*>(&small)}) {
        resolve(text, {.direction = each, .shape = layer->shape, .numerics = layer->numerics, .machine = machine});
      }
    }
  };
  const auto run_alike = [&](const std::string& text) {
    const PartialSchedule fields = PartialSchedule::parse(text);
    require_legal(fields);
    const ScheduleRequest request = {
        .direction = direction, .shape = config.shape, .numerics = config.numerics, .machine = machine};
    return canonical(resolve(fields, request), request) == canonical(given, request);
  };
  std::vector<std::string> texts;
  for (const char* text : kTexts) {
    try {
      if (!run_alike(text)) texts.emplace_back(text);
    } catch (const Error&) {  // not legal here
    }
  }
  return texts;
}

}  // namespace uniep::verify
