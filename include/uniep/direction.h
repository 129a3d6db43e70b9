#pragma once

namespace uniep {

enum class Direction : int { kForward = 0, kBackward = 1 };

}  // namespace uniep
