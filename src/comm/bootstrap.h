#pragma once

#include <optional>
#include <string>

#include "comm/rank_mesh.h"

// How the processes of a group agree on the name under which they meet. All are processes of one host and meet over
// Unix-domain sockets, so host names, addresses and ports are parts of that name and nothing more.
namespace uniep {

// What whoever starts a process a rank (torchrun, say) tells it in the environment.
struct RankEnvironment {
  int rank = 0;        // RANK
  int ranks = 1;       // WORLD_SIZE
  int local_rank = 0;  // LOCAL_RANK: its GPU
  std::string name;    // of MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID and the user
};

// Nothing where neither RANK nor WORLD_SIZE is set. Throws Error(kInvalidArgument) that names the variable, its value
// and what is legal; kUnsupported where LOCAL_WORLD_SIZE says that the ranks are on several hosts.
std::optional<RankEnvironment> rank_environment();

// The same for who needs it. Throws Error(kInvalidArgument) where the environment says nothing.
RankEnvironment required_rank_environment();

constexpr std::size_t kUniqueIdBytes = 128;

// What make_unique_id() of include/uniep/group.h gives.
std::string new_unique_id();

// The name that stands for a unique id: one of new_unique_id(), or any other bytes that all ranks have and no other
// group (ncclGetUniqueId's, say). Throws Error(kInvalidArgument) unless there are 128, kUnsupported if they were made
// on another host.
std::string name_of_unique_id(const std::string& id);

}  // namespace uniep
