#include "tune/solve_space.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "program/build.h"
#include "program/canonical.h"
#include "uniep/error.h"

namespace uniep::tune {
namespace {

constexpr uint64_t kMaxPoints = 300'000;  // of the densest values that are tried
constexpr int kDensities = 3;
constexpr int kMaxChunk = 4096;  // above it the ring of a 256 column kernel keeps one chunk in flight
constexpr int kMinColumns = 64;  // of a column chunk

std::vector<int> worker_counts(int field, int density) {
  static const std::vector<int> kDispatch[kDensities] = {
      {8, 16, 24, 32}, {4, 8, 16, 24, 32, 40, 48}, {2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96}};
  static const std::vector<int> kReduce[kDensities] = {{0, 8}, {0, 4, 8, 16}, {0, 2, 4, 8, 16, 24, 32}};
  static const std::vector<int> kCombine[kDensities] = {{0}, {0, 8, 16}, {0, 4, 8, 16, 24, 32}};
  if (field == kCommDispatchSms) return kDispatch[density];
  return field == kCommReduceSms ? kReduce[density] : kCombine[density];
}

}  // namespace

SolveSpace::SolveSpace(const SolveRequest& request)
    : fixed_(request.fixed), backward_(request.direction == Direction::kBackward) {
  const Machine machine = sim::schedule_machine(*request.machine, request.ranks);
  const ScheduleRequest wanted = {
      .direction = request.direction, .shape = request.shape, .numerics = request.numerics, .machine = machine};
  const std::vector<std::string> wrong = shape_violations(wanted);
  if (!wrong.empty()) throw Error(Status::kInvalidArgument, wrong.front());
  base_ = resolve(request.fixed, wanted);
  problem_ = problem_of(request, busiest(request, base_));
  local_experts_ = static_cast<int>(request.shape.experts / request.ranks);
  available_ = machine.workers - program::idle_workers(base_);
  for (int density = kDensities - 1; density >= 0; --density) {
    list_values(density);
    find_fits(request);
    list_gemms();
    list_dispatches();
    list_combines();
    size_ = count();
    // With groups results have one way to go, which leaves room for more of other values.
    if (size_ <= (problem_.groups ? 2 : 1) * kMaxPoints) break;
  }
  if (size_ == 0) {
    throw Error(Status::kInvalidArgument, "--schedule: nothing with these values is legal: " + to_text(base_));
  }
}

// A field's values, the preferred ones first: what is fixed, else those given, where the field may have them.
std::vector<int> SolveSpace::allowed(int field, std::vector<int> values) {
  const FieldDescriptor& descriptor = descriptor_of(field);
  bool is_given = fixed_.given(descriptor.field.name);
  if (field == kTileN || field == kTileCluster) {
    for (const GemmStage stage : stages_of(problem_.direction)) {
      // dgrad FC2 has columns of its own.
      if (stage == GemmStage::kDgradFc2 && field == kTileN) continue;
      is_given = is_given || fixed_.given(name_of(stage_field(stage, static_cast<FieldId>(field))));
    }
  }
  if (is_given) values = {descriptor.get(base_).value_or(base_.tile_of(GemmStage::kDgradFc2).n)};
  std::string line = descriptor.field.name + ":";
  for (const int value : values) {
    line += (line.back() == ':' ? " " : ", ") + value_text(descriptor.field, value);
  }
  values_.push_back(line);
  fields_.emplace_back(field, values);
  return values;
}

void SolveSpace::list_values(int density) {
  values_.clear();
  fields_.clear();
  // Fields that are for some values of others alone.
  const bool parts_experts = base_.order.blocks_per_wave > 0, shares = base_.order.second_share > 0;
  const bool relays = base_.comm.relay_sms > 0;
  fusions_ = allowed(kFusion, parts_experts || shares ? std::vector<int>{2} : std::vector<int>{2, 1, 0});
  const bool lends = base_.comm.lend_sms;
  transports_ = allowed(kDispatchTransport, relays               ? std::vector<int>{1}
                                            : backward_ || lends ? std::vector<int>{0}
                                                                 : std::vector<int>{0, 1});
  const bool dedup_matters = local_experts_ > 1 && problem_.shape.topk > 1;
  dedups_ = allowed(kDispatchDedup, dedup_matters ? std::vector<int>{1, 0} : std::vector<int>{1});
  // Workers that were given are whole ones that copy.
  const auto gives_workers = [&](int field) {
    return fixed_.given(name_of(field)) && descriptor_of(field).get(base_).value() > 0;
  };
  const bool by_workers = gives_workers(kCommDispatchSms) || gives_workers(kCommRelaySms) ||
                          gives_workers(kCommCombineSms) || gives_workers(kCommReduceSms);
  wheres_ = allowed(kCommWhere, by_workers ? std::vector<int>{1}
                                : lends    ? std::vector<int>{0}
                                           : std::vector<int>{0, 1});
  const auto workers = [&](int field) {
    std::vector<int> values = worker_counts(field, density);
    std::erase_if(values, [&](int value) { return value > 0 && value >= available_; });
    return allowed(field, values);
  };
  dispatch_sms_ = workers(kCommDispatchSms);
  combine_sms_ = workers(kCommCombineSms);
  reduce_sms_ = workers(kCommReduceSms);
  std::vector<int> chunks;
  const auto row = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(problem_.shape.hidden * 2)));
  for (int bytes = kMaxChunk; bytes >= 512; bytes /= 2) {
    if (bytes <= std::max<int64_t>(row, 512)) chunks.push_back(bytes);
  }
  chunks_ = allowed(kCommChunkBytes, chunks);
  std::vector<int> waves;
  for (int experts = 1; experts <= local_experts_; ++experts) {
    if (experts <= 8 || std::has_single_bit(static_cast<unsigned>(experts)) || experts == local_experts_) {
      waves.push_back(experts);
    }
  }
  if (backward_) waves = {local_experts_};
  if (parts_experts) waves = {1};
  waves_ = allowed(kOrderExpertsPerWave, waves);
  interleaves_ = allowed(kOrderInterleave, shares      ? std::vector<int>{1}
                                           : backward_ ? std::vector<int>{0}
                                                       : std::vector<int>{0, 1});
  rasters_ = allowed(kOrderRaster, {16, 8, 4, 2, 1});
  queues_ = allowed(kQueue, lends || shares  ? std::vector<int>{1}
                            : available_ > 1 ? std::vector<int>{1, 0}
                                             : std::vector<int>{0});
  widths_.clear();
  const std::vector<int> widths = allowed(kTileN, {256, 128});
  const int own = stage_field(GemmStage::kDgradFc2, kTileN);
  const std::vector<int> firsts = backward_ ? allowed(own, {192, 128}) : std::vector<int>{0};
  for (const int common : widths) {
    for (const int first : firsts) widths_.push_back({common, first});
  }
  clusters_ = allowed(kTileCluster, {2, 1});
  const bool only_staged = problem_.groups || gives_workers(kCommCombineSms);
  combine_transports_ = allowed(kCombineTransport, only_staged ? std::vector<int>{1} : std::vector<int>{0, 1});
  std::vector<int> column_chunks;
  for (int count = 1; count <= 8; ++count) {
    if (count == 1 || problem_.shape.hidden / count >= kMinColumns) column_chunks.push_back(count);
  }
  column_chunks_ = allowed(kCombineColumnChunks, column_chunks);
  wgrads_ = {static_cast<int>(base_.wgrad)};
  if (!backward_) return;
  // A reserve that was given is for one order of the weight gradients.
  wgrads_ = fixed_.given(name_of(kBackwardWgradReserve))
                ? allowed(kBackwardWgrad, {static_cast<int>(base_.wgrad)})
                : allowed(kBackwardWgrad, {static_cast<int>(WgradOrder::kFill), static_cast<int>(WgradOrder::kAfter)});
  // What is kept costs memory, which is not for a solver to choose; it says what that buys.
  allowed(kSaveXg, {static_cast<int>(base_.save_xg)});
  const int other = static_cast<int>(base_.save_xg == SaveXg::kKeep ? SaveXg::kRedispatch : SaveXg::kKeep);
  if (!fixed_.given(name_of(kSaveXg))) fields_.back().second.push_back(other);
  allowed(kSaveZ, {static_cast<int>(base_.save_z)});
  const int other_z = static_cast<int>(base_.save_z == SaveZ::kKeep ? SaveZ::kRecompute : SaveZ::kKeep);
  if (!fixed_.given(name_of(kSaveZ))) fields_.back().second.push_back(other_z);
}

