#pragma once

#include <optional>
#include <string>

namespace uniep {

// What whoever starts a process a rank (torchrun, say) tells it in the environment.
struct RankEnvironment {
  int rank = 0;        // RANK
  int ranks = 1;       // WORLD_SIZE
  int local_rank = 0;  // LOCAL_RANK: among those of this machine, and its GPU
  std::string id;      // where the ranks meet, host:port: NCCL_COMM_ID, or MASTER_ADDR and the port after MASTER_PORT
};

// Nothing where neither RANK nor WORLD_SIZE is set. Throws Error(kInvalidArgument) that names the variable, its value
// and what is legal.
std::optional<RankEnvironment> rank_environment();

}  // namespace uniep
