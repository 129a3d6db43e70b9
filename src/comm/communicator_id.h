#pragma once

#include <string>

namespace uniep {

// A unique id that the ranks of a caller's ncclComm_t share over it, from its rank 0; nothing else is done with the
// communicator. Collective over it. `rank` and `ranks` are its. Throws Error: kTimeout when `seconds` were not enough
// (the communicator is then still in use), kDevice when NCCL fails, kUnsupported when there is no NCCL.
std::string share_unique_id_over(void* communicator, int device, int& rank, int& ranks, double seconds);

}  // namespace uniep
