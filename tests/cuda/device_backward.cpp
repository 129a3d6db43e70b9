#include "tests/cuda/device_backward.h"

#include <algorithm>
#include <cstring>

#include "engine/cuda/runtime/driver.h"
#include "tests/cuda/layer_oracle.h"

namespace uniep::cuda::test {
namespace {

constexpr auto kGradientElement = static_cast<int64_t>(sizeof(BFloat16));

void poison(const DeviceArray& array, int64_t bytes, CUstream stream) {
  if (bytes == 0) return;
  check(driver().cuMemsetD8Async(device_pointer(array.data()), 0xff, static_cast<std::size_t>(bytes), stream),
        "poisoning");
}

template <typename T>
void keep_part(std::vector<T>& values, int64_t first, int64_t count) {
  if (values.empty()) return;
  const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
  values = std::vector<T>(begin, begin + static_cast<std::ptrdiff_t>(count));
}

}  // namespace

DeviceBackward::DeviceBackward(DeviceLayer& layer, const PartialSchedule& given) : layer_(layer) {
  use_schedule(given);
  for (int local = 0; local < layer_.group().local_ranks(); ++local) {
    const ScopedDevice scope(layer_.device_of(static_cast<std::size_t>(local)));
    check(driver().cuStreamCreate(&asides_.emplace_back(), CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    check(driver().cuEventCreate(&events_.emplace_back(), CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  }
}

DeviceBackward::~DeviceBackward() {
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    const ScopedDevice scope(layer_.device_of(local));
    driver().cuStreamSynchronize(asides_[local]);
    driver().cuEventDestroy(events_[local]);
    driver().cuStreamDestroy(asides_[local]);
  }
}

void DeviceBackward::use_schedule(const PartialSchedule& given) {
  schedule_ = resolve(given, {.direction = Direction::kBackward,
                              .shape = layer_.config().shape,
                              .numerics = layer_.config().numerics,
                              .machine = layer_.group().machine()});
}

void DeviceBackward::give_weights_by_address(bool apart) {
  weight_addresses_.clear();
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    const Weights whole = layer_.weights_of(local);
    WeightAddresses& own = weight_addresses_.emplace_back();
    for (int64_t expert = 0; expert < local_experts(); ++expert) {
      own.w1.push_back(whole.w1 + expert * 2 * expert_elements());
      if (apart) own.w1_up.push_back(own.w1.back() + expert_elements());
      own.w2.push_back(whole.w2 + expert * expert_elements());
    }
  }
}

// ---- Data

BackwardArrays DeviceBackward::arrays(const std::vector<int64_t>& tokens) const {
  const LayerShape& shape = layer_.config().shape;
  BackwardArrays made;
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    const int device = layer_.device_of(local);
    const int64_t own = tokens[static_cast<std::size_t>(layer_.rank_of(local))];
    made.local.push_back({DeviceArray(device, own * shape.hidden * kGradientElement),
                          DeviceArray(device, own * shape.hidden * kGradientElement),
                          DeviceArray(device, own * dprobs_of_token() * static_cast<int64_t>(sizeof(float)))});
  }
  return made;
}

// A half of an expert's dW1: the gate rows, or the up rows.
void* DeviceBackward::half_of_dw1(const GradientArrays& gradients, std::size_t local, int64_t expert,
                                  int64_t half) const {
  const GradientArrays::OfRank& own = gradients.local[local];
  const int64_t bytes = expert_elements() * element_bytes();
  if (gradients.by_address && gradients.apart) {
    return (half == 0 ? own.dw1_experts : own.dw1_up_experts)[static_cast<std::size_t>(expert)];
  }
  if (gradients.by_address) {
    return static_cast<std::byte*>(own.dw1_experts[static_cast<std::size_t>(expert)]) + half * bytes;
  }
  const int64_t place = gradients.apart ? half * local_experts() + expert : 2 * expert + half;
  return static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(own.dw1.data()))) + place * bytes;
}

GradientArrays DeviceBackward::gradients(bool by_address, bool apart) const {
  GradientArrays made;
  made.by_address = by_address;
  made.apart = apart;
  const int64_t bytes = expert_elements() * element_bytes(), experts = local_experts();
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    const int device = layer_.device_of(local);
    GradientArrays::OfRank& own = made.local.emplace_back();
    own.dw1 = DeviceArray(device, experts * 2 * bytes);
    own.dw2 = DeviceArray(device, experts * bytes);
    for (int64_t expert = experts; expert-- > 0;) {
      auto* const dw1 = static_cast<std::byte*>(own.dw1.data());
      own.dw1_experts.push_back(dw1 + expert * (apart ? 1 : 2) * bytes);
      if (apart) own.dw1_up_experts.push_back(dw1 + (experts + expert) * bytes);
      own.dw2_experts.push_back(static_cast<std::byte*>(own.dw2.data()) + expert * bytes);
    }
  }
  return made;
}