// Pipeline stages, then the ring's, as many as there is room for.
void SolveSpace::find_fits(const SolveRequest& request) {
  const Machine machine = sim::schedule_machine(*request.machine, request.ranks);
  const RuleContext context = rule_context(
      {.direction = request.direction, .shape = request.shape, .numerics = request.numerics, .machine = machine});
  const std::vector<Rule> rules = schedule_rules(context);
  const auto choices = [&](int field, std::vector<int> values) {
    if (fixed_.given(name_of(field))) values = {descriptor_of(field).get(base_).value()};
    return values;
  };
  const auto fit_of = [&](Schedule probe) -> Fit {
    for (const int stages : choices(kTileStages, {4, 3, 2})) {
      for (const int ring : choices(kCommStages, {4, 3, 2, 1})) {
        probe.tile.stages = stages;
        probe.comm.stages = ring;
        const bool legal = std::all_of(rules.begin(), rules.end(),
                                       [&](const Rule& rule) { return rule.holds(probe, context, rule.stage); });
        if (legal) return {true, stages, ring};
      }
    }
    return {};
  };
  fits_.assign(widths_.size() * chunks_.size() * 2 * kKernelKinds, {});
  const auto probe_kind = [&](const GemmChoice& gemm, int chunk, int where) {
    Schedule probe = base_;
    set_gemms(probe, gemm);
    probe.comm.chunk_bytes = chunks_[chunk];
    probe.comm.where = static_cast<CommWhere>(where);
    probe.comm.dispatch_sms = where == 0 ? 0 : gemm.cluster;
    probe.comm.combine_sms = probe.comm.reduce_sms = 0;
    if (!problem_.groups) probe.combine.transport = CombineTransport::kEpilogue;
    fits_[index(gemm.width, chunk, static_cast<CommWhere>(where)) * kKernelKinds + kind_of(gemm)] = fit_of(probe);
  };
  const auto probe = [&](int fusion, int wgrad, int cluster, int queue) {
    for (std::size_t width = 0; width < widths_.size(); ++width) {
      GemmChoice gemm{};
      gemm.fusion = static_cast<Fusion>(fusion);
      gemm.experts_per_wave = backward_ ? waves_.front() : 1;
      gemm.interleave = base_.order.second_share > 0 ? Interleave::kMixed : Interleave::kPhased;
      gemm.raster = base_.order.raster;
      gemm.queue = static_cast<QueueKind>(queue);
      gemm.width = static_cast<int>(width);
      gemm.cluster = cluster;
      gemm.wgrad = static_cast<WgradOrder>(wgrad);
      if (!may_fill(gemm)) continue;
      for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
        for (const int where : wheres_) probe_kind(gemm, static_cast<int>(chunk), where);
      }
    }
  };
  for (const int fusion : fusions_) {
    for (const int wgrad : wgrads_) {
      for (const int cluster : clusters_) {
        for (const int queue : queues_) probe(fusion, wgrad, cluster, queue);
      }
    }
  }
}

