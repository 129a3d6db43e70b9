#pragma once

#include <functional>
#include <memory>

#include "uniep/c_api.h"
#include "uniep/layer.h"

// What the C API's other files need of its handles.
namespace uniep {

// Keeps the handle's state alive.
std::shared_ptr<Group> group_of(const uniep_group& handle);
const Saved& saved_of(const uniep_saved& handle);

// Runs a call of the C API: an exception becomes its status and uniep_last_error().
uniep_status guarded_call(const std::function<void()>& call) noexcept;

}  // namespace uniep