void DeviceBackward::upload(const BackwardArrays& arrays, const cli::LayerData& data) const {
  const LayerShape& shape = layer_.config().shape;
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    const int rank = layer_.rank_of(local);
    const int64_t tokens = data.tokens[static_cast<std::size_t>(rank)];
    if (tokens == 0) continue;
    const BackwardArrays::OfRank& own = arrays.local[local];
    const ScopedDevice scope(layer_.device_of(local));
    check(driver().cuMemcpyHtoDAsync(device_pointer(own.dy.data()), data.dy_of(rank),
                                     static_cast<std::size_t>(tokens * shape.hidden * kGradientElement),
                                     layer_.stream_of(local)),
          "uploading dy");
    poison(own.dx, tokens * shape.hidden * kGradientElement, layer_.stream_of(local));
    poison(own.dprobs, tokens * dprobs_of_token() * static_cast<int64_t>(sizeof(float)), layer_.stream_of(local));
  }
}

cli::LayerResult DeviceBackward::started() const {
  cli::LayerResult result;
  const Numerics& numerics = layer_.config().numerics;
  const int64_t of_rank = local_experts() * expert_elements(), first = layer_.rank_of(0) * of_rank;
  const int64_t count = static_cast<int64_t>(local_ranks()) * of_rank;
  const auto fill = [&](std::vector<BFloat16>& bf16, std::vector<float>& fp32, int64_t factor) {
    if (is_bf16()) {
      bf16.assign(static_cast<std::size_t>(factor * count), BFloat16{0xffff});
      return;
    }
    fp32.assign(static_cast<std::size_t>(factor * count), 0.0f);
    if (numerics.weight_gradient != WeightGradient::kMainGrad) {
      std::memset(fp32.data(), 0xff, fp32.size() * sizeof(float));
      return;
    }
    for (std::size_t i = 0; i < fp32.size(); ++i) {
      fp32[i] = cli::start_main_grad(static_cast<uint64_t>(factor * first) + i);
    }
  };
  fill(result.dw1_bf16, result.dw1_fp32, 2);
  fill(result.dw2_bf16, result.dw2_fp32, 1);
  return result;
}

void DeviceBackward::start(const GradientArrays& gradients) const {
  const int64_t experts = local_experts();
  if (layer_.config().numerics.weight_gradient != WeightGradient::kMainGrad) {
    for (std::size_t local = 0; local < local_ranks(); ++local) {
      const ScopedDevice scope(layer_.device_of(local));
      const int64_t bytes = experts * expert_elements() * element_bytes();
      poison(gradients.local[local].dw1, 2 * bytes, layer_.stream_of(local));
      poison(gradients.local[local].dw2, bytes, layer_.stream_of(local));
    }
    return;
  }
  const cli::LayerResult values = started();
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    const ScopedDevice scope(layer_.device_of(local));
    const auto copy = [&](const DeviceArray& whole, const std::vector<void*>& addresses, const std::vector<float>& from,
                          int64_t elements) {
      const float* const first = from.data() + static_cast<int64_t>(local) * experts * elements;
      for (int64_t expert = 0; expert < experts; ++expert) {
        void* const target = gradients.by_address ? addresses[static_cast<std::size_t>(expert)]
                                                  : static_cast<float*>(whole.data()) + expert * elements;
        check(driver().cuMemcpyHtoDAsync(device_pointer(target), first + expert * elements,
                                         static_cast<std::size_t>(elements) * sizeof(float), layer_.stream_of(local)),
              "starting main_grad");
      }
    };
    const GradientArrays::OfRank& own = gradients.local[local];
    for (int64_t half = 0; half < 2 * experts; ++half) {
      const float* const first =
          values.dw1_fp32.data() + (static_cast<int64_t>(local) * 2 * experts + half) * expert_elements();
      check(driver().cuMemcpyHtoDAsync(device_pointer(half_of_dw1(gradients, local, half / 2, half % 2)), first,
                                       static_cast<std::size_t>(expert_elements()) * sizeof(float),
                                       layer_.stream_of(local)),
            "starting main_grad");
    }
    copy(own.dw2, own.dw2_experts, values.dw2_fp32, expert_elements());
  }
}

// ---- Calls