void SolveSpace::set_gemms(Schedule& schedule, const GemmChoice& gemm) const {
  schedule.fusion = gemm.fusion;
  schedule.order.experts_per_wave = gemm.experts_per_wave;
  schedule.order.interleave = gemm.interleave;
  schedule.order.raster = gemm.raster;
  schedule.queue = gemm.queue;
  schedule.tile.n = widths_[gemm.width].common;
  schedule.tile.cluster = gemm.cluster;
  schedule.wgrad = gemm.wgrad;
  if (!backward_) return;
  TileOverride& own = schedule.stage_tile[static_cast<int>(GemmStage::kDgradFc2)];
  own.n = widths_[gemm.width].first;
  if (!fixed_.given(name_of(stage_field(GemmStage::kDgradFc2, kTileStages)))) own.stages.reset();
}

// Calls list(fusion, experts of a wave, interleave) for what goes together.
template <typename List>
void SolveSpace::for_each_order(List&& list) const {
  const bool waves_are_fixed = fixed_.given(name_of(kOrderExpertsPerWave));
  const bool mixed_is_fixed = interleaves_.size() == 1 && interleaves_.front() == 1;
  for (const int fusion : fusions_) {
    const bool layer = static_cast<Fusion>(fusion) == Fusion::kLayer;
    if (!layer && mixed_is_fixed) continue;
    const std::vector<int> waves = layer || waves_are_fixed ? waves_ : std::vector<int>{local_experts_};
    for (const int experts : waves) {
      for (const int interleave : interleaves_) {
        const bool mixed = static_cast<Interleave>(interleave) == Interleave::kMixed;
        const bool one_wave = experts >= local_experts_ && base_.order.blocks_per_wave == 0;
        if (mixed && (!layer || (one_wave && interleaves_.size() > 1))) continue;
        list(static_cast<Fusion>(fusion), experts, static_cast<Interleave>(interleave));
      }
    }
  }
}

void SolveSpace::list_gemms() {
  gemms_.clear();
  for_each_order([&](Fusion fusion, int experts, Interleave interleave) {
    for (const int wgrad : wgrads_) {
      for (const int cluster : clusters_) {
        for (const int raster : rasters_) {
          if (cluster == 2 && raster % 2 != 0 && rasters_.size() > 1) continue;
          for (const int queue : queues_) {
            for (std::size_t width = 0; width < widths_.size(); ++width) {
              GemmChoice choice{fusion,
                                experts,
                                interleave,
                                raster,
                                static_cast<QueueKind>(queue),
                                static_cast<int>(width),
                                cluster,
                                static_cast<WgradOrder>(wgrad),
                                {}};
              if (!may_fill(choice)) continue;
              Schedule schedule = base_;
              set_gemms(schedule, choice);
              choice.part = gemm_part(problem_, schedule);
              gemms_.push_back(choice);
            }
          }
        }
      }
    }
  });
}

