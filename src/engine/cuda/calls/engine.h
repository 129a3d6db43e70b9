#pragma once

#include <memory>
#include <string>

#include "engine/engine.h"

namespace uniep::cuda {

// The Hopper engine for a group's completed options. Throws Error (kUnsupported) where there is no Hopper GPU, or where
// the library was built without CUDA's headers.
std::unique_ptr<internal::Engine> make_engine(const GroupOptions& options);

// A GPU's name.
std::string device_label(int device);

// Whether this process can use a Hopper GPU.
bool has_hopper_gpu();

}  // namespace uniep::cuda
