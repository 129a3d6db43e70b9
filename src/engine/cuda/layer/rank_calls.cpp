#include "engine/cuda/layer/rank_calls.h"

#include <cstring>

#include "engine/cuda/device/gemm_config.h"
#include "engine/cuda/tensor_maps.h"
#include "engine/workspace.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

int64_t local_experts(const CallBinding& call, const DeviceProgram& program) {
  return call.request.shape.experts / program.program.ranks;
}

// W1 [El, 2 I, H] or W2 [El, H, I], as one tensor or as El of them.
std::vector<TensorMap> weight_maps(const BFloat16* whole, const BFloat16* const* experts, int64_t count, int64_t rows,
                                   int64_t columns, int box_rows, const char* name) {
  std::vector<TensorMap> maps;
  if (whole == nullptr && experts == nullptr) return maps;
  if (experts == nullptr) {
    maps.push_back(encode_operand_map({whole, columns, rows, count}, box_rows, name));
  } else {
    for (int64_t expert = 0; expert < count; ++expert) {
      maps.push_back(encode_operand_map({experts[expert], columns, rows, 1}, box_rows, name));
    }
  }
  return maps;
}

std::size_t map_count(const BFloat16* const* experts, int64_t count) {
  return experts == nullptr ? 1 : static_cast<std::size_t>(count);
}

// Without rows no tile reads A.
TensorMap row_map(const BFloat16* rows, int64_t count, int64_t columns, const char* name) {
  return count == 0 ? TensorMap{} : encode_operand_map({rows, columns, count, 1}, kTileM, name);
}

void bind_peers(RankCall& rank_call, const CallBinding& call, const std::vector<RankBinding>& ranks, int own) {
  for (int peer = 0; peer < rank_call.program.ranks; ++peer) {
    rank_call.flags[peer] = call.symmetric.flags(own, peer);
    rank_call.slots[peer] = call.symmetric.slots(own, peer);
    rank_call.prob_slots[peer] = call.symmetric.prob_slots(own, peer);
    rank_call.input[0][peer] = call.inputs[static_cast<std::size_t>(peer)];
  }
  for (const RankBinding& peer : ranks) {
    for (int operand = 0; operand < kMaxOperands; ++operand) {
      rank_call.gathered_of[operand][peer.rank] = peer.gathered[operand];
    }
    rank_call.rows_of[peer.rank] = peer.row_table;
  }
}

RankCall rank_call_of(const CallBinding& call, const std::vector<RankBinding>& ranks, const RankBinding& own,
                      const DeviceProgram& program) {
  const LayerShape& shape = call.request.shape;
  RankCall rank_call{};
  rank_call.first_a = row_map(own.gathered[0], own.rows, shape.hidden, "dispatched rows");
  rank_call.second_a = row_map(own.activation, own.rows, shape.intermediate, "activations");
  rank_call.program = program.program;
  rank_call.layout = program.layout;
  rank_call.hidden = shape.hidden;
  rank_call.intermediate = shape.intermediate;
  rank_call.slot_count = static_cast<int32_t>(internal::slots_per_token(shape, call.request.numerics));
  rank_call.state = call.symmetric.signals().state(own.rank);
  rank_call.counters = own.counters;
  rank_call.wait_limit_ns = static_cast<uint64_t>(call.wait_seconds * 1e9);
  rank_call.arrival_limit_ns = static_cast<uint64_t>(call.arrival_seconds * 1e9);
  bind_peers(rank_call, call, ranks, own.rank);
  rank_call.z = own.z;
  rank_call.activation = own.activation;
  rank_call.output_rows = own.output_rows;
  rank_call.output = own.output;
  rank_call.row_probs = own.row_probs;
  rank_call.dprobs = own.dprobs;
  rank_call.prob_chunks = own.prob_chunks;
  rank_call.prob_stride = static_cast<int32_t>(own.rows);
  rank_call.prob_chunk_count = own.prob_chunk_count;
  rank_call.records = own.records;
  rank_call.record_counts = own.record_counts;
  rank_call.record_capacity = own.record_capacity;
  return rank_call;
}

}  // namespace

void refuse_push() {
  throw Error(Status::kUnsupported,
              "dispatch.transport: push writes into other ranks' expert rows, which are a layer's own memory; with a "
              "process a GPU peers do not reach it: use pull");
}

std::size_t call_image_bytes(const CallBinding& call, const std::vector<RankBinding>& ranks,
                             std::span<const std::size_t> locals) {
  const int64_t experts = call.request.shape.experts / call.symmetric.control().ranks();
  std::size_t bytes = locals.size() * sizeof(RankCall);
  for (const std::size_t i : locals) {
    const Weights& weights = ranks[i].weights;
    bytes += (map_count(weights.w1_experts, experts) + map_count(weights.w2_experts, experts)) * sizeof(TensorMap);
  }
  return bytes;
}

std::vector<std::byte> call_image(const CallBinding& call, const std::vector<RankBinding>& ranks,
                                  std::span<const std::size_t> locals, const std::vector<DeviceProgram>& programs,
                                  std::byte* memory) {
  static_assert(sizeof(RankCall) % alignof(TensorMap) == 0, "the maps that follow are aligned");
  const LayerShape& shape = call.request.shape;
  const int first_box = call.request.schedule.tile_of(GemmStage::kFc1).n / 2;
  const int second_box = call.request.schedule.tile_of(GemmStage::kFc2).n / 2;
  std::vector<std::byte> image(locals.size() * sizeof(RankCall));
  const auto append = [&](const std::vector<TensorMap>& maps) {
    const std::size_t offset = image.size();
    image.resize(offset + maps.size() * sizeof(TensorMap));
    std::memcpy(image.data() + offset, maps.data(), maps.size() * sizeof(TensorMap));
    return reinterpret_cast<const TensorMap*>(memory + offset);
  };
  std::size_t next = 0;
  for (const std::size_t i : locals) {
    const int64_t experts = local_experts(call, programs[i]);
    const Weights& weights = ranks[i].weights;
    RankCall rank_call = rank_call_of(call, ranks, ranks[i], programs[i]);
    rank_call.first_b = append(
        weight_maps(weights.w1, weights.w1_experts, experts, 2 * shape.intermediate, shape.hidden, first_box, "w1"));
    rank_call.second_b = append(
        weight_maps(weights.w2, weights.w2_experts, experts, shape.hidden, shape.intermediate, second_box, "w2"));
    rank_call.first_map_per_expert = weights.w1_experts != nullptr ? 1 : 0;
    rank_call.second_map_per_expert = weights.w2_experts != nullptr ? 1 : 0;
    std::memcpy(image.data() + next++ * sizeof(RankCall), &rank_call, sizeof(RankCall));
  }
  return image;
}

}  // namespace uniep::cuda