WeightGradients DeviceBackward::addresses(const GradientArrays& gradients, std::size_t local, bool dw1,
                                          bool dw2) const {
  const GradientArrays::OfRank& own = gradients.local[local];
  WeightGradients to;
  if (gradients.by_address) {
    if (dw1) to.dw1_experts = own.dw1_experts.data();
    if (dw1 && gradients.apart) to.dw1_up_experts = own.dw1_up_experts.data();
    if (dw2) to.dw2_experts = own.dw2_experts.data();
  } else {
    if (dw1) to.dw1 = half_of_dw1(gradients, local, 0, 0);
    if (dw1 && gradients.apart) to.dw1_up = half_of_dw1(gradients, local, 0, 1);
    if (dw2) to.dw2 = own.dw2.data();
  }
  return to;
}

PendingWeightGradients DeviceBackward::backward(const CallArrays& call, const BackwardArrays& arrays,
                                                const Saved& saved, const GradientArrays* gradients,
                                                const MemoryOptions& use, const OwnMemory& memory) {
  std::vector<BackwardArguments> arguments;
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    BackwardArguments& own = arguments.emplace_back();
    own.dy = static_cast<const BFloat16*>(arrays.local[local].dy.data());
    if (schedule_.save_xg == SaveXg::kRedispatch) own.x = call.local[local].input;
    own.weights = layer_.weights_of(local);
    if (!weight_addresses_.empty()) own.weights.w1_experts = weight_addresses_[local].w1.data();
    if (!weight_addresses_.empty()) own.weights.w2_experts = weight_addresses_[local].w2.data();
    if (!weight_addresses_.empty() && !weight_addresses_[local].w1_up.empty()) {
      own.weights.w1_up_experts = weight_addresses_[local].w1_up.data();
    }
    own.dx = static_cast<BFloat16*>(arrays.local[local].dx.data());
    own.dprobs = static_cast<float*>(arrays.local[local].dprobs.data());
    if (gradients != nullptr) own.gradients = addresses(*gradients, local, true, true);
    own.stream = Stream{layer_.stream_of(local)};
    own.weight_gradients = use.weight_gradients;
    own.last_use = use.last_use;
    if (!memory.workspace.empty()) own.workspace_memory = memory.workspace[local];
    if (!memory.pending.empty()) own.pending_memory = memory.pending[local];
  }
  return uniep::backward(layer_.group(), layer_.config(), schedule_, saved, arguments);
}

void DeviceBackward::make(const PendingWeightGradients& work, const GradientArrays& gradients,
                          const GradientCall& call) {
  std::vector<WeightGradientArguments> arguments;
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    WeightGradientArguments& own = arguments.emplace_back();
    own.gradients = addresses(gradients, local, call.dw1, call.dw2);
    own.stream = Stream{layer_.stream_of(local)};
    own.sms = call.sms;
    if (!call.aside) continue;
    own.stream = Stream{asides_[local]};
    const ScopedDevice scope(layer_.device_of(local));
    check(driver().cuEventRecord(events_[local], layer_.stream_of(local)), "cuEventRecord");
    check(driver().cuStreamWaitEvent(asides_[local], events_[local], 0), "cuStreamWaitEvent");
  }
  uniep::weight_gradients(layer_.group(), work, arguments);
}

void DeviceBackward::join_aside() const {
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    const ScopedDevice scope(layer_.device_of(local));
    check(driver().cuEventRecord(events_[local], asides_[local]), "cuEventRecord");
    check(driver().cuStreamWaitEvent(layer_.stream_of(local), events_[local], 0), "cuStreamWaitEvent");
  }
}

// ---- What is expected

cli::LayerResult DeviceBackward::read(const BackwardArrays& arrays, const CallArrays& call) const {
  layer_.synchronize();
  const LayerShape& shape = layer_.config().shape;
  cli::LayerResult result;
  const auto add = [](auto& values, const DeviceArray& array, int64_t count) {
    const std::size_t end = values.size();
    values.resize(end + static_cast<std::size_t>(count));
    if (count > 0) array.read(values.data() + end, count * static_cast<int64_t>(sizeof(values[0])));
  };
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    const int64_t tokens = call.tokens[static_cast<std::size_t>(layer_.rank_of(local))];
    add(result.y, call.local[local].y, tokens * shape.hidden);
    add(result.dx, arrays.local[local].dx, tokens * shape.hidden);
    add(result.dprobs, arrays.local[local].dprobs, tokens * dprobs_of_token());
  }
  return result;
}

