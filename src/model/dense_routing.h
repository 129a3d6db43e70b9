#pragma once

#include "model/portability.h"

// From a map of experts [T, E] to slots, for both engines: a token's slots are its experts, ascending.
namespace uniep {

// What stands in a token's first slot where the map has more experts than there are slots. No legal id.
UNIEP_HOST_DEVICE int32_t id_of_too_many(int32_t experts_of_token) {
  return -1 - experts_of_token;
}
UNIEP_HOST_DEVICE int64_t experts_of_token(int64_t id_of_too_many) {
  return -1 - id_of_too_many;
}

}  // namespace uniep
