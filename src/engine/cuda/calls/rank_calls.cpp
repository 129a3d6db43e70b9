#include "engine/cuda/calls/rank_calls.h"

#include <algorithm>
#include <cstring>

#include "engine/cuda/kernels/layer_kernels.h"
#include "engine/cuda/kernels/tensor_maps.h"
#include "engine/workspace.h"
#include "model/activation_choice.h"
#include "uniep/error.h"

namespace uniep::cuda {
namespace {

int64_t local_experts(const CallBinding& call, const DeviceProgram& program) {
  return call.request.shape.experts / program.program.ranks;
}

// What the GEMMs of a call read: the weights of its first and second GEMM, [rows, columns] each.
// Gate and up apart: rows of each, and `up` is the second.
struct WeightSide {
  const BFloat16* whole;
  const BFloat16* const* experts;
  int64_t rows, columns;
  GemmStage stage;
  const char* name;
  const BFloat16* up = nullptr;
  const BFloat16* const* up_experts = nullptr;

  bool apart() const { return up != nullptr || up_experts != nullptr; }
  // Of dgrad FC1 a K block may hold the last gate rows and the first up rows.
  bool straddles() const { return apart() && stage == GemmStage::kDgradFc1 && rows % kTileK != 0; }
  int64_t maps_of_tensor(int64_t local_experts) const { return experts == nullptr ? 1 : local_experts; }
  int64_t maps(int64_t local_experts) const {
    return maps_of_tensor(local_experts) * (straddles() ? 4 : apart() ? 2 : 1);
  }
};

int ranks_of(const CallBinding& call) {
  return call.symmetric.control().ranks();
}

bool has_gemms(const CallBinding& call) {
  return call.request.part == ProgramPart::kLayer || call.request.part == ProgramPart::kRecompute;
}

bool is_backward(const CallBinding& call) {
  return call.request.direction == Direction::kBackward;
}

WeightSide w1_of(const CallBinding& call, const Weights& weights) {
  const LayerShape& shape = call.request.shape;
  WeightSide side{weights.w1,
                  weights.w1_experts,
                  z_columns(shape, call.request.numerics),
                  shape.hidden,
                  is_backward(call) ? GemmStage::kDgradFc1 : GemmStage::kFc1,
                  "w1",
                  weights.w1_up,
                  weights.w1_up_experts};
  if (side.apart()) side.rows = shape.intermediate;
  return side;
}

WeightSide w2_of(const CallBinding& call, const Weights& weights) {
  const LayerShape& shape = call.request.shape;
  return {weights.w2,
          weights.w2_experts,
          shape.hidden,
          shape.intermediate,
          is_backward(call) ? GemmStage::kDgradFc2 : GemmStage::kFc2,
          "w2"};
}

// One tensor over the local experts, or as many as they are; then the same of the up, and of both in small boxes.
std::vector<TensorMap> weight_maps(const CallBinding& call, const WeightSide& side, int64_t local_experts) {
  std::vector<TensorMap> maps;
  if (side.whole == nullptr && side.experts == nullptr) return maps;
  const bool first = (side.stage == GemmStage::kFc1) || (side.stage == GemmStage::kDgradFc2);
  const LayerGemms gemms = !is_backward(call) ? LayerGemms::kForward
                           : first            ? LayerGemms::kFirstGradient
                                              : LayerGemms::kSecondGradient;
  const int box_rows = b_box_rows(layer_gemm(gemms, {.tile_n = call.request.schedule.tile_of(side.stage).n}));
  const auto add = [&](const BFloat16* whole, const BFloat16* const* experts, int rows, const char* name) {
    if (experts == nullptr) {
      maps.push_back(encode_operand_map({whole, side.columns, side.rows, local_experts}, rows, name));
      return;
    }
    for (int64_t expert = 0; expert < local_experts; ++expert) {
      maps.push_back(encode_operand_map({experts[expert], side.columns, side.rows, 1}, rows, name));
    }
  };
  add(side.whole, side.experts, box_rows, side.name);
  if (side.apart()) add(side.up, side.up_experts, box_rows, "w1_up");
  if (side.straddles()) {
    add(side.whole, side.experts, kFewDepthRows, side.name);
    add(side.up, side.up_experts, kFewDepthRows, "w1_up");
  }
  return maps;
}

// Without rows no tile reads A.
TensorMap row_map(const BFloat16* rows, int64_t count, int64_t columns, const char* name) {
  return count == 0 ? TensorMap{} : encode_operand_map({rows, columns, count, 1}, kTileM, name);
}

void bind_peers(RankCall& rank_call, const CallBinding& call, const std::vector<RankBinding>& ranks, int own) {
  for (int peer = 0; peer < rank_call.program.ranks; ++peer) {
    rank_call.flags[peer] = call.symmetric.flags(own, peer);
    rank_call.slot_rows[peer] = call.symmetric.slots(own, peer);
    rank_call.prob_slots[peer] = call.symmetric.prob_slots(own, peer);
    for (int operand = 0; operand < rank_call.program.operands; ++operand) {
      rank_call.input[operand][peer] = call.inputs[operand][static_cast<std::size_t>(peer)];
    }
  }
  for (const RankBinding& peer : ranks) {
    for (int operand = 0; operand < kMaxOperands; ++operand) {
      rank_call.gathered_of[operand][peer.rank] = peer.gathered[operand];
    }
    rank_call.rows_of[peer.rank] = peer.row_table;
  }
}

// RankCall::gradient_maps. Without rows the kernels ask for boxes, too, beyond all columns: `any` is memory that a map
// may be of.
std::vector<TensorMap> gradient_maps(const CallBinding& call, const RankBinding& own, const void* any) {
  constexpr int kWarpRows = kTileM / kMathWarps;
  const int64_t hidden = call.request.shape.hidden, width = call.request.shape.intermediate;
  const int64_t of_z = z_columns(call.request.shape, call.request.numerics);
  const int halves = static_cast<int>(of_z / width);
  const int64_t rows = std::max<int64_t>(own.rows, kTileM);
  const auto of = [&](const void* memory) { return own.rows == 0 || memory == nullptr ? any : memory; };
  const auto moved = [&](const void* memory, int parts, const char* name) {
    return encode_transfer_map({of(memory), rows, parts, width}, kWarpRows, name);
  };
  const auto multiplied = [&](const void* memory, int64_t columns, const char* name) {
    return encode_operand_map({of(memory), columns, rows, 1}, kTileK, name);
  };
  return {moved(own.z, halves, "z"),
          moved(own.dz, halves, "dz"),
          moved(own.activation, 1, "a"),
          multiplied(own.gathered[0], hidden, "rows of dy"),
          multiplied(own.activation, width, "a"),
          multiplied(own.dz, of_z, "dz"),
          multiplied(own.gathered[1], hidden, "rows of x")};
}

// Gradients [rows, columns] of an expert: one tensor, or as many as experts.
struct GradientSide {
  void* whole;
  void* const* experts;
  int64_t rows, columns;
  int box_rows;  // that TMA moves at once: no box may hold both gate and up where they lie apart
  const char* name;
};

constexpr int kWarpRows = kTileM / kMathWarps;

GradientSide dw1_of(const CallBinding& call, const WeightGradients& gradients) {
  const bool apart = is_apart(gradients);
  return {gradients.dw1,
          gradients.dw1_experts,
          apart ? call.request.shape.intermediate : z_columns(call.request.shape, call.request.numerics),
          call.request.shape.hidden,
          apart ? kWarpRows : kTileM,
          "dw1"};
}

GradientSide dw1_up_of(const CallBinding& call, const WeightGradients& gradients) {
  return {
      gradients.dw1_up, gradients.dw1_up_experts, call.request.shape.intermediate, call.request.shape.hidden, kWarpRows,
      "dw1_up"};
}

GradientSide dw2_of(const CallBinding& call, const WeightGradients& gradients) {
  return {gradients.dw2, gradients.dw2_experts, call.request.shape.hidden, call.request.shape.intermediate, kTileM,
          "dw2"};
}

int64_t element_bytes(const CallBinding& call) {
  return call.request.numerics.weight_gradient == WeightGradient::kBFloat16 ? 2 : 4;
}

// TMA writes those in fp32.
int64_t output_map_count(const CallBinding& call, const GradientSide& side, int64_t experts) {
  if (call.request.numerics.weight_gradient == WeightGradient::kBFloat16) return 0;
  return side.experts != nullptr ? experts : int64_t{side.whole != nullptr};
}

std::vector<TensorMap> output_maps(const CallBinding& call, const GradientSide& side, int64_t experts) {
  std::vector<TensorMap> maps;
  const int64_t count = output_map_count(call, side, experts);
  for (int64_t i = 0; i < count; ++i) {
    const MatrixView view = side.experts != nullptr ? MatrixView{side.experts[i], side.columns, side.rows, 1}
                                                    : MatrixView{side.whole, side.columns, side.rows, experts};
    maps.push_back(encode_gradient_map(view, side.box_rows, side.name));
  }
  return maps;
}

std::size_t address_count(const WeightGradients& gradients, int64_t experts) {
  return static_cast<std::size_t>(experts) *
         ((gradients.dw1_experts != nullptr ? 1 : 0) + (gradients.dw2_experts != nullptr ? 1 : 0) +
          (gradients.dw1_up_experts != nullptr ? 1 : 0));
}

// Biases by address, of forward alone.
std::size_t bias_address_count(const CallBinding& call, const Weights& weights, int64_t experts) {
  if (is_backward(call) || !call.request.numerics.bias) return 0;
  return static_cast<std::size_t>(experts) *
         ((weights.b1_experts != nullptr ? 1 : 0) + (weights.b2_experts != nullptr ? 1 : 0));
}

std::size_t address_count(const CallBinding& call, const RankBinding& own) {
  const int64_t experts = call.request.shape.experts / ranks_of(call);
  return address_count(own.gradients, experts) + bias_address_count(call, own.weights, experts);
}

// How W1's maps are told apart, and dW1's rows.
void bind_gate_and_up(RankCall& rank_call, const WeightSide& w1, int64_t local_experts, int64_t intermediate,
                      const WeightGradients& gradients) {
  constexpr int32_t kNoEnd = 1 << 30;
  const auto width = static_cast<int32_t>(intermediate);
  rank_call.up_maps = w1.apart() ? static_cast<int32_t>(w1.maps_of_tensor(local_experts)) : 0;
  rank_call.up_row = w1.apart() ? 0 : width;
  rank_call.gate_depth = w1.apart() ? width : kNoEnd;
  rank_call.gate_rows = is_apart(gradients) ? width : kNoEnd;
}

RankCall rank_call_of(const CallBinding& call, const std::vector<RankBinding>& ranks, const RankBinding& own,
                      const DeviceProgram& program) {
  const LayerShape& shape = call.request.shape;
  RankCall rank_call{};
  rank_call.first_a = row_map(own.gathered[0], own.rows, shape.hidden, "dispatched rows");
  const int64_t of_z = z_columns(shape, call.request.numerics);
  rank_call.second_a = own.dz != nullptr ? row_map(own.dz, own.rows, of_z, "dz")
                                         : row_map(own.activation, own.rows, shape.intermediate, "activations");
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
  // Dense ones are made of what peers have stored, which nobody touches before the group's next call.
  rank_call.dprobs = own.dense_dprobs != nullptr ? call.symmetric.prob_slots(own.rank, own.rank) : own.dprobs;
  rank_call.prob_chunks = own.prob_chunks;
  rank_call.prob_stride = static_cast<int32_t>(own.rows);
  rank_call.prob_chunk_count = own.prob_chunk_count;
  rank_call.records = own.records;
  rank_call.record_counts = own.record_counts;
  rank_call.record_capacity = own.record_capacity;
  return rank_call;
}

}  // namespace

bool is_apart(const WeightGradients& gradients) {
  return gradients.dw1_up != nullptr || gradients.dw1_up_experts != nullptr;
}

void refuse_push() {
  throw Error(Status::kUnsupported,
              "dispatch.transport: push writes into other ranks' expert rows, which are a layer's own memory; with a "
              "process a GPU peers do not reach it: use pull");
}

std::size_t call_image_bytes(const CallBinding& call, const std::vector<RankBinding>& ranks,
                             std::span<const std::size_t> locals) {
  const int64_t experts = call.request.shape.experts / ranks_of(call);
  std::size_t bytes = locals.size() * sizeof(RankCall);
  for (const std::size_t i : locals) {
    const Weights& weights = ranks[i].weights;
    int64_t maps = w1_of(call, weights).maps(experts) + w2_of(call, weights).maps(experts) + kGradientMaps;
    for (const GradientSide& side :
         {dw1_of(call, ranks[i].gradients), dw1_up_of(call, ranks[i].gradients), dw2_of(call, ranks[i].gradients)}) {
      maps += output_map_count(call, side, experts);
    }
    bytes += static_cast<std::size_t>(maps) * sizeof(TensorMap) +
             round_up(static_cast<int64_t>(address_count(call, ranks[i]) * sizeof(void*)), sizeof(TensorMap));
  }
  return bytes;
}

std::vector<std::byte> call_image(const CallBinding& call, const std::vector<RankBinding>& ranks,
                                  std::span<const std::size_t> locals, const std::vector<DeviceProgram>& programs,
                                  std::byte* memory) {
  static_assert(sizeof(RankCall) % alignof(TensorMap) == 0, "the maps that follow are aligned");
  std::vector<std::byte> image(locals.size() * sizeof(RankCall));
  const auto append = [&](const std::vector<TensorMap>& maps) {
    const std::size_t offset = image.size();
    image.resize(offset + maps.size() * sizeof(TensorMap));
    std::memcpy(image.data() + offset, maps.data(), maps.size() * sizeof(TensorMap));
    return reinterpret_cast<const TensorMap*>(memory + offset);
  };
  // Behind all maps, which are aligned to more.
  std::vector<const void*> addresses;
  std::size_t addresses_at = call_image_bytes(call, ranks, locals);
  for (const std::size_t i : locals) {
    addresses_at -= address_count(call, ranks[i]) * sizeof(void*);
  }
  const auto next_address = [&] { return memory + addresses_at + addresses.size() * sizeof(void*); };
  const auto vectors = [&](const BFloat16* whole, const BFloat16* const* experts, int64_t count, int64_t columns) {
    if (experts == nullptr) return BiasVectors{whole, nullptr, columns};
    auto* const table = reinterpret_cast<const BFloat16* const*>(next_address());
    addresses.insert(addresses.end(), experts, experts + count);
    return BiasVectors{nullptr, table, 0};
  };
  // `before`: bytes of rows that the kernels count and that are elsewhere. Maps know no such rows.
  const auto matrices = [&](const GradientSide& side, int64_t count, int64_t before) {
    const int64_t bytes = side.rows * side.columns * element_bytes(call);
    const TensorMap* const maps =
        output_map_count(call, side, count) > 0 ? append(output_maps(call, side, count)) : nullptr;
    if (side.experts == nullptr) {
      return GradientMatrices{static_cast<std::byte*>(side.whole) - before, nullptr, bytes, maps, side.box_rows};
    }
    auto* const table = reinterpret_cast<void* const*>(next_address());
    for (int64_t i = 0; i < count; ++i) addresses.push_back(static_cast<std::byte*>(side.experts[i]) - before);
    return GradientMatrices{nullptr, table, 0, maps, side.box_rows};
  };
  std::size_t next = 0;
  for (const std::size_t i : locals) {
    const int64_t experts = local_experts(call, programs[i]);
    const Weights& weights = ranks[i].weights;
    RankCall rank_call = rank_call_of(call, ranks, ranks[i], programs[i]);
    const WeightSide w1 = w1_of(call, weights), w2 = w2_of(call, weights);
    const WeightSide& first = is_backward(call) ? w2 : w1;
    const WeightSide& second = is_backward(call) ? w1 : w2;
    rank_call.first_b = append(weight_maps(call, first, experts));
    rank_call.second_b = append(weight_maps(call, second, experts));
    rank_call.first_map_per_expert = first.experts != nullptr ? 1 : 0;
    rank_call.second_map_per_expert = second.experts != nullptr ? 1 : 0;
    const bool has_weights = has_gemms(call);
    rank_call.first_maps = has_weights ? static_cast<int32_t>(first.maps(experts)) : 0;
    rank_call.second_maps = has_weights ? static_cast<int32_t>(second.maps(experts)) : 0;
    bind_gate_and_up(rank_call, w1, experts, call.request.shape.intermediate, ranks[i].gradients);
    if (has_gemms(call) && is_backward(call)) {
      rank_call.gradient_maps = append(gradient_maps(call, ranks[i], memory));
      const WeightGradients& gradients = ranks[i].gradients;
      const int64_t gate_bytes = call.request.shape.intermediate * call.request.shape.hidden * element_bytes(call);
      rank_call.gradients[0] = matrices(dw2_of(call, gradients), experts, 0);
      rank_call.gradients[1] = matrices(dw1_of(call, gradients), experts, 0);
      if (is_apart(gradients)) rank_call.gradients[2] = matrices(dw1_up_of(call, gradients), experts, gate_bytes);
    }
    if (has_gemms(call) && !is_backward(call) && call.request.numerics.bias) {
      const LayerShape& shape = call.request.shape;
      rank_call.b1 = vectors(weights.b1, weights.b1_experts, experts, z_columns(shape, call.request.numerics));
      rank_call.b2 = vectors(weights.b2, weights.b2_experts, experts, shape.hidden);
    }
    std::memcpy(image.data() + next++ * sizeof(RankCall), &rank_call, sizeof(RankCall));
  }
  image.resize(addresses_at + addresses.size() * sizeof(void*));
  if (!addresses.empty()) {
    std::memcpy(image.data() + addresses_at, addresses.data(), addresses.size() * sizeof(void*));
  }
  return image;
}

}  // namespace uniep::cuda