cli::LayerResult DeviceBackward::read(const GradientArrays& gradients) const {
  join_aside();
  layer_.synchronize();
  cli::LayerResult result;
  const auto add = [&](auto& values, const DeviceArray& whole, const std::vector<void*>& addresses, std::size_t local,
                       int64_t elements) {
    using T = std::remove_reference_t<decltype(values[0])>;
    for (int64_t expert = 0; expert < local_experts(); ++expert) {
      const std::size_t end = values.size();
      values.resize(end + static_cast<std::size_t>(elements));
      const void* const from = gradients.by_address ? addresses[static_cast<std::size_t>(expert)]
                                                    : static_cast<const T*>(whole.data()) + expert * elements;
      DeviceArray::read_device(layer_.device_of(local), from, values.data() + end,
                               elements * static_cast<int64_t>(sizeof(T)));
    }
  };
  const auto add_dw1 = [&](auto& values, std::size_t local) {
    for (int64_t half = 0; half < 2 * local_experts(); ++half) {
      const std::size_t end = values.size();
      values.resize(end + static_cast<std::size_t>(expert_elements()));
      DeviceArray::read_device(layer_.device_of(local), half_of_dw1(gradients, local, half / 2, half % 2),
                               values.data() + end, expert_elements() * element_bytes());
    }
  };
  for (std::size_t local = 0; local < local_ranks(); ++local) {
    const GradientArrays::OfRank& own = gradients.local[local];
    if (is_bf16()) {
      add_dw1(result.dw1_bf16, local);
      add(result.dw2_bf16, own.dw2, own.dw2_experts, local, expert_elements());
    } else {
      add_dw1(result.dw1_fp32, local);
      add(result.dw2_fp32, own.dw2, own.dw2_experts, local, expert_elements());
    }
  }
  return result;
}

cli::LayerResult DeviceBackward::oracle(const cli::LayerData& data, const Numerics& numerics) const {
  layer_.synchronize();
  LayerConfig config = layer_.config();
  config.numerics = numerics;
  const LayerShape& shape = config.shape;
  cli::LayerResult result;
  {
    const ScopedDevice scope(layer_.device_of(0));
    result = naive_layer(layer_.kernels(), config, data, cli::start_main_grad);
  }
  const int first = layer_.rank_of(0), count = static_cast<int>(local_ranks());
  const int64_t token = data.first_token(first), tokens = data.tokens_of({first, count});
  const int64_t of_rank = local_experts() * expert_elements();
  result.z.clear();
  keep_part(result.y, token * shape.hidden, tokens * shape.hidden);
  keep_part(result.dx, token * shape.hidden, tokens * shape.hidden);
  keep_part(result.dprobs, token * shape.topk, tokens * shape.topk);
  if (layer_.gives_maps()) {
    std::vector<float> dense(static_cast<std::size_t>(tokens * shape.experts), 0.0f);
    for (std::size_t slot = 0; slot < result.dprobs.size(); ++slot) {
      const int32_t expert = data.ids[static_cast<std::size_t>(token * shape.topk) + slot];
      const auto row = static_cast<int64_t>(slot) / shape.topk;
      if (expert >= 0) dense[static_cast<std::size_t>(row * shape.experts + expert)] = result.dprobs[slot];
    }
    result.dprobs = std::move(dense);
  }
  keep_part(result.dw1_bf16, first * 2 * of_rank, count * 2 * of_rank);
  keep_part(result.dw1_fp32, first * 2 * of_rank, count * 2 * of_rank);
  keep_part(result.dw2_bf16, first * of_rank, count * of_rank);
  keep_part(result.dw2_fp32, first * of_rank, count * of_rank);
  return result;
}

bool DeviceBackward::record(const std::string& name, const cli::LayerResult& got, const cli::LayerResult& expected) {
  const std::string text = uniep::test::difference(got, expected);
  layer_.results().record(name, text.empty(), text);
  return text.empty();
}

bool DeviceBackward::expect(const std::string& name, const BackwardArrays& arrays, const CallArrays& call,
                            const cli::LayerResult& expected) {
  cli::LayerResult own;
  own.y = expected.y;
  own.dx = expected.dx;
  own.dprobs = expected.dprobs;
  return record(name, read(arrays, call), own);
}

bool DeviceBackward::expect(const std::string& name, const GradientArrays& gradients, const cli::LayerResult& expected,
                            bool dw1, bool dw2) {
  cli::LayerResult got = read(gradients), own;
  own.dw1_bf16 = expected.dw1_bf16;
  own.dw1_fp32 = expected.dw1_fp32;
  own.dw2_bf16 = expected.dw2_bf16;
  own.dw2_fp32 = expected.dw2_fp32;
  if (!dw1) got.dw1_bf16 = own.dw1_bf16;
  if (!dw1) got.dw1_fp32 = own.dw1_fp32;
  if (!dw2) got.dw2_bf16 = own.dw2_bf16;
  if (!dw2) got.dw2_fp32 = own.dw2_fp32;
  return record(name, got, own);
}

}  // namespace uniep::cuda::test