void SolveSpace::list_dispatches() {
  dispatches_.clear();
  for (const int where : wheres_) {
    const bool by_warps = static_cast<CommWhere>(where) == CommWhere::kWarps;
    const std::vector<int> sms = by_warps ? std::vector<int>{0} : dispatch_sms_;
    for (const int transport : transports_) {
      for (const int dedup : dedups_) {
        for (const int count : sms) {
          for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
            // Whole workers copy by their port, whatever the chunk.
            if (!by_warps && chunk > 0) continue;
            if (!by_warps && count < 1) continue;
            DispatchChoice choice{static_cast<DispatchTransport>(transport),
                                  dedup != 0,
                                  static_cast<CommWhere>(where),
                                  count,
                                  static_cast<int>(chunk),
                                  {}};
            Schedule schedule = base_;
            schedule.dispatch = {choice.transport, choice.dedup};
            schedule.comm.where = choice.where;
            schedule.comm.dispatch_sms = count;
            schedule.comm.chunk_bytes = chunks_[chunk];
            choice.part = dispatch_part(problem_, schedule);
            dispatches_.push_back(choice);
          }
        }
      }
    }
  }
}

void SolveSpace::list_combines() {
  combines_.assign(widths_.size() * chunks_.size() * 2, {});
  for (std::size_t width = 0; width < widths_.size(); ++width) {
    for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
      for (const int where : wheres_) {
        const bool by_warps = static_cast<CommWhere>(where) == CommWhere::kWarps;
        std::vector<CombineChoice>& list =
            combines_[index(static_cast<int>(width), static_cast<int>(chunk), static_cast<CommWhere>(where))];
        for (const int transport : combine_transports_) {
          const bool staged = static_cast<CombineTransport>(transport) == CombineTransport::kStaged;
          for (const int column_chunks : column_chunks_) {
            for (const int combine_sms : by_warps || !staged ? std::vector<int>{0} : combine_sms_) {
              for (const int reduce_sms : by_warps ? std::vector<int>{0} : reduce_sms_) {
                CombineChoice choice{
                    static_cast<CombineTransport>(transport), column_chunks, combine_sms, reduce_sms, {}};
                Schedule schedule = base_;
                schedule.combine = {choice.transport, column_chunks};
                schedule.comm.where = static_cast<CommWhere>(where);
                schedule.comm.combine_sms = combine_sms;
                schedule.comm.reduce_sms = reduce_sms;
                schedule.comm.chunk_bytes = chunks_[chunk];
                schedule.tile.n = widths_[width].common;
                choice.part = combine_part(problem_, schedule);
                list.push_back(choice);
              }
            }
          }
        }
      }
    }
  }
}

uint64_t SolveSpace::count() const {
  // How many choices of the GEMMs there are of a width and kind of kernel is all that matters.
  std::vector<uint64_t> alike(widths_.size() * kKernelKinds, 0);
  std::vector<const GemmChoice*> first(alike.size(), nullptr);
  for (const GemmChoice& gemm : gemms_) {
    const std::size_t at = static_cast<std::size_t>(gemm.width) * kKernelKinds + kind_of(gemm);
    ++alike[at];
    first[at] = &gemm;
  }
  uint64_t total = 0;
  for (std::size_t at = 0; at < alike.size(); ++at) {
    for (const DispatchChoice& dispatch : dispatches_) {
      if (first[at] == nullptr || !fit(*first[at], dispatch).fits) continue;
      for (const CombineChoice& combine : combines(*first[at], dispatch)) {
        total += goes_together(*first[at], dispatch, combine) ? alike[at] : 0;
      }
    }
  }
  return total;
}

Schedule SolveSpace::schedule(const GemmChoice& gemm, const DispatchChoice& dispatch,
                              const CombineChoice& combine) const {
  Schedule schedule = base_;
  set_gemms(schedule, gemm);
  const Fit& room = fit(gemm, dispatch);
  schedule.tile.stages = room.stages;
  schedule.comm.stages = room.ring;
  schedule.dispatch = {dispatch.transport, dispatch.dedup};
  schedule.comm.where = dispatch.where;
  schedule.comm.dispatch_sms = dispatch.sms;
  schedule.comm.chunk_bytes = chunks_[dispatch.chunk];
  schedule.combine = {combine.transport, combine.column_chunks};
  schedule.comm.combine_sms = combine.combine_sms;
  schedule.comm.reduce_sms = combine.reduce_sms;
  return schedule;
}

}  // namespace uniep::tune
