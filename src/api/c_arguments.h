#pragma once

#include <fmt/format.h>

#include "uniep/c_api.h"
#include "uniep/uniep.h"

// The C API's arguments as the C++ API takes them. All throw Error(kInvalidArgument) for a value that is no constant.
namespace uniep {

template <typename Enumeration>
Enumeration checked_constant(int32_t value, Enumeration last, const char* name) {
  if (value < 0 || value > static_cast<int>(last)) {
    throw Error(Status::kInvalidArgument,
                fmt::format("{}: {}; legal are the constants 0 to {}", name, value, static_cast<int>(last)));
  }
  return static_cast<Enumeration>(value);
}

// 0 or 1.
bool checked_flag(int32_t value, const char* name);

// The allocator of a C caller. Its address is the context of the C++ allocator, so it must outlive all that is taken.
struct CallerAllocator {
  decltype(uniep_group_options::allocate) allocate;
  decltype(uniep_group_options::release) release;
  void* context;
};

// A text of the library's in a caller's buffer, as uniep_schedule_resolve() says.
void put_text(const std::string& text, const char* needs, char* buffer, std::size_t capacity, std::size_t* needed);

GroupOptions group_options(const uniep_group_options& given, CallerAllocator& allocator);
LayerShape layer_shape(const uniep_layer_config& given);
Numerics layer_numerics(const uniep_layer_config& given);
Routing routing(const uniep_routing& given);
CallerMemory caller_memory(const uniep_caller_memory& given);
ForwardArguments forward_arguments(const uniep_forward_arguments& given);
BackwardArguments backward_arguments(const uniep_backward_arguments& given);
WeightGradientArguments weight_gradient_arguments(const uniep_weight_gradient_arguments& given);
DispatchArguments dispatch_arguments(const uniep_dispatch_arguments& given);
CombineArguments combine_arguments(const uniep_combine_arguments& given);

}  // namespace uniep
