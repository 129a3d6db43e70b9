#include "api/c_arguments.h"

#include <cstring>

#include "api/c_struct.h"

namespace uniep {
namespace {

static_assert(UNIEP_ENGINE_CPU == static_cast<int>(EngineKind::kCpu) &&
                  UNIEP_ENGINE_CUDA == static_cast<int>(EngineKind::kCuda) &&
                  UNIEP_ACTIVATION_GEGLU_TANH == static_cast<int>(Activation::kGegluTanh) &&
                  UNIEP_ACTIVATION_GEGLU_ERF == static_cast<int>(Activation::kGegluErf) &&
                  UNIEP_ACTIVATION_RELU2 == static_cast<int>(Activation::kRelu2) &&
                  UNIEP_ACTIVATION_SILU == static_cast<int>(Activation::kSilu) &&
                  UNIEP_ROUTER_WEIGHT_OUTPUT == static_cast<int>(RouterWeight::kOutput) &&
                  UNIEP_ROUTER_WEIGHT_INPUT == static_cast<int>(RouterWeight::kInput) &&
                  UNIEP_WEIGHT_GRADIENT_FP32 == static_cast<int>(WeightGradient::kFloat32) &&
                  UNIEP_WEIGHT_GRADIENT_MAIN_GRAD == static_cast<int>(WeightGradient::kMainGrad) &&
                  UNIEP_WEIGHT_GRADIENTS_LATER == static_cast<int>(WeightGradientTime::kLater) &&
                  UNIEP_WEIGHT_GRADIENTS_NONE == static_cast<int>(WeightGradientTime::kNone) &&
                  UNIEP_INDEX_INT64 == static_cast<int>(IndexType::kInt64) &&
                  UNIEP_LAUNCH_PROCESSES == static_cast<int>(Launch::kProcesses) &&
                  UNIEP_BACKWARD == static_cast<int>(Direction::kBackward),
              "the C constants hold the values of the C++ enumerations");

Allocator adapted(CallerAllocator& caller) {
  Allocator allocator;
  if (caller.allocate != nullptr) {
    allocator.allocate = [](void* context, std::size_t bytes, std::size_t alignment, int rank, Stream stream) {
      const CallerAllocator& own = *static_cast<const CallerAllocator*>(context);
      return own.allocate(own.context, bytes, alignment, rank, stream.handle);
    };
  }
  if (caller.release != nullptr) {
    allocator.release = [](void* context, void* memory, std::size_t bytes, int rank, Stream stream) {
      const CallerAllocator& own = *static_cast<const CallerAllocator*>(context);
      own.release(own.context, memory, bytes, rank, stream.handle);
    };
  }
  allocator.context = &caller;
  return allocator;
}

const BFloat16* const* addresses(const void* const* given) {
  return reinterpret_cast<const BFloat16* const*>(given);
}

// Without one all addresses are null; the call says which one it needs.
Weights weights(const uniep_weights* given) {
  if (given == nullptr) return {};
  const uniep_weights read = read_struct<uniep_weights>(given, "weights");
  Weights own;
  own.w1 = static_cast<const BFloat16*>(read.w1);
  own.w2 = static_cast<const BFloat16*>(read.w2);
  own.w1_experts = addresses(read.w1_experts);
  own.w2_experts = addresses(read.w2_experts);
  own.w1_up = static_cast<const BFloat16*>(read.w1_up);
  own.w1_up_experts = addresses(read.w1_up_experts);
  own.b1 = static_cast<const BFloat16*>(read.b1);
  own.b2 = static_cast<const BFloat16*>(read.b2);
  own.b1_experts = addresses(read.b1_experts);
  own.b2_experts = addresses(read.b2_experts);
  return own;
}

WeightGradients weight_gradients_of(const uniep_weight_gradients* given) {
  if (given == nullptr) return {};
  const uniep_weight_gradients read = read_struct<uniep_weight_gradients>(given, "gradients");
  return {read.dw1, read.dw2, read.dw1_experts, read.dw2_experts, read.dw1_up, read.dw1_up_experts,
          read.db1, read.db2, read.db1_experts, read.db2_experts};
}

}  // namespace

bool checked_flag(int32_t value, const char* name) {
  if (value != 0 && value != 1) {
    throw Error(Status::kInvalidArgument, fmt::format("{}: {}; legal are 0 and 1", name, value));
  }
  return value == 1;
}

void put_text(const std::string& text, const char* needs, char* buffer, std::size_t capacity, std::size_t* needed) {
  *needed = text.size() + 1;
  if (buffer == nullptr) return;
  if (capacity < *needed) {
    throw Error(Status::kOverflow, fmt::format("capacity: {} bytes; {} {}", capacity, needs, *needed));
  }
  std::memcpy(buffer, text.c_str(), *needed);
}

GroupOptions group_options(const uniep_group_options& given, CallerAllocator& allocator) {
  GroupOptions options;
  options.engine = checked_constant(given.engine, EngineKind::kCuda, "engine");
  options.ranks = given.ranks;
  options.workers = given.workers;
  options.timeout_seconds = given.timeout_seconds;
  options.arrival_timeout_seconds = given.arrival_timeout_seconds;
  options.nan_on_overflow = checked_flag(given.nan_on_overflow, "nan_on_overflow");
  options.allocator = adapted(allocator);
  options.launch = checked_constant(given.launch, Launch::kProcesses, "launch");
  options.rank = given.rank;
  options.communicator = given.communicator;
  if (given.unique_id != nullptr) options.bootstrap.assign(given.unique_id, UNIEP_UNIQUE_ID_BYTES);
  if (given.device_count < 0 || (given.device_count > 0) != (given.devices != nullptr)) {
    throw Error(Status::kInvalidArgument,
                fmt::format("device_count: {}; must be the number of entries of devices, or 0 where devices is null",
                            given.device_count));
  }
  options.devices.assign(given.devices, given.devices + given.device_count);
  return options;
}

LayerShape layer_shape(const uniep_layer_config& given) {
  return {given.hidden, given.intermediate, given.experts, given.topk};
}

Numerics layer_numerics(const uniep_layer_config& given) {
  Numerics numerics;
  numerics.activation = checked_constant(given.activation, Activation::kSilu, "activation");
  numerics.router_weight = checked_constant(given.router_weight, RouterWeight::kInput, "router_weight");
  numerics.weight_gradient = checked_constant(given.weight_gradient, WeightGradient::kMainGrad, "weight_gradient");
  numerics.combine_groups = given.combine_groups;
  if (given.alpha != 0) numerics.alpha = given.alpha;
  numerics.gate_limit = given.gate_limit;
  numerics.up_limit = given.up_limit;
  numerics.up_offset = given.up_offset;
  numerics.bias = checked_flag(given.bias, "bias");
  return numerics;
}

Routing routing(const uniep_routing& given) {
  Routing own;
  own.tokens = given.tokens;
  own.topk_ids = given.topk_ids;
  own.index_type = checked_constant(given.index_type, IndexType::kInt64, "index_type");
  own.probs = given.probs;
  own.stream.handle = given.stream;
  own.routing_map = given.routing_map;
  return own;
}

CallerMemory caller_memory(const uniep_caller_memory& given) {
  return {given.data, given.bytes};
}

ForwardArguments forward_arguments(const uniep_forward_arguments& given) {
  ForwardArguments own;
  own.x = static_cast<const BFloat16*>(given.x);
  own.weights = weights(given.weights);
  own.y = static_cast<BFloat16*>(given.y);
  own.stream.handle = given.stream;
  own.saved_memory = caller_memory(given.saved_memory);
  own.workspace_memory = caller_memory(given.workspace_memory);
  return own;
}

BackwardArguments backward_arguments(const uniep_backward_arguments& given) {
  BackwardArguments own;
  own.dy = static_cast<const BFloat16*>(given.dy);
  own.x = static_cast<const BFloat16*>(given.x);
  own.weights = weights(given.weights);
  own.dx = static_cast<BFloat16*>(given.dx);
  own.dprobs = given.dprobs;
  own.gradients = weight_gradients_of(given.gradients);
  own.stream.handle = given.stream;
  own.weight_gradients = checked_constant(given.weight_gradients, WeightGradientTime::kNone, "weight_gradients");
  own.last_use = checked_flag(given.last_use, "last_use");
  own.workspace_memory = caller_memory(given.workspace_memory);
  own.pending_memory = caller_memory(given.pending_memory);
  return own;
}

WeightGradientArguments weight_gradient_arguments(const uniep_weight_gradient_arguments& given) {
  WeightGradientArguments own;
  own.gradients = weight_gradients_of(given.gradients);
  own.stream.handle = given.stream;
  own.sms = given.sms;
  return own;
}

DispatchArguments dispatch_arguments(const uniep_dispatch_arguments& given) {
  DispatchArguments own;
  own.x = static_cast<const BFloat16*>(given.x);
  own.rows = static_cast<BFloat16*>(given.rows);
  own.row_probs = given.row_probs;
  own.stream.handle = given.stream;
  return own;
}

CombineArguments combine_arguments(const uniep_combine_arguments& given) {
  CombineArguments own;
  own.rows = static_cast<const BFloat16*>(given.rows);
  own.y = static_cast<BFloat16*>(given.y);
  own.row_dprobs = given.row_dprobs;
  own.dprobs = given.dprobs;
  own.stream.handle = given.stream;
  return own;
}

}  // namespace uniep
