#pragma once

#include "engine/engine.h"

namespace uniep::test {

// Disturbs all later calls of the group.
inline void disturb(const Group& group, const internal::Disturbance& disturbance) {
  group.implementation().disturb(disturbance);
}

}  // namespace uniep::test
